"""In a process without other workers; that several agree is tested in tests/cluster."""

import pytest
import tensorflow as tf

from gba_tf.worker_agreement import WorkerAgreement


def test_one_worker_always_agrees_with_itself():
    workers = WorkerAgreement(tf.distribute.OneDeviceStrategy("/cpu:0"))
    assert (workers.has_others, workers.is_first) == (False, True)
    with workers.together("Nothing was done"):
        workers.agree()
        assert workers.numbers(7) == [7]


def test_its_own_error_is_what_ends_it():
    workers = WorkerAgreement(tf.distribute.OneDeviceStrategy("/cpu:0"))
    with pytest.raises(OSError, match="the disk is gone"):
        with workers.together("Nothing was done"):
            raise OSError("the disk is gone")
