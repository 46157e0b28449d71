"""Measures the speed of gba beside TensorFlow's own parameter servers and the machine's ceiling.

    python scripts/benchmark.py --quick

Three modes, each in processes of its own that live through the whole run, only ever one at work:

  gba               gba_tf.GBAStrategy on a local cluster
  parameter_server  tf.distribute.ParameterServerStrategy, unmodified, on another one
  ceiling           a single process on one core, times the number of cores

In each cell (optimizer, local batch size, steps_per_execution) each mode trains a new model: a
warm-up first, then the modes are timed in turn, A B C A B C ..., --repeats times. The model is
DeepFM-like: 26 fields with 10,000 rows of 16 numbers and a first-order weight in one table of
260,000 rows, ids with a Zipf-like distribution within each field, 13 numeric columns, hidden
layers of 256 and 128. The ceiling and parameter_server update after each local batch, gba after
every M-th: where updates are dear, as Adam's are, gba can pass the ceiling.

Prints examples per second and, less disturbed by other programs, the CPU seconds of each process
for 1000 steps; writes both and all single measurements to --output.
"""

import contextlib
import json
import multiprocessing.connection
import os
import pathlib
import sys
import tempfile
import time

from absl import app, flags

from gba_tf import benchmarking, local_cluster
from gba_tf.benchmarking import CEILING, MODES, Cell, Measurement

_TASK = pathlib.Path(__file__).with_name("benchmark_task.py")
_POLL_SECONDS = 0.2
_QUICK = {"local_batch_sizes": ["512"], "repeats": 3, "steps": 120}

_OPTIMIZERS = flags.DEFINE_list("optimizers", ["Adagrad", "Adam"], "tf.keras optimizers.")
_LOCAL_BATCH_SIZES = flags.DEFINE_list("local_batch_sizes", ["512", "2048"], "Values of B.")
_STEPS_PER_EXECUTION = flags.DEFINE_list(
    "steps_per_execution", ["1", "10"], "Values of Model.compile(steps_per_execution=...)."
)
_GRADIENTS_PER_UPDATE = flags.DEFINE_integer("gradients_per_update", 4, "M of gba.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements of each mode in a cell.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps",
    240,
    "Local batches in a measurement for the smallest B; for larger B fewer, for as many examples.",
    lower_bound=1,
)
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 2, "Workers of a cluster.", lower_bound=1)
_NUM_PS = flags.DEFINE_integer("num_ps", 1, "Parameter servers of a cluster.", lower_bound=1)
_MODEL = flags.DEFINE_enum(
    "model",
    "one_table",
    ["one_table", "deepfm"],
    "one_table: plain Keras, as above. deepfm: gba_tf.models.DeepFM, of the same size.",
)
_OUTPUT = flags.DEFINE_string(
    "output",
    "build/benchmark.json",
    "The JSON file; logs of the processes go to a folder beside it.",
)
_QUICK_FLAG = flags.DEFINE_bool(
    "quick",
    False,
    "A first impression in about 2 minutes: "
    + " ".join(f"--{name}={_QUICK[name]}" for name in ("repeats", "steps"))
    + " --local_batch_sizes=512, unless these are given.",
)


class TaskFailed(Exception):
    """A process of the benchmark ended before its time; what it said has been shown."""

    def __init__(self, exit_code: int):
        super().__init__()
        self.exit_code = exit_code


