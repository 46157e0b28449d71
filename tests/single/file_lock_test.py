"""A claim on a file, which no other process and nobody else in this one can have."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from gba_tf.file_lock import FileLock, LockedError

CLAIMS = """
import pathlib, sys
from gba_tf.file_lock import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_gives_its_claim_back(tmp_path):
    path = tmp_path / "lock"
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"claimed\n"
    with pytest.raises(LockedError, match=rf'expected no other claim .*"pid": {other.pid}'):
        FileLock(path)
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    FileLock(path)


def test_a_claim_ends_when_it_is_closed_and_when_nobody_has_it(tmp_path):
    path = tmp_path / "lock"
    lock = FileLock(path)
    with pytest.raises(LockedError, match=f'"pid": {os.getpid()}') as error:
        FileLock(path)
    assert f'"pid": {os.getpid()}' in error.value.owner
    lock.close()
    lock = FileLock(path)
    del lock
    FileLock(path).close()


def test_a_claim_on_a_file_that_was_removed_keeps_nobody_out(tmp_path):
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert lock.is_in_place()
    path.unlink()
    assert not lock.is_in_place()
    other = FileLock(path)
    assert other.is_in_place() and not lock.is_in_place()


def test_where_there_are_no_locks_everybody_gets_the_claim_and_can_tell(tmp_path, monkeypatch):
    assert FileLock(tmp_path / "lock").keeps_others_out

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    claims = [FileLock(tmp_path / "lock") for _ in range(2)]
    assert not any(claim.keeps_others_out for claim in claims)
