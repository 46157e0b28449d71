"""What does not count into the time that a segment of `--strategy=auto` has trained."""

import time

import pytest
import tensorflow as tf

from gba_tf.batch_plan import BatchPlan
from gba_tf.switch_files import Segment, SwitchFiles
from gba_tf.switch_monitor import SwitchMonitor
from gba_tf.switching import ALL_REDUCE, SwitchRule


@pytest.fixture
def monitor(tmp_path):
    monitor = SwitchMonitor(Segment(0, ALL_REDUCE), SwitchRule(), SwitchFiles(tmp_path))
    monitor.restore_begins()
    plan = BatchPlan.create(ALL_REDUCE, global_batch_size=4, num_workers=2)
    monitor.restored(tf.distribute.get_strategy(), plan, num_steps=9, is_leader=False)
    return monitor


def seconds_in_a_while(monitor):
    before = monitor._stay.seconds
    time.sleep(0.001)
    return monitor._stay.seconds - before


def test_a_checkpoint_within_an_epoch_is_no_part_of_training(monitor):
    monitor.on_train_begin()
    assert seconds_in_a_while(monitor) > 0
    with monitor.paused():
        assert seconds_in_a_while(monitor) == 0
    assert seconds_in_a_while(monitor) > 0
    with pytest.raises(OSError), monitor.paused():
        raise OSError("the disk is full")
    assert seconds_in_a_while(monitor) > 0
    monitor.on_train_end()
    assert seconds_in_a_while(monitor) == 0
