"""Vocabulary look-ups on the way of the data, wherever they are made (tensorflow#57694)."""

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.

keras = tf.keras
VOCABULARY = ["a", "b", "c"]
WORDS = np.array(["a", "b", "c", "a", "unknown", "b", "c", "a"])[:, np.newaxis]
LABELS = np.arange(8, dtype="float32")[:, np.newaxis]


def rows(strategy, place):
    """The ids that a model's embedding is asked for, seen by which rows have moved."""
    with strategy.scope():
        lookup = keras.layers.StringLookup(vocabulary=VOCABULARY)
        table = keras.layers.Embedding(6, 1, embeddings_initializer="zeros")
        words = keras.Input([1], dtype=tf.string if place == "in the model" else tf.int64)
        ids = lookup(words) if place == "in the model" else words
        model = keras.Model(words, keras.layers.Flatten()(table(ids)))
        model.compile(keras.optimizers.SGD(0.1), "mse")

    def dataset(context=None):
        data = tf.data.Dataset.from_tensor_slices((WORDS, LABELS + 1.0)).repeat().batch(8)
        if place == "in the model":
            return data
        look_up = lookup
        if place == "inside the dataset function":
            look_up = keras.layers.StringLookup(vocabulary=VOCABULARY)
        return data.map(lambda words, labels: (look_up(words), labels))

    if place in ("in the model", "in a dataset"):
        data = dataset()
    else:
        data = keras.utils.experimental.DatasetCreator(dataset)
    model.fit(data, steps_per_epoch=8, verbose=0)
    return np.flatnonzero(table.get_weights()[0][:, 0]).tolist()


@pytest.mark.parametrize(
    "place",
    ["in the model", "in a dataset", "outside the dataset function", "inside the dataset function"],
)
def test_a_lookup_finds_its_table_on_every_worker(cluster, place):
    strategy = cluster.strategy(2, 1, global_batch_size=16, local_batch_size=8)
    # Every batch has every word. 0 is out of vocabulary; nobody asks for rows 4 and 5.
    assert rows(strategy, place) == [0, 1, 2, 3]
