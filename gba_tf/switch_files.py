"""Files by which the tasks of `--strategy=auto` agree, and that keep what was decided and why.

    MODEL_DIR/switching/segment-0000.json    the mode from the start
    MODEL_DIR/switching/segment-0001.json    the mode after the first switch, with its numbers
    MODEL_DIR/switching/task-worker-0.json   a supervisor's signs of life

A segment is the time between two switches. Its file is written, by the task that leads, when the
one before has ended and its checkpoint is there; that it exists is the signal. Numbers go on over
restarts of the whole run, and each file says of which run it is. Every file is replaced as a whole.
Imports no TensorFlow.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from gba_tf.switching import DEFAULT_EFFICIENCY

SWITCHING = "switching"
# The mode of the segment after the last one.
FINISHED = "finished"
_SEGMENT = re.compile(r"segment-(\d{4,})\.json")

_T = TypeVar("_T")


class SwitchFileError(ValueError):
    """A file that cannot be used: which one, what was expected and found, what to do."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """What the tasks do from one switch to the next.

    Attributes:
      number: 0 for the first one in this model_dir.
      mode: One of switching.MODES, or FINISHED: the run has ended.
      resume: Whether to go on from the newest checkpoint.
      efficiency: Of gba, as far as it is known when the segment begins.
      switch: What led to it, as in summary.json: "from", "to", "global_step", "ratio", ... None
        where a run begins or ends.
      seconds: What the switch cost: "save", "restart", "restore", "first_step".
      saved_at: Time of day at which the segment before had saved, in seconds.
      run_id: Of the run, which the chief began with the first of its segments.
    """

    number: int
    mode: str
    resume: bool = True
    efficiency: float = DEFAULT_EFFICIENCY
    switch: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    saved_at: float = 0.0
    run_id: str = ""


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What a supervisor says about itself, over and over.

    Attributes:
      process: An id of the supervisor's process, another one after a restart.
      beat: Grows while it lives.
      segment: The segment it is in: its part in earlier ones has ended. -1 before the first one.
      failure: Why it ended; empty while all is well.
      is_over: Whether it has ended, with or without a failure.
      run_id: Of the run that it is in; empty before it has joined one.
      cluster: A digest of the cluster that it is a task of.
    """

    process: str
    beat: int = 0
    segment: int = -1
    failure: str = ""
    is_over: bool = False
    run_id: str = ""
    cluster: str = ""


class SwitchFiles:
    """The files of one run.

    Args:
      model_dir: The folder of the run, which all tasks share.
    """

    def __init__(self, model_dir: str | os.PathLike[str]):
        self.folder = pathlib.Path(model_dir) / SWITCHING

    def begin(self) -> None:
        """Makes the folder, without what writers that were killed left behind: for the chief."""
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.glob(".*.json.*"):
            path.unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """Of all segments, ascending."""
        names = (_SEGMENT.fullmatch(path.name) for path in self.folder.glob("segment-*.json"))
        return sorted(int(name[1]) for name in names if name)

    def write_segment(self, segment: Segment) -> None:
        """Returns when the segment is on the disk.

        Raises:
          SwitchFileError: One of another run has its number.
        """
        path = self._segment_path(segment.number)
        present = self.segment(segment.number)
        if present is not None and present.run_id != segment.run_id:
            raise SwitchFileError(
                f"{path}: expected no segment or one of this run, found that of another run, which"
                " has taken over the folder. Start this task again to join it"
            )
        self._write(path, segment, durable=True)

    def segment(self, number: int) -> Segment | None:
        """None until it is written.

        Raises:
          SwitchFileError: It is broken.
        """
        return _read(self._segment_path(number), Segment)

    def latest_efficiency(self) -> float:
        """Of gba, as the latest segment knew it."""
        segments = self._readable_segments()
        return segments[-1].efficiency if segments else DEFAULT_EFFICIENCY

    def switches(self) -> list[dict[str, Any]]:
        """All switches so far that can be read, the oldest first, for summary.json."""
        switched = (s for s in self._readable_segments() if s.switch is not None)
        return [{**s.switch, "seconds": dict(s.seconds)} for s in switched]

    def _readable_segments(self) -> list[Segment]:
        segments = []
        for number in self.numbers():
            with contextlib.suppress(SwitchFileError):
                segments.append(self.segment(number))
        return [segment for segment in segments if segment is not None]

    def write_task(self, task: str, state: TaskState) -> None:
        self._write(self._task_path(task), state)

    def task(self, task: str) -> TaskState | None:
        """None until it is written, and where a crash of its host has left it broken."""
        with contextlib.suppress(SwitchFileError):
            return _read(self._task_path(task), TaskState)
        return None

    def _segment_path(self, number: int) -> pathlib.Path:
        return self.folder / f"segment-{number:04d}.json"

    def _task_path(self, task: str) -> pathlib.Path:
        return self.folder / f"task-{task.replace(' ', '-')}.json"

    def _write(
        self, path: pathlib.Path, content: Segment | TaskState, durable: bool = False
    ) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("w") as file:
                file.write(json.dumps(dataclasses.asdict(content)) + "\n")
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _read(path: pathlib.Path, kind: type[_T]) -> _T | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return kind(**json.loads(text))
    except (ValueError, TypeError) as error:
        found = "an empty file" if not text.strip() else str(error)
        raise SwitchFileError(
            f"{path}: expected {kind.__name__} as JSON, found {found}. Remove the file and start"
            " every task again with the same --model_dir: the checkpoints do not depend on it"
        ) from None
