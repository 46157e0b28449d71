"""What the ranking models share: the loss, and one training and one evaluation step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tensorflow_recommenders as tfrs


class RankingModel(tfrs.Model):
    """A model whose call returns one logit [batch] per example; trained on binary cross-entropy.

    Data are (features, labels) or (features, labels, sample weights). Metrics given to `compile`
    get the probabilities sigmoid(logits); none are computed unless given, since metrics are
    variables, which cost a parameter server as much as others.

    The steps differ from `tfrs.Model` in three ways: the loss is divided by the number of replicas,
    as Keras does, because all-reduce adds gradients up; the optimizer's `minimize` is used, which
    scales the loss where mixed precision asks for it; and `evaluate` returns the mean loss of all
    examples, as the last step of `fit` does for those of an epoch.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.BinaryCrossentropy(
                from_logits=True, reduction=tf.keras.losses.Reduction.NONE
            )
        )
        self._mean_loss = tf.keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The mean loss, and the metrics given to `compile`."""
        compiled = self.compiled_metrics.metrics if self.compiled_metrics is not None else []
        return [self._mean_loss, *compiled]

    def compute_loss(self, inputs: Any, training: bool = False) -> tf.Tensor:
        """Returns the mean binary cross-entropy of a batch (features, labels[, weights])."""
        features, labels, weights = tf.keras.utils.unpack_x_y_sample_weight(inputs)
        logits = self(features, training=training)
        labels = tf.reshape(labels, [-1, 1])
        if weights is not None:
            weights = tf.reshape(weights, [-1])
        loss = self.task(labels, logits[:, tf.newaxis], weights, training=training)
        if self.compiled_metrics is not None:
            self.compiled_metrics.update_state(labels, tf.sigmoid(logits)[:, tf.newaxis], weights)
        return tf.reduce_mean(loss)

    def train_step(self, inputs: Any) -> Mapping[str, tf.Tensor]:
        """Makes one update from a batch; returns the mean loss, without regularisation, so far."""
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, training=True)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            total = tf.add_n([loss, *self.losses]) / replicas
        self.optimizer.minimize(total, self.trainable_variables, tape=tape)
        return self._results(loss, inputs)

    def test_step(self, inputs: Any) -> Mapping[str, tf.Tensor]:
        """Evaluates a batch; returns the mean loss, without regularisation, so far."""
        loss = self.compute_loss(inputs, training=False)
        return self._results(loss, inputs)

    def _results(self, loss: tf.Tensor, inputs: Any) -> dict[str, tf.Tensor]:
        self._mean_loss.update_state(loss, sample_weight=tf.shape(inputs[1])[0])
        return {metric.name: metric.result() for metric in self.metrics}
