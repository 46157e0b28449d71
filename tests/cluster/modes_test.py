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


class Progress:
    """Trains w, of one element per worker: a gradient of worker i is 1 in element i, else 0."""

    def __init__(self, strategy, seconds=(SLOW_SECONDS, FAST_SECONDS, FAST_SECONDS)):
        self.strategy = strategy
        with strategy.scope():
            self.w = tf.Variable(tf.zeros([NUM_WORKERS]))
            self.optimizer = keras.optimizers.SGD(1.0)
            # Gradients that each worker has begun and ended.
            counts = tf.zeros([2, NUM_WORKERS], tf.int64)
            self.counts = tf.Variable(counts, trainable=False)
        self.seconds = tf.constant(seconds, tf.float64)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def _compute(self):
        worker = worker_identity()[0]
        begun = tf.cast(self.counts.scatter_nd_add([[0, worker]], [1]), tf.int64)
        with tf.control_dependencies([begun]):
            gradient = tf.one_hot(worker, NUM_WORKERS)
        gradient = process.sleep(gradient, tf.gather(self.seconds, worker))
        with tf.control_dependencies([gradient]):
            ended = self.counts.scatter_nd_add([[1, worker]], [1])
        with tf.control_dependencies([ended]):
            self.optimizer.apply_gradients([(tf.identity(gradient), self.w)])
        return worker, begun[0], self.counts.read_value()[1]

    def train(self, num_steps):
        """Returns for each step its worker, and how many each had begun then and has ended now."""
        step = tf.function(lambda: self.strategy.run(self._compute))
        results = [self.coordinator.schedule(step) for _ in range(num_steps)]
        self.coordinator.join()
        return [[np.asarray(value) for value in result.fetch()] for result in results]


def leads(steps):
    """How many more gradients than the slowest worker the fastest has ended, at each step's end."""
    return [int(ended.max() - ended.min()) for _, _, ended in steps]


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
    # Two of its 10 gradients may be made by others: in the beginning and in the end, a worker that
    # was given no step yet, or none any more, is not waited for.
    np.testing.assert_allclose(progress.w.numpy(), [-10 / 3] * 3, atol=2 / 3 + 1e-6)


def test_hop_bw_without_backups_is_synchronous_training(cluster):
    strategy = strategy_of(cluster, Policy("hop_bw", NUM_WORKERS))
    with strategy.scope():
        w = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(0.5)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients([(w - 1.0, w)]))

    for _ in range(10 * NUM_WORKERS):
        coordinator.schedule(step)
    coordinator.join()
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
