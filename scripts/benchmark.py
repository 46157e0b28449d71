"""Measures the speed of gba: beside TensorFlow's own parameter servers, and with a slow worker.

    python scripts/benchmark.py --quick
    python scripts/benchmark.py --suite=stragglers --plot=build/stragglers.png

Every mode has processes of its own that live through the whole run, only ever one mode at work. In
each cell each mode is warmed up, and the modes are timed in turn, A B C A B C ..., --repeats times.

--suite=throughput, where the machine is the limit:

  gba               gba_tf.GBAStrategy on a local cluster
  parameter_server  tf.distribute.ParameterServerStrategy, unmodified, on another one
  ceiling           a single process on one core, times the number of cores

A cell is an optimizer, a local batch size and steps_per_execution. The model is DeepFM-like: 26
fields with 10,000 rows of 16 numbers and a first-order weight in one table of 260,000 rows, ids
with a Zipf-like distribution within each field, 13 numeric columns, hidden layers of 256 and 128.
The ceiling and parameter_server update after each local batch, gba after every M-th: where updates
are dear, as Adam's are, gba can pass the ceiling. Prints examples per second and, less disturbed by
other programs, the CPU seconds of each process for 1000 steps.

--suite=stragglers, where a slow worker is the limit: all modes of gba_tf.create_strategy that take
several workers. Computing a gradient is a wait of --compute_seconds in a small model, so that few
cores carry many workers; worker 0 is slower by a factor, and a cell is such a factor. Every mode
has as many examples per gradient, gba and bsp as many gradients per update as there are workers.
Prints examples per second beside the ideal, at which no worker waits for anything, and whether the
floors are met. Needs about 0.3 GB of memory per process: --modes leaves modes out.

Writes the results and all single measurements to --output.
"""

import contextlib
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, NoReturn

from absl import app, flags

from gba_tf import benchmarking, straggler_benchmark
from gba_tf.benchmark_processes import Contender, TaskFailed
from gba_tf.benchmarking import CEILING

_THROUGHPUT = "throughput"
_STRAGGLERS = "stragglers"
_FOLDER = pathlib.Path(__file__).parent
_QUICK = {"local_batch_sizes": ["512"], "repeats": 3, "steps": 120}
_STRAGGLER_DEFAULTS = {"num_workers": 4, "repeats": 3, "output": "build/stragglers.json"}

_SUITE = flags.DEFINE_enum(
    "suite", _THROUGHPUT, [_THROUGHPUT, _STRAGGLERS], "What to measure, see above."
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Measurements of each mode in a cell. Stragglers: 3.", lower_bound=1
)
_NUM_WORKERS = flags.DEFINE_integer(
    "num_workers", 2, "Workers of a cluster. Stragglers: 4.", lower_bound=1
)
_NUM_PS = flags.DEFINE_integer("num_ps", 1, "Parameter servers of a cluster.", lower_bound=1)
_OUTPUT = flags.DEFINE_string(
    "output",
    "build/benchmark.json",
    "The JSON file; logs of the processes go to a folder beside it. Stragglers:"
    f" {_STRAGGLER_DEFAULTS['output']}.",
)

# Of the suite throughput.
_OPTIMIZERS = flags.DEFINE_list("optimizers", ["Adagrad", "Adam"], "tf.keras optimizers.")
_LOCAL_BATCH_SIZES = flags.DEFINE_list("local_batch_sizes", ["512", "2048"], "Values of B.")
_STEPS_PER_EXECUTION = flags.DEFINE_list(
    "steps_per_execution", ["1", "10"], "Values of Model.compile(steps_per_execution=...)."
)
_GRADIENTS_PER_UPDATE = flags.DEFINE_integer("gradients_per_update", 4, "M of gba.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps",
    240,
    "Local batches in a measurement for the smallest B; for larger B fewer, for as many examples.",
    lower_bound=1,
)
_MODEL = flags.DEFINE_enum(
    "model",
    "one_table",
    ["one_table", "deepfm"],
    "one_table: plain Keras, as above. deepfm: gba_tf.models.DeepFM, of the same size.",
)
_QUICK_FLAG = flags.DEFINE_bool(
    "quick",
    False,
    "A first impression in about 2 minutes: "
    + " ".join(f"--{name}={_QUICK[name]}" for name in ("repeats", "steps"))
    + " --local_batch_sizes=512, unless these are given.",
)

