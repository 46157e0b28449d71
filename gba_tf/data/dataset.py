"""What every loader returns: examples in memory and the declarations of their columns."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np

from gba_tf.features import (
    PADDING_ID,
    CategoricalFeature,
    Feature,
    MultiCategoricalFeature,
    check_features,
)


class DataError(ValueError):
    """A data file is missing or malformed. Its text is one line: file, line, expected, found."""


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples in columns.

    Attributes:
      columns: name -> array of shape [n] or [n, max_length]: integer ids or float32 numbers.
      labels: float32 [n], 0 or 1.

    Raises:
      ValueError: the columns and the labels differ in length.
    """

    columns: Mapping[str, np.ndarray]
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != np.float32:
            raise ValueError(
                f"expected labels to be float32 of shape [n], found {_describe(self.labels)}"
            )
        for name, column in self.columns.items():
            if column.shape[:1] != self.labels.shape:
                raise ValueError(
                    f"column {name!r}: expected {len(self)} rows as in labels, "
                    f"found {_describe(column)}"
                )

    def __len__(self) -> int:
        return self.labels.shape[0]

    def checksum(self) -> int:
        """CRC-32 of all columns and labels: other for other data, or another order of them."""
        crc = zlib.crc32(np.ascontiguousarray(self.labels))
        for name, column in sorted(self.columns.items()):
            crc = zlib.crc32(np.ascontiguousarray(column), zlib.crc32(name.encode(), crc))
        return crc

    def take(self, indices: np.ndarray | slice) -> Examples:
        """Returns the examples at `indices` (integers of any order, or a slice), in that order."""
        return Examples(
            {name: column[indices] for name, column in self.columns.items()}, self.labels[indices]
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A data set split into a training part and a held-out part.

    Attributes:
      name: as given to `gba_tf.data.load`.
      train: the examples to train on.
      test: the held-out examples.
      features: the columns of both parts; every column is declared and every declaration has one.

    Raises:
      ValueError: a part is empty, or a column does not match its declaration: name, type, shape, or
        an id outside 0 ... num_ids - 1.
    """

    name: str
    train: Examples
    test: Examples
    features: tuple[Feature, ...]

    def __post_init__(self) -> None:
        declared = {feature.name for feature in check_features(self.features)}
        for part_name, part in (("train", self.train), ("test", self.test)):
            if not len(part):
                raise ValueError(f"{self.name}: expected examples in {part_name}, found none")
            if set(part.columns) != declared:
                raise ValueError(
                    f"{self.name}: expected the columns {sorted(declared)} in {part_name}, "
                    f"found {sorted(part.columns)}"
                )
            for feature in self.features:
                problem = _mismatch(feature, part.columns[feature.name])
                if problem:
                    raise ValueError(f"{self.name}: {part_name} column {feature.name!r}: {problem}")


def _mismatch(feature: Feature, column: np.ndarray) -> str | None:
    """Says how `column` differs from what `feature` declares, or None."""
    if isinstance(feature, (CategoricalFeature, MultiCategoricalFeature)):
        several = isinstance(feature, MultiCategoricalFeature)
        shape = column.shape[:1] + ((feature.max_length,) if several else ())
        if column.dtype not in (np.int32, np.int64) or column.shape != shape:
            return f"expected int32 or int64 of shape {list(shape)}, found {_describe(column)}"
        lowest = PADDING_ID if several else 0
        if column.min() < lowest or column.max() >= feature.num_ids:
            return (
                f"expected ids from {lowest} to {feature.num_ids - 1}, "
                f"found {column.min()} to {column.max()}"
            )
        return None
    if column.dtype != np.float32 or column.ndim != 1:
        return f"expected float32 of shape [n], found {_describe(column)}"
    if not np.isfinite(column).all():
        return "expected finite numbers, found NaN or infinity"
    return None


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
