"""One run at a time writes to a folder, and only to its own or a new one."""

import os
import signal
import subprocess
import sys

import pytest

from gba_tf.model_dir import ModelDir

CLAIM_AND_WAIT = """
import sys
from gba_tf.model_dir import ModelDir
claim = ModelDir(sys.argv[1], resume=True)
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_new_folder_is_created_with_one_for_logs(tmp_path):
    claim = ModelDir(tmp_path / "new" / "run", resume=False)
    assert (tmp_path / "new" / "run" / "logs").is_dir()
    claim.release()


def test_a_second_run_is_refused_while_the_first_lives_and_let_in_when_it_was_killed(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIM_AND_WAIT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert first.stdout.readline() == b"claimed\n"
    for resume in (True, False):
        with pytest.raises(ValueError, match=rf'in use by another run \(.*"pid": {first.pid}'):
            ModelDir(tmp_path, resume)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    ModelDir(tmp_path, resume=True).release()


def test_the_folder_of_an_earlier_run_is_for_going_on(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a").touch()
    with pytest.raises(ValueError, match="found a run in .* --resume goes on with it"):
        ModelDir(tmp_path, resume=False)
    ModelDir(tmp_path, resume=True).release()
    assert (tmp_path / "checkpoints" / "a").exists()


def test_the_folder_of_a_run_that_did_not_begin_is_as_good_as_new(tmp_path):
    (tmp_path / "given").mkdir()
    ModelDir(tmp_path / "given", resume=False).release()
    ModelDir(tmp_path / "given", resume=False).release()


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path, resume):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="expected a new or an empty folder.*'thesis.txt' in it"):
        ModelDir(tmp_path, resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="expected a folder, found the file .*file"):
        ModelDir(tmp_path / "file", resume=True)


def test_only_what_is_new_and_empty_is_removed(tmp_path):
    unused, used = ModelDir(tmp_path / "unused", True), ModelDir(tmp_path / "used", True)
    (tmp_path / "used" / "logs" / "chief.log").touch()
    unused.release()
    used.release()
    assert not (tmp_path / "unused").exists()
    assert (tmp_path / "used" / "logs" / "chief.log").exists()
