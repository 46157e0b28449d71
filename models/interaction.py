"""Interactions between the embeddings of fields."""

from __future__ import annotations

import tensorflow as tf


@tf.keras.utils.register_keras_serializable(package="gba_tf")
class FactorizationMachine(tf.keras.layers.Layer):
    """Second-order interactions of a factorization machine.

    The sum over all pairs of fields of the inner products of their embeddings,

        sum_{i<j} <e_i, e_j> = 1/2 sum_d ((sum_i e_id)^2 - sum_i e_id^2),

    computed by the right-hand side, in time linear in the number of fields.

    Input: [batch, fields, dim]. Output: [batch].

    Example: fields [1, 2] and [3, 4] give 1 * 3 + 2 * 4 = 11.

    Source: Rendle 2010, "Factorization Machines", lemma 3.1; Guo et al. 2017, arXiv 1703.04247,
    equation 2.
    """

    def call(self, embeddings: tf.Tensor) -> tf.Tensor:
        """Returns the interactions [batch] of `embeddings` [batch, fields, dim]."""
        square_of_sum = tf.square(tf.reduce_sum(embeddings, axis=1))
        sum_of_squares = tf.reduce_sum(tf.square(embeddings), axis=1)
        return 0.5 * tf.reduce_sum(square_of_sum - sum_of_squares, axis=1)
