"""Python handle of the op that ends a process (gba_tf/cc/ops/process_ops.cc)."""

import ctypes
import functools
from typing import Any


def request_shutdown(status: int, message: str) -> Any:
    """Asks the process that runs this op to end; it goes on until it looks.

    Args:
      status: Exit code to end with, a scalar int32.
      message: The reason, a scalar string.

    Returns:
      In a graph the `tf.Operation`, else None.
    """
    from gba_tf.ops import library

    return library.load().gba_request_shutdown(status=status, message=message)


def shutdown_requested() -> tuple[int, str] | None:
    """Returns the status and the message of the first request, or None. Does not block."""
    status = ctypes.c_int32()
    message = ctypes.c_char_p()
    if not _shutdown_requested_function()(ctypes.byref(status), ctypes.byref(message)):
        return None
    return status.value, (message.value or b"").decode(errors="replace")


@functools.cache
def _shutdown_requested_function() -> Any:
    from gba_tf.ops import library

    # TensorFlow must have loaded the file first: this handle then is of the same copy.
    library.load()
    function = ctypes.CDLL(str(library.path())).GbaShutdownRequested
    function.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_char_p)]
    function.restype = ctypes.c_bool
    return function
