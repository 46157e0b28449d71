"""A worker is killed at an exact place of its step: training goes on and every count adds up.

Two variables, one on each parameter server, have a constant gradient of 1, so that with SGD a
variable's value counts the updates it got: -LEARNING_RATE * k.
"""

import pathlib
import subprocess
import threading

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.
from gba_tf.apply import UpdateGroup
from gba_tf.config import Policy
from gba_tf.ops.gradient_buffer import GradientBuffer
from gba_tf.ops.token_server import TokenServer, worker_identity

SOURCE = pathlib.Path(__file__).with_name("worker_death_ops.cc")
LEARNING_RATE = 0.5
GRADIENTS_PER_UPDATE = 3
# The victim has done something before.
VICTIM, RUN = 1, 3

# TensorFlow's threads do not catch what it costs them to lose a worker.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def op_library(tmp_path_factory):
    path = tmp_path_factory.mktemp("ops") / "worker_death_ops.so"
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    subprocess.run(
        ["g++", "-w", "-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(path), *flags],
        check=True,
    )
    return path


@pytest.fixture(scope="module")
def own_cluster(start_cluster, op_library):
    return start_cluster(2, 2, [op_library])


class Death:
    """Kills worker VICTIM where a test calls `here`."""

    def __init__(self, op_library, folder):
        self._ops = tf.load_op_library(str(op_library))
        self._begun, self._dead = str(folder / "begun"), str(folder / "dead")

    @property
    def happened(self):
        return pathlib.Path(self._dead).exists()

    def here(self, value, armed=True, run=RUN, during_update=False):
        with tf.device("/device:CPU:0"):
            return self._ops.gba_test_die(
                value=value,
                armed=armed,
                task=VICTIM,
                run=run,
                wait_for=self._begun if during_update else "",
                dead=self._dead,
            )

    def hold_update(self, gradient):
        """The first update that gets here goes on a second after the worker's death."""
        return self._ops.gba_test_hold(value=gradient, begun=self._begun, until=self._dead)


@pytest.fixture
def death(op_library, tmp_path):
    return Death(op_library, tmp_path)


def before_the_pushes(monkeypatch, death):
    push = GradientBuffer.push
    monkeypatch.setattr(
        GradientBuffer, "push", lambda self, token, block: push(self, death.here(token), block)
    )


def between_two_pushes(monkeypatch, death):
    push = GradientBuffer.push
    pushed = []

    def push_or_die(self, token, block):
        if "task:1" in self.device:
            with tf.control_dependencies([pushed[-1]]):
                token = death.here(token)
        pushed.append(push(self, token, block))
        return pushed[-1]

    monkeypatch.setattr(GradientBuffer, "push", push_or_die)


def between_push_and_commit(monkeypatch, death):
    commit = TokenServer.commit

    def die_or_commit(self, pushed):
        with tf.control_dependencies(pushed):
            return commit(self, [death.here(pushed[0]), *pushed[1:]])

    monkeypatch.setattr(TokenServer, "commit", die_or_commit)


def has_steps(decision):
    return decision[1] > 0


def between_commit_and_update(monkeypatch, death):
    apply = UpdateGroup.apply
    monkeypatch.setattr(
        UpdateGroup,
        "apply",
        lambda self, decision: apply(self, death.here(decision, has_steps(decision), run=1)),
    )


def between_two_servers_updates(monkeypatch, death):
    apply = GradientBuffer.apply

    def apply_or_die(self, decision, update, captured, shared_state=None):
        if "task:1" in self.device:
            # The shared state is here when the first server has applied the update.
            with tf.control_dependencies([shared_state]):
                decision = death.here(decision, has_steps(decision), run=1)
        return apply(self, decision, update, captured, shared_state)

    monkeypatch.setattr(GradientBuffer, "apply", apply_or_die)


def between_update_and_its_report(monkeypatch, death):
    mark_applied = TokenServer.mark_applied
    monkeypatch.setattr(
        TokenServer,
        "mark_applied",
        lambda self, decision: mark_applied(self, death.here(decision, has_steps(decision), run=1)),
    )


PLACES_BEFORE_COMMIT = [before_the_pushes, between_two_pushes, between_push_and_commit]
PLACES_AFTER_COMMIT = [
    between_commit_and_update,
    between_two_servers_updates,
    between_update_and_its_report,
]


class Training:
    def __init__(self, strategy, optimizer=None):
        self.strategy = strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self.variables = [tf.Variable(tf.zeros([4]), name=name) for name in ("w", "v")]
            self.optimizer = optimizer or tf.keras.optimizers.SGD(LEARNING_RATE)
        assert strategy.variable_bytes_per_ps() == (16, 16)

        @tf.function
        def step():
            def compute():
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(variable) for variable in self.variables])
                gradients = tape.gradient(loss, self.variables)
                self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
                return worker_identity()[0]

            return strategy.run(compute)

        self._step = step

    def run(self, num_steps):
        """Runs the steps on whichever workers live; returns the workers that ended one."""
        workers = [self._coordinator.schedule(self._step) for _ in range(num_steps)]
        self._coordinator.join()
        return {int(worker.fetch()) for worker in workers}

    def run_beyond(self, death):
        """Runs steps until the victim has died, and some more; returns their number."""
        num_steps = 0
        while not death.happened:
            self.run(8)
            num_steps += 8
        self.run(20)
        return num_steps + 20

    def assert_that_all_counts_add_up(self, committed, lost):
        stats = self.strategy.stats()
        k, buffered = divmod(committed, GRADIENTS_PER_UPDATE)
        assert (stats.lost, stats.outstanding) == (lost, 0)
        assert stats.issued == committed + lost
        assert stats.applied + stats.decayed == k * GRADIENTS_PER_UPDATE
        assert (stats.global_step, stats.buffered) == (k, buffered)
        assert sum(stats.staleness.values()) == k * GRADIENTS_PER_UPDATE
        assert int(self.optimizer.iterations) == k
        for variable in self.variables:
            # Nobody is more than the staleness tolerance late here: no gradient is decayed.
            np.testing.assert_array_equal(variable.numpy(), [-LEARNING_RATE * k] * 4)
        [group] = self.strategy._groups.values()
        for shard in group.shards:
            counts = shard.buffer.stats()
            assert counts["applied_steps"] == k
            assert counts["num_gradients"] == buffered
            # Header, 16 bytes of values, each aligned to 64.
            assert counts["num_bytes"] == buffered * 128


