"""Which examples the steps of Model.fit see, counted by what the training leaves in the weights."""

import numpy as np
import pytest
import tensorflow as tf

keras = tf.keras
NUM_EXAMPLES = 100
BATCH_SIZE = 5
NUM_BATCHES = NUM_EXAMPLES // BATCH_SIZE
EXAMPLES = np.arange(NUM_EXAMPLES)[:, np.newaxis]
UNUSED_LABELS = np.zeros([NUM_EXAMPLES, 1], "float32")


class Visits(keras.Model):
    """A weight per example; its gradient is 1 / batch size where the batch has the example."""

    def __init__(self):
        super().__init__()
        self.weight_of = self.add_weight("weight_of", [NUM_EXAMPLES], initializer="zeros")

    def call(self, examples):
        return tf.gather(self.weight_of, examples[:, 0])


def visits_model(strategy):
    with strategy.scope():
        model = Visits()
        model.compile(keras.optimizers.SGD(1.0), loss=lambda labels, outputs: outputs)
    return model


def visits(cluster, data, num_workers=2, num_batches=NUM_BATCHES, **fit_options):
    """How often each example was part of a step: int[batches of the data, BATCH_SIZE]."""
    strategy = cluster.strategy(
        num_workers,
        1,
        global_batch_size=BATCH_SIZE,
        local_batch_size=BATCH_SIZE,
        staleness_tolerance=1000,  # Slow workers count as well.
    )
    model = visits_model(strategy)
    model.fit(data, steps_per_epoch=num_batches, epochs=1, verbose=0, **fit_options)
    found = -model.weight_of.numpy() * BATCH_SIZE
    np.testing.assert_allclose(found, np.round(found), atol=1e-3)
    return np.round(found).astype(int).reshape([NUM_BATCHES, BATCH_SIZE])


def rounds(num_steps, num_batches):
    """Visits of each of some batches that are read in turn, again and again."""
    return [num_steps // num_batches + (i < num_steps % num_batches) for i in range(num_batches)]


def pairs():
    return tf.data.Dataset.from_tensor_slices((EXAMPLES, UNUSED_LABELS))


@pytest.mark.parametrize("num_passes", [1, 3])
def test_one_worker_visits_every_example_once_per_pass(cluster, num_passes):
    data = pairs().shuffle(NUM_EXAMPLES).batch(BATCH_SIZE)
    assert np.all(visits(cluster, data, 1, num_passes * NUM_BATCHES) == num_passes)


@pytest.mark.parametrize(
    ("data", "fit_options"),
    [
        (pairs().batch(BATCH_SIZE), {}),
        (EXAMPLES, {"y": UNUSED_LABELS, "batch_size": BATCH_SIZE, "shuffle": False}),
    ],
    ids=["dataset", "arrays"],
)
def test_two_workers_read_every_other_batch(cluster, data, fit_options):
    found = visits(cluster, data, **fit_options)
    assert found.sum() == NUM_EXAMPLES
    for worker in range(2):
        share = found[worker::2]
        # A fast worker takes more steps than its share has, and begins it again.
        of_batch = rounds(share.sum() // BATCH_SIZE, NUM_BATCHES // 2)
        assert share.tolist() == [[times] * BATCH_SIZE for times in of_batch]


@pytest.mark.parametrize(
    ("data", "fit_options"),
    [
        (pairs().shuffle(NUM_EXAMPLES).batch(BATCH_SIZE), {}),
        (EXAMPLES, {"y": UNUSED_LABELS, "batch_size": BATCH_SIZE, "shuffle": True}),
        (EXAMPLES, {"y": UNUSED_LABELS, "batch_size": BATCH_SIZE, "shuffle": "batch"}),
    ],
    ids=["dataset", "arrays", "batches of arrays"],
)
def test_two_workers_share_what_is_shuffled(cluster, data, fit_options):
    # Half a pass: even if one worker takes all of these steps, it does not begin its share again.
    found = visits(cluster, data, num_batches=NUM_BATCHES // 2, **fit_options)
    assert (found.min(), found.max(), found.sum()) == (0, 1, NUM_EXAMPLES // 2)


def test_without_sharding_every_worker_reads_the_whole(cluster):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = pairs().batch(BATCH_SIZE).repeat().with_options(options)
    found = visits(cluster, data)
    first = int(np.sum(found == 2)) // BATCH_SIZE or NUM_BATCHES
    of_batch = np.add(rounds(first, NUM_BATCHES), rounds(NUM_BATCHES - first, NUM_BATCHES))
    assert found.tolist() == [[times] * BATCH_SIZE for times in of_batch]


def generated_batches():
    yield EXAMPLES[:BATCH_SIZE], UNUSED_LABELS[:BATCH_SIZE]


def generator_dataset(_=None):
    signature = (tf.TensorSpec([None, 1], tf.int64), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(generated_batches, output_signature=signature)


@pytest.mark.parametrize(
    "make",
    [
        generator_dataset,
        lambda: pairs().batch(BATCH_SIZE).concatenate(generator_dataset()),
        lambda: keras.utils.experimental.DatasetCreator(generator_dataset),
    ],
    ids=["dataset", "part of a dataset", "DatasetCreator"],
)
def test_a_dataset_that_calls_python_is_refused(cluster, make):
    model = visits_model(cluster.strategy(2, 1, global_batch_size=10, local_batch_size=5))
    with pytest.raises(ValueError, match="that can run on any worker.*TFRecord or CSV files"):
        model.fit(make(), steps_per_epoch=2, verbose=0)


def test_a_python_generator_is_refused(cluster):
    model = visits_model(cluster.strategy(2, 1, global_batch_size=10, local_batch_size=5))
    with pytest.raises(NotImplementedError, match="supported types"):
        model.fit(generated_batches(), steps_per_epoch=2, verbose=0)
