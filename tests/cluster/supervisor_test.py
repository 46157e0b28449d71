"""Supervisors of real processes, without TensorFlow: what follows what, and how a run ends.

With TensorFlow: switching_test.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from gba_tf.switch_files import SwitchFiles

TASK = pathlib.Path(__file__).with_name("supervised_task.py")
TIMEOUT_SECONDS = 60
TASKS = ("chief 0", "worker 0", "worker 1", "ps 0")
WORKERS = ("worker 0", "worker 1")


class Run:
    """Four supervisors and their processes."""

    def __init__(self, model_dir, gone_seconds=30.0):
        self.model_dir = model_dir
        (model_dir / "ran").mkdir(exist_ok=True)
        self._gone_seconds = gone_seconds
        self.supervisors = {}

    def start(self, *tasks):
        # Nobody listens at these addresses.
        cluster = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}
        for name in tasks or TASKS:
            job, index = name.split()
            config = {"cluster": cluster, "task": {"type": job, "index": int(index)}}
            self.supervisors[name] = subprocess.Popen(
                [sys.executable, str(TASK), str(self.model_dir), str(self._gone_seconds)],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return self

    def then(self, segment, order):
        """What the process that leads the segment does."""
        path = self.model_dir / f"then-{segment}"
        path.with_suffix(".new").write_text(order)
        path.with_suffix(".new").rename(path)

    def wait_for(self, segment, *tasks, times=1):
        """Returns the latest process of each task in a segment, when they have run so often."""
        return [wait_until(lambda t=t: self._latest(t, segment, times)) for t in tasks]

    def _latest(self, task, segment, times):
        found = sorted(self.processes(task, segment), key=lambda path: path.stat().st_mtime_ns)
        return int(found[-1].name.rpartition("-")[2]) if len(found) == times else None

    def processes(self, task="*", segment="*"):
        return list((self.model_dir / "ran").glob(f"{task}-{segment}-*"))

    def end(self):
        """Returns task -> (exit code, output); checks that no process is left."""
        ended = {}
        for name, supervisor in self.supervisors.items():
            output, _ = supervisor.communicate(timeout=TIMEOUT_SECONDS)
            ended[name] = supervisor.returncode, output
        for path in self.processes():
            process_id = int(path.name.rpartition("-")[2])
            wait_until(lambda p=process_id: not is_alive(p))
        return ended


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def is_alive(process_id):
    try:
        status = pathlib.Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def start(tmp_path):
    runs = []

    def start_run(*tasks, **kwargs):
        runs.append(Run(tmp_path, **kwargs).start(*tasks))
        return runs[-1]

    yield start_run
    for run in runs:
        for supervisor in run.supervisors.values():
            supervisor.kill()
            supervisor.wait()


def test_segments_follow_each_other_and_a_second_run_goes_on_with_their_numbers(start, tmp_path):
    run = start("worker 1", "ps 0")  # These wait for the others.
    run.start("chief 0", "worker 0")
    first = run.wait_for(0, *WORKERS)
    assert not run.processes("chief 0") + run.processes("ps 0"), "all-reduce needs workers only"
    run.then(0, "gba")
    second = run.wait_for(1, *TASKS)
    assert not any(map(is_alive, first)), "no process of the segment before is left"
    run.then(1, "multi_worker_mirrored")
    third = run.wait_for(2, *WORKERS)
    assert not any(map(is_alive, second))
    assert len({*first, *second, *third}) == 8
    run.then(2, "finished")
    assert run.end() == dict.fromkeys(TASKS, (0, ""))

    run = start()
    run.wait_for(4, *WORKERS)
    files = SwitchFiles(tmp_path)
    assert [files.segment(number).mode for number in files.numbers()] == [
        *("multi_worker_mirrored", "gba", "multi_worker_mirrored", "finished"),
        "multi_worker_mirrored",
    ]
    assert files.segment(4).efficiency == 0.5, "what was measured is kept"
    assert [(s["from"], s["to"]) for s in files.switches()] == [
        ("multi_worker_mirrored", "gba"),
        ("gba", "multi_worker_mirrored"),
    ]
    run.then(4, "finished")
    assert run.end() == dict.fromkeys(TASKS, (0, ""))


def test_a_worker_that_is_killed_under_gba_is_started_again(start):
    run = start()
    run.then(0, "gba")
    worker, _ = run.wait_for(1, "worker 1", "chief 0")
    os.kill(worker, signal.SIGKILL)
    (again,) = run.wait_for(1, "worker 1", times=2)
    assert is_alive(again) and again != worker
    run.then(1, "finished")
    ended = run.end()
    message = "gba_tf: worker 1 was killed by signal 9 (Killed); it is started again\n"
    assert ended.pop("worker 1") == (0, message)
    assert set(ended.values()) == {(0, "")}


def test_a_worker_that_is_killed_under_all_reduce_ends_the_run(start):
    run = start()
    _, worker = run.wait_for(0, *WORKERS)
    os.kill(worker, signal.SIGKILL)
    ended = run.end()
    reason = "its process was killed by signal 9 (Killed)"
    assert ended.pop("worker 1") == (128 + 9, f"gba_tf: worker 1 ends: {reason}\n")
    for name, result in ended.items():
        assert result == (1, f"gba_tf: {name} ends: worker 1: {reason}\n")


def test_everybody_says_why_the_one_that_leads_failed(start):
    run = start()
    run.then(0, "gba")
    run.wait_for(1, *TASKS)
    run.then(1, "the disk is full")
    ended = run.end()
    reason = "its process ended with exit code 1: ValueError: the disk is full"
    code, output = ended.pop("chief 0")
    assert code == 1
    assert output.endswith(f"gba_tf: chief 0 ends: {reason}\n")
    assert "Traceback" in output
    for name, result in ended.items():
        assert result == (1, f"gba_tf: {name} ends: chief 0: {reason}\n")


def test_a_run_that_cannot_begin_ends_everywhere(start, tmp_path):
    (tmp_path / "damaged").touch()
    ended = start().end()
    assert ended.pop("chief 0") == (2, "gba_tf: chief 0 ends: the checkpoint is damaged\n")
    for name, result in ended.items():
        assert result == (1, f"gba_tf: {name} ends: chief 0: the checkpoint is damaged\n")


@pytest.mark.parametrize("victim", ["chief 0", "ps 0"])
def test_a_supervisor_that_is_killed_takes_its_process_along_and_ends_the_run(start, victim):
    run = start(gone_seconds=3.0)
    run.then(0, "gba")
    process, *_ = run.wait_for(1, victim, *TASKS)
    run.supervisors[victim].kill()
    wait_until(lambda: not is_alive(process))
    ended = run.end()
    assert ended.pop(victim)[0] == -9
    for name, (code, output) in ended.items():
        assert code == 1
        assert output.startswith(f"gba_tf: {name} ends: {victim} is gone: no sign of life for 3 s")


def test_a_supervisor_that_is_told_to_stop_stops_the_run(start):
    run = start()
    run.wait_for(0, *WORKERS)
    run.supervisors["worker 0"].terminate()
    ended = run.end()
    assert ended.pop("worker 0") == (128 + 15, "gba_tf: worker 0 ends: stopped by SIGTERM\n")
    for name, result in ended.items():
        assert result == (1, f"gba_tf: {name} ends: worker 0: stopped by SIGTERM\n")
