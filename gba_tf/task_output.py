"""The output of a local cluster's tasks: to the terminal without TensorFlow's noise, and tails."""

import codecs
import os
import pathlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO, TextIO

# Set for a task whose output is shown while it leads.
LEADER_MARKS_VARIABLE = "GBA_TF_LEADER_MARKS"
# Lines that no program writes by chance; all start with the same rare byte.
_LEADS, _FOLLOWS = b"\x1egba_tf: this task leads\n", b"\x1egba_tf: this task follows\n"
_MARK = re.compile(b"(" + _LEADS + b"|" + _FOLLOWS + b")")

_ABSL_PREFIX = rb"\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+:\d+\] "
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|To enable the following instructions: .* rebuild TensorFlow"
    rb"|I" + _ABSL_PREFIX + rb"|E" + _ABSL_PREFIX + rb"(failed call to cuInit"
    rb"|Unable to register cu\w+ factory)"
)
_NOISE_STARTS = (
    b"WARNING: All log messages before absl::",
    b"To enable the following instructions:",
)


class NoiseFilter:
    """Drops the lines that TensorFlow writes to standard error whenever it starts.

    Some of them come before TF_CPP_MIN_LOG_LEVEL has any effect. Example: fed with
    b"I0000 00:00:1796117102.3  35 port.cc:153] oneDNN\\nstep 1", it returns b"step 1".
    """

    def __init__(self) -> None:
        self._held = b""
        self._inside_line = False

    def feed(self, data: bytes) -> bytes:
        """Takes the next piece of output; returns what may be shown now."""
        shown = []
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if self._inside_line:
                shown.append(piece)
                self._inside_line = not piece.endswith(b"\n")
                continue
            line, self._held = self._held + piece, b""
            if line.endswith(b"\n"):
                if not _NOISE.match(line):
                    shown.append(line)
            elif _may_become_noise(line):
                self._held = line
            else:  # A progress bar or a prompt is shown before its line is complete.
                shown.append(line)
                self._inside_line = True
        return b"".join(shown)

    def flush(self) -> bytes:
        """Returns what was held back, at the end of the output."""
        held, self._held = self._held, b""
        return b"" if _NOISE.match(held) else held


def _may_become_noise(line: bytes) -> bool:
    if re.match(rb"[IE](\d{0,3}$|\d{4}( |$))", line):
        return True
    return any(start.startswith(line[: len(start)]) for start in _NOISE_STARTS)


def mark_leader(leads: bool) -> None:
    """Says to the local cluster, if this process is of one, whether to show its output from now on.

    The marks are lines of their own, which `OutputCopier` takes out again.
    """
    if not os.environ.get(LEADER_MARKS_VARIABLE):
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.write((_LEADS if leads else _FOLLOWS).decode())
        stream.flush()


class LeaderMarks:
    """Takes the marks of `mark_leader` out of a stream, and knows what they say.

    Attributes:
      leads: Whether the task leads now.
    """

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self._held = b""

    def split(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Takes the next piece of output; yields it in order, each part with whether to show it."""
        *parts, rest = _MARK.split(self._held + data)
        # The beginning of a mark, perhaps, whose end is still to come.
        start = rest.rfind(_LEADS[:1])
        if start < 0 or not any(mark.startswith(rest[start:]) for mark in (_LEADS, _FOLLOWS)):
            start = len(rest)
        self._held = rest[start:]
        for part in (*parts, rest[:start]):
            if part in (_LEADS, _FOLLOWS):
                self.leads = part == _LEADS
            elif part:
                yield part, self.leads

    def flush(self) -> bytes:
        """Returns what was held back, at the end of the output."""
        held, self._held = self._held, b""
        return held


class OutputCopier:
    """Copies a pipe to a log file, complete, and to the terminal, filtered, in its own thread."""

    def __init__(
        self,
        pipe: BinaryIO,
        log: BinaryIO,
        terminal: TextIO,
        hide_noise: bool,
        leads: bool = True,
    ) -> None:
        """Starts copying.

        Args:
          pipe: The reading end; closed at its end of file.
          log: The log file, unbuffered; stays open.
          terminal: Where to show it, usually `sys.stdout`.
          hide_noise: Whether TensorFlow's start-up lines are kept out of the terminal.
          leads: Whether the terminal shows the output from the start, before any mark of
            `mark_leader`. Default: True.
        """
        self._pipe, self._log, self._terminal = pipe, log, terminal
        self._filter = NoiseFilter() if hide_noise else None
        self._marks = LeaderMarks(leads)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether the terminal shows the output now."""
        return self._marks.leads

    def join(self, timeout_seconds: float) -> None:
        """Waits until all is copied; not for ever, as a child of the task may hold the pipe."""
        self._thread.join(timeout_seconds)

    def _copy(self) -> None:
        unfinished_line = b""
        with self._pipe:
            while data := os.read(self._pipe.fileno(), 1 << 16):
                for part, shown in self._marks.split(data):
                    # Whole lines only: the other stream of the task goes into the same file.
                    lines, end, unfinished_line = (unfinished_line + part).rpartition(b"\n")
                    self._log.write(lines + end)
                    if shown:
                        self._show(self._filter.feed(part) if self._filter else part)
        held = self._marks.flush()
        self._log.write(unfinished_line + held)
        if self.leads and self._filter:
            held = self._filter.feed(held) + self._filter.flush()
        self._show(held if self.leads else b"", final=True)

    def _show(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        try:
            if text:
                self._terminal.write(text)
                self._terminal.flush()
        except (OSError, ValueError):
            # The terminal is gone (`| head`); the task must not block on a full pipe for that.
            pass


def last_lines(path: pathlib.Path, count: int = 20) -> list[str]:
    """The last lines of a log file, read from its end; bytes that are not UTF-8 are replaced."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 64 * 1024))
        return log.read().decode(errors="replace").splitlines()[-count:]
