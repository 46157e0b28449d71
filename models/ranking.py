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
    examples, as the last step of `fit` does for those of an epoch. With sample weights it is, in
    each batch, the weighted mean; examples of weight 0 do not count.

    Under all-reduce a replica may get an empty batch, whose loss is 0, or a smaller one than the
    others. The update then is that of the mean over the global batch of n examples if the examples
    of a replica that got n_i of them have the weight n_i * replicas / n; see `Blocks.part_at`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.BinaryCrossentropy(
                from_logits=True, reduction=tf.keras.losses.Reduction.NONE
            )
        )
        self._mean_loss = tf.keras.metrics.Mean(name="loss")
        # A metric's result is of all replicas already; by default, Keras adds up theirs.
        self.distribute_reduction_method = "first"

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The mean loss, and the metrics given to `compile`."""
        compiled = self.compiled_metrics.metrics if self.compiled_metrics is not None else []
        return [self._mean_loss, *compiled]

    def compute_loss(self, inputs: Any, training: bool = False) -> tf.Tensor:
        """Returns the mean binary cross-entropy of a batch (features, labels[, weights]).

        It is sum(weight * loss) / batch size, and 0 for an empty batch.
        """
        features, labels, weights = tf.keras.utils.unpack_x_y_sample_weight(inputs)
        logits = self(features, training=training)
        labels = tf.reshape(labels, [-1, 1])
        if weights is not None:
            weights = tf.reshape(weights, [-1])
        loss = self.task(labels, logits[:, tf.newaxis], weights, training=training)
        if self.compiled_metrics is not None:
            self.compiled_metrics.update_state(labels, tf.sigmoid(logits)[:, tf.newaxis], weights)
        return tf.math.divide_no_nan(tf.reduce_sum(loss), tf.cast(tf.size(loss), loss.dtype))

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
        _, labels, weights = tf.keras.utils.unpack_x_y_sample_weight(inputs)
        number = tf.cast(tf.shape(labels)[0], loss.dtype)
        if weights is not None:
            loss = tf.math.divide_no_nan(loss * number, tf.reduce_sum(tf.cast(weights, loss.dtype)))
            number = tf.math.count_nonzero(weights, dtype=loss.dtype)
        self._mean_loss.update_state(loss, sample_weight=number)
        return {metric.name: metric.result() for metric in self.metrics}
