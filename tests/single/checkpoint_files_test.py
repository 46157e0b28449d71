"""The folder of checkpoints, without TensorFlow: whole ones only, whatever happens while saving."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from gba_tf.checkpoint_files import CheckpointError, CheckpointFiles

# Saves, and waits within.
SAVES_SLOWLY = """
import sys
from gba_tf.checkpoint_files import CheckpointFiles

def write(folder):
    (folder / "data").write_text("of the first process")
    print("writing", flush=True)
    sys.stdin.readline()
    return {"text": "of the first process"}

files = CheckpointFiles(sys.argv[1])
files.save(20, write, 0)
print("saved", flush=True)
sys.stdin.readline()
"""

# Forks a process for every call that a save makes to the file system, and kills it right there.
KILLED_EVERYWHERE = """
import os, pathlib, shutil, signal, sys
from gba_tf.checkpoint_files import CheckpointFiles

CALLS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open", "shutil.rmtree", "os.scandir"}
root = pathlib.Path(sys.argv[1])
directory = root / "checkpoints"

def write(text):
    def write_into(folder):
        for name in ("one", "two"):
            (folder / name).write_text(text + name)
        return {"text": text}
    return write_into

def in_child(function, *arguments):
    child = os.fork()
    if child == 0:
        function(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

def save_first():
    CheckpointFiles(directory).save(5, write("first"), 0)

def save(kill_at):
    calls = 0
    def count(event, arguments):
        nonlocal calls
        if event in CALLS and str(arguments[0]).startswith(str(directory)):
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    files = CheckpointFiles(directory, max_to_keep=1)
    sys.addaudithook(count)
    files.save(5, write("second"), 0)  # Replaces the first.
    files.save(6, write("third"), 0)  # Removes the second.

def save_last():
    CheckpointFiles(directory, max_to_keep=1).save(7, write("fourth"), 0)

def found():
    newest = CheckpointFiles(directory).newest()  # Raises for one that is damaged.
    text = newest.metadata["text"]
    assert [(newest.folder / name).read_text() for name in ("one", "two")] == [
        text + "one", text + "two"
    ]
    return newest.step, text

seen = []
for kill_at in range(1, 1000):
    shutil.rmtree(directory, ignore_errors=True)
    assert in_child(save_first)
    ended_well = in_child(save, kill_at)
    seen.append(found())
    # It claims the folder that the killed one had claimed, and removes what that one left.
    assert in_child(save_last), kill_at
    assert found() == (7, "fourth")
    names = {path.name for path in directory.iterdir()}
    assert names == {"00000007", "checkpoint", ".lock"}, (kill_at, names)
    if ended_well:
        break
order = [(5, "first"), (5, "second"), (6, "third")]
assert ended_well and seen == sorted(seen, key=order.index), seen
print(*(seen.count(state) for state in order))
"""


def write_text(text):
    def write(folder):
        (folder / "data").write_text(text)
        return {"text": text}

    return write


def step_folders(directory):
    return sorted(path.name for path in directory.glob("[0-9]*"))


@pytest.fixture
def files(tmp_path):
    files = CheckpointFiles(tmp_path)
    for step in (3, 12):
        files.save(step, write_text(f"text of {step}"), 0)
    return files


def test_a_process_killed_at_any_call_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Before the replacement is complete, after it, and after the next checkpoint.
    assert all(int(times) > 5 for times in done.stdout.split()), done.stdout


def test_checkpoints_are_found_by_their_step(files, tmp_path):
    assert CheckpointFiles(tmp_path / "nothing").newest() is None
    assert files.steps() == [3, 12]
    newest = files.newest()
    assert (newest.step, newest.folder.name) == (12, "00000012")
    assert newest.metadata["text"] == "text of 12"
    assert files.read(3).metadata["text"] == "text of 3"


def test_only_so_many_are_kept(tmp_path):
    files = CheckpointFiles(tmp_path, max_to_keep=2)
    for step in range(5):
        files.save(step, write_text(""), 0)
    assert step_folders(tmp_path) == ["00000003", "00000004"]
    with pytest.raises(ValueError, match="max_to_keep: expected at least 1 or None, found 0"):
        CheckpointFiles(tmp_path, max_to_keep=0)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_another_version(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 77}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("data", pathlib.Path.unlink, "data is missing"),
        ("data", truncate, r"expected 10 bytes in \S*data, found 7"),
        ("data", flip_a_bit, r"the checksum of \S*data does not match its 10 bytes"),
        ("training.json", pathlib.Path.unlink, r"training.json is missing"),
        ("training.json", truncate, r"training.json (is not what gba_tf wrote|does not match)"),
        ("training.json", flip_a_bit, r"training.json (is not what gba_tf wrote|does not match)"),
        ("training.json", write_another_version, "expected format version 2 .* found 77"),
    ],
)
def test_damage_is_named_and_so_is_the_checkpoint_before_it(files, name, damage, message):
    damage(files.folder(12) / name)
    earlier = rf"of global step 3\. To go on from there, move {files.folder(12)} away"
    with pytest.raises(CheckpointError, match=message) as error:
        files.newest()
    error.match(earlier)
    files.folder(12).rename(files.directory / "away")
    assert files.newest().step == 3


def test_of_two_damaged_checkpoints_neither_is_proposed(files):
    for step in (3, 12):
        (files.folder(step) / "data").unlink()
    with pytest.raises(CheckpointError, match="There is no earlier complete one"):
        files.newest()


def test_a_failure_while_writing_leaves_what_was_there(files):
    def fail(folder):
        (folder / "data").write_text("half")
        raise RuntimeError("the model is gone")

    for step in (12, 13):
        with pytest.raises(RuntimeError, match="the model is gone"):
            files.save(step, fail, 0)
    names = [".lock", "00000003", "00000012", "checkpoint"]
    assert sorted(os.listdir(files.directory)) == names
    assert files.newest().metadata["text"] == "text of 12"


def test_only_the_process_that_saves_removes_what_another_one_left(tmp_path):
    """A second process may look, but neither save nor remove what the first is writing."""
    directory = tmp_path
    for step in (3, 12):
        CheckpointFiles(directory).save(step, write_text(f"text of {step}"), 0)
    (directory / ".00000021.writing").mkdir()
    for helper in ("worker-1", "worker-7"):
        (directory / f".{helper}.scratch").mkdir()
    first = subprocess.Popen(
        [sys.executable, "-c", SAVES_SLOWLY, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "writing\n"
    second = CheckpointFiles(directory, helpers=["worker-1"])
    # The first one has claimed the folder, and removed what was left by others.
    left = [path.name for path in directory.iterdir() if path.name not in (".lock", "checkpoint")]
    assert sorted(left) == [".00000020.writing", "00000003", "00000012"]
    (directory / ".worker-1.scratch").mkdir()
    (directory / ".worker-7.scratch").mkdir()
    assert second.newest().step == 12
    message = (
        rf'Expected no other process that saves in {directory}, found one: .*"pid": {first.pid}'
    )
    for said in ("saved\n", ""):  # While it saves, and afterwards.
        with pytest.raises(RuntimeError, match=message):
            second.save(20, write_text("of the second"), 0)
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == said
    first.communicate()
    assert first.returncode == 0
    assert second.newest().metadata["text"] == "of the first process"
    second.save(20, write_text("of the second"), 0)
    assert second.newest().metadata["text"] == "of the second"
    names = {path.name for path in directory.iterdir() if path.name.endswith(".scratch")}
    assert names == {".worker-1.scratch"}


def test_a_folder_that_was_removed_is_claimed_anew(tmp_path):
    directory = tmp_path / "checkpoints"
    files = CheckpointFiles(directory)
    files.save(1, write_text("old"), 0)
    shutil.rmtree(directory)
    files.save(2, write_text("new"), 0)
    assert (files.steps(), (directory / ".lock").exists()) == ([2], True)


def test_a_state_file_that_cannot_be_written_does_not_undo_a_complete_checkpoint(files, caplog):
    (files.directory / "checkpoint").unlink()
    (files.directory / "checkpoint").mkdir()
    folder = files.save(13, write_text("text of 13"), 0)
    assert files.newest().metadata["text"] == "text of 13"
    assert f"The checkpoint {folder} is complete, but tf.train.latest_checkpoint" in caplog.text
    names = [".lock", "00000003", "00000012", "00000013", "checkpoint"]
    assert sorted(os.listdir(files.directory)) == names
