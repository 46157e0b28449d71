"""Blocks of examples are read as tensors, in the order of `Blocks`, once per epoch each.

How workers share them is in tests/cluster/block_source_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.data import block_source
from gba_tf.data.block_source import BlockReader
from gba_tf.data.blocks import Blocks
from gba_tf.data.dataset import Examples

NUM_EXAMPLES, BATCH = 10, 4


def examples():
    ids = np.arange(NUM_EXAMPLES, dtype=np.int32)
    return Examples(
        {"id": ids, "pair": np.stack([ids, 100 + ids], axis=1)}, (ids % 2).astype(np.float32)
    )


def reader(**settings):
    return BlockReader(examples(), Blocks(NUM_EXAMPLES, BATCH, seed=3, **settings))


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_block_has_the_columns_and_labels_of_its_examples(in_graph):
    read = reader(shuffle=False).read
    columns, labels = (tf.function(read) if in_graph else read)(tf.constant(1, tf.int64))
    assert columns["id"].numpy().tolist() == [4, 5, 6, 7]
    assert columns["pair"].numpy().tolist() == [[4, 104], [5, 105], [6, 106], [7, 107]]
    assert labels.numpy().tolist() == [0, 1, 0, 1]


def test_the_last_block_is_smaller_and_the_next_epoch_starts_over():
    read = reader(shuffle=False).read
    ids = [read(tf.constant(position, tf.int64))[0]["id"].numpy() for position in range(4)]
    assert [block.tolist() for block in ids] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_a_block_larger_than_the_data_is_the_data():
    columns, _ = BlockReader(examples(), Blocks(NUM_EXAMPLES, 2**31 - 1, seed=3)).read(
        tf.constant(5, tf.int64)
    )
    assert sorted(columns["id"].numpy()) == list(range(NUM_EXAMPLES))


def test_the_stream_has_each_example_once_per_epoch_in_another_order_each_time():
    ids = [columns["id"].numpy() for columns, _ in reader().dataset().take(6)]
    first, second = np.concatenate(ids[:3]), np.concatenate(ids[3:])
    assert sorted(first) == sorted(second) == list(range(NUM_EXAMPLES))
    assert first.tolist() != second.tolist()


def test_the_stream_can_start_in_the_middle():
    blocks = [columns["id"].numpy().tolist() for columns, _ in reader().dataset().take(6)]
    later = [columns["id"].numpy().tolist() for columns, _ in reader().dataset(2).take(4)]
    assert later == blocks[2:]


def test_the_parts_of_a_stream_are_its_batches():
    whole = [columns["id"].numpy() for columns, _ in reader().dataset(1).take(2)]
    parts = [list(reader().dataset_of_parts(1, part, 2).take(2)) for part in range(2)]
    for batch, *of_workers in zip(whole, *parts, strict=True):
        ids = np.concatenate([columns["id"].numpy() for columns, _, _ in of_workers])
        assert ids.tolist() == batch.tolist()
        assert all(
            weights.numpy().tolist() == [1] * (len(batch) // 2) for _, _, weights in of_workers
        )


def test_blocks_of_other_data_are_refused():
    with pytest.raises(ValueError, match="expected 10 examples, found blocks of 11"):
        BlockReader(examples(), Blocks(11, BATCH, seed=3))


def test_data_that_do_not_fit_into_a_message_are_refused(monkeypatch):
    # 10 x (4 + 8 + 4) bytes.
    monkeypatch.setattr(block_source, "_MAX_BYTES", 159)
    with pytest.raises(ValueError, match="expected at most 159 bytes in memory, found 160"):
        reader()
