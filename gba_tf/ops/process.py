"""Python handles of the ops of a process: its end (process_ops.cc), its time (timing_ops.cc)."""

import ctypes
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # What serves a task imports this before TensorFlow may be touched.
    import tensorflow as tf


def request_shutdown(status: int, message: str) -> Any:
    """Asks the process that runs this op to end; it goes on until it looks.

    Args:
      status: Exit code to end with, a scalar int32.
      message: The reason, a scalar string.

    Returns:
      In a graph the `tf.Operation`, else None.
    """
    return _library().gba_request_shutdown(status=status, message=message)


def shutdown_requested() -> tuple[int, str] | None:
    """Returns the status and the message of the first request, or None. Does not block."""
    status = ctypes.c_int32()
    message = ctypes.c_char_p()
    if not _shutdown_requested_function()(ctypes.byref(status), ctypes.byref(message)):
        return None
    return status.value, (message.value or b"").decode(errors="replace")


def sleep(value: "tf.Tensor", seconds: "float | tf.Tensor") -> "tf.Tensor":
    """Passes a value on after a while, for tests, demos and benchmarks of slow workers.

    Holds no thread meanwhile; when the step is cancelled the wait ends. Differentiable in `value`.

    Args:
      value: Of any dtype and shape.
      seconds: Scalar, at least 0.

    Returns:
      `value`.

    Raises:
      tf.errors.InvalidArgumentError: When run: `seconds` is negative or not finite.
      tf.errors.CancelledError: When run: the step was cancelled.
    """
    import tensorflow as tf

    seconds = tf.cast(seconds, tf.float64)

    @tf.custom_gradient
    def pass_on(value):
        return _library().gba_sleep(value=value, seconds=seconds), lambda gradient: gradient

    return pass_on(value)


def record_step_seconds(seconds: "float | tf.Tensor") -> Any:
    """Adds one step to the step times of the process that runs this op.

    Args:
      seconds: Scalar, what the step took; at least 0.

    Returns:
      In a graph the `tf.Operation`, else None.

    Raises:
      tf.errors.InvalidArgumentError: When run: `seconds` is negative or not finite.
    """
    import tensorflow as tf

    return _library().gba_record_step_seconds(seconds=tf.cast(seconds, tf.float64))


def step_seconds() -> "tuple[tf.Tensor, tf.Tensor]":
    """Reads the step times of the process that runs this op.

    Returns:
      The number of steps recorded since the process began, int64 scalar, and the sum of their
      seconds, float64 scalar.
    """
    return tuple(_library().gba_step_seconds())


@functools.cache
def _shutdown_requested_function() -> Any:
    from gba_tf.ops import library

    # TensorFlow must have loaded the file first: this handle then is of the same copy.
    library.load()
    function = ctypes.CDLL(str(library.path())).GbaShutdownRequested
    function.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_char_p)]
    function.restype = ctypes.c_bool
    return function


def _library() -> Any:
    from gba_tf.ops import library

    return library.load()
