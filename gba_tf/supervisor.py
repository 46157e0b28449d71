"""One supervisor per task: it lives as long as the run, and starts a process for each segment.

A process of TensorFlow's cannot change its place in a cluster, so that a switch of modes means new
processes. The supervisor has imported TensorFlow and read the data once, and forks.

The chief's supervisor begins the first segment; whoever leads the training begins each of the
others (switch_monitor). All supervisors agree through files in the shared model_dir (switch_files).
One that is killed is missed after some seconds, and then all of them end.
"""

import contextlib
import dataclasses
import os
import signal
import time
import types
import uuid
from collections.abc import Callable, Iterator

from gba_tf import switching
from gba_tf.cluster import say
from gba_tf.cluster_config import ClusterConfig
from gba_tf.forked_process import ForkedProcess
from gba_tf.switch_files import FINISHED, Segment, SwitchFiles, TaskState

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 0.5
_NOTICE_SECONDS = 30.0
# How long a process that trains may take to end when the one that leads has ended.
_END_SECONDS = 10.0
# Of one worker, in one segment of gba.
_MAX_RESTARTS = 10
# How long a chief that cannot begin stays, for the others to hear of it.
_START_SECONDS = 5.0
_CHIEF = "chief 0"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(Exception):
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


class Supervisor:
    """Takes a task through the segments of a run of `--strategy=auto`.

    Args:
      config: From TF_CONFIG, with chief, workers and parameter servers.
      model_dir: Shared by all tasks; claimed for this run on the chief.
      first_mode: Says, on the chief, that of the first segment, of switching.MODES; may raise
        ValueError.
      resume: Whether the first segment goes on from the newest checkpoint.
      train: Does what this task has to do in a segment, in a process of its own: trains or serves.
      gone_seconds: How long a task may give no sign of life; one on a busy machine must not end the
        run. Default: 30.
    """

    def __init__(
        self,
        config: ClusterConfig,
        model_dir: str | os.PathLike[str],
        first_mode: Callable[[], str],
        resume: bool,
        train: Callable[[Segment], None],
        gone_seconds: float = 30.0,
    ):
        self._config = config
        self._files = SwitchFiles(model_dir)
        self._first_mode = first_mode
        self._resume = resume
        self._train = train
        self._gone_seconds = gone_seconds
        self._state = TaskState(process=uuid.uuid4().hex)
        self._others = [
            f"{job} {index}"
            for job, addresses in config.cluster.items()
            for index in range(len(addresses))
            if f"{job} {index}" != config.task_name
        ]
        # Of other tasks: their latest signs of life, and when they were new.
        self._seen: dict[str, tuple[TaskState, float]] = {}
        self._next_beat = 0.0
        self._first_segment = 0

    def run(self) -> int:
        """Returns when the run has ended, or cannot go on.

        Returns:
          The exit code of this task: 0; that of its process that failed, 128 + signal for one that
          was killed; 1 when another task failed; 128 + signal when this one was told to stop.
        """
        failure, code = "", 0
        try:
            with _signals_end():
                number = self._first_segment = self._join()
                while (segment := self._await_segment(number)).mode != FINISHED:
                    self._take_part(segment)
                    number += 1
        except _Ended as end:
            failure, code = end.reason, end.code
            say(f"{self._config.task_name} ends: {failure}")
            if end.is_own:
                failure = f"{self._config.task_name}: {failure}"
        if not self._files.folder.exists():
            return code
        self._say_alive(failure)
        if self._config.is_chief and self._state.segment < 0:
            # For those that are just starting: they go by what changes while they look.
            end = time.monotonic() + _START_SECONDS
            while time.monotonic() < end:
                time.sleep(_BEAT_SECONDS)
                self._say_alive(failure)
        return code

    def _join(self) -> int:
        """Returns the number of the segment to begin with."""
        if self._config.is_chief:
            self._files.begin()
            number = max(self._files.numbers(), default=-1) + 1
            efficiency = switching.DEFAULT_EFFICIENCY
            if number:
                efficiency = self._files.segment(number - 1).efficiency
            try:
                mode = self._first_mode()
            except ValueError as error:
                raise _Ended(str(error), code=2, is_own=True) from None
            self._files.write_segment(Segment(number, mode, self._resume, efficiency))
            return number
        # What there is may be of an earlier run: a chief that lives changes it.
        first = self._files.task(_CHIEF)
        start = notice = time.monotonic()
        while (state := self._files.task(_CHIEF)) in (None, first) or state.segment < 0:
            if state not in (None, first) and state.failure:
                raise _Ended(state.failure)
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - notice >= _NOTICE_SECONDS:
                notice = time.monotonic()
                say(
                    f"{self._config.task_name} waits for the chief, which has given no sign of life"
                    f" in {self._files.folder} for {notice - start:.0f} s. Start the same program"
                    " there with the same --model_dir, on a file system that all tasks share"
                )
        return state.segment

    def _await_segment(self, number: int) -> Segment:
        while (segment := self._files.segment(number)) is None:
            self._tick()
        self._state = dataclasses.replace(self._state, segment=number)
        self._say_alive()
        return segment

    def _take_part(self, segment: Segment) -> None:
        """Returns when the segment has ended, and this task's part in it."""
        leads = self._config.task_name == _leader(segment.mode)
        trains = leads or segment.mode == switching.ALL_REDUCE
        following = segment.number + 1
        restarts = 0
        with contextlib.ExitStack() as stack:
            child = None
            if self._has_part(segment.mode):
                self._await_others(segment)
                child = self._start(stack, segment)
            while self._files.segment(following) is None:
                code = None if child is None else child.poll()
                if code is not None and (code or leads) and not self._files.segment(following):
                    restarts += 1
                    if trains or code >= 0 or not self._may_restart(restarts):
                        raise self._failure(child)
                    say(f"{self._config.task_name} {_describe_end(code)}; it is started again")
                    child = self._start(stack, segment)
                self._tick()
            if child is not None and child.end(_END_SECONDS if trains else 0.0) and trains:
                say(
                    f"{self._config.task_name} still ran {_END_SECONDS:.0f} s after the end of"
                    " its segment, and was killed"
                )

    def _has_part(self, mode: str) -> bool:
        job = self._config.task_type
        return job == "worker" or (mode == switching.GBA and job in ("chief", "ps"))

    def _may_restart(self, restarts: int) -> bool:
        return self._config.task_type == "worker" and restarts <= _MAX_RESTARTS

    def _start(self, stack: contextlib.ExitStack, segment: Segment) -> ForkedProcess:
        child = ForkedProcess(lambda: self._train(segment))
        stack.callback(child.close)
        return child

    def _await_others(self, segment: Segment) -> None:
        """Until none has a process of an earlier segment, which would answer instead.

        For those that have no part in this one, too: a run of which one task had not yet heard
        could be over when it begins to look.
        """
        start = notice = time.monotonic()
        while True:
            states = {task: self._files.task(task) for task in self._others}
            missing = [t for t, s in states.items() if s is None or s.segment < segment.number]
            if not missing:
                return
            if time.monotonic() - notice >= _NOTICE_SECONDS:
                notice = time.monotonic()
                say(
                    f"{self._config.task_name} waits for {', '.join(missing)}, which have given no"
                    f" sign of life in {self._files.folder} for {notice - start:.0f} s"
                )
            self._tick()

    def _failure(self, child: ForkedProcess) -> _Ended:
        code = child.poll()
        if not code:
            return _Ended("its process ended without saying what follows", is_own=True)
        reason = child.reason()
        text = f"its process {_describe_end(code)}{': ' if reason else ''}{reason}"
        return _Ended(text, code if code > 0 else 128 - code, is_own=True)

    def _tick(self) -> None:
        """Shows that this task lives, looks at the others, and sleeps a little."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._say_alive()
            # The chief looks at everybody, and everybody at the chief.
            for task in self._others if self._config.is_chief else [_CHIEF]:
                self._look_at(task, now)
        time.sleep(_POLL_SECONDS)

    def _look_at(self, task: str, now: float) -> None:
        state = self._files.task(task)
        # One that has not joined this run may be late, which _await_others says.
        if state is None or state.segment < self._first_segment:
            return
        last, since = self._seen.get(task, (state, now))
        if state.failure:
            raise _Ended(state.failure)
        if state.process != last.process:
            raise _Ended(f"{task} was started again in the middle of the run")
        if state != last:
            since = now
        if now - since >= self._gone_seconds:
            raise _Ended(f"{task} is gone: no sign of life for {now - since:.0f} s")
        self._seen[task] = (state, since)

    def _say_alive(self, failure: str = "") -> None:
        self._state = dataclasses.replace(self._state, beat=self._state.beat + 1, failure=failure)
        self._files.write_task(self._config.task_name, self._state)


def _leader(mode: str) -> str:
    return _CHIEF if mode == switching.GBA else "worker 0"


def _describe_end(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """Ends what runs within, its processes too, when this one is told to stop."""

    def stop(signum: int, frame: types.FrameType | None) -> None:
        raise _Ended(f"stopped by {signal.Signals(signum).name}", 128 + signum, is_own=True)

    previous = {signum: signal.signal(signum, stop) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
