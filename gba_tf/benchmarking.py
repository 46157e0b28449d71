"""What scripts/benchmark.py computes and prints; imports no TensorFlow.

A *cell* is one setting (optimizer, local batch size, steps per execution). In every cell the modes
are measured in turn, A B C A B C ..., so that what disturbs the machine disturbs all of them, and
ratios are taken between neighbours.
"""

import dataclasses
import os
import pathlib
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

GBA = "gba"
PARAMETER_SERVER = "parameter_server"
CEILING = "ceiling"
MODES = (GBA, PARAMETER_SERVER, CEILING)
# Of its core, the share that the ceiling's process gets on an idle machine is larger.
_UNDISTURBED_CORE = 0.9
_PACKAGES = ("gba_tf", "tensorflow", "tf_keras", "numpy")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting in which the modes are compared.

    Attributes:
      optimizer: Name of a tf.keras optimizer.
      local_batch_size: B, examples per gradient, in every mode.
      steps_per_execution: Steps that a worker runs for one request of the chief.
    """

    optimizer: str
    local_batch_size: int
    steps_per_execution: int

    def __str__(self) -> str:
        return (
            f"{self.optimizer}, B = {self.local_batch_size},"
            f" steps_per_execution = {self.steps_per_execution}"
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed run of one mode.

    Attributes:
      steps: Local batches trained on, by all workers together.
      seconds: From the first step to the end of the last, wall clock.
      updates: Optimizer updates made in that time.
      cpu_seconds: Task ("chief", "worker-0", "ps-0") to the CPU seconds it used, user and system.
    """

    steps: int
    seconds: float
    updates: int
    cpu_seconds: Mapping[str, float]


def steps_per_measurement(cell: Cell, cells: Sequence[Cell], steps: int, num_workers: int) -> int:
    """Steps of a measurement of `cell`: as many examples in all cells, whole executions per worker.

    Example: with `steps` 400 and local batches of 512 and 2048, 400 and 100.
    """
    smallest = min(other.local_batch_size for other in cells)
    unit = num_workers * max(other.steps_per_execution for other in cells)
    wanted = steps * smallest / cell.local_batch_size
    return max(1, round(wanted / unit)) * unit


def measure_in_turn(
    modes: Sequence[str], repeats: int, measure: Callable[[str], Measurement]
) -> dict[str, list[Measurement]]:
    """Measures the modes A B C A B C ...; returns each mode's measurements in order."""
    measurements: dict[str, list[Measurement]] = {mode: [] for mode in modes}
    for _ in range(repeats):
        for mode in modes:
            measurements[mode].append(measure(mode))
    return measurements


def summarize(
    cell: Cell, measurements: Mapping[str, Sequence[Measurement]], cores: int
) -> dict[str, Any]:
    """The results of a cell, as written to the JSON file.

    Args:
      cell: The setting.
      measurements: Mode to its measurements; the i-th ones of all modes were neighbours in time.
      cores: The ceiling is that of one core times this.

    Returns:
      `examples_per_second` (medians; the ceiling's is that of all cores), `ratio` (median of the
      paired ratios gba / parameter_server) with `ratio_range`, `share_of_ceiling`,
      `cpu_seconds_per_1000_steps` (mode -> job -> value), `cores_used`, and the raw measurements.
    """
    rates = {
        mode: [
            m.steps * cell.local_batch_size / m.seconds * (cores if mode == CEILING else 1)
            for m in runs
        ]
        for mode, runs in measurements.items()
    }
    ratios = _paired_ratios(rates[GBA], rates[PARAMETER_SERVER])
    return {
        **dataclasses.asdict(cell),
        "examples_per_second": {
            mode: statistics.median(of_mode) for mode, of_mode in rates.items()
        },
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "share_of_ceiling": {
            mode: statistics.median(_paired_ratios(rates[mode], rates[CEILING]))
            for mode in (GBA, PARAMETER_SERVER)
        },
        "cpu_seconds_per_1000_steps": {
            mode: cpu_per_1000_steps(runs) for mode, runs in measurements.items()
        },
        "cores_used": {
            mode: sum(sum(m.cpu_seconds.values()) for m in runs) / sum(m.seconds for m in runs)
            for mode, runs in measurements.items()
        },
        "measurements": {
            mode: [dataclasses.asdict(m) for m in runs] for mode, runs in measurements.items()
        },
    }


