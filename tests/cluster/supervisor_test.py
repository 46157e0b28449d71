"""Supervisors of real processes, without TensorFlow: what follows what, and how a run ends.

Their signs of life, too: who joins which run, and what ends none.

With TensorFlow: switching_test.
"""

import json
import os
import pathlib
import resource
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

    def __init__(self, model_dir, gone_seconds=30.0, num_workers=2):
        self.model_dir = model_dir
        (model_dir / "ran").mkdir(exist_ok=True)
        self._gone_seconds = gone_seconds
        self._num_workers = num_workers
        self.supervisors = {}

    def start(self, *tasks):
        # Nobody listens at these addresses.
        workers = [f"h:{port}" for port in range(10, 10 + self._num_workers)]
        cluster = {"chief": ["h:1"], "worker": workers, "ps": ["h:2"]}
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

    def end(self, segment="*"):
        """Returns task -> (exit code, output); checks that no process of the segment is left."""
        ended = {}
        for name, supervisor in self.supervisors.items():
            output, _ = supervisor.communicate(timeout=TIMEOUT_SECONDS)
            ended[name] = supervisor.returncode, output
        for path in self.processes(segment=segment):
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


def test_tasks_of_a_second_run_that_is_started_by_mistake_do_not_end_the_first(start):
    first = start()
    first.wait_for(0, *WORKERS)
    # Its chief was refused by ModelDir. One of them has its like in the first, and one has not.
    second = start("ps 0", "worker 2", num_workers=3).end(segment="none")
    folder = first.model_dir / "switching"
    assert second["ps 0"] == (
        2,
        f"gba_tf: ps 0 ends: expected nobody else to be ps 0 in {folder}, found a living process"
        " that is. Wait for the end of its run, or choose another --model_dir\n",
    )
    assert second["worker 2"] == (
        2,
        f"gba_tf: worker 2 ends: expected the chief of this task's cluster in {folder}, found that"
        " of another one. Give every task the same cluster in TF_CONFIG, and each cluster a"
        " --model_dir of its own\n",
    )
    first.then(0, "finished")
    assert first.end() == dict.fromkeys(TASKS, (0, ""))


def test_a_chief_that_is_started_again_begins_a_run_that_the_others_join_when_they_are(start):
    old = start(gone_seconds=6.0)
    old.wait_for(0, *WORKERS)
    old.supervisors["chief 0"].kill()
    old.supervisors.pop("chief 0").wait()
    new = start("chief 0", gone_seconds=6.0)
    for name, (code, output) in old.end(segment=0).items():
        assert code == 1
        assert output.startswith(f"gba_tf: {name} ends: chief 0 is gone: no sign of life for 6 s,")
        assert "joins the run of the chief" in output
    new.start(*WORKERS, "ps 0")
    new.wait_for(1, *WORKERS)
    new.then(1, "finished")
    assert new.end() == dict.fromkeys(TASKS, (0, ""))


@pytest.mark.parametrize("victim", ["worker 1", "chief 0"])
def test_a_task_that_cannot_begin_ends_the_run_with_its_reason(start, tmp_path, victim):
    (tmp_path / f"{victim} has no data").touch()
    run = start(*[task for task in TASKS if task != "chief 0"])
    run.start("chief 0")
    ended = run.end()
    assert ended.pop(victim) == (2, "")
    for name, result in ended.items():
        assert result == (1, f"gba_tf: {name} ends: {victim}: no data\n")


def test_a_failure_of_an_earlier_run_does_not_end_a_new_one(start, tmp_path):
    (tmp_path / "worker 1 has no data").touch()
    start().end()
    (tmp_path / "worker 1 has no data").unlink()
    run = start("chief 0", "worker 0", "ps 0")
    wait_until(lambda: run.processes(segment=0) or SwitchFiles(tmp_path).numbers() == [0, 1])
    run.start("worker 1")
    run.wait_for(1, *WORKERS)
    run.then(1, "finished")
    assert run.end() == dict.fromkeys(TASKS, (0, ""))


def test_a_pause_of_all_tasks_does_not_end_the_run(start):
    run = start(gone_seconds=3.0)
    run.wait_for(0, *WORKERS)
    for supervisor in run.supervisors.values():
        supervisor.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    for supervisor in run.supervisors.values():
        supervisor.send_signal(signal.SIGCONT)
    time.sleep(1.0)  # They look at each other.
    run.then(0, "finished")
    assert run.end() == dict.fromkeys(TASKS, (0, ""))


def test_a_folder_that_cannot_be_written_is_named_after_some_seconds_and_not_at_once(start):
    run = start(gone_seconds=3.0)
    run.wait_for(0, *WORKERS)
    worker = run.supervisors["worker 1"].pid
    limits = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, limits[1]))
    time.sleep(1.5)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, limits)
    time.sleep(1.0)
    assert all(supervisor.poll() is None for supervisor in run.supervisors.values())
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, limits[1]))
    ended = run.end()
    assert [code for code, _ in ended.values()].count(0) == 0
    assert "File too large" in ended["worker 1"][1]
    assert "worker 1 is gone" in ended["chief 0"][1]
    assert not list(run.model_dir.glob("switching/.*")), "no temporary files are left"


def test_a_broken_segment_is_named_and_one_of_an_earlier_run_does_not_matter(start, tmp_path):
    (tmp_path / "switching").mkdir()
    (tmp_path / "switching" / "segment-0000.json").write_text("")
    run = start()
    run.wait_for(1, *WORKERS)
    (tmp_path / "switching" / "segment-0002.json").write_text("")
    ended = run.end()
    outputs = [output for _, output in ended.values()]
    assert {code for code, _ in ended.values()} <= {1, 2}
    assert any("segment-0002.json: expected Segment as JSON, found an empty" in o for o in outputs)
