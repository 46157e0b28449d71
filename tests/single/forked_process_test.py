"""A child goes on from where its parent is, and its end is told from all others."""

import os
import subprocess
import sys
import threading
import time

import pytest

from gba_tf.forked_process import ForkedProcess

TIMEOUT_SECONDS = 60


PROGRAM = """
import os, signal, sys, threading, time
from gba_tf.forked_process import ForkedProcess, ProcessFailure

def wait(child):
    while child.poll() is None:
        time.sleep(0.01)
    return child.poll(), child.reason()

{body}
"""


def python(body):
    """Runs it in a process that has not started TensorFlow; returns the lines and the errors."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return result.stdout.splitlines(), result.stderr


def test_the_ways_to_end():
    out, err = python(
        """
seen = []
def fail(): raise ValueError("no disk\\nmore")
def fail_in_autograph(): raise ValueError("in user code:\\n\\n  File x\\n\\n  TypeError: two\\n")
def refuse(): raise ProcessFailure("disk full:\\n 3 bytes", code=2)
def leave(): sys.exit(7)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def work(): seen.append(1); print("works")
for function in (work, fail, fail_in_autograph, refuse, leave, die):
    print(wait(ForkedProcess(function)))
print(seen)
print("once")
"""
    )
    assert out == [
        "works",
        "(0, '')",
        "(1, 'ValueError: no disk')",
        "(1, 'TypeError: two')",
        "(2, 'disk full: 3 bytes')",
        "(7, '')",
        "(-9, '')",
        "[]",
        "once",
    ]
    assert err.count("Traceback") == 2


def test_a_child_that_does_not_end_is_killed_and_handlers_of_the_parent_are_not_its_own():
    out, err = python(
        """
signal.signal(signal.SIGTERM, lambda *unused: print("handled", flush=True))
child = ForkedProcess(lambda: time.sleep(3600))
print(child.poll(), child.end(grace_seconds=0.1), child.poll(), child.end())
child = ForkedProcess(lambda: time.sleep(3600))
os.kill(child.process_id, signal.SIGTERM)
print(wait(child)[0])
print(ForkedProcess(lambda: None).end(grace_seconds=60))
"""
    )
    assert (out, err) == (["None True -9 False", "-15", "False"], "")


def test_a_child_does_not_outlive_its_parent():
    out, _ = python(
        """
child = ForkedProcess(lambda: time.sleep(3600))
print(child.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            os.kill(int(out[0]), 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{out[0]}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_has_threads_or_runs_tensorflow_is_not_forked():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="reader")
    thread.start()
    try:
        with pytest.raises(
            RuntimeError, match="expected no threads in this process, found .*reader"
        ):
            ForkedProcess(lambda: None)
    finally:
        stop.set()
        thread.join()
    out, err = python(
        """
import tensorflow as tf
ForkedProcess(lambda: print(float(tf.reduce_sum(tf.ones([1000]))))).end(60)
tf.ones([1])
ForkedProcess(lambda: None)
"""
    )
    assert out == ["1000.0"]
    assert err.splitlines()[-1] == (
        "RuntimeError: fork: expected that TensorFlow has run no operation in this process, found"
        " its runtime started, whose threads a child would not have."
    )
