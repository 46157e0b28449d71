"""Metrics equal what their definitions say, on numbers worked out by hand and by brute force."""

import math

import numpy as np
import pytest

from gba_tf import metrics


def auc_over_all_pairs(labels, scores):
    positives, negatives = scores[labels == 1], scores[labels == 0]
    wins = (positives[:, None] > negatives[None, :]).sum()
    ties = (positives[:, None] == negatives[None, :]).sum()
    return (wins + ties / 2) / (len(positives) * len(negatives))


@pytest.mark.parametrize(
    "labels, scores, expected",
    [
        ([0, 1], [1.0, 2.0], 1.0),
        ([0, 1], [2.0, 1.0], 0.0),
        # Pairs (positive, negative): 3 > 1, 3 > 2, 2 > 1 and the tie 2 = 2.
        ([0, 1, 0, 1], [1.0, 3.0, 2.0, 2.0], 3.5 / 4),
        ([0, 0, 1, 1], [7.0, 7.0, 7.0, 7.0], 0.5),
        ([0, 1], [-math.inf, math.inf], 1.0),
    ],
)
def test_auc_of_small_examples(labels, scores, expected):
    assert metrics.auc(np.array(labels), np.array(scores)) == expected


@pytest.mark.parametrize("num_values", [2, 10, 10_000])
def test_auc_counts_every_pair_and_half_of_each_tie(num_values):
    generator = np.random.default_rng(num_values)
    labels = (generator.random(500) < 0.3).astype(np.float32)
    scores = generator.integers(num_values, size=500).astype(np.float32)
    assert metrics.auc(labels, scores) == pytest.approx(
        auc_over_all_pairs(labels, scores), abs=1e-12
    )


def test_auc_takes_columns_of_any_shape_and_depends_on_the_order_of_scores_only():
    labels, scores = np.array([0, 1, 1, 0, 1]), np.array([0.1, 0.2, 0.9, 0.3, 0.4])
    expected = 5 / 6  # Only the pair 0.2 < 0.3 is wrong.
    assert metrics.auc(labels[:, None], scores[:, None]) == pytest.approx(expected, abs=1e-15)
    assert metrics.auc(labels, np.exp(100 * scores)) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "labels, scores", [([1, 1], [0.0, 1.0]), ([0, 0], [0.0, 1.0]), ([0, 1], [0.0, math.nan])]
)
def test_auc_is_nan_where_it_is_not_defined(labels, scores):
    assert math.isnan(metrics.auc(np.array(labels), np.array(scores)))


def test_log_loss_of_small_examples():
    # Probabilities 1/2, 3/4 and 1/4: losses log 2, log 4/3 and log 4/3.
    logits = np.array([0.0, math.log(3), -math.log(3)])
    expected = (math.log(2) + 2 * math.log(4 / 3)) / 3
    assert metrics.log_loss(np.array([1, 1, 0]), logits) == pytest.approx(expected, abs=1e-12)


def test_log_loss_of_large_logits_neither_overflows_nor_vanishes():
    assert metrics.log_loss(np.array([0, 1]), np.array([1000.0, 1000.0])) == 500.0
    assert metrics.log_loss(np.array([1]), np.array([40.0])) == pytest.approx(
        math.exp(-40), rel=1e-2
    )


@pytest.mark.parametrize("metric", [metrics.auc, metrics.log_loss])
def test_lengths_that_differ_are_refused(metric):
    with pytest.raises(ValueError, match="as many labels as scores, found 3 and 1"):
        metric(np.zeros(3), np.zeros(1))
