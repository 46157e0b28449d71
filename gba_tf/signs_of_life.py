"""How the supervisors of `--strategy=auto` know of each other: who lives, in which run, who failed.

Each writes a file of its own over and over (switch_files.TaskState). The chief makes the id of the
run; the others join the run of a living chief of the same cluster, and what is of another run means
nothing to them: a second run that is started by mistake does not end the first, and a chief that is
started again begins anew. Imports no TensorFlow.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from gba_tf.cluster import say
from gba_tf.cluster_config import ClusterConfig
from gba_tf.switch_files import SwitchFiles, TaskState

CHIEF = "chief 0"
_POLL_SECONDS = 0.02
_BEAT_SECONDS = 0.5
_NOTICE_SECONDS = 30.0
# Whoever has written nothing for so long is dead, for one that is to take its place.
_ALIVE_SECONDS = 3.0
# Longer between two looks at the others: the machine or the file system stood still, theirs too.
_PAUSE_SECONDS = 2.0
# How long a task that cannot begin stays, for the others to hear of it.
_HEARD_SECONDS = 30.0

_T = TypeVar("_T")


class Ended(Exception):
    """The run cannot go on, for this task.

    Args:
      reason: Why; of another task it begins with its name.
      code: The exit code of this task.
      is_own: Whether it began with this task, and not with another one.
    """

    def __init__(self, reason: str, code: int = 1, is_own: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.is_own = is_own


class SignsOfLife:
    """Of this task and of the others.

    Args:
      config: Of this task.
      files: Of the shared model_dir.
      gone_seconds: How long another task may give no sign of life, and the folder refuse one.
    """

    def __init__(self, config: ClusterConfig, files: SwitchFiles, gone_seconds: float):
        self._config = config
        self._files = files
        self._gone_seconds = gone_seconds
        self._state = TaskState(process=uuid.uuid4().hex, cluster=_digest(config))
        self.others = [
            f"{job} {index}"
            for job, addresses in config.cluster.items()
            for index in range(len(addresses))
            if f"{job} {index}" != config.task_name
        ]
        # What there is may be of an earlier run: those that live change it.
        self._earlier = {task: files.task(task) for task in self.others}
        # Of other tasks in this run: their latest signs of life, and when they were new.
        self._seen: dict[str, tuple[TaskState, float]] = {}
        self._trouble: dict[str, tuple[OSError, float]] = {}
        # Before that, its file may be another process's.
        self._has_place = False
        self._next_beat = 0.0
        self._latest_tick: float | None = None

    @property
    def run_id(self) -> str:
        """Empty before the run is joined."""
        return self._state.run_id

    @property
    def trouble(self) -> str:
        """Why the folder cannot be used just now; empty if it can."""
        return "; ".join(str(error) for error, _ in self._trouble.values())

    def take_place(self) -> None:
        """Makes sure that no other process is this task.

        Raises:
          Ended: One is.
        """
        name = self._config.task_name
        earlier = self._files.task(name)
        end = time.monotonic() + _ALIVE_SECONDS
        while _may_live(earlier) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            state = self._files.task(name)
            if _may_live(state) and state != earlier:
                raise Ended(
                    f"expected nobody else to be {name} in {self._files.folder}, found a living"
                    " process that is. Wait for the end of its run, or choose another --model_dir",
                    code=2,
                    is_own=True,
                )
            earlier = state
        self._has_place = True

    def begin_run(self) -> None:
        """For the chief."""
        self._state = dataclasses.replace(self._state, run_id=uuid.uuid4().hex)

    def join_run(self) -> int:
        """For all others: waits for the chief, and returns the number of its segment.

        Raises:
          Ended: The chief cannot begin, or is that of another cluster.
        """
        first = self._earlier[CHIEF]
        start = notice = time.monotonic()
        while True:
            state = self._read_task(CHIEF)
            if state is not None and state != first:
                if state.cluster == self._state.cluster:
                    if state.failure:
                        raise Ended(state.failure)
                    if state.segment >= 0 and not state.is_over:
                        break
                elif _may_live(state):
                    raise Ended(
                        f"expected the chief of this task's cluster in {self._files.folder}, found"
                        " that of another one. Give every task the same cluster in TF_CONFIG, and"
                        " each cluster a --model_dir of its own",
                        code=2,
                        is_own=True,
                    )
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - notice >= _NOTICE_SECONDS:
                notice = time.monotonic()
                say(
                    f"{self._config.task_name} waits for the chief, which has given no sign of life"
                    f" in {self._files.folder} for {notice - start:.0f} s. Start the same program"
                    " there with the same --model_dir, on a file system that all tasks share"
                )
        self._state = dataclasses.replace(self._state, run_id=state.run_id)
        self._seen[CHIEF] = state, time.monotonic()
        return state.segment

    def enter(self, segment: int) -> None:
        """Says that this task's part in the segments before has ended."""
        self._state = dataclasses.replace(self._state, segment=segment)
        self._write()

    def await_others(self, segment: int) -> None:
        """Until all have entered the segment.

        Raises:
          Ended: As of `tick`.
        """
        start = notice = time.monotonic()
        while missing := [task for task in self.others if not self._has_entered(task, segment)]:
            if time.monotonic() - notice >= _NOTICE_SECONDS:
                notice = time.monotonic()
                say(
                    f"{self._config.task_name} waits for {', '.join(missing)}, which have given no"
                    f" sign of life in {self._files.folder} for {notice - start:.0f} s"
                )
            self.tick()

    def tick(self) -> None:
        """Shows that this task lives, looks at the others, and sleeps a little.

        Raises:
          Ended: Another task failed or is gone, or the folder cannot be used any more.
        """
        now = time.monotonic()
        if self._latest_tick is not None and now - self._latest_tick >= _PAUSE_SECONDS:
            self._seen = {task: (state, now) for task, (state, _) in self._seen.items()}
        self._latest_tick = now
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._write()
            # The chief looks at everybody, and everybody at the chief.
            for task in self.others if self._config.is_chief else [CHIEF]:
                self._look_at(task, now)
        time.sleep(_POLL_SECONDS)

    def end(self, failure: str = "") -> None:
        """Says that this task has ended, as far as it can.

        Args:
          failure: Why, with the name of the task where it began; empty after a whole run.
        """
        with contextlib.suppress(OSError):
            # Before there is a folder, it is for the chief to make it.
            if self._has_place and self._files.folder.exists():
                self._say(failure, is_over=True)

    def stay(self, failure: str, seconds: float = _HEARD_SECONDS) -> None:
        """For a task that cannot begin: says so until those have heard of it who wait for it.

        Those that are just starting go by what changes while they look.
        """
        listeners = self.others if self._config.is_chief else [CHIEF]
        end = time.monotonic() + seconds
        while self._has_place and time.monotonic() < end:
            self.end(failure)
            time.sleep(_BEAT_SECONDS)
            with contextlib.suppress(OSError):
                states = {task: self._files.task(task) for task in listeners}
                if all(s not in (None, self._earlier[t]) and s.is_over for t, s in states.items()):
                    return

    def tolerate(self, what: str, call: Callable[[], _T]) -> _T | None:
        """What `call` returns; None where the folder cannot be used for a while.

        Args:
          what: Kind of use: one may work while another one does not.
          call: Uses the folder.

        Raises:
          Ended: It could not be used for gone_seconds.
        """
        try:
            result = call()
        except OSError as error:
            now = time.monotonic()
            _, since = self._trouble.setdefault(what, (error, now))
            if now - since >= self._gone_seconds:
                raise Ended(
                    f"{self._files.folder} could not be used for {now - since:.0f} s: {error}."
                    " Make room and see to the file system; then start every task again",
                    code=2,
                    is_own=True,
                ) from error
            return None
        self._trouble.pop(what, None)
        return result

    def _has_entered(self, task: str, segment: int) -> bool:
        state = self._read_task(task)
        return state is not None and state.run_id == self.run_id and state.segment >= segment

    def _look_at(self, task: str, now: float) -> None:
        state = self._read_task(task)
        is_of_run = state is not None and state.run_id == self.run_id
        # It cannot begin, and so has joined none.
        is_of_none = state is not None and not state.run_id and state != self._earlier[task]
        if state is not None and state.failure and (is_of_run or is_of_none):
            if state.cluster == self._state.cluster:
                raise Ended(state.failure)
        # One that has not joined this run may be late, which await_others says.
        if not is_of_run and task not in self._seen:
            return
        last, since = self._seen.get(task, (state, now))
        if is_of_run:
            if state.process != last.process:
                raise Ended(f"{task} was started again in the middle of the run")
            if state != last:
                last, since = state, now
        if now - since >= self._gone_seconds:
            reason = f"{task} is gone: no sign of life for {now - since:.0f} s"
            if state is not None and not is_of_run:
                reason += (
                    ", and another process in its place. A task that is started again joins the run"
                    " of the chief"
                )
            raise Ended(reason)
        self._seen[task] = last, since

    def _read_task(self, task: str) -> TaskState | None:
        return self.tolerate("read", lambda: self._files.task(task))

    def _write(self) -> None:
        self.tolerate("write", self._say)

    def _say(self, failure: str = "", is_over: bool = False) -> None:
        self._state = dataclasses.replace(
            self._state, beat=self._state.beat + 1, failure=failure, is_over=is_over
        )
        self._files.write_task(self._config.task_name, self._state)


def report_failure(
    config: ClusterConfig, model_dir: str | os.PathLike[str], reason: str, seconds: float = 30.0
) -> None:
    """Tells the other supervisors that this task cannot begin, so that none waits for it.

    Returns when they have heard of it, or after some seconds.

    Args:
      config: Of this task.
      model_dir: Shared by all tasks; claimed by the chief, if this is the chief.
      reason: Why, in one line.
      seconds: How long to stay for others to hear of it. Default: 30.
    """
    files = SwitchFiles(model_dir)
    signs = SignsOfLife(config, files, gone_seconds=seconds)
    try:
        signs.take_place()
        if config.is_chief:
            files.begin()
    except (Ended, OSError):
        return  # Another run is there, or nothing can be written.
    signs.stay(f"{config.task_name}: {' '.join(reason.split())}", seconds)


def _may_live(state: TaskState | None) -> bool:
    return state is not None and not state.is_over


def _digest(config: ClusterConfig) -> str:
    """Of the cluster in TF_CONFIG: other clusters have another one."""
    cluster = {job: list(addresses) for job, addresses in config.cluster.items()}
    return hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()[:16]