def cpu_per_1000_steps(runs: Sequence[Measurement]) -> dict[str, float]:
    """CPU seconds of each job per 1000 steps, over all runs; tasks of a job are added up."""
    steps = sum(m.steps for m in runs)
    jobs: dict[str, float] = {}
    for m in runs:
        for task, seconds in m.cpu_seconds.items():
            job = task.partition("-")[0]
            jobs[job] = jobs.get(job, 0.0) + seconds * 1000 / steps
    return jobs


def cpu_seconds(pid: int) -> float:
    """CPU seconds, user and system, that a process and its threads have used so far."""
    # The name in parentheses may hold spaces; user time is field 14 of proc(5), system time 15.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ticks_to_seconds(int(fields[11]) + int(fields[12]))


def ticks_to_seconds(ticks: int) -> float:
    """Of the times in /proc."""
    return ticks / os.sysconf("SC_CLK_TCK")


def available_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def machine_facts() -> dict[str, Any]:
    """What a reader of the numbers has to know about the machine, now."""
    cpu_model = "unknown"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu_model = line.partition(":")[2].strip()
            break
    return {
        "cores": len(available_cores()),
        "cpu_model": cpu_model,
        "load_before": list(os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def render_speed(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of speeds, one line per cell."""
    rows = [
        (
            "optimizer",
            "B",
            "steps/exec",
            GBA,
            PARAMETER_SERVER,
            CEILING,
            "gba/ps",
            "(min .. max)",
            "gba of ceiling",
            "ps of ceiling",
        )
    ]
    for result in results:
        rate, share = result["examples_per_second"], result["share_of_ceiling"]
        rows.append(
            (
                *_cell_columns(result),
                *(f"{rate[mode]:,.0f}" for mode in MODES),
                f"{result['ratio']:.2f}",
                "({:.2f} .. {:.2f})".format(*result["ratio_range"]),
                f"{share[GBA]:.0%}",
                f"{share[PARAMETER_SERVER]:.0%}",
            )
        )
    text = "Examples per second (medians; gba/ps is the median of paired ratios)\n" + render_table(
        rows
    )
    core = min(result["cores_used"][CEILING] for result in results)
    if core < _UNDISTURBED_CORE:
        text += (
            f"\nOther programs were at work: the ceiling's process got {core:.2f} of its core."
            " Speeds and shares of the ceiling mislead; the CPU seconds below tell more."
        )
    return text


def render_cpu(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of CPU seconds per 1000 steps and process, one line per cell and mode."""
    rows = [
        (
            "optimizer",
            "B",
            "steps/exec",
            "mode",
            "chief",
            "workers",
            "ps",
            "all",
            "ps/gba",
            "of ceiling",
            "cores used",
        )
    ]
    for result in results:
        per_mode = result["cpu_seconds_per_1000_steps"]
        totals = {mode: sum(jobs.values()) for mode, jobs in per_mode.items()}
        for mode in MODES:
            jobs = per_mode[mode]
            rows.append(
                (
                    *_cell_columns(result),
                    mode,
                    *(
                        f"{jobs[job]:.2f}" if job in jobs else ""
                        for job in ("chief", "worker", "ps")
                    ),
                    f"{totals[mode]:.2f}",
                    f"{totals[PARAMETER_SERVER] / totals[GBA]:.2f}" if mode == GBA else "",
                    f"{totals[CEILING] / totals[mode]:.0%}" if mode != CEILING else "",
                    f"{result['cores_used'][mode]:.2f}",
                )
            )
    return (
        "CPU seconds per 1000 steps (the ceiling is one process; ps/gba and the share of it are"
        "\nratios of the sums: what the speeds come to where nothing but the CPU is the limit)\n"
        + render_table(rows)
    )


def _cell_columns(result: Mapping[str, Any]) -> tuple[str, str, str]:
    return (
        result["optimizer"],
        str(result["local_batch_size"]),
        str(result["steps_per_execution"]),
    )


def _paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns that are aligned to the right; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    )
