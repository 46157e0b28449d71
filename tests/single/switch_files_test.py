"""Files of `--strategy=auto` that are broken, of another run, or cannot be written."""

import dataclasses
import resource
import signal

import pytest

from gba_tf.switch_files import Segment, SwitchFileError, SwitchFiles, TaskState

SWITCH = {"from": "multi_worker_mirrored", "to": "gba", "global_step": 7}


@pytest.fixture
def files(tmp_path):
    files = SwitchFiles(tmp_path)
    files.begin()
    return files


def segment_path(files, number):
    return files.folder / f"segment-{number:04d}.json"


@pytest.mark.parametrize(
    "text, found",
    [("", "an empty file"), ('{"number": 0,', "Expecting"), ('{"mode": "gba"}', "number")],
)
def test_a_broken_segment_is_named_with_what_to_do(files, text, found):
    segment_path(files, 0).write_text(text)
    with pytest.raises(SwitchFileError) as error:
        files.segment(0)
    message = str(error.value)
    assert message.startswith(f"{segment_path(files, 0)}: expected Segment as JSON, found ")
    assert found in message
    assert "Remove the file and start every task again" in message


def test_switches_and_efficiency_skip_what_cannot_be_read(files):
    assert files.latest_efficiency() == 0.9
    files.write_segment(Segment(0, "gba", efficiency=0.6, switch=SWITCH, seconds={"save": 2.0}))
    segment_path(files, 1).write_text("")
    assert files.switches() == [{**SWITCH, "seconds": {"save": 2.0}}]
    assert files.latest_efficiency() == 0.6
    assert files.numbers() == [0, 1]


def test_a_segment_of_another_run_is_not_overwritten(files):
    first = Segment(3, "gba", run_id="first")
    files.write_segment(first)
    with pytest.raises(SwitchFileError, match="found that of another run"):
        files.write_segment(Segment(3, "finished", run_id="second"))
    files.write_segment(dataclasses.replace(first, seconds={"save": 1.0}))
    assert files.segment(3) == Segment(3, "gba", run_id="first", seconds={"save": 1.0})


def test_broken_signs_of_life_are_none(files):
    (files.folder / "task-worker-0.json").write_text("")
    assert files.task("worker 0") is None


def test_what_cannot_be_written_leaves_the_earlier_file_and_no_other(files):
    state = TaskState("process", beat=4)
    files.write_task("worker 0", state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            files.write_task("worker 0", dataclasses.replace(state, beat=5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files.task("worker 0") == state
    assert [path.name for path in files.folder.iterdir()] == ["task-worker-0.json"]
