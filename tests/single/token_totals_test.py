"""Token counts over several runs."""

import json

import tensorflow as tf

from gba_tf import token_totals
from gba_tf.ops.token_server import TokenStats

FIRST = TokenStats(10, 5, 2, 1, 0, 2, 3, {0: 5, 6: 2})
SECOND = TokenStats(4, 3, 0, 0, 1, 0, 5, {0: 2, 1: 1})


def test_counts_add_up_and_the_global_step_is_the_last():
    total = token_totals.total([FIRST, SECOND])
    assert total == TokenStats(14, 8, 2, 1, 1, 2, 5, {0: 7, 1: 1, 6: 2})
    assert total.issued == 8 + 2 + 1 + 1 + 2


def test_counts_pass_through_json():
    assert token_totals.from_json(json.loads(json.dumps(token_totals.to_json(FIRST)))) == FIRST


def test_a_mode_without_tokens_keeps_those_of_earlier_runs():
    strategy, other = (tf.distribute.OneDeviceStrategy("/cpu:0") for _ in range(2))
    token_totals.set_earlier_stats(strategy, FIRST)
    assert token_totals.total_stats(strategy) == FIRST
    assert token_totals.total_stats(other) == token_totals.NO_TOKENS
