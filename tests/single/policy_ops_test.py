"""The ops of the policies that wait: who waits for whom, and what ends a wait."""

import threading
import time

import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

from gba_tf.config import Policy
from gba_tf.ops import library, process
from gba_tf.ops.gradient_buffer import GradientSpec
from gba_tf.ops.token_server import TokenServer

CPU = "/device:CPU:0"
SECONDS_TO_FAIL = 60


def worker(task, incarnation=17):
    return tf.constant([task, incarnation], tf.int64)


class Calls:
    """Runs a function in a thread of its own; `result()` is what it returned or raised."""

    def __init__(self, function, *args):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function, args):
        try:
            self._outcome = (function(*args), None)
        except tf.errors.OpError as error:
            self._outcome = (None, error)

    def result(self):
        self._thread.join(SECONDS_TO_FAIL)
        assert not self._thread.is_alive(), "It waits for ever."
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def num_waiting(server):
    return int(library.load().gba_token_stats(token_server=server._handle).counts[-1])


def until_waiting(server, number):
    end = time.monotonic() + SECONDS_TO_FAIL
    while (found := num_waiting(server)) != number:
        assert time.monotonic() < end, f"{found} wait, expected {number}."
        time.sleep(0.001)


def take_and_wait(server, task):
    """A take that is seen to wait."""
    before = num_waiting(server)
    calls = Calls(server.take, worker(task))
    until_waiting(server, before + 1)
    return calls


@pytest.fixture
def make_policy_server(run_id):
    def make(*policy, run_id=run_id, **settings):
        return TokenServer(CPU, run_id, "server", Policy(*policy, **settings))

    return make


def take_and_commit(server, task):
    return server.commit([server.take(worker(task))])


def test_bounded_staleness_waits_for_the_slowest_worker(make_policy_server):
    server = make_policy_server("hop_bs", 1, staleness_bound=2)
    server.join(1)
    for step in range(2):
        # One step, of one gradient of weight 1.
        decision = take_and_commit(server, 0)
        server.mark_applied(decision)
        assert decision.numpy().tolist() == [step + 1, 1, step, 1, 1, step, 1]
    calls = take_and_wait(server, 0)
    take_and_commit(server, 1)
    assert int(calls.result()) == 3


@pytest.mark.parametrize("end", ["give_up", "leave"])
def test_a_worker_that_dies_or_has_no_work_ends_the_wait_for_it(make_policy_server, end):
    server = make_policy_server("hop_bs", 1, staleness_bound=1)
    server.join(1)
    take_and_commit(server, 0)
    calls = take_and_wait(server, 0)
    getattr(server, end)(1)
    assert int(calls.result()) == 1


def test_backup_workers_drop_the_late_gradient_and_free_it(make_applied, run_id):
    spec = GradientSpec("v", tf.float32, tf.TensorShape([1]))
    applied = make_applied([spec], policy=Policy("hop_bw", 2))
    server, buffer = applied.server, applied.buffer
    late = server.take(worker(2))
    assert applied.push_and_commit(0, [tf.constant([1.0])]).numpy().tolist() == [0, 0]
    calls = take_and_wait(server, 0)
    closing = applied.push_and_commit(1, [tf.constant([3.0])])
    assert closing.numpy().tolist() == [0, 1, 0, 2, 2, 1, 2, 1, 1]
    applied.apply(closing)
    next_token = calls.result()
    assert applied.variables[0].numpy().tolist() == [-2.0]

    pushed = buffer.push(late, applied.pack([tf.constant([50.0])]))
    assert server.commit([pushed]).numpy().tolist() == [3, 0]
    assert server.stats().decayed == 1
    assert server.stats().staleness == {0: 2, 1: 1}
    pushed = buffer.push(next_token, applied.pack([tf.constant([5.0])]))
    server.commit([pushed])
    applied.apply(applied.push_and_commit(2, [tf.constant([7.0])]))
    assert applied.variables[0].numpy().tolist() == [-8.0]
    assert buffer.stats()["num_gradients"] == 0


