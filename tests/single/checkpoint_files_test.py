"""The folder of checkpoints, without TensorFlow: whole ones only, whatever happens while saving."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from gba_tf.checkpoint_files import CheckpointError, CheckpointFiles

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

def save(kill_at):
    calls = 0
    def count(event, arguments):
        nonlocal calls
        if event in CALLS and str(arguments[0]).startswith(str(directory)):
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    files = CheckpointFiles(directory, max_to_keep=1)
    files.clean()
    sys.addaudithook(count)
    files.save(5, write("second"), 0)  # Replaces the first.
    files.save(6, write("third"), 0)  # Removes the second.
    os._exit(0)

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
    CheckpointFiles(directory).save(5, write("first"), 0)
    child = os.fork()
    if child == 0:
        save(kill_at)
    ended_well = os.waitpid(child, 0)[1] == 0
    seen.append(found())
    files = CheckpointFiles(directory, max_to_keep=1)
    files.clean()
    assert found() == seen[-1], kill_at
    assert not [path.name for path in directory.iterdir() if not path.name.isdigit()], kill_at
    files.save(7, write("fourth"), 0)
    assert found() == (7, "fourth")
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]
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
        ("training.json", write_another_version, "expected format version 1 .* found 77"),
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
    assert sorted(os.listdir(files.directory)) == ["00000003", "00000012"]
    assert files.newest().metadata["text"] == "text of 12"
