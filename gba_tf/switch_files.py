"""Files by which the tasks of `--strategy=auto` agree, and that keep what was decided and why.

    MODEL_DIR/switching/segment-0000.json    the mode from the start
    MODEL_DIR/switching/segment-0001.json    the mode after the first switch, with its numbers
    MODEL_DIR/switching/task-worker-0.json   a supervisor's signs of life

A segment is the time between two switches. Its file is written, by the task that leads, when the
one before has ended and its checkpoint is there; that it exists is the signal. Numbers go on over
restarts of the whole run. Every file is replaced as a whole. Imports no TensorFlow.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from gba_tf.switching import DEFAULT_EFFICIENCY

SWITCHING = "switching"
# The mode of the segment after the last one.
FINISHED = "finished"
_SEGMENT = re.compile(r"segment-(\d{4,})\.json")


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
    """

    number: int
    mode: str
    resume: bool = True
    efficiency: float = DEFAULT_EFFICIENCY
    switch: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    saved_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What a supervisor says about itself, over and over.

    Attributes:
      process: An id of the supervisor's process, another one after a restart.
      beat: Grows while it lives.
      segment: The segment it is in: its part in earlier ones has ended. -1 before the first one.
      failure: Why it ended; empty while all is well.
    """

    process: str
    beat: int = 0
    segment: int = -1
    failure: str = ""


class SwitchFiles:
    """The files of one run.

    Args:
      model_dir: The folder of the run, which all tasks share.
    """

    def __init__(self, model_dir: str | os.PathLike[str]):
        self.folder = pathlib.Path(model_dir) / SWITCHING

    def begin(self) -> None:
        """Makes the folder, without the signs of life of an earlier run: for the chief."""
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.glob("task-*.json"):
            path.unlink()

    def numbers(self) -> list[int]:
        """Of all segments, ascending."""
        names = (_SEGMENT.fullmatch(path.name) for path in self.folder.glob("segment-*.json"))
        return sorted(int(name[1]) for name in names if name)

    def write_segment(self, segment: Segment) -> None:
        self._write(self._segment_path(segment.number), segment)

    def segment(self, number: int) -> Segment | None:
        """None until it is written."""
        fields = _read(self._segment_path(number))
        return None if fields is None else Segment(**fields)

    def switches(self) -> list[dict[str, Any]]:
        """All switches so far, the oldest first, for summary.json."""
        segments = (self.segment(number) for number in self.numbers())
        return [{**s.switch, "seconds": dict(s.seconds)} for s in segments if s.switch is not None]

    def write_task(self, task: str, state: TaskState) -> None:
        self._write(self._task_path(task), state)

    def task(self, task: str) -> TaskState | None:
        """None until it is written."""
        fields = _read(self._task_path(task))
        return None if fields is None else TaskState(**fields)

    def _segment_path(self, number: int) -> pathlib.Path:
        return self.folder / f"segment-{number:04d}.json"

    def _task_path(self, task: str) -> pathlib.Path:
        return self.folder / f"task-{task.replace(' ', '-')}.json"

    def _write(self, path: pathlib.Path, content: Segment | TaskState) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(dataclasses.asdict(content)) + "\n")
        os.replace(temporary, path)


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
