"""The ops of a process: how it ends, how it sleeps, and what it measures."""

import subprocess
import sys
import threading
import time

import pytest


def test_the_first_request_is_kept():
    # In a process of its own, because a request cannot be taken back.
    program = """
from gba_tf.ops import process
assert process.shutdown_requested() is None
process.request_shutdown(3, "the disk is full: ä")
assert process.shutdown_requested() == (3, "the disk is full: ä")
process.request_shutdown(0, "")
assert process.shutdown_requested() == (3, "the disk is full: ä")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("status, message", [([0, 1], "reason"), (0, ["reason"])])
def test_only_scalars_are_taken(status, message):
    import tensorflow as tf

    from gba_tf.ops import process

    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a scalar status and a"):
        process.request_shutdown(status, message)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Shape must be rank 0"):
        process.request_shutdown(status, message)
    assert process.shutdown_requested() is None


def sleep_until_cancelled(seconds):
    """Cancels a step that would sleep for hours."""
    import tensorflow as tf
    from tensorflow.python.eager import cancellation

    from gba_tf.ops import process

    # More of them than TensorFlow has threads; a tf.function would put them one after the other.
    sleep = tf.compat.v1.wrap_function(
        lambda: tf.add_n([process.sleep(tf.constant(1), 3600) for _ in range(32)]), []
    )
    manager = cancellation.CancellationManager()
    threading.Timer(seconds, manager.start_cancel).start()
    manager.get_cancelable_function(sleep)()


def test_a_value_is_passed_on_after_a_while():
    import tensorflow as tf

    from gba_tf.ops import process

    begun = time.monotonic()
    assert process.sleep(tf.constant([1, 2], tf.int64), 0.05).numpy().tolist() == [1, 2]
    assert time.monotonic() - begun >= 0.05
    assert process.sleep(tf.constant("text"), 0).numpy() == b"text"


def test_a_gradient_passes_through_a_sleep():
    import tensorflow as tf

    from gba_tf.ops import process

    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = process.sleep(x * x, 0.001)
    assert float(tape.gradient(y, x)) == 6.0


def test_a_cancelled_step_does_not_sleep_on():
    import tensorflow as tf

    with pytest.raises(tf.errors.CancelledError):
        sleep_until_cancelled(0.05)
    with pytest.raises(tf.errors.CancelledError):
        sleep_until_cancelled(0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(seconds):
    import tensorflow as tf

    from gba_tf.ops import process

    expected = pytest.raises(
        tf.errors.InvalidArgumentError, match="expected at least 0 and finite, found"
    )
    with expected:
        process.sleep(tf.constant(1), seconds)
    with expected:
        process.record_step_seconds(seconds)
    with pytest.raises(tf.errors.InvalidArgumentError, match="seconds: expected a scalar"):
        process.record_step_seconds([1.0])
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Shape must be rank 0"):
        process.sleep(tf.constant(1), [1.0])


def test_step_seconds_add_up_over_the_process():
    import tensorflow as tf

    from gba_tf.ops import process

    def read():
        count, seconds = process.step_seconds()
        return int(count), float(seconds)

    @tf.function(input_signature=[tf.TensorSpec([])])
    def record(seconds):
        process.record_step_seconds(seconds)

    count, seconds = read()
    process.record_step_seconds(0.5)
    record(0.25)
    record(0.25)
    assert read() == (count + 3, seconds + 1.0)
