"""What tells the modes of the token server apart, on real workers of which one is slow.

Who waits is seen from inside the steps: each reads the progress of all workers.
"""

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.
from gba_tf.config import Policy
from gba_tf.ops import process
from gba_tf.ops.token_server import worker_identity

keras = tf.keras
NUM_WORKERS = 3
SLOW_SECONDS, FAST_SECONDS = 0.1, 0.004


class Start:
    """Holds the steps until all of them are scheduled and, where there are enough, each worker has
    one: nobody waits for a worker that was given no step yet.

    A step that is held has taken its token.
    """

    def __init__(self, strategy):
        with strategy.scope():
            self._begun = tf.Variable(tf.zeros([NUM_WORKERS], tf.int64), trainable=False)
            self._expected = tf.Variable(0, trainable=False)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def hold(self):
        """In a step: returns True, when it may go on."""
        here = [worker_identity()[:1]]
        self._begun.scatter_nd_update(tf.transpose(here), [1])

        def is_held(_):
            return tf.math.count_nonzero(self._begun.read_value(), dtype=tf.int32) < self._expected

        return tf.while_loop(is_held, lambda go: [process.sleep(go, 0.002)], [tf.constant(True)])[0]

    def schedule(self, step, num_steps):
        """Returns what `step` returned, num_steps times."""
        self._begun.assign(tf.zeros_like(self._begun))
        self._expected.assign(NUM_WORKERS + 1)
        results = [self.coordinator.schedule(step) for _ in range(num_steps)]
        self._expected.assign(min(NUM_WORKERS, num_steps))
        self.coordinator.join()
        return [result.fetch() for result in results]


class Progress:
    """Trains w, of one element per worker: a gradient of worker i is 1 in element i, else 0."""

    def __init__(self, strategy, seconds=(SLOW_SECONDS, FAST_SECONDS, FAST_SECONDS)):
        self.strategy = strategy
        self.start = Start(strategy)
        with strategy.scope():
            self.w = tf.Variable(tf.zeros([NUM_WORKERS]))
            self.optimizer = keras.optimizers.SGD(1.0)
            # Gradients that each worker has begun and ended.
            counts = tf.zeros([2, NUM_WORKERS], tf.int64)
            self.counts = tf.Variable(counts, trainable=False)
        self.seconds = tf.constant(seconds, tf.float64)

    def _compute(self):
        worker = worker_identity()[0]
        begun = self.counts.scatter_nd_add([[0, worker]], [1])
        with tf.control_dependencies([begun, self.start.hold()]):
            gradient = tf.one_hot(worker, NUM_WORKERS)
        gradient = process.sleep(gradient, tf.gather(self.seconds, worker))
        with tf.control_dependencies([gradient]):
            ended = self.counts.scatter_nd_add([[1, worker]], [1])
        with tf.control_dependencies([ended]):
            self.optimizer.apply_gradients([(tf.identity(gradient), self.w)])
            return self.counts.read_value()

    def train(self, num_steps):
        """Returns, at each step's end, how many each worker has begun and ended: [2, workers]."""
        step = tf.function(lambda: self.strategy.run(self._compute))
        return [np.asarray(counts) for counts in self.start.schedule(step, num_steps)]


def leads(steps):
    """How many more gradients than the slowest worker the fastest has ended, at each step's end.

    While all have work: a worker that finds no more steps is not waited for, and the others may
    have one each that they have not begun.
    """
    of_all = [ended for begun, ended in steps if begun.sum() <= len(steps) - NUM_WORKERS]
    return [int(ended.max() - ended.min()) for ended in of_all]


def strategy_of(cluster, policy, num_workers=NUM_WORKERS):
    return cluster.strategy(num_workers, 1, global_batch_size=4, local_batch_size=1, policy=policy)


@pytest.mark.parametrize("bound", [1, 3])
def test_hop_bs_keeps_the_fastest_within_the_bound_of_the_slowest(cluster, bound):
    progress = Progress(strategy_of(cluster, Policy("hop_bs", 1, staleness_bound=bound)))
    steps = progress.train(30)
    # The end of a step is counted before its commit: the lead of commits is never more than this.
    assert max(leads(steps)) <= bound
    # And it is used: the others do not go in step with the slow one.
    assert max(leads(steps)) == bound
    stats = progress.strategy.stats()
    assert (stats.issued, stats.applied, stats.decayed, stats.lost) == (30, 30, 0, 0)
    # Every gradient is an update.
    assert stats.global_step == int(progress.optimizer.iterations) == 30
    assert progress.w.numpy().sum() == -30


def test_without_a_bound_the_lead_grows(cluster):
    progress = Progress(strategy_of(cluster, Policy("bsp", 1)))
    assert max(leads(progress.train(60))) > 10


def test_hop_bs_does_not_wait_for_workers_without_work(cluster):
    progress = Progress(strategy_of(cluster, Policy("hop_bs", 1, staleness_bound=1)))
    # One step at a time: whoever gets it may be ahead of those that have none.
    for _ in range(8):
        progress.train(1)
    assert progress.strategy.stats().applied == 8


