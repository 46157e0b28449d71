"""The op that ends a process: the first request counts, and wrong shapes are refused."""

import subprocess
import sys

import pytest


def test_the_first_request_is_kept():
    # In a process of its own, because a request cannot be taken back.
    program = """
from gba_tf.ops import process
assert process.shutdown_requested() is None
process.request_shutdown(3, "the disk is full: ä")
assert process.shutdown_requested() == (3, "the disk is full: ä")
process.request_shutdown(0, "")
assert process.shutdown_requested() == (3, "the disk is full: ä")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("status, message", [([0, 1], "reason"), (0, ["reason"])])
def test_only_scalars_are_taken(status, message):
    import tensorflow as tf

    from gba_tf.ops import process

    with pytest.raises(tf.errors.InvalidArgumentError, match="expected a scalar status and a"):
        process.request_shutdown(status, message)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Shape must be rank 0"):
        process.request_shutdown(status, message)
    assert process.shutdown_requested() is None
