"""Workers share the blocks of an epoch: each example once, whoever is fast takes more."""

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.data.block_source import BlockReader, BlockSource
from gba_tf.data.blocks import Blocks
from gba_tf.data.dataset import Examples
from gba_tf.ops.token_server import worker_identity

NUM_EXAMPLES, BATCH, NUM_BLOCKS = 118, 4, 30  # The last block has 2 examples.


class CountingReader(BlockReader):
    """Counts how often it is traced into a function, with all its examples as constants."""

    traces = 0

    def read(self, position):
        self.traces += 1
        return super().read(position)


def new_reader():
    ids = np.arange(NUM_EXAMPLES, dtype=np.int32)
    return CountingReader(
        Examples({"id": ids}, np.ones(NUM_EXAMPLES, np.float32)),
        Blocks(NUM_EXAMPLES, BATCH, seed=5),
    )


@pytest.mark.parametrize("num_workers", [2, 3])
def test_uneven_workers_see_each_example_once_per_epoch_and_none_sees_all(cluster, num_workers):
    strategy = cluster.strategy(num_workers, 1, global_batch_size=BATCH, local_batch_size=BATCH)
    source = BlockSource(new_reader(), strategy)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        started = tf.Variable(tf.zeros([num_workers], tf.int64), trainable=False)

    @tf.function
    def step(blocks):
        columns, _ = next(blocks)
        worker = worker_identity()[0]
        # Nobody goes on before everybody has a block.
        started.scatter_nd_update([[worker]], [1])
        while tf.reduce_sum(started.read_value()) < num_workers:
            pass
        # Worker 0 has a thousand times the work of the others.
        rounds = tf.where(worker == 0, 20_000, 20)
        work = tf.while_loop(
            lambda i, x: i < rounds, lambda i, x: (i + 1, tf.sin(x)), [0, tf.ones([100])]
        )
        with tf.control_dependencies(work):
            return worker, tf.identity(columns["id"])

    for epoch in range(2):
        started.assign(tf.zeros([num_workers], tf.int64))
        results = [coordinator.schedule(step, args=(iter(source),)) for _ in range(NUM_BLOCKS)]
        coordinator.join()
        seen = {worker: [] for worker in range(num_workers)}
        for result in results:
            worker, ids = result.fetch()
            seen[int(worker)].extend(ids.tolist())
        assert sorted(sum(seen.values(), [])) == list(range(NUM_EXAMPLES))
        assert all(0 < len(ids) < NUM_EXAMPLES for ids in seen.values())
        assert source.position == (epoch + 1) * NUM_BLOCKS


class VisitCounter(tf.keras.Model):
    """Row i of its table grows by 1 / M whenever example i is trained on."""

    def __init__(self):
        super().__init__()
        self.visits = tf.keras.layers.Embedding(NUM_EXAMPLES, 1, embeddings_initializer="zeros")

    def train_step(self, data):
        columns, _ = data
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(self.visits(columns["id"]))
        self.optimizer.minimize(loss, self.trainable_variables, tape)
        return {"loss": loss}


def test_fit_trains_on_each_example_once_per_epoch_and_sends_the_data_once(cluster):
    # 3 x 30 gradients are 45 updates of 2: none is left over.
    strategy = cluster.strategy(
        3, 2, global_batch_size=2 * BATCH, local_batch_size=BATCH, staleness_tolerance=1000
    )
    reader = new_reader()
    with strategy.scope():
        model = VisitCounter()
        model.compile(optimizer=tf.keras.optimizers.SGD(1.0))
        model.visits(tf.constant([0]))
    source = BlockSource(reader, strategy)
    traces = []
    for epoch in range(3):
        model.fit(
            source, steps_per_epoch=NUM_BLOCKS, epochs=epoch + 1, initial_epoch=epoch, verbose=0
        )
        traces.append(reader.traces)
    np.testing.assert_allclose(model.visits.embeddings.numpy(), np.full((NUM_EXAMPLES, 1), 1.5))
    assert traces == [traces[0]] * 3
    assert source.position == 3 * NUM_BLOCKS


def test_other_data_on_the_same_cluster_are_left_alone(cluster):
    strategy = cluster.strategy(2, 1, global_batch_size=BATCH, local_batch_size=BATCH)
    with strategy.scope():
        model = VisitCounter()
        model.compile(optimizer=tf.keras.optimizers.SGD(1.0))
        model.visits(tf.constant([0]))
    BlockSource(new_reader(), strategy)
    of_one_example = tf.data.Dataset.from_tensors(({"id": tf.constant([7])}, tf.constant([1.0])))
    model.fit(of_one_example.repeat(), steps_per_epoch=6, verbose=0)
    visits = model.visits.embeddings.numpy()
    assert visits[7] == 6 and np.count_nonzero(visits) == 1
