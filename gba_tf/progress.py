"""Shows how far an epoch is while it runs: Keras refuses its own bar under parameter servers."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_BAR_WIDTH = 24
_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 10.0


class EpochProgress:
    """Prints a line that follows a counter: rewritten in place on a terminal, else every 10 s.

    Use as a context manager around an epoch.

    Args:
      title: Start of the line, e.g. "epoch 2/5".
      done: Returns how many batches of this epoch are done; called from a thread of its own.
      total: Batches in the epoch.
      batch_size: Examples in a batch, for the rate.
      detail: Returns text for the end of the line, such as the global step. Default: nothing.
      stream: Default: standard output.
    """

    def __init__(
        self,
        title: str,
        done: Callable[[], int],
        total: int,
        batch_size: int,
        detail: Callable[[], str] = lambda: "",
        stream: TextIO | None = None,
    ):
        self._title = title
        self._done = done
        self._total = total
        self._batch_size = batch_size
        self._detail = detail
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="EpochProgress", daemon=True)

    def __enter__(self) -> "EpochProgress":
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *unused) -> None:
        self._end.set()
        self._thread.join()
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, done: int, seconds: float) -> str:
        """The text for `done` batches after `seconds`."""
        done = min(done, self._total)
        filled = _BAR_WIDTH * done // self._total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        rate = done * self._batch_size / seconds if seconds > 0 else 0.0
        text = f"{self._title} [{bar}] {done:,}/{self._total:,} batches, {rate:,.0f} examples/s"
        detail = self._detail()
        return f"{text}, {detail}" if detail else text

    def _follow(self) -> None:
        interval = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        while not self._end.wait(interval):
            text = self.line(self._done(), time.monotonic() - self._start)
            self._stream.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
            self._stream.flush()
