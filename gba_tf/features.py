"""Declarations of the columns that a model reads.

A data set says with these what its columns hold, and a model builds its embeddings from them, so
the two agree without knowing each other. Ids run from 0 to `num_ids - 1`; id 0 stands for "missing
or not in the vocabulary" in every categorical feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# Fills up a row of a `MultiCategoricalFeature` that has fewer than `max_length` values.
PADDING_ID = -1


@dataclasses.dataclass(frozen=True)
class CategoricalFeature:
    """One id per example: an integer column of shape [n].

    Attributes:
      name: the column's name.
      num_ids: how many ids there are, id 0 (missing or out of vocabulary) included.
      embedding_dim: width of its embedding; None leaves the choice to the model.

    Raises:
      ValueError: the name is empty, or a number is not a positive integer.
    """

    name: str
    num_ids: int
    embedding_dim: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_positive(self.name, "num_ids", self.num_ids)
        if self.embedding_dim is not None:
            _check_positive(self.name, "embedding_dim", self.embedding_dim)


@dataclasses.dataclass(frozen=True)
class MultiCategoricalFeature:
    """Several ids per example, such as genres: an integer column of shape [n, max_length].

    Rows with fewer values are filled up with `PADDING_ID` (-1), which models ignore. Order is kept,
    so that a sequence is declared in the same way.

    Attributes:
      name: the column's name.
      num_ids: how many ids there are, id 0 (missing or out of vocabulary) included; padding is
        none.
      max_length: values per example at most.
      embedding_dim: width of its embedding; None leaves the choice to the model.

    Raises:
      ValueError: the name is empty, or a number is not a positive integer.
    """

    name: str
    num_ids: int
    max_length: int
    embedding_dim: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_positive(self.name, "num_ids", self.num_ids)
        _check_positive(self.name, "max_length", self.max_length)
        if self.embedding_dim is not None:
            _check_positive(self.name, "embedding_dim", self.embedding_dim)


@dataclasses.dataclass(frozen=True)
class NumericFeature:
    """One number per example: a float32 column of shape [n].

    Attributes:
      name: the column's name.
      missing_value: the number that marks a missing value and that no real value has; None where
        nothing can be missing.

    Raises:
      ValueError: the name is empty.
    """

    name: str
    missing_value: float | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)


Feature = CategoricalFeature | MultiCategoricalFeature | NumericFeature

_KINDS = {
    kind.__name__: kind for kind in (CategoricalFeature, MultiCategoricalFeature, NumericFeature)
}


def check_features(features: Sequence[Feature]) -> tuple[Feature, ...]:
    """Returns `features` as a tuple after checking that a model can be built from them.

    Raises:
      ValueError: there is none, one is no feature, or two have the same name.
    """
    features = tuple(features)
    if not features:
        raise ValueError("expected at least one feature, found none")
    names: set[str] = set()
    for feature in features:
        if type(feature) not in _KINDS.values():
            raise ValueError(f"expected one of {', '.join(_KINDS)}, found {feature!r}")
        if feature.name in names:
            raise ValueError(f"expected unique feature names, found {feature.name!r} twice")
        names.add(feature.name)
    return features


def features_to_config(features: Sequence[Feature]) -> list[dict[str, Any]]:
    """Returns plain dictionaries from which `features_from_config` makes the same features."""
    return [{"kind": type(f).__name__, **dataclasses.asdict(f)} for f in features]


def features_from_config(config: Sequence[dict[str, Any]]) -> tuple[Feature, ...]:
    """Returns the features that `features_to_config` wrote.

    Raises:
      ValueError: an entry names an unknown kind of feature.
    """
    features = []
    for entry in config:
        settings = dict(entry)
        kind = settings.pop("kind", None)
        if kind not in _KINDS:
            raise ValueError(f"expected a feature of kind {', '.join(_KINDS)}, found {kind!r}")
        features.append(_KINDS[kind](**settings))
    return tuple(features)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"expected a feature's name to be a non-empty string, found {name!r}")


def _check_positive(name: str, setting: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"feature {name!r}: expected {setting} to be a positive integer, found {value!r}"
        )
