"""Exact metrics over a whole held-out set, in numpy."""

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: P(score of a positive > score of a negative), ties count half.

    AUC = (sum of the ranks of positives - p (p + 1) / 2) / (p n), with mean ranks for ties and p
    positives among p + n examples (Mann-Whitney U).

    Args:
      labels: [n], 0 or 1.
      scores: [n], any monotone score.

    Returns:
      The area, NaN where one of the classes is missing or a score is NaN.

    Raises:
      ValueError: The lengths differ.
    """
    labels, scores = _columns("auc", labels, scores)
    is_positive = labels > 0.5
    positives = int(is_positive.sum())
    negatives = labels.size - positives
    if not positives or not negatives or np.isnan(scores).any():
        return float("nan")
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = mean_rank[group][is_positive].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Mean binary cross-entropy of logits: mean(log(1 + exp(z)) - y z).

    Args:
      labels: [n], 0 or 1.
      logits: [n].

    Raises:
      ValueError: The lengths differ.
    """
    labels, logits = _columns("log_loss", labels, logits)
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def _columns(name: str, labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels, np.float64).reshape(-1)
    scores = np.asarray(scores, np.float64).reshape(-1)
    if labels.size != scores.size:
        raise ValueError(
            f"{name}: expected as many labels as scores, found {labels.size} and {scores.size}."
        )
    return labels, scores