def test_waiting_holds_no_thread(make_policy_server):
    server = make_policy_server("hop_bw", 64)
    server.join(99)
    for task in range(32):
        take_and_commit(server, task)

    # A tf.function would put them one after the other.
    take_all = tf.compat.v1.wrap_function(
        lambda: [server.take(worker(task)) for task in range(32)], []
    )
    calls = Calls(take_all)
    # More than TensorFlow has threads.
    until_waiting(server, 32)
    server.mark_applied(server.flush())
    assert sorted(int(token) for token in calls.result()) == list(range(32, 64))


def test_a_cancelled_step_ends_its_wait(make_policy_server):
    server = make_policy_server("hop_bw", 2)
    server.join(1)
    take_and_commit(server, 0)
    take = tf.function(lambda: server.take(worker(0))).get_concrete_function()
    manager = cancellation.CancellationManager()
    calls = Calls(manager.get_cancelable_function(take))
    until_waiting(server, 1)
    manager.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        calls.result()
    assert num_waiting(server) == 0
    # Nothing is lost by it.
    assert server.stats().issued == 1
    with pytest.raises(tf.errors.CancelledError):
        manager.get_cancelable_function(take)()
    assert num_waiting(server) == 0


def test_the_death_of_the_waiting_worker_ends_its_wait(make_policy_server):
    server = make_policy_server("hop_bw", 2)
    server.join(1)
    take_and_commit(server, 0)
    calls = take_and_wait(server, 0)
    server.give_up(0)
    with pytest.raises(tf.errors.CancelledError, match="Worker 0 .* given up as dead"):
        calls.result()


def test_a_newer_run_ends_the_waits_of_the_one_before_it(make_policy_server, run_id):
    server = make_policy_server("hop_bw", 2)
    server.join(1)
    take_and_commit(server, 0)
    calls = take_and_wait(server, 0)
    make_policy_server("hop_bw", 2, run_id=run_id + "-next")
    with pytest.raises(tf.errors.CancelledError, match="is gone: a newer run"):
        calls.result()


def test_bsp_waits_for_nobody_and_decays_nothing(make_policy_server):
    server = make_policy_server("bsp", 1)
    late = server.take(worker(0))
    for _ in range(10):
        server.mark_applied(take_and_commit(server, 1))
    # Oldest live token 11; one step: 10, divisor 1, one id 0, weight 1.
    assert server.commit([late]).numpy().tolist() == [11, 1, 10, 1, 1, 0, 1]
    assert server.stats().applied == 11
    assert server.stats().staleness == {-1: 10, 10: 1}


def test_worker_seconds_begin_with_the_token_and_end_with_the_commit(make_policy_server):
    server = make_policy_server("bsp", 4)
    assert server.worker_seconds() == {}
    token = process.sleep(server.take(worker(5)), 0.02)
    server.commit([token])
    take_and_commit(server, 3)
    take_and_commit(server, 3)
    seconds = server.worker_seconds()
    assert {task: gradients for task, (gradients, _) in seconds.items()} == {3: 2, 5: 1}
    assert list(seconds) == [3, 5]
    assert seconds[5][1] >= 0.02


def test_settings_that_do_not_go_together_are_refused(run_id, make_policy_server):
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected 1 for hop_bs.*found 4"):
        make_policy_server("hop_bs", 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match='"asp" is not in the list'):
        make_policy_server("asp", 1)
    make_policy_server("hop_bs", 1, staleness_bound=2)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="staleness bound 3, found .* staleness bound 2"
    ):
        make_policy_server("hop_bs", 1, staleness_bound=3)


def test_a_state_of_another_policy_is_refused(make_policy_server, run_id):
    state = make_policy_server("bsp", 2).serialize()
    other = TokenServer(CPU, run_id, "other", Policy("gba", 2))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="saved with policy gba, found bsp.*mode it was saved"
    ):
        other.restore(state)
