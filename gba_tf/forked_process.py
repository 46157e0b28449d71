"""A child that goes on from where its parent is: imports done, data read. Needs Linux."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_MAX_REASON_BYTES = 2000
_POLL_SECONDS = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessFailure(Exception):
    """Ends a ForkedProcess, raised in it, without a traceback.

    Args:
      reason: For `ForkedProcess.reason`, in one line.
      code: The exit code.
    """

    def __init__(self, reason: str, code: int):
        super().__init__(reason)
        self.reason = " ".join(reason.split())
        self.code = code


class ForkedProcess:
    """Runs a function in a fork of this process, and ends with this process at the latest.

    A child has none of its parent's other threads, and what they had in use is broken in it: this
    is for a parent that has imported TensorFlow and not started its runtime. TensorFlow has no
    threads before that, and the libraries that do (OpenBLAS, jemalloc, Arrow) start theirs again.

    Args:
      function: What the child does. Its process ends with 0 when the function returns, with the
        code of a SystemExit or ProcessFailure, and with 1 after any other exception, which is
        printed.

    Raises:
      RuntimeError: This process has threads of Python's, or TensorFlow's runtime has started.
    """

    def __init__(self, function: Callable[[], None]):
        _refuse_unsafe_fork()
        parent = os.getpid()
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A handler of the parent's that raises must not make the child go on in its place.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.process_id = os.fork()
        if self.process_id == 0:
            _run(function, parent, writing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(writing)
        self._reading = reading
        self._code: int | None = None

    def poll(self) -> int | None:
        """None while it runs, then its exit code; negative: the signal that killed it."""
        if self._code is None:
            process_id, status = os.waitpid(self.process_id, os.WNOHANG)
            if process_id:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def reason(self) -> str:
        """The exception that ended it, in one line; empty if it was none. After its end."""
        with open(self._reading, "rb", closefd=False) as pipe:
            return pipe.read().decode(errors="replace")

    def end(self, grace_seconds: float = 0.0) -> bool:
        """Waits for its end, and kills it after `grace_seconds`; returns whether it had to."""
        deadline = time.monotonic() + grace_seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        killed = self.poll() is None
        if killed:
            os.kill(self.process_id, signal.SIGKILL)
            _, status = os.waitpid(self.process_id, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return killed

    def close(self) -> None:
        """Kills it if it runs, and frees what it has here."""
        self.end()
        os.close(self._reading)


def _refuse_unsafe_fork() -> None:
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if names:
        raise RuntimeError(f"fork: expected no threads in this process, found {', '.join(names)}.")
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module and module.context_safe()
    if context is not None and context._context_handle is not None:
        raise RuntimeError(
            "fork: expected that TensorFlow has run no operation in this process, found its runtime"
            " started, whose threads a child would not have."
        )


def _run(function: Callable[[], None], parent: int, reason: int) -> NoReturn:
    code = 1
    # Nothing of the parent may run here: neither its handlers nor what it does at its exit.
    try:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # It died before it could be watched.
            os._exit(1)
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except ProcessFailure as error:
        code = error.code
        os.write(reason, error.reason.encode()[:_MAX_REASON_BYTES])
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        os.write(reason, _one_line(error).encode()[:_MAX_REASON_BYTES])
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if lines[0] == "in user code:":  # AutoGraph puts a traceback before the error itself.
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