@pytest.fixture
def strategy(own_cluster, request):
    """Two living workers; a dead one is started again after the test."""
    processes = own_cluster.processes
    yield own_cluster.strategy(
        global_batch_size=GRADIENTS_PER_UPDATE,
        local_batch_size=1,
        staleness_tolerance=1000,
        policy=getattr(request, "param", None),
    )
    if processes.processes[f"worker-{VICTIM}"].poll() is not None:
        restart_victim(own_cluster)
    own_cluster.end_strategy()


def restart_victim(cluster):
    task = f"worker-{VICTIM}"
    times = cluster.processes.log_path(task).read_text(errors="replace").count("serving\n")
    cluster.processes.restart(task)
    cluster.wait_until_serving(task, times + 1)


def committed_twice(place):
    # TensorFlow runs the step of a dead worker again: one that had committed counts twice.
    return int(place in PLACES_AFTER_COMMIT)


@pytest.mark.parametrize("place", PLACES_BEFORE_COMMIT + PLACES_AFTER_COMMIT)
def test_training_goes_on_without_the_dead_worker(strategy, death, monkeypatch, place):
    place(monkeypatch, death)
    training = Training(strategy)
    num_steps = training.run_beyond(death)
    training.assert_that_all_counts_add_up(
        num_steps + committed_twice(place), lost=1 - committed_twice(place)
    )


@pytest.mark.parametrize("place", PLACES_AFTER_COMMIT)
def test_an_update_that_looks_at_all_gradients_is_finished_by_another_worker(
    strategy, death, monkeypatch, place
):
    place(monkeypatch, death)
    with strategy.scope():
        # Far above the norm: a factor of exactly 1.
        optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, global_clipnorm=2.0**20)
    training = Training(strategy, optimizer)
    num_steps = training.run_beyond(death)
    training.assert_that_all_counts_add_up(num_steps + 1, lost=0)


@pytest.mark.parametrize("place", [between_push_and_commit, between_two_servers_updates])
def test_a_restarted_worker_joins_again(own_cluster, strategy, death, monkeypatch, place):
    place(monkeypatch, death)
    training = Training(strategy)
    victim = own_cluster.processes.processes[f"worker-{VICTIM}"]

    def restart_when_dead():
        victim.wait()
        restart_victim(own_cluster)

    restarter = threading.Thread(target=restart_when_dead, daemon=True)
    restarter.start()
    num_steps = training.run_beyond(death)
    restarter.join()
    workers = set()
    while VICTIM not in workers:
        workers = training.run(4)
        num_steps += 4
    training.assert_that_all_counts_add_up(
        num_steps + committed_twice(place), lost=1 - committed_twice(place)
    )


@pytest.mark.parametrize(
    "strategy", [Policy("hop_bs", 1, staleness_bound=1), Policy("hop_bw", 2)], indirect=True
)
def test_a_wait_for_the_dead_worker_ends(strategy, death, monkeypatch):
    # Without the victim, whose token is out, nobody may take another one and no step can close.
    before_the_pushes(monkeypatch, death)
    training = Training(strategy)
    num_steps = training.run_beyond(death)
    stats = strategy.stats()
    assert (stats.lost, stats.outstanding) == (1, 0)
    assert stats.issued == num_steps + 1
    assert stats.applied + stats.decayed + stats.buffered == num_steps


def test_an_update_that_was_started_is_finished_without_the_worker(strategy, death, monkeypatch):
    class HeldSGD(tf.keras.optimizers.SGD):
        def update_step(self, gradient, variable):
            super().update_step(death.hold_update(gradient), variable)

    apply = UpdateGroup.apply

    def apply_and_die(self, decision):
        apply(self, decision)
        death.here(decision, has_steps(decision), run=1, during_update=True)

    monkeypatch.setattr(UpdateGroup, "apply", apply_and_die)
    with strategy.scope():
        optimizer = HeldSGD(LEARNING_RATE)
    training = Training(strategy, optimizer)
    num_steps = training.run_beyond(death)
    training.assert_that_all_counts_add_up(num_steps + 1, lost=0)
