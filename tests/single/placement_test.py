"""Variables are balanced over parameter server tasks by bytes."""

import pytest
import tensorflow as tf

from gba_tf.placement import BalancedPlacement, task_of


def test_the_task_with_the_fewest_bytes_gets_the_next_variable():
    placement = BalancedPlacement(2)
    shapes = [[100], [10], [20], [30], [25]]
    # Bytes before each: (0, 0), (400, 0), (400, 40), (400, 120), (400, 240).
    assert [placement.place(shape, tf.float32) for shape in shapes] == [0, 1, 1, 1, 1]
    assert placement.bytes_per_task == (400, 340)


def test_bytes_count_and_not_elements():
    placement = BalancedPlacement(2)
    assert placement.place([10], tf.float64) == 0
    assert placement.place([10], tf.float32) == 1
    # 80 and 40 bytes.
    assert placement.place([10], tf.float16) == 1
    assert placement.bytes_per_task == (80, 60)


def test_shards_of_a_table_are_spread():
    placement = BalancedPlacement(3)
    assert [placement.place([1000, 16], tf.float32) for _ in range(3)] == [0, 1, 2]


def test_scalars_go_to_task_0_and_weigh_nothing():
    placement = BalancedPlacement(2)
    placement.place([8], tf.float32)
    assert placement.place([], tf.int64) == 0
    assert placement.bytes_per_task == (32, 0)


def test_a_shape_that_is_not_known_counts_as_one_element():
    placement = BalancedPlacement(1)
    placement.place(None, None)
    placement.place([None, 3], tf.float64)
    assert placement.bytes_per_task == (4 + 8,)


def test_a_variable_that_is_on_no_parameter_server_is_refused():
    with pytest.raises(ValueError, match="Variable local:0: expected it on a parameter server"):
        task_of(tf.Variable(1.0, name="local"))
