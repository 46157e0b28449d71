"""One supervisor per task: it lives as long as the run, and starts a process for each segment.

A process of TensorFlow's cannot change its place in a cluster, so that a switch of modes means new
processes. The supervisor has imported TensorFlow and read the data once, and forks.

The chief's supervisor begins the first segment; whoever leads the training begins each of the
others (switch_monitor). All supervisors agree through files in the shared model_dir (switch_files).
One that is killed is missed after some seconds, and then all of them end (signs_of_life).
"""

import contextlib
import os
import signal
import types
from collections.abc import Callable, Iterator

from gba_tf import switching
from gba_tf.cluster import say
from gba_tf.cluster_config import ClusterConfig
from gba_tf.forked_process import ForkedProcess
from gba_tf.signs_of_life import CHIEF, Ended, SignsOfLife
from gba_tf.switch_files import FINISHED, Segment, SwitchFileError, SwitchFiles

# How long a process that trains may take to end when the one that leads has ended.
_END_SECONDS = 10.0
# Of one worker, in one segment of gba.
_MAX_RESTARTS = 10
# How long a chief that is stopped before it began stays, for the others to hear of it.
_STOPPED_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        self._signs = SignsOfLife(config, self._files, gone_seconds)

    def run(self) -> int:
        """Returns when the run has ended, or cannot go on.

        Returns:
          The exit code of this task: 0; that of its process that failed, 128 + signal for one that
          was killed; 1 when another task failed; 128 + signal when this one was told to stop.
        """
        failure, code = "", 0
        number = None
        try:
            with _signals_end():
                number = self._join()
                while (segment := self._await_segment(number)).mode != FINISHED:
                    self._take_part(segment)
                    number += 1
        except (Ended, SwitchFileError) as error:
            end = error if isinstance(error, Ended) else Ended(str(error), code=2, is_own=True)
            failure, code = end.reason, end.code
            trouble = self._signs.trouble if not end.is_own else ""
            say(f"{self._config.task_name} ends: {failure}{trouble and f' ({trouble})'}")
            if end.is_own:
                failure = f"{self._config.task_name}: {failure}"
        if self._config.is_chief and number is None:
            self._signs.stay(failure, *([_STOPPED_SECONDS] if code > 128 else []))
        else:
            self._signs.end(failure)
        return code

    def _join(self) -> int:
        """Returns the number of the segment to begin with."""
        self._signs.take_place()
        if not self._config.is_chief:
            return self._signs.join_run()
        self._files.begin()
        try:
            mode = self._first_mode()
        except ValueError as error:
            raise Ended(str(error), code=2, is_own=True) from None
        self._signs.begin_run()
        number = max(self._files.numbers(), default=-1) + 1
        efficiency = self._files.latest_efficiency()
        self._files.write_segment(
            Segment(number, mode, self._resume, efficiency, run_id=self._signs.run_id)
        )
        return number

    def _await_segment(self, number: int) -> Segment:
        while (segment := self._segment(number)) is None:
            self._signs.tick()
        self._signs.enter(number)
        return segment

    def _segment(self, number: int) -> Segment | None:
        """None until it is written, and where it is of another run."""
        segment = self._signs.tolerate("read a segment", lambda: self._files.segment(number))
        return segment if segment and segment.run_id == self._signs.run_id else None

    def _take_part(self, segment: Segment) -> None:
        """Returns when the segment has ended, and this task's part in it."""
        leads = self._config.task_name == _leader(segment.mode)
        trains = leads or segment.mode == switching.ALL_REDUCE
        following = segment.number + 1
        restarts = 0
        with contextlib.ExitStack() as stack:
            child = None
            if self._has_part(segment.mode):
                # Until none has a process of an earlier segment, which would answer instead. Of
                # those that have no part in this one, too: a run of which one task had not yet
                # heard could be over when it begins to look.
                self._signs.await_others(segment.number)
                child = self._start(stack, segment)
            while self._segment(following) is None:
                code = None if child is None else child.poll()
                # Whether it said what follows cannot be told while the folder cannot be used.
                is_ended = code is not None and (code or (leads and not self._signs.trouble))
                if is_ended and not self._segment(following):
                    restarts += 1
                    if trains or code >= 0 or not self._may_restart(restarts):
                        raise self._failure(child)
                    say(f"{self._config.task_name} {_describe_end(code)}; it is started again")
                    child = self._start(stack, segment)
                self._signs.tick()
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

    def _failure(self, child: ForkedProcess) -> Ended:
        code = child.poll()
        if not code:
            return Ended("its process ended without saying what follows", is_own=True)
        reason = child.reason()
        text = f"its process {_describe_end(code)}{': ' if reason else ''}{reason}"
        return Ended(text, code if code > 0 else 128 - code, is_own=True)


def _leader(mode: str) -> str:
    return CHIEF if mode == switching.GBA else "worker 0"


def _describe_end(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """Ends what runs within, its processes too, when this one is told to stop."""

    def stop(signum: int, frame: types.FrameType | None) -> None:
        raise Ended(f"stopped by {signal.Signals(signum).name}", 128 + signum, is_own=True)

    previous = {signum: signal.signal(signum, stop) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
