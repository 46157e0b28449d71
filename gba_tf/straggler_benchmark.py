"""What scripts/benchmark.py --suite=stragglers computes and prints; imports no TensorFlow.

Every gradient is of the same number of examples B in every mode, and its computation is a wait:
of `compute_seconds` t, but of t times the *slow factor* on worker 0. Without any other cost and
without waiting for each other the workers would train on `sum(B / t_i)` examples per second, the
*ideal*. In every cell, that is for every slow factor, the modes are measured in turn.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gba_tf import batch_plan, benchmarking, config

ALL_REDUCE = "multi_worker_mirrored"
GBA = "gba"
# In the order of the tables; the two that are compared are neighbours in time.
MODES = (ALL_REDUCE, GBA, "parameter_server", "bsp", "hop_bs", "hop_bw")
EXAMPLES_PER_GRADIENT = 64

# Of the issue: gba reaches this part of the ideal everywhere; and, of the speed of all-reduce, this
# part without a straggler, and this multiple from this slow factor on.
IDEAL_SHARE = 0.9
UNDISTURBED_RATIO = 0.95
STRAGGLER_RATIO = 2.4
STRAGGLER_FACTOR = 5.0

# In these modes the fast workers keep to the pace of the slowest.
_MODES_IN_STEP = (ALL_REDUCE, "hop_bs")
# Until the workers are at work as they will be: gradients of the slow worker, and of a fast one.
_WARM_UP_SLOW_GRADIENTS = 2
_WARM_UP_GRADIENTS = 10
# Of the slow worker, in a measurement.
_MIN_SLOW_GRADIENTS = 6
# By which a clock may be late on a busy machine.
_LATE_SECONDS = 1.0
# Other programs are harmless below this.
_HARMLESS_CORES = 0.1


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting in which the modes are compared.

    Attributes:
      slow_factor: How many times as long as the others worker 0 takes; 1 or more.
      compute_seconds: t, the wait of the other workers for each gradient.
      num_workers: N.
    """

    slow_factor: float
    compute_seconds: float
    num_workers: int

    def __str__(self) -> str:
        return f"slow factor {self.slow_factor:g}"

    @property
    def slowest_seconds(self) -> float:
        """Of one gradient of worker 0."""
        return self.compute_seconds * self.slow_factor

    @property
    def gradients_per_second(self) -> float:
        """sum(1 / t_i) over the workers."""
        return 1 / self.slowest_seconds + (self.num_workers - 1) / self.compute_seconds

    @property
    def ideal(self) -> float:
        """sum(B / t_i) over the workers, in examples per second."""
        return EXAMPLES_PER_GRADIENT * self.gradients_per_second

    def request(self, mode: str, seconds: float) -> dict[str, float]:
        """What a process of `mode` is asked to do for one measurement.

        Args:
          mode: One of MODES.
          seconds: The least; it is longer where the slow worker has less than 6 gradients in it.

        Returns:
          slow_factor; warm_up_seconds; seconds; and `steps`: under all-reduce those of the
          measurement, after `warm_up_steps`; in the other modes more than they can take until its
          end, so that no worker is idle before.
        """
        slowest = self.slowest_seconds
        slow_gradients = max(_MIN_SLOW_GRADIENTS, math.ceil(seconds / slowest))
        seconds = max(seconds, _MIN_SLOW_GRADIENTS * slowest)
        warm_up = _WARM_UP_SLOW_GRADIENTS * slowest + _WARM_UP_GRADIENTS * self.compute_seconds
        request = {
            "slow_factor": self.slow_factor,
            "warm_up_seconds": warm_up,
            "seconds": seconds,
        }
        if mode == ALL_REDUCE:
            request["warm_up_steps"] = math.ceil(warm_up / slowest)
            request["steps"] = slow_gradients
            return request
        # Nobody is faster than the ideal. A measurement begins and ends with the next update.
        rate, lead = self.gradients_per_second, 0
        if mode in _MODES_IN_STEP:
            rate, lead = self.num_workers / slowest, config.DEFAULT_STALENESS_BOUND
        until_end = warm_up + seconds + 2 * slowest + _LATE_SECONDS
        request["steps"] = math.ceil(rate * until_end) + self.num_workers * (lead + 4)
        return request


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed run of one mode.

    Attributes:
      seconds: Wall clock.
      applied: Gradients that were applied in that time.
      dropped: Gradients that were not, because they were too late: decayed to 0 or dropped.
      cores_used: By all processes of the mode, on average, with the warm-up and the steps that
        were left at the end.
      other_cores: That other programs used meanwhile, on average.
    """

    seconds: float
    applied: int
    dropped: int
    cores_used: float
    other_cores: float

    @property
    def examples_per_second(self) -> float:
        """Of what was applied."""
        return self.applied * EXAMPLES_PER_GRADIENT / self.seconds


def global_batch_size(mode: str, num_workers: int) -> int:
    """G with which every gradient of a mode has EXAMPLES_PER_GRADIENT examples.

    An update is made of as many gradients as there are workers; in hop_bw, where it is G / the
    workers that are no backups, of fewer.
    """
    if mode == "hop_bw":
        num_workers -= batch_plan.DEFAULT_BACKUP_WORKERS
    return EXAMPLES_PER_GRADIENT * num_workers


def busy_seconds() -> float:
    """CPU seconds that all programs of this machine have used so far, Linux only."""
    # user nice system idle iowait irq softirq steal, see proc(5).
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
    return benchmarking.ticks_to_seconds(user + nice + system + irq + softirq + steal)


def summarize(cell: Cell, measurements: Mapping[str, Sequence[Measurement]]) -> dict[str, Any]:
    """The results of a cell, as written to the JSON file.

    Args:
      cell: The setting.
      measurements: Mode to its measurements; the i-th ones of all modes were neighbours in time.

    Returns:
      The setting; `ideal`; medians for each mode: `examples_per_second`, `share_of_ideal`,
      `dropped` (the part of the gradients that was too late), `cores_used`; with gba and
      all-reduce among them `ratio` (median of the paired ratios gba / all-reduce) with
      `ratio_range`; `other_cores`, the median of all measurements; and the raw measurements.
    """
    rates = {mode: [m.examples_per_second for m in runs] for mode, runs in measurements.items()}
    medians = {mode: statistics.median(of_mode) for mode, of_mode in rates.items()}
    result = {
        **dataclasses.asdict(cell),
        "ideal": cell.ideal,
        "examples_per_second": medians,
        "share_of_ideal": {mode: rate / cell.ideal for mode, rate in medians.items()},
        "dropped": {
            mode: statistics.median(m.dropped / (m.applied + m.dropped) for m in runs)
            for mode, runs in measurements.items()
        },
        "cores_used": {
            mode: statistics.median(m.cores_used for m in runs)
            for mode, runs in measurements.items()
        },
        "other_cores": statistics.median(
            m.other_cores for runs in measurements.values() for m in runs
        ),
        "measurements": {
            mode: [dataclasses.asdict(m) for m in runs] for mode, runs in measurements.items()
        },
    }
    if GBA in rates and ALL_REDUCE in rates:
        ratios = [gba / other for gba, other in zip(rates[GBA], rates[ALL_REDUCE], strict=True)]
        result["ratio"] = statistics.median(ratios)
        result["ratio_range"] = [min(ratios), max(ratios)]
    return result


def floors(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What gba has to reach, for each cell to which it applies.

    Args:
      results: Of `summarize`.

    Returns:
      `floor` (in words), `slow_factor`, `expected` (at least), `found`, `met`. Nothing where gba,
      or all-reduce for a ratio, was not measured.
    """
    found = []

    def check(floor: str, result: Mapping[str, Any], expected: float, value: float) -> None:
        found.append(
            {
                "floor": floor,
                "slow_factor": result["slow_factor"],
                "expected": expected,
                "found": value,
                "met": value >= expected,
            }
        )

    for result in results:
        if GBA in result["share_of_ideal"]:
            check("gba / ideal", result, IDEAL_SHARE, result["share_of_ideal"][GBA])
    for result in results:
        if "ratio" not in result:
            continue
        if result["slow_factor"] >= STRAGGLER_FACTOR:
            check(f"gba / {ALL_REDUCE}", result, STRAGGLER_RATIO, result["ratio"])
        elif result["slow_factor"] == 1:
            check(f"gba / {ALL_REDUCE}", result, UNDISTURBED_RATIO, result["ratio"])
    return found


