"""Steps that are timed or slowed down train exactly as others do."""

import numpy as np
import pytest
import tensorflow as tf

from gba_tf import step_times
from gba_tf.injected_delay import InjectedDelay
from gba_tf.ops import process
from gba_tf.step_times import AllReduceTimes, time_gradients
from gba_tf.switching import Window

IDS = np.array([0, 3, 3, 1, 0, 2], np.int64)
LABELS = np.linspace(-1, 1, 6, dtype=np.float32)
STEPS = 3


def trained(instrument):
    """The weights after three steps of batches of 2, and the steps and seconds that were timed."""
    tf.keras.utils.set_random_seed(3)
    model = tf.keras.Sequential([tf.keras.layers.Embedding(4, 2), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.Adagrad(0.1), loss="mse")
    model.build([None])
    instrument(model)
    count, seconds = map(np.array, process.step_seconds())
    model.fit(IDS, LABELS, batch_size=2, shuffle=False, verbose=0)
    count_after, seconds_after = map(np.array, process.step_seconds())
    return model.get_weights(), count_after - count, seconds_after - seconds


def test_each_step_is_timed_once_and_changes_nothing():
    plain, count, _ = trained(lambda model: None)
    assert count == 0
    timed, count, seconds = trained(time_gradients)
    assert count == STEPS
    assert seconds > 0
    for ours, theirs in zip(timed, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("worker, is_slow", [(2, True), (1, False)])
def test_a_delay_is_part_of_the_time_of_its_worker(worker, is_slow):
    # A step takes more than a microsecond, and ten thousand times as long in one of the three.
    delay = InjectedDelay(worker=2, factor=1e4, from_step=1, to_step=2)
    plain, *_ = trained(lambda model: None)
    slowed, count, seconds = trained(lambda model: time_gradients(model, delay, worker))
    assert count == STEPS
    if is_slow:
        assert seconds > 1e4 * 1e-6
    for ours, theirs in zip(slowed, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_clock_that_is_set_back_gives_no_negative_seconds():
    assert step_times._seconds_since(tf.timestamp() + 3600.0) == 0.0
    assert step_times._seconds_since(tf.timestamp() - 3600.0) >= 3600.0


def test_seconds_per_example_are_never_zero():
    times = AllReduceTimes(tf.distribute.MirroredStrategy(["/cpu:0"]), local_batch_size=4)
    for seconds in (0.5, 1.5):
        process.record_step_seconds(tf.constant(seconds, tf.float64))
    # Two seconds of two steps of four.
    assert times.end_window(7.0) == (7.0, (0.25,))
    process.record_step_seconds(tf.constant(0.0, tf.float64))
    stay, (least,) = times.end_window(8.0)
    assert stay == 8.0
    assert 0 < least < 1e-6
    assert Window(stay, (least, least)).ratio == pytest.approx(0.9)
