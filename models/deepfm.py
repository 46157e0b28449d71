"""DeepFM: a factorization machine and a deep network over the same embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gba_tf.features import Feature, check_features, features_from_config, features_to_config
from gba_tf.models.field_embeddings import FieldEmbeddings
from gba_tf.models.interaction import FactorizationMachine
from gba_tf.models.ranking import RankingModel


@tf.keras.utils.register_keras_serializable(package="gba_tf")
class DeepFM(RankingModel):
    """Predicts a click or a like from fields:

        logit = b + sum_i w_i x_i + sum_{i<j} <v_i, v_j> x_i x_j + MLP([v_1 x_1, ..., v_m x_m])

    where the factorization machine and the multilayer perceptron (ReLU) share the embeddings v. How
    each kind of feature becomes w_i x_i and v_i x_i is said in `FieldEmbeddings`.

    Call: name -> tensor, see `FieldEmbeddings.call`; returns logits [batch] in float32. tf.sigmoid
    of a logit is the probability of label 1.

    Example:
      model = DeepFM(dataset.features, seed=1)
      model.compile(optimizer="adam")
      model.fit(tf.data.Dataset.from_tensor_slices((columns, labels)).batch(512))

    Args:
      features: the fields, see `gba_tf.features`.
      embedding_dim: width of an embedding.
      hidden_units: widths of the deep part's layers; at least one.
      dropout: share of the deep part's hidden units that is dropped in training.
      l2: weight of the squared embeddings and first-order weights of an example in the loss.
      seed: of the initial values and of dropout; None takes another one each time.

    Raises:
      ValueError: a setting is out of range.

    Source: Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR
    Prediction", arXiv 1703.04247, section 2.1, equations 1 to 4.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int = 16,
        hidden_units: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        l2: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_settings(embedding_dim, hidden_units, dropout, l2)
        self._features = check_features(features)
        self._embedding_dim = embedding_dim
        self._hidden_units = tuple(hidden_units)
        self._dropout = dropout
        self._l2 = l2
        self._seed = seed
        self.field_embeddings = FieldEmbeddings(features, embedding_dim, l2=l2, seed=seed)
        self.factorization_machine = FactorizationMachine()
        self.deep = tf.keras.Sequential([tf.keras.layers.Flatten()], name="deep")
        for layer, units in enumerate(hidden_units, start=1):
            # Layers of one size and one seed would start with the same values.
            self.deep.add(_dense(units, "relu", None if seed is None else seed + layer))
            if dropout:
                self.deep.add(tf.keras.layers.Dropout(dropout, seed=seed))
        last_seed = None if seed is None else seed + len(hidden_units) + 1
        # Its bias is the model's b, as the deep part is added to the rest.
        self.output_layer = _dense(1, None, last_seed)

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """Returns logits [batch], float32."""
        first_order, embeddings = self.field_embeddings(inputs)
        second_order = self.factorization_machine(embeddings)
        deep = tf.squeeze(self.output_layer(self.deep(embeddings, training=training)), axis=1)
        logits = tf.reduce_sum(first_order, axis=1) + second_order + deep
        return tf.cast(logits, tf.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, in plain types."""
        return {
            **super().get_config(),
            "features": features_to_config(self._features),
            "embedding_dim": self._embedding_dim,
            "hidden_units": list(self._hidden_units),
            "dropout": self._dropout,
            "l2": self._l2,
            "seed": self._seed,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DeepFM:
        """Makes a model, with new weights, from what `get_config` returned."""
        return cls(**{**config, "features": features_from_config(config["features"])})


def _dense(units: int, activation: str | None, seed: int | None) -> tf.keras.layers.Dense:
    return tf.keras.layers.Dense(
        units, activation, kernel_initializer=tf.keras.initializers.GlorotUniform(seed)
    )


def _check_settings(
    embedding_dim: int, hidden_units: Sequence[int], dropout: float, l2: float
) -> None:
    if embedding_dim < 1:
        raise ValueError(f"expected embedding_dim to be at least 1, found {embedding_dim}")
    if not hidden_units or any(units < 1 for units in hidden_units):
        raise ValueError(f"expected hidden_units to be positive integers, found {hidden_units}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"expected dropout from 0 to below 1, found {dropout}")
    if l2 < 0.0:
        raise ValueError(f"expected l2 to be at least 0, found {l2}")
