"""Watches the training of one segment of `--strategy=auto`, and ends it where a switch pays."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from gba_tf import coordination, switching
from gba_tf.batch_plan import BatchPlan
from gba_tf.step_times import AllReduceTimes, TokenTimes
from gba_tf.strategy import GBAStrategy
from gba_tf.switch_files import FINISHED, Segment, SwitchFiles
from gba_tf.switching import SwitchRule, Window

# A window, and what is left out in the beginning, when functions are traced and sent: updates.
_UPDATES_PER_WINDOW = 20
_UPDATES_TO_WARM_UP = 4
_POLL_SECONDS = 0.02
_JOIN_SECONDS = 1.0


class SwitchMonitor(tf.keras.callbacks.Callback):
    """Measures windows of a segment, decides after each, and leaves the numbers behind.

    A callback of every Model.fit of the segment. Under all-reduce every worker has one, and all of
    them decide the same at the same step, as they apply the same rule to the same numbers.

    Args:
      segment: What is trained.
      rule: When to switch.
      files: Where the next segment is written to.

    Attributes:
      decision: The window that decided for a switch; None while there is none.
    """

    def __init__(self, segment: Segment, rule: SwitchRule, files: SwitchFiles):
        super().__init__()
        # Else Keras waits for every step to tell its results, and refuses parameter servers.
        self._supports_tf_logs = True
        self._segment = segment
        self._rule = rule
        self._files = files
        self._efficiency = segment.efficiency
        self._seconds: dict[str, float] = {}
        self._windows: list[Window] = []
        self._steps = 0
        self._stay = _Stopwatch()
        self._window_start = 0.0
        self._times: AllReduceTimes | TokenTimes | None = None
        self._is_first_step_done = False
        self._first_step: threading.Thread | None = None
        self._decided_at = 0.0
        self.decision: Window | None = None

    def restore_begins(self) -> None:
        """To be called when the model is there, and nothing is restored yet."""
        self._mark = time.time()
        self._seconds["restart"] = self._mark - self._segment.saved_at

    def restored(
        self,
        strategy: tf.distribute.Strategy,
        plan: BatchPlan,
        num_steps: int,
        is_leader: bool,
    ) -> None:
        """To be called when training can begin.

        Args:
          strategy: That of the segment's mode.
          plan: Of the strategy.
          num_steps: After which the training of all epochs is done: no switch then.
          is_leader: Whether this process writes the files.
        """
        now = time.time()
        self._seconds["restore"], self._mark = now - self._mark, now
        self._strategy = strategy
        self._plan = plan
        self._num_steps = num_steps
        self._is_leader = is_leader
        if isinstance(strategy, GBAStrategy):
            # Else the chief schedules a quarter of a million steps ahead, and cannot stop.
            coordination.limit_schedule(strategy._cluster_coordinator, 2 * plan.num_workers)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._stay.go()
        if self._is_first_step_done or not self._is_leader:
            return
        if isinstance(self._strategy, GBAStrategy):
            # For Keras a batch has ended when it is scheduled.
            self._first_step = threading.Thread(target=self._await_first_step, daemon=True)
            self._first_step.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += 1
        if self._first_step is None:
            self._note_first_step()
        per_update = 1
        if isinstance(self._strategy, GBAStrategy):
            per_update = self._plan.gradients_per_update
        updates, rest = divmod(self._steps, per_update)
        updates -= _UPDATES_TO_WARM_UP
        if rest or updates < 0 or updates % _UPDATES_PER_WINDOW:
            return
        if self._times is None:
            self._times = self._begin_times()
            self._window_start = self._stay.seconds
        else:
            self._end_window()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._first_step is not None:
            # All steps are done; with fewer than make an update, there is none yet.
            self._first_step.join(_JOIN_SECONDS)
        # Evaluation and saving are no part of the speed of training.
        self._stay.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what runs within, such as a checkpoint within an epoch, out of the numbers."""
        if isinstance(self._strategy, GBAStrategy):
            # What is scheduled is still trained, and counted.
            self._strategy._cluster_coordinator.join()
        self._stay.stop()
        try:
            yield
        finally:
            self._stay.go()

    def end_segment(self, global_step: int, trained: bool) -> None:
        """To be called when the segment has ended and its checkpoint is there; says what follows.

        Args:
          global_step: That of the checkpoint.
          trained: Whether all epochs are done.
        """
        if not self._is_leader:
            return
        following = self._segment.number + 1
        if trained:
            segment = Segment(
                following, FINISHED, efficiency=self._efficiency, run_id=self._segment.run_id
            )
        else:
            to = _other(self._segment.mode)
            saved_at = time.time()
            switch = {"from": self._segment.mode, "to": to, "global_step": global_step}
            segment = Segment(
                following,
                to,
                efficiency=self._efficiency,
                switch={**switch, **self.decision.to_json()},
                seconds={"save": saved_at - self._decided_at},
                saved_at=saved_at,
                run_id=self._segment.run_id,
            )
        self._files.write_segment(segment)

    def switches(self) -> list[dict[str, Any]]:
        """All of the run so far, for summary.json."""
        return self._files.switches()

    def _begin_times(self) -> AllReduceTimes | TokenTimes:
        size, workers = self._plan.local_batch_size, self._plan.num_workers
        if isinstance(self._strategy, GBAStrategy):
            return TokenTimes(self._strategy, size, workers)
        return AllReduceTimes(self._strategy, size)

    def _end_window(self) -> None:
        stay = self._stay.seconds
        if isinstance(self._times, TokenTimes):
            speed, seconds = self._times.end_window(stay - self._window_start)
            self._efficiency = switching.measured_efficiency(self._efficiency, speed, seconds)
        else:
            stay, seconds = self._times.end_window(stay)
        self._window_start = self._stay.seconds
        window = Window(stay, seconds, self._efficiency)
        self._windows = [*self._windows, window][-self._rule.windows :]
        logging.info("%s: %s", self._segment.mode, window.describe())
        mode = switching.next_mode(self._rule, self._segment.mode, self._windows)
        if mode != self._segment.mode and self._steps < self._num_steps:
            self.decision = window
            self._decided_at = time.time()
            self.model.stop_training = True
            if self._is_leader:
                print(
                    f"switch from {self._segment.mode} to {mode}: {window.describe()}, in"
                    f" {self._rule.windows} windows in a row",
                    flush=True,
                )

    def _await_first_step(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                stats = self._strategy.stats()
            except tf.errors.OpError:
                return  # A parameter server does not answer: training will say so.
            if stats.applied + stats.decayed:
                return self._note_first_step()

    def _note_first_step(self) -> None:
        if self._is_first_step_done or not self._is_leader:
            return
        self._is_first_step_done = True
        if self._segment.switch is None:
            return
        self._seconds["first_step"] = time.time() - self._mark
        seconds = {**self._segment.seconds, **self._seconds}
        self._files.write_segment(dataclasses.replace(self._segment, seconds=seconds))
        parts = ", ".join(f"{name.replace('_', ' ')} {s:.1f}" for name, s in seconds.items())
        print(
            f"the switch to {self._segment.mode} at global step"
            f" {self._segment.switch['global_step']:,} took {sum(seconds.values()):.1f} s: {parts}",
            flush=True,
        )


class _Stopwatch:
    """Seconds between go() and stop(), added up."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._sum + running

    def go(self) -> None:
        self._since = time.monotonic()

    def stop(self) -> None:
        self._sum, self._since = self.seconds, None


def _other(mode: str) -> str:
    (other,) = (other for other in switching.MODES if other != mode)
    return other
