"""What tf.train.latest_checkpoint says."""

import os

import pytest
import tensorflow as tf

from gba_tf import tf_state_file


def test_the_latest_checkpoint_is_the_one_that_was_written_last(tmp_path):
    for step in ("00000001", "00000002"):
        prefix = tmp_path / step / "variables"
        tf.train.Checkpoint(value=tf.Variable(1.0)).write(str(prefix))
        tf_state_file.write(tmp_path, f"{step}/variables")
        assert tf.train.latest_checkpoint(tmp_path) == str(prefix)
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002", "checkpoint"]


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(IsADirectoryError):
        tf_state_file.write(tmp_path, "00000001/variables")
    assert os.listdir(tmp_path) == ["checkpoint"]
