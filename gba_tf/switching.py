"""When `--strategy=auto` moves between all-reduce and gba: a rule on measured numbers.

Synchronous training is as fast as its slowest worker, gba as all workers together less what its
token server and buffers cost. With t seconds per example of each of N workers:

    all-reduce   N / max(t)                    examples per second
    gba          efficiency * sum(1 / t)       examples per second
    ratio        gba / all-reduce = efficiency * mean(max(t) / t)

The ratio does not depend on the unit of t, so it may be measured in either mode. What t covers does
depend on the mode: under all-reduce it ends when the gradients are ready; under gba it goes from
the token to the commit, and so reading parameters and pushing gradients are in it, which adds to
fast and slow workers alike and makes the ratio smaller. Imports no TensorFlow.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

ALL_REDUCE = "multi_worker_mirrored"
GBA = "gba"
MODES = (ALL_REDUCE, GBA)
# Until it was measured.
DEFAULT_EFFICIENCY = 0.9
# Of a new window in the running mean: the last six or so count.
_SMOOTHING = 0.3


@dataclasses.dataclass(frozen=True)
class SwitchRule:
    """When to switch. The defaults leave a cluster alone whose slowest of 4 workers takes less than
    twice as long as the others, and move it from there on (ratio 1.58 at twice, 3.6 at five times).

    Attributes:
      threshold: To gba where it is expected to be so many times as fast. Default 1.5.
      windows: Windows in a row that have to agree. Default 3.
      hysteresis: Back where the ratio is at most threshold * (1 - hysteresis). Default 0.2.
      minimum_stay_seconds: No switch before a mode has trained so long; a switch costs some
        seconds. Default 60.

    Raises:
      ValueError: A value is out of range.
    """

    threshold: float = 1.5
    windows: int = 3
    hysteresis: float = 0.2
    minimum_stay_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(
                f"switch_threshold: expected a positive number, found {self.threshold}."
            )
        if self.windows < 1:
            raise ValueError(f"switch_windows: expected at least 1, found {self.windows}.")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(
                f"switch_hysteresis: expected a number from 0 to below 1, found {self.hysteresis}."
            )
        if not 0 <= self.minimum_stay_seconds < math.inf:
            raise ValueError(
                "switch_minimum_stay: expected seconds of 0 or more, found"
                f" {self.minimum_stay_seconds}."
            )


@dataclasses.dataclass(frozen=True)
class Window:
    """What was measured over some updates in a row.

    Attributes:
      stay_seconds: For how long the present mode had trained at the end of the window.
      seconds_per_example: t, of each worker, positive.
      efficiency: Of gba, 1 if it cost nothing; see `measured_efficiency`.
    """

    stay_seconds: float
    seconds_per_example: tuple[float, ...]
    efficiency: float = DEFAULT_EFFICIENCY

    @property
    def all_reduce_speed(self) -> float:
        """Examples per second that are expected of all-reduce."""
        return len(self.seconds_per_example) / max(self.seconds_per_example)

    @property
    def gba_speed(self) -> float:
        """Examples per second that are expected of gba."""
        return self.efficiency * sum(1 / seconds for seconds in self.seconds_per_example)

    @property
    def ratio(self) -> float:
        return self.gba_speed / self.all_reduce_speed

    def describe(self) -> str:
        """The numbers, for a log."""
        each = ", ".join(f"{1e6 * seconds:,.0f}" for seconds in self.seconds_per_example)
        return (
            f"workers take {each} us per example: all-reduce {self.all_reduce_speed:,.0f}"
            f" examples/s, gba {self.gba_speed:,.0f} (efficiency {self.efficiency:.2f}), ratio"
            f" {self.ratio:.2f}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "efficiency": self.efficiency,
            "seconds_per_example": list(self.seconds_per_example),
            "all_reduce_examples_per_second": self.all_reduce_speed,
            "gba_examples_per_second": self.gba_speed,
        }


def next_mode(rule: SwitchRule, mode: str, windows: Sequence[Window]) -> str:
    """The mode that is to follow: the present one unless there is reason to switch.

    Args:
      rule: The settings.
      mode: The present one, of MODES.
      windows: All those since the present mode began, the oldest first; `rule.windows` are enough.

    Returns:
      One of MODES.
    """
    latest = windows[-rule.windows :]
    if len(latest) < rule.windows or latest[-1].stay_seconds < rule.minimum_stay_seconds:
        return mode
    if mode == ALL_REDUCE:
        agree = all(window.ratio >= rule.threshold for window in latest)
        return GBA if agree else mode
    limit = rule.threshold * (1 - rule.hysteresis)
    return ALL_REDUCE if all(window.ratio <= limit for window in latest) else mode


def measured_efficiency(
    previous: float, examples_per_second: float, seconds_per_example: Sequence[float]
) -> float:
    """The running mean of gba's real speed over sum(1 / t), at most 1.

    Args:
      previous: The mean so far, DEFAULT_EFFICIENCY in the beginning.
      examples_per_second: What a window of gba really reached.
      seconds_per_example: t of each worker in it.
    """
    measured = examples_per_second / sum(1 / seconds for seconds in seconds_per_example)
    return previous + _SMOOTHING * (min(measured, 1.0) - previous)
