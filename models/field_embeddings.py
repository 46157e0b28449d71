"""Embeddings and first-order weights of all fields, in one table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gba_tf.features import (
    PADDING_ID,
    CategoricalFeature,
    Feature,
    MultiCategoricalFeature,
    NumericFeature,
    check_features,
    features_from_config,
    features_to_config,
)


@tf.keras.utils.register_keras_serializable(package="gba_tf")
class FieldEmbeddings(tf.keras.layers.Layer):
    """Looks up the embedding v and the first-order weight w of every field of an example.

    A field's embedding is
      * v[id] for a `CategoricalFeature`;
      * the mean of v[id] over the ids that are not padding for a `MultiCategoricalFeature`; zero if
        all are;
      * value * v for a `NumericFeature`, or a vector of its own where the value is missing;
    and its first-order term is the same with w in place of v.

    All fields share one table of embeddings and one of weights, field after field, so that a
    parameter server handles two variables however many fields there are: a categorical field has
    `num_ids` rows, a numeric field one, and one more if its values can be missing. Only the
    distinct rows of a batch are read, so gradients are `IndexedSlices` over distinct rows. Numeric
    fields are part of every batch.

    An id outside 0 ... num_ids - 1 counts as id 0 (out of vocabulary): it never reaches a row of
    another field.

    Args:
      features: the fields.
      embedding_dim: width of the embeddings; at least 1.
      l2: adds l2 * (|v|^2 + |w|^2), summed over an example's fields, averaged over the batch. Being
        a mean over examples, it touches only rows of the batch, and gradients of local batches
        average to that of the global batch.
      seed: of the initial embeddings, normal with standard deviation 0.01. Weights start at 0.

    Raises:
      ValueError: no features, an embedding_dim that a feature contradicts, or tables of 2^31 rows.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        l2: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._fields = check_features(features)
        self._embedding_dim = embedding_dim
        self._l2 = l2
        self._seed = seed
        for feature in self._fields:
            width = getattr(feature, "embedding_dim", None)
            if width not in (None, embedding_dim):
                raise ValueError(
                    f"feature {feature.name!r}: expected embedding_dim {embedding_dim} as in the "
                    f"model, since its fields interact by inner products, found {width}"
                )
        self._first_row: dict[str, int] = {}
        self._num_rows = 0
        for feature in self._fields:
            self._first_row[feature.name] = self._num_rows
            self._num_rows += _rows_of(feature)
        if self._num_rows >= 2**31:
            raise ValueError(f"expected fewer than 2^31 rows in all fields, found {self._num_rows}")

    @property
    def num_rows(self) -> int:
        """Rows of either table."""
        return self._num_rows

    def first_row(self, name: str) -> int:
        """Returns the row of id 0 of a categorical field, or the first row of a numeric one."""
        return self._first_row[name]

    def build(self, input_shape: Any) -> None:
        """Creates the two tables."""
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self._num_rows, self._embedding_dim),
            initializer=tf.keras.initializers.RandomNormal(stddev=0.01, seed=self._seed),
            experimental_autocast=False,
        )
        self.weights_table = self.add_weight(
            name="first_order",
            shape=(self._num_rows, 1),
            initializer="zeros",
            experimental_autocast=False,
        )
        super().build(input_shape)

    def call(self, inputs: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Looks up a batch.

        Args:
          inputs: name -> [batch] or [batch, 1] of ids or numbers, [batch, max_length] of ids for a
            `MultiCategoricalFeature`.

        Returns:
          First-order terms [batch, fields] and embeddings [batch, fields, dim], fields in the order
          of `features`.

        Raises:
          ValueError: a field is missing from `inputs`.
        """
        missing = [feature.name for feature in self._fields if feature.name not in inputs]
        if missing:
            raise ValueError(f"expected the features {missing} in the inputs, found {list(inputs)}")
        ids = [self._row_ids(f, inputs[f.name]) for f in self._fields if not _is_numeric(f)]
        numeric_rows = self._numeric_rows()
        if ids:
            flat_ids = tf.concat(ids, axis=1)
            distinct, positions = tf.unique(tf.reshape(flat_ids, [-1]))
            # Numeric rows are in no categorical field: appended, the rows are still distinct.
            rows = tf.concat([distinct, numeric_rows], axis=0)
            positions = tf.reshape(positions, tf.shape(flat_ids))
        else:
            rows, positions = tf.constant(numeric_rows), None
        weights, embeddings = (
            self._spread(inputs, tf.nn.embedding_lookup(table, rows), positions)
            for table in (self.weights_table, self.embeddings)
        )
        if self._l2:
            squares = tf.reduce_sum(tf.square(embeddings), [1, 2]) + tf.reduce_sum(
                tf.square(weights), [1, 2]
            )
            # Of an empty batch 0, which a worker may get under all-reduce.
            number = tf.cast(tf.size(squares), squares.dtype)
            self.add_loss(self._l2 * tf.math.divide_no_nan(tf.reduce_sum(squares), number))
        dtype = self.compute_dtype
        return tf.cast(tf.squeeze(weights, axis=2), dtype), tf.cast(embeddings, dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "features": features_to_config(self._fields),
            "embedding_dim": self._embedding_dim,
            "l2": self._l2,
            "seed": self._seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FieldEmbeddings:
        """Makes a layer from what `get_config` returned."""
        return cls(**{**config, "features": features_from_config(config["features"])})

    def _row_ids(self, feature: Feature, ids: tf.Tensor) -> tf.Tensor:
        """Returns int32 rows [batch, 1 or max_length] of the table."""
        width = feature.max_length if isinstance(feature, MultiCategoricalFeature) else 1
        ids = tf.reshape(ids, [-1, width])
        # Compared before the cast, which would wrap a large int64 around into a valid id.
        limit = tf.constant(feature.num_ids, ids.dtype)
        known = tf.logical_and(ids >= 0, ids < limit)
        return tf.where(known, tf.cast(ids, tf.int32), 0) + self._first_row[feature.name]

    def _numeric_rows(self) -> np.ndarray:
        rows = [
            np.arange(_rows_of(feature)) + self._first_row[feature.name]
            for feature in self._fields
            if _is_numeric(feature)
        ]
        return np.concatenate([np.empty(0), *rows]).astype(np.int32)

    def _spread(
        self,
        inputs: Mapping[str, tf.Tensor],
        looked_up: tf.Tensor,
        positions: tf.Tensor | None,
    ) -> tf.Tensor:
        """Turns distinct rows [rows, width] of a table into the terms [batch, fields, width]."""
        categorical = None if positions is None else tf.gather(looked_up, positions)
        numeric = looked_up[tf.shape(looked_up)[0] - len(self._numeric_rows()) :]
        terms = []
        column = row = 0
        for feature in self._fields:
            if isinstance(feature, CategoricalFeature):
                terms.append(categorical[:, column : column + 1])
                column += 1
            elif isinstance(feature, MultiCategoricalFeature):
                values = categorical[:, column : column + feature.max_length]
                terms.append(_mean(values, inputs[feature.name], feature.max_length))
                column += feature.max_length
            else:
                value = tf.cast(tf.reshape(inputs[feature.name], [-1, 1]), looked_up.dtype)
                term = value * numeric[row : row + 1]
                if feature.missing_value is not None:
                    term = tf.where(
                        value == feature.missing_value, numeric[row + 1 : row + 2], term
                    )
                terms.append(term[:, tf.newaxis])
                row += _rows_of(feature)
        return tf.concat(terms, axis=1)


def _is_numeric(feature: Feature) -> bool:
    return isinstance(feature, NumericFeature)


def _rows_of(feature: Feature) -> int:
    if isinstance(feature, NumericFeature):
        return 1 if feature.missing_value is None else 2
    return feature.num_ids


def _mean(values: tf.Tensor, ids: tf.Tensor, max_length: int) -> tf.Tensor:
    """Returns the mean [batch, 1, width] of `values` [batch, max_length, width] without padding."""
    present = tf.cast(tf.reshape(ids, [-1, max_length]) != PADDING_ID, values.dtype)
    total = tf.reduce_sum(values * present[:, :, tf.newaxis], axis=1, keepdims=True)
    count = tf.reduce_sum(present, axis=1)[:, tf.newaxis, tf.newaxis]
    return tf.math.divide_no_nan(total, count)