class Contender:
    """The processes of one mode, and the connection to their chief.

    Args:
      mode: One of benchmarking.MODES.
      folder: For the socket.
      log_dir: For the logs of the processes.
    """

    def __init__(self, mode: str, folder: str, log_dir: pathlib.Path):
        address = os.path.join(folder, mode)
        command = [sys.executable, str(_TASK), mode, address, str(_GRADIENTS_PER_UPDATE.value)]
        alone = mode == CEILING
        self._mode = mode
        self._cluster = local_cluster.LocalCluster(
            command,
            num_workers=0 if alone else _NUM_WORKERS.value,
            num_ps=0 if alone else _NUM_PS.value,
            log_dir=log_dir,
            # At level 2 a chief that ends says of each function that it cannot remove it remotely.
            env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        self._address = address
        self._connection: multiprocessing.connection.Connection | None = None

    def connect(self) -> None:
        """Waits until the chief is ready for requests."""
        while self._connection is None:
            try:
                self._connection = multiprocessing.connection.Client(self._address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                self._check_processes()
                time.sleep(_POLL_SECONDS)

    def prepare(self, cell: Cell, steps: int) -> None:
        """Makes the model of a cell and trains it for a warm-up of `steps` local batches."""
        self._steps = steps
        self._connection.send(
            {
                "model": _MODEL.value,
                "optimizer": cell.optimizer,
                "local_batch_size": cell.local_batch_size,
                "steps_per_execution": cell.steps_per_execution,
                "steps": steps,
                "repeats": _REPEATS.value,
            }
        )
        self._receive()

    def measure(self) -> Measurement:
        """Trains for the cell's steps, timed."""
        before = self._cpu_seconds()
        self._connection.send("go")
        result = self._receive()
        after = self._cpu_seconds()
        return Measurement(
            steps=self._steps,
            cpu_seconds={task: after[task] - before[task] for task in after},
            **result,
        )

    def end(self) -> None:
        """Ends the processes; raises TaskFailed if one did not end well."""
        self._connection.send(None)
        if exit_code := self._cluster.wait():
            raise TaskFailed(exit_code)

    def close(self) -> None:
        """Stops what still runs."""
        self._cluster.close()  # First: a chief without its connection would complain.
        if self._connection is not None:
            self._connection.close()

    def _receive(self):
        try:
            while not self._connection.poll(_POLL_SECONDS):
                self._check_processes()
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise TaskFailed(self._cluster.wait() or 1) from None

    def _check_processes(self) -> None:
        if any(process.poll() is not None for process in self._cluster.processes.values()):
            raise TaskFailed(self._cluster.wait() or 1)

    def _cpu_seconds(self) -> dict[str, float]:
        return {
            "process" if self._mode == CEILING else task: benchmarking.cpu_seconds(process.pid)
            for task, process in self._cluster.processes.items()
        }


def _run(cells: list[Cell], contenders: dict[str, Contender], cores: int) -> list[dict]:
    results = []
    for number, cell in enumerate(cells, start=1):
        steps = benchmarking.steps_per_measurement(cell, cells, _STEPS.value, _NUM_WORKERS.value)
        start = time.monotonic()
        for contender in contenders.values():
            contender.prepare(cell, steps)
        measurements = benchmarking.measure_in_turn(
            MODES, _REPEATS.value, lambda mode: contenders[mode].measure()
        )
        results.append(benchmarking.summarize(cell, measurements, cores))
        print(
            f"{number}/{len(cells)}  {cell}: gba / parameter_server {results[-1]['ratio']:.2f}"
            f" ({time.monotonic() - start:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    return results


def _cells() -> list[Cell]:
    return [
        Cell(optimizer, batch_size, steps_per_execution)
        for optimizer in _OPTIMIZERS.value
        for batch_size in _integers(_LOCAL_BATCH_SIZES)
        for steps_per_execution in _integers(_STEPS_PER_EXECUTION)
    ]


def _integers(flag: flags.FlagHolder) -> list[int]:
    try:
        values = [int(text) for text in flag.value]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        _fail(f"--{flag.name}: expected positive integers, found {','.join(flag.value)!r}")
    return values


def _settings() -> dict:
    return {
        "model": _MODEL.value,
        "gradients_per_update": _GRADIENTS_PER_UPDATE.value,
        "num_workers": _NUM_WORKERS.value,
        "num_ps": _NUM_PS.value,
        "repeats": _REPEATS.value,
        "steps": _STEPS.value,
    }


def _show_and_write(results: list[dict], machine: dict, output: pathlib.Path) -> None:
    print(f"\n{benchmarking.render_speed(results)}\n\n{benchmarking.render_cpu(results)}")
    written = {"machine": machine, "settings": _settings(), "cells": results}
    output.write_text(json.dumps(written, indent=1) + "\n")
    print(f"\nwritten to {output}", flush=True)


def _fail(text: str) -> None:
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
    if _QUICK_FLAG.value:
        for name, value in _QUICK.items():
            if not flags.FLAGS[name].present:
                setattr(flags.FLAGS, name, value)
    return argv


def main(argv: list[str]) -> int:
    del argv
    cells = _cells()
    machine = benchmarking.machine_facts()
    print(
        f"{machine['cores']} cores of {machine['cpu_model']}, tensorflow {machine['tensorflow']};"
        f" load before: {machine['load_before'][0]:.2f}\n"
        f"{_MODEL.value}, M = {_GRADIENTS_PER_UPDATE.value}, {_NUM_WORKERS.value} workers,"
        f" {_NUM_PS.value} parameter servers, {_REPEATS.value} measurements",
        flush=True,
    )
    output = pathlib.Path(_OUTPUT.value)
    log_dir = output.with_name(f"{output.stem}-logs")
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            contenders = {}
            for mode in MODES:
                contenders[mode] = Contender(mode, folder, log_dir / mode)
                stack.callback(contenders[mode].close)
            for contender in contenders.values():
                contender.connect()
            results = _run(cells, contenders, machine["cores"])
            # Before the processes end: whatever goes wrong then takes no results along.
            _show_and_write(results, machine, output)
            for contender in contenders.values():
                contender.end()
    except TaskFailed as failure:
        return failure.exit_code
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