# Of the suite stragglers.
_MODES = flags.DEFINE_list(
    "modes", list(straggler_benchmark.MODES), "Modes that are measured side by side."
)
_SLOW_FACTORS = flags.DEFINE_list(
    "slow_factors",
    ["1", "2", "5", "10"],
    "How many times as long as the others worker 0 takes for a gradient.",
)
_COMPUTE_SECONDS = flags.DEFINE_float(
    "compute_seconds", 0.2, "What the others take for a gradient.", lower_bound=0.001
)
_MEASURE_SECONDS = flags.DEFINE_float(
    "measure_seconds",
    6.0,
    "Of a measurement, at least; it is longer where worker 0 has less than 6 gradients in it.",
    lower_bound=0.001,
)
_PLOT = flags.DEFINE_string(
    "plot", None, "Draw the speeds into this file, .png or .svg; needs gba_tf[plot]."
)

_ONLY_IN = {
    _THROUGHPUT: (
        *("optimizers", "local_batch_sizes", "steps_per_execution", "gradients_per_update"),
        *("steps", "model", "quick"),
    ),
    _STRAGGLERS: ("modes", "slow_factors", "compute_seconds", "measure_seconds", "plot"),
}


class Throughput:
    """The suite throughput: its cells, processes, measurements and tables."""

    modes = benchmarking.MODES

    def __init__(self):
        batch_sizes = _numbers(_LOCAL_BATCH_SIZES, int, "positive integers")
        executions = _numbers(_STEPS_PER_EXECUTION, int, "positive integers")
        self.cells = [
            benchmarking.Cell(optimizer, batch_size, steps_per_execution)
            for optimizer in _OPTIMIZERS.value
            for batch_size in batch_sizes
            for steps_per_execution in executions
        ]
        self.settings = {
            "model": _MODEL.value,
            "gradients_per_update": _GRADIENTS_PER_UPDATE.value,
            "steps": _STEPS.value,
        }
        self.title = f"{_MODEL.value}, M = {_GRADIENTS_PER_UPDATE.value}"

    def start(self, mode: str, folder: str, log_dir: pathlib.Path) -> Contender:
        """Starts the processes of a mode."""
        address = os.path.join(folder, mode)
        task = str(_FOLDER / "benchmark_task.py")
        command = [sys.executable, task, mode, address, str(_GRADIENTS_PER_UPDATE.value)]
        if mode == CEILING:
            return Contender(command, [address], 0, 0, log_dir)
        return Contender(command, [address], _NUM_WORKERS.value, _NUM_PS.value, log_dir)

    def prepare(self, mode: str, contender: Contender) -> None:
        """Returns when the processes can be measured."""
        del mode
        contender.connect()

    def measure(
        self, cell: benchmarking.Cell, contenders: dict[str, Contender], cores: int
    ) -> dict:
        """Warms the modes up in a cell, measures them in turn, and returns the results."""
        steps = benchmarking.steps_per_measurement(
            cell, self.cells, _STEPS.value, _NUM_WORKERS.value
        )

        def run(mode: str) -> benchmarking.Measurement:
            before = contenders[mode].cpu_seconds()
            result = contenders[mode].request("go")
            after = contenders[mode].cpu_seconds()
            used = {task: after[task] - before[task] for task in after}
            if mode == CEILING:
                used = {"process": used["chief"]}
            return benchmarking.Measurement(steps=steps, cpu_seconds=used, **result)

        for contender in contenders.values():
            contender.request(
                {
                    "model": _MODEL.value,
                    "optimizer": cell.optimizer,
                    "local_batch_size": cell.local_batch_size,
                    "steps_per_execution": cell.steps_per_execution,
                    "steps": steps,
                    "repeats": _REPEATS.value,
                }
            )
        measurements = benchmarking.measure_in_turn(self.modes, _REPEATS.value, run)
        return benchmarking.summarize(cell, measurements, cores)

    def in_short(self, result: dict[str, Any]) -> str:
        return f"gba / parameter_server {result['ratio']:.2f}"

    def report(self, results: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        return f"{benchmarking.render_speed(results)}\n\n{benchmarking.render_cpu(results)}", {}


class Stragglers:
    """The suite stragglers: its cells, processes, measurements and tables."""

    def __init__(self):
        known = straggler_benchmark.MODES
        if not _MODES.value or not set(_MODES.value) <= set(known):
            _fail(f"--modes: expected some of {','.join(known)}, found {','.join(_MODES.value)!r}")
        if _NUM_WORKERS.value < 2:
            _fail("--num_workers: expected 2 or more, of which one is the straggler, found 1")
        if _PLOT.value is not None and pathlib.Path(_PLOT.value).suffix not in (".png", ".svg"):
            _fail(f"--plot: expected a file name ending in .png or .svg, found {_PLOT.value!r}")
        # In the order of the tables, each once.
        self.modes = [mode for mode in known if mode in _MODES.value]
        self.cells = [
            straggler_benchmark.Cell(factor, _COMPUTE_SECONDS.value, _NUM_WORKERS.value)
            for factor in _numbers(_SLOW_FACTORS, float, "numbers of 1 or more")
        ]
        self.settings = {
            "examples_per_gradient": straggler_benchmark.EXAMPLES_PER_GRADIENT,
            "measure_seconds": _MEASURE_SECONDS.value,
        }
        self.title = (
            f"gradients of {straggler_benchmark.EXAMPLES_PER_GRADIENT} examples in"
            f" {_COMPUTE_SECONDS.value:g} s"
        )

    def start(self, mode: str, folder: str, log_dir: pathlib.Path) -> Contender:
        num_workers = _NUM_WORKERS.value
        settings = {
            "mode": mode,
            "folder": folder,
            "local_batch_size": straggler_benchmark.EXAMPLES_PER_GRADIENT,
            "global_batch_size": straggler_benchmark.global_batch_size(mode, num_workers),
            "compute_seconds": _COMPUTE_SECONDS.value,
        }
        training = num_workers if mode == straggler_benchmark.ALL_REDUCE else 1
        addresses = [os.path.join(folder, f"{mode}-{index}") for index in range(training)]
        command = [sys.executable, str(_FOLDER / "straggler_task.py"), json.dumps(settings)]
        return Contender(command, addresses, num_workers, _NUM_PS.value, log_dir)

    def prepare(self, mode: str, contender: Contender) -> None:
        contender.connect()
        # The functions are traced, and the workers get their data sets and functions.
        no_straggler = straggler_benchmark.Cell(1.0, _COMPUTE_SECONDS.value, _NUM_WORKERS.value)
        contender.request(no_straggler.request(mode, _COMPUTE_SECONDS.value))
        print(f"{mode} is ready", file=sys.stderr, flush=True)

    def measure(self, cell, contenders: dict[str, Contender], cores: int) -> dict:
        del cores

        def run(mode: str) -> straggler_benchmark.Measurement:
            request = cell.request(mode, _MEASURE_SECONDS.value)
            start = time.monotonic()
            busy = straggler_benchmark.busy_seconds()
            before = sum(contenders[mode].cpu_seconds().values())
            result = contenders[mode].request(request)
            used = sum(contenders[mode].cpu_seconds().values()) - before
            busy = straggler_benchmark.busy_seconds() - busy
            seconds = time.monotonic() - start
            return straggler_benchmark.Measurement(
                cores_used=used / seconds, other_cores=max(0.0, busy - used) / seconds, **result
            )

        measurements = benchmarking.measure_in_turn(self.modes, _REPEATS.value, run)
        return straggler_benchmark.summarize(cell, measurements)

    def in_short(self, result: dict[str, Any]) -> str:
        shares = result["share_of_ideal"].items()
        return "of the ideal " + ", ".join(f"{mode} {share:.0%}" for mode, share in shares)

    def report(self, results: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        tables = [
            straggler_benchmark.render_speed(results),
            straggler_benchmark.render_costs(results),
        ]
        floors = straggler_benchmark.floors(results)
        if floors:
            tables.append(straggler_benchmark.render_floors(floors))
        return "\n\n".join(tables), {"floors": floors}


def _run(suite: Throughput | Stragglers, contenders: dict[str, Contender], cores: int) -> list:
    results = []
    for number, cell in enumerate(suite.cells, start=1):
        start = time.monotonic()
        results.append(suite.measure(cell, contenders, cores))
        print(
            f"{number}/{len(suite.cells)}  {cell}: {suite.in_short(results[-1])}"
            f" ({time.monotonic() - start:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    return results


def _numbers(flag: flags.FlagHolder, number: type, expected: str) -> list:
    try:
        values = [number(text) for text in flag.value]
    except ValueError:
        values = []
    if not values or not all(1 <= value < math.inf for value in values):
        _fail(f"--{flag.name}: expected {expected}, found {','.join(flag.value)!r}")
    return values


def _show_and_write(
    suite: Throughput | Stragglers, results: list[dict], machine: dict, output: pathlib.Path
) -> None:
    text, conclusions = suite.report(results)
    print(f"\n{text}")
    settings = {
        **suite.settings,
        "num_workers": _NUM_WORKERS.value,
        "num_ps": _NUM_PS.value,
        "repeats": _REPEATS.value,
    }
    written = {"machine": machine, "settings": settings, "cells": results, **conclusions}
    output.write_text(json.dumps(written, indent=1) + "\n")
    print(f"\nwritten to {output}", flush=True)


def _draw(results: list[dict]) -> None:
    try:
        straggler_benchmark.write_plot(results, pathlib.Path(_PLOT.value))
    except ImportError:
        print("no plot: matplotlib is missing. Install it: pip install 'gba_tf[plot]'", flush=True)
    else:
        print(f"plot in {_PLOT.value}", flush=True)


def _fail(text: str) -> NoReturn:
    print(f"benchmark: {' '.join(text.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; a mistake is one line and exit code 2."""
    try:
        unknown = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        _fail(f"{error} (--help lists the flags)")
    if unknown:
        _fail(f"expected flags only, found {' '.join(unknown)}")
    for suite, names in _ONLY_IN.items():
        given = [f"--{name}" for name in names if flags.FLAGS[name].present]
        if given and suite != _SUITE.value:
            _fail(f"--suite={_SUITE.value} has no {' '.join(given)}; --suite={suite} has")
    if _SUITE.value == _STRAGGLERS:
        _set_defaults(_STRAGGLER_DEFAULTS)
    if _QUICK_FLAG.value:
        _set_defaults(_QUICK)
    return argv


def _set_defaults(defaults: dict[str, Any]) -> None:
    for name, value in defaults.items():
        if not flags.FLAGS[name].present:
            setattr(flags.FLAGS, name, value)


def main(argv: list[str]) -> int:
    del argv
    suite = Stragglers() if _SUITE.value == _STRAGGLERS else Throughput()
    machine = benchmarking.machine_facts()
    print(
        f"{machine['cores']} cores of {machine['cpu_model']}, tensorflow {machine['tensorflow']};"
        f" load before: {machine['load_before'][0]:.2f}\n"
        f"{suite.title}, {_NUM_WORKERS.value} workers, {_NUM_PS.value} parameter servers,"
        f" {_REPEATS.value} measurements",
        flush=True,
    )
    output = pathlib.Path(_OUTPUT.value)
    log_dir = output.with_name(f"{output.stem}-logs")
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            contenders = {}
            for mode in suite.modes:
                contenders[mode] = stack.enter_context(suite.start(mode, folder, log_dir / mode))
                suite.prepare(mode, contenders[mode])
            results = _run(suite, contenders, machine["cores"])
            # Before the processes end: whatever goes wrong then takes no results along.
            _show_and_write(suite, results, machine, output)
            if _PLOT.value is not None:
                _draw(results)
            for contender in contenders.values():
                contender.end()
    except TaskFailed as failure:
        return failure.exit_code
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
