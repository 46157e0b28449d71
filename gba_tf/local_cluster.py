"""A cluster of real processes on this machine: every task runs the same command.

    with LocalCluster(["python", "train.py"], num_workers=2, num_ps=1) as cluster:
        exit_code = cluster.wait()

Needs Linux. Imports no TensorFlow, so that the launching process stays small.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence

from gba_tf import orphan_guard, task_output

_POLL_SECONDS = 0.05
# How long the other tasks may take to end after the chief.
_END_SECONDS = 10.0
_LOOPBACK_LIBRARY = pathlib.Path(__file__).parent / "ops" / "_loopback.so"
# Defaults for the tasks' environment; what the user has set stays.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
# The chief always leads, in the eyes of the terminal; worker 0 when it says so.
_MAY_LEAD = ("worker-0",)
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LocalCluster:
    """Starts a chief, workers, parameter servers and maybe an evaluator, and sees to their end.

    Each task gets a TF_CONFIG of its own, with addresses on 127.0.0.1 whose ports the system chose.
    TensorFlow's servers listen on that address only (see gba_tf/cc/preload/loopback.cc). The ports
    stay reserved while the cluster lives, so a restarted task finds its own again.

    The chief's output goes to this process' standard streams, without TensorFlow's start-up noise,
    and to `chief.log`; that of the others to `worker-0.log` and so on. Worker 0 is shown as well
    while it is the one that leads, under all-reduce. No process outlives the cluster: not after
    `close`, nor when this process is killed.

    Attributes:
      processes: Task name ("chief", "worker-0", "ps-0", "evaluator-0") to its latest process.
      addresses: Task name to "127.0.0.1:port".
      log_dir: The folder of the log files.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        num_ps: int,
        evaluator: bool = False,
        log_dir: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        tolerate_worker_failures: bool = False,
    ) -> None:
        """Starts all tasks.

        Args:
          command: Program and arguments, the same for every task.
          num_workers: Worker tasks besides the chief.
          num_ps: Parameter server tasks. All-reduce training needs none: there the workers train,
            or the chief if there are none, and chief and parameter servers step aside.
          evaluator: Whether to start an evaluator too. Default: False.
          log_dir: Folder for the log files, created if missing. Default: a new temporary folder.
          env: Added to the environment of every task. Default: nothing.
          tolerate_worker_failures: Whether a worker may die while others are left: it is reported
            in one line, and they go on. Default: False, the first task that fails ends the cluster.

        Raises:
          ValueError: If the command is empty or a number of tasks makes no cluster.
          FileNotFoundError: If the command, or the library that keeps servers on the loopback
            interface, does not exist.
          OSError: If a process or a log file cannot be created.
        """
        self._command = list(command)
        self._env = dict(env or {})
        self._check(num_workers, num_ps)
        self._tolerate_worker_failures = tolerate_worker_failures
        self._id = uuid.uuid4().hex
        self._reserved: list[socket.socket] = []
        self._copiers: dict[str, list[task_output.OutputCopier]] = {}
        self._reported: set[subprocess.Popen] = set()
        self._link_dir: tempfile.TemporaryDirectory | None = None
        self._signal = 0
        self.processes: dict[str, subprocess.Popen] = {}
        jobs = {"chief": 1, "worker": num_workers, "ps": num_ps, "evaluator": int(evaluator)}
        self._cluster = {
            job: [self._reserve_address() for _ in range(count)]
            for job, count in jobs.items()
            if count
        }
        self.addresses = {
            _task_name(job, index): address
            for job, addresses in self._cluster.items()
            for index, address in enumerate(addresses)
        }
        if log_dir is None:
            log_dir = tempfile.mkdtemp(prefix="gba_tf-")
        self.log_dir = pathlib.Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._guard = self._start_guard()
        try:
            _say(f"local cluster of {', '.join(self.addresses)}; logs in {self.log_dir}")
            # The chief is the last: it is the one that everybody hears of when it fails.
            for task in reversed(self.addresses):
                self.log_path(task).unlink(missing_ok=True)
                self._start(task)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def log_path(self, task: str) -> pathlib.Path:
        """The log file of a task, for example `LOG_DIR/worker-0.log`."""
        return self.log_dir / f"{task}.log"

    def wait(self) -> int:
        """Blocks until the cluster has ended, and ends what is left of it.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP of this process stop the tasks, if its main thread
        waits.

        Returns:
          0 when the chief and then, within 10 seconds, all others ended with 0; under all-reduce
          the chief ends with worker 0. The exit code of the first task that failed, 128 + signal
          for one that was killed; the last lines of its log are shown. 1 when the chief ended well
          but another task did not end. 128 + signal when this process was told to stop: 130 after
          Ctrl-C.
        """
        with self._handle_signals():
            end_deadline = None
            while True:
                if self._signal:
                    self.close()
                    _say(f"stopped by {signal.Signals(self._signal).name}")
                    return 128 + self._signal
                failed = self._failed_task()
                if failed is not None:
                    return self._end_after_failure(failed)
                running = [task for task, p in self.processes.items() if p.poll() is None]
                if not running:
                    self.close()
                    return 0
                if "chief" not in running:
                    now = time.monotonic()
                    end_deadline = end_deadline or now + _END_SECONDS
                    if now >= end_deadline:
                        _say(
                            f"the chief ended with exit code 0, but {', '.join(sorted(running))} "
                            f"still ran {_END_SECONDS:.0f} s later and had to be stopped. Let "
                            "every task call gba_tf.create_strategy or gba_tf.serve_if_not_chief"
                        )
                        self.close()
                        return 1
                time.sleep(_POLL_SECONDS)

    def kill(self, task: str, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to a task's process; returns when it is dead, if the signal is SIGKILL."""
        process = self.processes[task]
        process.send_signal(signum)
        if signum == signal.SIGKILL:
            process.wait()

    def restart(self, task: str) -> None:
        """Starts a task that has ended again, with the same address and the same log file.

        Raises:
          RuntimeError: If its process still runs.
        """
        if self.processes[task].poll() is None:
            raise RuntimeError(f"expected {task} to have ended, found it running. Kill it first")
        self._report_tolerated(task)
        self._start(task)

    def close(self) -> None:
        """Stops all processes: SIGTERM, after 3 seconds SIGKILL. May be called again."""
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()
        self._guard.wait()
        for process in self.processes.values():
            # Has nothing to do unless somebody killed the guard.
            process.kill()
            process.wait()
        for copiers in self._copiers.values():
            for copier in copiers:
                copier.join(timeout_seconds=1.0)
        for reserved in self._reserved:
            reserved.close()
        if self._link_dir is not None:
            self._link_dir.cleanup()

    def _check(self, num_workers: int, num_ps: int) -> None:
        if not self._command:
            raise ValueError("command: expected a program and its arguments, found nothing")
        if shutil.which(self._command[0], path=self._env.get("PATH")) is None:
            raise FileNotFoundError(
                f"command: expected a program, found none called {self._command[0]!r} in PATH"
            )
        if num_ps < 0 or num_workers < 0:
            raise ValueError(
                f"expected numbers of tasks of 0 or more, found num_workers={num_workers} and "
                f"num_ps={num_ps}"
            )
        if num_ps > 0 and num_workers == 0:
            raise ValueError(
                f"num_workers: expected 1 or more with num_ps={num_ps}, found 0: the chief only "
                "schedules, nobody would compute gradients"
            )
        if not _LOOPBACK_LIBRARY.exists():
            raise FileNotFoundError(
                f"expected {_LOOPBACK_LIBRARY}, which keeps TensorFlow's servers on the loopback "
                "interface; found none. Build it: `pip install .` in the checkout, or "
                "`pip install -e .` to work on it"
            )

    def _reserve_address(self) -> str:
        # Bound but not listening, for as long as the cluster lives: the system gives the port to
        # nobody else, while a server that sets SO_REUSEADDR, as gRPC does, may listen on it.
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.append(reserved)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}"

    def _start_guard(self) -> subprocess.Popen:
        # Without an environment: that of an outer local cluster would make it one of its tasks.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", orphan_guard.__file__, self._id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )

    def _loopback_library(self) -> pathlib.Path:
        """Where LD_PRELOAD, which cannot have spaces or colons in a path, finds the library."""
        if not set(str(_LOOPBACK_LIBRARY)) & set(" \t:"):
            return _LOOPBACK_LIBRARY
        if self._link_dir is None:
            self._link_dir = tempfile.TemporaryDirectory(prefix="gba_tf-")
            pathlib.Path(self._link_dir.name, _LOOPBACK_LIBRARY.name).symlink_to(_LOOPBACK_LIBRARY)
        return pathlib.Path(self._link_dir.name, _LOOPBACK_LIBRARY.name)

    def _environment(self, task: str) -> dict[str, str]:
        job, _, index = task.partition("-")
        environment = {**_ENVIRONMENT, **os.environ, **self._env}
        preloaded = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{self._loopback_library()} {preloaded}".strip()
        environment["GBA_TF_LOOPBACK_PORT"] = self.addresses[task].rpartition(":")[2]
        environment[orphan_guard.ENVIRONMENT_KEY] = self._id
        # In every task, as this cluster may itself run in the leading task of another one.
        environment[task_output.LEADER_MARKS_VARIABLE] = "1" if task in _MAY_LEAD else ""
        environment["TF_CONFIG"] = json.dumps(
            {"cluster": self._cluster, "task": {"type": job, "index": int(index or 0)}}
        )
        return environment

    def _start(self, task: str) -> None:
        is_watched = task == "chief" or task in _MAY_LEAD
        log = self.log_path(task).open("ab", buffering=0)
        try:
            # A session of its own: Ctrl-C in the terminal reaches this process only, which then
            # stops the tasks in order.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_watched else log,
                stderr=subprocess.PIPE if is_watched else subprocess.STDOUT,
                env=self._environment(task),
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            log.close()
            raise
        self.processes[task] = process
        if not is_watched:
            log.close()
            return
        for copier in self._copiers.pop(task, ()):  # Of the process that ended before.
            copier.join(timeout_seconds=1.0)
        # Level 0, which shows everything, is somebody's wish only where it was set.
        hide_noise = {**os.environ, **self._env}.get("TF_CPP_MIN_LOG_LEVEL") != "0"
        self._copiers[task] = [
            task_output.OutputCopier(pipe, log, terminal, hide_noise, leads=task == "chief")
            for pipe, terminal in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]

    def _failed_task(self) -> str | None:
        """The task whose failure ends the cluster. Reports the failures that do not."""
        failed = [task for task, p in self.processes.items() if p.poll() not in (None, 0)]
        workers = {task for task in self.processes if task.startswith("worker-")}
        # Without any worker the chief would wait for one for ever.
        if self._tolerate_worker_failures and not workers <= set(failed):
            for task in failed:
                self._report_tolerated(task)
            failed = [task for task in failed if task not in workers]
        # Of tasks that failed within one poll, the chief more likely is the victim than the cause;
        # it is the last in `processes`.
        return failed[0] if failed else None

    def _report_tolerated(self, task: str) -> None:
        process = self.processes[task]
        if process.poll() in (None, 0) or process in self._reported:
            return
        self._reported.add(process)
        _say(f"{task} {_describe_end(process)}; the others go on (log: {self.log_path(task)})")

    def _end_after_failure(self, task: str) -> int:
        process = self.processes[task]
        self.close()
        ended = f"{task} {_describe_end(process)}"
        if any(copier.leads for copier in self._copiers.get(task, ())):
            _say(f"{ended}; its output is above and in {self.log_path(task)}")
        else:
            lines = "\n".join(f"  {line}" for line in task_output.last_lines(self.log_path(task)))
            _say(f"{ended}; the last lines of {self.log_path(task)}:\n{lines}")
        return process.returncode if process.returncode > 0 else 128 - process.returncode

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        def remember(signum: int, frame: types.FrameType | None) -> None:
            self._signal = signum

        try:
            previous = {signum: signal.signal(signum, remember) for signum in _HANDLED_SIGNALS}
        except ValueError:  # Only the main thread receives signals.
            previous = {}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def _task_name(job: str, index: int) -> str:
    return "chief" if job == "chief" else f"{job}-{index}"


def _describe_end(process: subprocess.Popen) -> str:
    if process.returncode < 0:
        signum = -process.returncode
        return f"was killed by signal {signum} ({signal.strsignal(signum)})"
    return f"ended with exit code {process.returncode}"


def _say(text: str) -> None:
    print(f"gba_tf: {text}", file=sys.stderr, flush=True)
