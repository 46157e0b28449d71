"""Tests of the order of examples and its cut into local batches."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.data import Blocks


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "num_examples, batch, blocks", [(10, 4, 3), (12, 4, 3), (3, 8, 1), (1, 1, 1)]
)
def test_every_example_is_in_one_block_per_epoch(num_examples, batch, blocks, shuffle):
    cut = Blocks(num_examples, batch, seed=5, shuffle=shuffle)
    assert cut.num_blocks == blocks
    for epoch in range(3):
        parts = [cut.indices_at(epoch * blocks + block).numpy() for block in range(blocks)]
        assert all(len(part) == batch for part in parts[:-1])
        assert all(part.dtype == np.int64 for part in parts)
        assert sorted(np.concatenate(parts)) == list(range(num_examples))


def test_without_shuffle_the_order_is_ascending():
    # Position 22 is block 1 of epoch 7, at three blocks an epoch.
    assert at(Blocks(5, 2, seed=0, shuffle=False), 22) == [2, 3]
    assert at(Blocks(5, 2, seed=0, shuffle=False), 23) == [4]


def test_the_order_is_the_one_recorded_here():
    # Recorded once: a change would make a resumed run repeat examples and miss others.
    assert at(Blocks(8, 8, seed=3), 0) == [4, 0, 2, 7, 1, 3, 5, 6]
    assert at(Blocks(8, 8, seed=3), 1) == [6, 3, 5, 1, 0, 7, 2, 4]


def test_another_process_gives_the_same_order(tmp_path):
    program = (
        "from gba_tf.data import Blocks;"
        "print(Blocks(1000, 64, seed=11).indices_at(66).numpy().tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(at(Blocks(1000, 64, seed=11), 66))


def test_seed_and_epoch_change_the_order():
    first = at(Blocks(1000, 1000, seed=1), 0)
    assert first != at(Blocks(1000, 1000, seed=1), 1)
    assert first != at(Blocks(1000, 1000, seed=2), 0)


def test_a_graph_gives_the_same_order():
    cut = Blocks(1000, 64, seed=11)
    traced = tf.function(cut.indices_at).get_concrete_function(tf.TensorSpec([], tf.int64))
    assert traced(tf.constant(66, tf.int64)).numpy().tolist() == at(cut, 66)


def test_it_goes_on_in_the_middle_of_an_epoch_with_blocks_of_another_size():
    whole = np.array(at(Blocks(10, 10, seed=3), 2))
    blocks = Blocks(10, 4, seed=3, first_epoch=2, first_example=3)
    assert at(blocks, 0) == whole[3:7].tolist()
    assert at(blocks, 1) == whole[7:].tolist()
    assert at(blocks, 2) == at(Blocks(10, 4, seed=3), 9)
    assert at(blocks, 4) == at(Blocks(10, 4, seed=3), 11)
    progress = [(2, 3), (2, 7), (3, 0), (3, 4), (3, 8), (4, 0)]
    assert [blocks.progress_at(position) for position in range(6)] == progress
    assert [blocks.blocks_before_epoch(epoch) for epoch in (2, 3, 4)] == [0, 2, 5]
    assert [blocks.num_first_blocks, blocks.num_blocks] == [2, 3]


def test_parts_of_a_block_are_disjoint_and_their_weights_give_its_mean():
    blocks = Blocks(11, 6, seed=3)
    losses = np.arange(11.0) ** 2
    for position, size in ((0, 2), (1, 2), (2, 2)):  # Blocks of 6 and of 5, shared by 3.
        block = at(blocks, position)
        parts = [[t.numpy() for t in blocks.part_at(position, part, 3)] for part in range(3)]
        real = np.concatenate([indices[weights > 0] for indices, weights in parts])
        assert real.tolist() == block
        assert all(len(indices) == len(weights) == size for indices, weights in parts)
        means = [np.sum(weights * losses[indices]) / size for indices, weights in parts]
        assert np.mean(means) == pytest.approx(np.mean(losses[block]), rel=1e-6)
    assert parts[0][1].tolist() == [1, 1]
    # Of one example in all, two parts get nothing, with weight 0.
    parts = [Blocks(7, 6, seed=3).part_at(1, part, 3) for part in range(3)]
    assert [weights.numpy().tolist() for _, weights in parts] == [[3], [0], [0]]


def test_neighbours_are_torn_apart():
    order = np.array(at(Blocks(10_000, 10_000, seed=2), 0))
    # A random order of n numbers has a mean distance of n / 3 between neighbours.
    assert abs(np.abs(np.diff(order)).mean() / 10_000 - 1 / 3) < 0.02


@pytest.mark.parametrize(
    "settings, text",
    [
        ((0, 4, 1), "expected num_examples to be at least 1, found 0"),
        ((4, 0, 1), "expected local_batch_size to be at least 1, found 0"),
        ((4, 4, -1), "expected seed to be at least 0, found -1"),
        ((4, 4, 1, True, -1), "expected first_epoch to be at least 0, found -1"),
        ((4, 4, 1, True, 0, 4), "expected first_example to be below num_examples=4, found 4"),
    ],
)
def test_settings_out_of_range_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Blocks(*settings)


def test_a_negative_position_is_refused():
    with pytest.raises(ValueError, match="expected position to be at least 0, found -1"):
        Blocks(10, 4, seed=1).indices_at(-1)


def at(blocks, position):
    return blocks.indices_at(position).numpy().tolist()
