"""Tests of vocabularies."""

import numpy as np

from gba_tf.data.vocabulary import Vocabulary


def test_ids_start_at_1_in_ascending_order_and_unknown_values_are_0():
    vocabulary = Vocabulary(np.array([30, 10, 30, 20]))
    assert vocabulary.num_ids == 4
    assert vocabulary.ids(np.array([10, 20, 30, 5, 25, 99])).tolist() == [1, 2, 3, 0, 0, 0]


def test_texts_that_share_a_beginning_are_told_apart():
    vocabulary = Vocabulary(np.array(["war", "western"]))
    assert vocabulary.ids(np.array(["western", "war", "we", "warfare"])).tolist() == [2, 1, 0, 0]


def test_rows_are_padded_with_minus_1():
    vocabulary = Vocabulary(np.array(["drama", "war"]))
    rows = vocabulary.padded_ids([["war", "drama", "new"], [], ["war"]], max_length=3)
    assert rows.tolist() == [[2, 1, 0], [-1, -1, -1], [2, -1, -1]]