def test_hop_bw_closes_with_the_first_gradients_and_drops_the_late_ones(cluster):
    progress = Progress(strategy_of(cluster, Policy("hop_bw", NUM_WORKERS - 1)))
    progress.train(41)
    progress.strategy.flush()
    stats = progress.strategy.stats()
    late = stats.decayed
    assert late > 0 and stats.lost == stats.outstanding == stats.buffered == 0
    assert stats.issued == 41 == stats.applied + late
    # A late gradient takes no place: each update, but for the last one, has two that are not.
    assert stats.global_step == int(progress.optimizer.iterations) == -(-stats.applied // 2)
    w = -progress.w.numpy()
    if stats.applied % 2 == 0:
        assert w.sum() == pytest.approx(stats.applied / 2)
    # While the slow worker computes one gradient, the others close many steps without it.
    assert w[0] < w[1] and w[0] < w[2]
    assert sum(number for delay, number in stats.staleness.items() if delay > 0) == late


def test_hop_bw_gives_no_worker_two_places_in_one_update(cluster):
    # With no backup, each of the three has a third of every update, however fast it is.
    policy = Policy("hop_bw", NUM_WORKERS)
    progress = Progress(strategy_of(cluster, policy), seconds=(0.0, 0.01, 0.02))
    progress.train(30)
    stats = progress.strategy.stats()
    assert (stats.applied, stats.decayed, stats.global_step) == (30, 0, 10)
    # One of its 10 gradients may be made by another: in the end, a worker that was given no step
    # any more is not waited for.
    np.testing.assert_allclose(progress.w.numpy(), [-10 / 3] * 3, atol=1 / 3 + 1e-6)


def test_hop_bw_without_backups_is_synchronous_training(cluster):
    strategy = strategy_of(cluster, Policy("hop_bw", NUM_WORKERS))
    with strategy.scope():
        w = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(0.5)
    start = Start(strategy)

    def compute():
        gradient = w - 1.0
        with tf.control_dependencies([start.hold()]):
            optimizer.apply_gradients([(tf.identity(gradient), w)])

    start.schedule(tf.function(lambda: strategy.run(compute)), 10 * NUM_WORKERS)
    # Each of an update's gradients is of the parameters that the update before left.
    assert float(w[0]) == 1 - 0.5**10


def test_bsp_never_decays_where_gba_does(cluster):
    def train(policy):
        progress = Progress(strategy_of(cluster, policy), seconds=(0.5, 0.0, 0.0))
        progress.train(120)
        progress.strategy.flush()
        stats = progress.strategy.stats()
        assert max(stats.staleness) > 1, "the slow worker was not late"
        assert stats.issued == 120 == stats.applied + stats.decayed
        return stats, float(-progress.w.numpy().sum())

    stats, total = train(Policy("bsp", 4))
    assert stats.decayed == 0 and total == pytest.approx(120 / 4)
    stats, total = train(Policy("gba", 4, staleness_tolerance=1))
    assert stats.decayed > 0 and total == pytest.approx(stats.applied / 4)


class TwoSets:
    """Steps that train a, and steps that train b, each by an optimizer of its own."""

    def __init__(self, strategy):
        with strategy.scope():
            self.a, self.b = tf.Variable([0.0]), tf.Variable([0.0])
            self.optimizers = [keras.optimizers.SGD(1.0), keras.optimizers.SGD(1.0)]
            self.is_open = tf.Variable(False, trainable=False)
        self.strategy = strategy
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def step(self, *variables, held=False):
        """Of one strategy.run() for each variable; `held` until `is_open`."""

        def train(variable):
            gradient = tf.ones([1])
            if held:
                [gradient] = tf.while_loop(
                    lambda _: not self.is_open, lambda g: [process.sleep(g, 0.002)], [gradient]
                )
            optimizer = self.optimizers[0 if variable is self.a else 1]
            optimizer.apply_gradients([(gradient, variable)])

        def run():
            for variable in variables:
                self.strategy.run(train, args=(variable,))

        return tf.function(run)

    def schedule(self, *steps):
        for step in steps:
            self.coordinator.schedule(step)

    def issued(self):
        return [self.strategy.stats(optimizer).issued for optimizer in self.optimizers]


@pytest.mark.parametrize("policy", [Policy("hop_bs", 1, staleness_bound=1), Policy("hop_bw", 2)])
def test_where_workers_wait_two_sets_of_variables_are_trained_one_after_the_other(cluster, policy):
    sets = TwoSets(strategy_of(cluster, policy))
    step_a, step_b = sets.step(sets.a), sets.step(sets.b)
    # Another function of the same set may come at any time.
    sets.schedule(*[sets.step(sets.a, held=True), step_a] * 6)
    mixed = f"{policy.name}: expected steps that are scheduled together to train one set.*join()"
    with pytest.raises(NotImplementedError, match=mixed):
        sets.schedule(step_b)
    sets.is_open.assign(True)
    sets.coordinator.join()
    sets.schedule(*[step_b] * 9)
    sets.coordinator.join()
    sets.schedule(*[step_a] * 9)
    sets.coordinator.join()
    several = r"expected one step to train one set.*SGD for \['Variable:0'\], in all 1; SGD for"
    with pytest.raises(NotImplementedError, match=several):
        sets.schedule(sets.step(sets.a, sets.b))
    # What was refused has taken nothing.
    assert sets.issued() == [21, 9]
    if policy.name == "hop_bs":
        assert (float(sets.a[0]), float(sets.b[0])) == (-21.0, -9.0)


def test_where_nobody_waits_two_sets_of_variables_are_trained_at_once(cluster):
    sets = TwoSets(strategy_of(cluster, Policy("bsp", 1)))
    sets.schedule(*[sets.step(sets.a), sets.step(sets.b)] * 20, sets.step(sets.a, sets.b))
    sets.coordinator.join()
    assert sets.issued() == [21, 21]
    assert (float(sets.a[0]), float(sets.b[0])) == (-21.0, -21.0)