def render_speed(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of speeds, one line per slow factor."""
    modes = list(results[0]["examples_per_second"])
    has_ratio = "ratio" in results[0]
    header = ["slow factor", "ideal", *modes]
    if GBA in modes:
        header.append("gba of ideal")
    if has_ratio:
        header += ["gba/all-reduce", "(min .. max)"]
    rows = [header]
    for result in results:
        row = [f"{result['slow_factor']:g}x", f"{result['ideal']:,.0f}"]
        row += [f"{result['examples_per_second'][mode]:,.0f}" for mode in modes]
        if GBA in modes:
            row.append(f"{result['share_of_ideal'][GBA]:.1%}")
        if has_ratio:
            row.append(f"{result['ratio']:.2f}")
            row.append("({:.2f} .. {:.2f})".format(*result["ratio_range"]))
        rows.append(row)
    text = (
        "Examples per second whose gradients were applied (medians; gba/all-reduce is the median of"
        "\npaired ratios)\n" + benchmarking.render_table(rows)
    )
    others = max(result["other_cores"] for result in results)
    if others > _HARMLESS_CORES:
        text += (
            f"\nOther programs were at work: they used up to {others:.2f} cores (the median of a"
            " line). Waits are not disturbed, but whatever is computed between them is."
        )
    return text


def render_costs(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of gradients that came too late, and of the cores that were used."""
    modes = list(results[0]["examples_per_second"])
    rows = [["slow factor", "", *modes]]
    for result in results:
        factor = f"{result['slow_factor']:g}x"
        rows.append([factor, "too late", *(f"{result['dropped'][mode]:.1%}" for mode in modes)])
        rows.append(
            [factor, "cores used", *(f"{result['cores_used'][mode]:.2f}" for mode in modes)]
        )
    return (
        "Gradients that were decayed or dropped, and cores that the processes used\n"
        + benchmarking.render_table(rows)
    )


def render_floors(checks: Sequence[Mapping[str, Any]]) -> str:
    """One line per floor."""
    rows = [["floor", "slow factor", "at least", "found", ""]]
    for check in checks:
        rows.append(
            [
                check["floor"],
                f"{check['slow_factor']:g}x",
                f"{check['expected']:.2f}",
                f"{check['found']:.3f}",
                "met" if check["met"] else "MISSED",
            ]
        )
    return benchmarking.render_table(rows)


def write_plot(results: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws examples per second over the slow factor, one line per mode, the ideal dashed.

    Args:
      results: Of `summarize`.
      path: The image, .png or .svg; its folder is created if missing.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib import figure

    factors = [f"{result['slow_factor']:g}x" for result in results]
    first = results[0]
    drawing = figure.Figure(figsize=(8, 5), layout="constrained")
    axes = drawing.add_subplot()
    ideal = [result["ideal"] for result in results]
    axes.plot(factors, ideal, "--", color="black", label="ideal, sum(B / t)")
    for mode, marker in zip(first["examples_per_second"], "os^vDP", strict=False):
        rates = [result["examples_per_second"][mode] for result in results]
        axes.plot(factors, rates, marker=marker, label=mode)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of a gradient on worker 0, in multiples of the others'")
    axes.set_ylabel("examples per second")
    axes.set_title(
        f"{first['num_workers']} workers, {first['compute_seconds'] * 1000:g} ms per gradient of"
        f" {EXAMPLES_PER_GRADIENT} examples"
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)
