"""Shares of datasets: read here, one worker after the other, they are disjoint and complete."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tf_keras.src.engine import data_adapter

from gba_tf import input_data
from gba_tf.input_data import serialize_seeded, share

Dataset = tf.data.Dataset
AutoShardPolicy = tf.data.experimental.AutoShardPolicy
NUM_WORKERS = 2


def context(worker):
    return tf.distribute.InputContext(NUM_WORKERS, worker, 1)


def shares(dataset, count):
    """The first `count` values of each worker's share."""
    serialized = serialize_seeded(dataset)
    return [
        values(
            share(
                coordinator_values.deserialize_dataset_from_graph(serialized, dataset.element_spec),
                context(worker),
            ),
            count,
        )
        for worker in range(NUM_WORKERS)
    ]


def values(dataset, count):
    return list(dataset.unbatch().take(count).as_numpy_iterator())


def batched(dataset):
    return dataset.batch(5)


def with_inner_shuffle(dataset):
    return dataset.window(10).flat_map(lambda window: window.shuffle(10))


def drawn_from_two(dataset):
    halves = [dataset.filter(lambda x: x < 50), dataset.filter(lambda x: x >= 50)]
    return Dataset.sample_from_datasets(halves)


@pytest.mark.parametrize(
    ("dataset", "is_shuffled"),
    [
        (Dataset.range(100), False),
        (Dataset.range(100).shuffle(100), True),
        (Dataset.range(100).shuffle(7).shuffle(100), True),
        (Dataset.range(100).shuffle(100, reshuffle_each_iteration=False), True),
        (Dataset.range(100).shuffle(100, seed=3), True),
        (with_inner_shuffle(Dataset.range(100)), True),
        (drawn_from_two(Dataset.range(100)), True),
    ],
    ids=["unshuffled", "shuffled", "twice", "once", "seeded", "inside a function", "drawn"],
)
def test_the_shares_of_every_pass_are_disjoint_and_complete(dataset, is_shuffled):
    first, second = shares(batched(dataset), 150)
    passes = [first[i : i + 50] + second[i : i + 50] for i in (0, 50, 100)]
    for of_both in passes:
        assert sorted(of_both) == list(range(100))
    assert (first[:50] == sorted(first[:50])) != is_shuffled


def test_a_repeated_dataset_is_shared_pass_by_pass():
    first, second = shares(batched(Dataset.range(100).shuffle(100).repeat()), 200)
    for i in range(0, 200, 50):
        assert sorted(first[i : i + 50] + second[i : i + 50]) == list(range(100))


def test_each_pass_and_each_iterator_has_an_order_of_its_own():
    dataset = batched(Dataset.range(100).shuffle(100))
    (first, _), (again, _) = shares(dataset, 100), shares(dataset, 100)
    assert first[:50] != first[50:]
    assert first[:50] != again[:50]


def test_the_seed_of_the_user_is_kept():
    dataset = batched(Dataset.range(100).shuffle(100, seed=3))
    expected = values(dataset, 100)
    first, second = shares(dataset, 50)
    assert first == [x for i in range(0, 100, 10) for x in expected[i : i + 5]]
    assert second == [x for i in range(5, 100, 10) for x in expected[i : i + 5]]


@pytest.fixture
def record_files(tmp_path):
    """Writes the numbers 0 to 99 to TFRecord files, in turn."""

    def write(num_files):
        for file in range(num_files):
            with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as writer:
                for number in range(file, 100, num_files):
                    writer.write(str(number).encode())
        return str(tmp_path / "*.tfrecord")

    return write


def test_files_are_shared_where_there_are_enough(record_files):
    files = Dataset.list_files(record_files(4), shuffle=True)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=2).shuffle(100)
    numbers = records.map(lambda record: tf.strings.to_number(record, tf.int64))
    first, second = shares(numbers.batch(5), 100)
    for i in (0, 50):
        assert sorted(first[i : i + 50] + second[i : i + 50]) == list(range(100))
        for of_one in (first, second):
            per_file = collections.Counter(number % 4 for number in of_one[i : i + 50])
            assert sorted(per_file.values()) == [25, 25]


def test_a_dataset_without_sharding_is_whole_for_every_worker():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    for of_one in shares(batched(Dataset.range(100).shuffle(100)).with_options(options), 100):
        assert sorted(of_one) == list(range(100))


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_arrays_are_shared_in_one_order(shuffle):
    # What Model.fit does to them.
    creator = data_adapter._ClusterCoordinatorDataHandler._convert_to_dataset_creator(
        None, x=np.arange(100), y=np.arange(100), batch_size=5, epochs=2, shuffle=shuffle
    )

    @tf.function(autograph=False)
    def share_of(worker):
        with input_data.same_order_of_arrays(creator):
            dataset = creator(None)
        return share(dataset.map(lambda x, y: x), context(worker))

    first, second = (values(share_of(tf.constant(worker, tf.int64)), 250) for worker in range(2))
    for i in range(0, 250, 50):
        assert sorted(first[i : i + 50] + second[i : i + 50]) == list(range(100))
    assert (first[:50] == first[50:100]) == (shuffle is False)
