"""Shows how far an epoch is while it runs: Keras refuses its own bar under parameter servers."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

# A task of a local cluster writes to a pipe; whoever started it says here that a terminal of so
# many columns shows what comes out.
COLUMNS_VARIABLE = "GBA_TF_TERMINAL_COLUMNS"
_DEFAULT_COLUMNS = 80
_BAR_WIDTH = 12
_TERMINAL_SECONDS = 0.5
# In a log, a short epoch shows something too, and a long one does not fill it.
_FIRST_LOG_SECONDS = 2.0
_MAX_LOG_SECONDS = 30.0
_JOIN_SECONDS = 5.0


def terminal_columns(stream: TextIO, environ: Mapping[str, str] = os.environ) -> int | None:
    """Columns of the terminal that shows what is written to `stream`; None if none does."""
    if environ.get(COLUMNS_VARIABLE, "").isdecimal():
        return int(environ[COLUMNS_VARIABLE])
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


class EpochProgress:
    """Prints a line that follows a counter.

    On a terminal it is rewritten in place and gone in the end; elsewhere there is a line after 2,
    6, 14, 30 seconds, then every 30. Use as a context manager around an epoch.

    Args:
      title: Start of the line, e.g. "epoch 2/5".
      done: Returns how many batches of this epoch are done; called from a thread of its own. If it
        or `detail` raises, there is no line that time.
      total: Batches in the epoch.
      examples: Examples in the epoch, for the rate.
      detail: Returns text for the end of the line, such as the loss. Default: nothing.
      stream: Default: standard output.
      silent: Whether to show nothing, as in the processes that do not lead.
    """

    def __init__(
        self,
        title: str,
        done: Callable[[], int],
        total: int,
        examples: int,
        detail: Callable[[], str] = lambda: "",
        stream: TextIO | None = None,
        silent: bool = False,
    ):
        self._silent = silent
        self._title = title
        self._done = done
        self._total = total
        self._examples = examples
        self._detail = detail
        self._stream = stream or sys.stdout
        self._columns = terminal_columns(self._stream)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="EpochProgress", daemon=True)

    def __enter__(self) -> "EpochProgress":
        self._start = time.monotonic()
        if not self._silent:
            self._thread.start()
        return self

    def __exit__(self, *unused) -> None:
        if self._silent:
            return
        self._end.set()
        # Not for ever: the thread may be reading from a parameter server that is gone.
        self._thread.join(_JOIN_SECONDS)
        if self._columns is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, done: int, seconds: float) -> str:
        """The text for `done` batches after `seconds`, no longer than the terminal is wide."""
        done = min(done, self._total)
        filled = _BAR_WIDTH * done // self._total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        text = f"{self._title} [{bar}] {done:,}/{self._total:,} batches"
        if done:
            rate = done / self._total * self._examples / seconds
            text = ", ".join(filter(None, [text, f"{rate:,.0f} examples/s", self._detail()]))
        # A line that wraps could not be rewritten.
        return text if self._columns is None else text[: self._columns - 1]

    def _follow(self) -> None:
        interval = _FIRST_LOG_SECONDS if self._columns is None else _TERMINAL_SECONDS
        while not self._end.wait(interval):
            if self._columns is None:
                interval = min(2 * interval, _MAX_LOG_SECONDS)
            try:
                text = self.line(self._done(), time.monotonic() - self._start)
            except Exception:  # A parameter server does not answer: training will say so.
                continue
            self._stream.write(f"{text}\n" if self._columns is None else f"\r{text}\x1b[K")
            self._stream.flush()
