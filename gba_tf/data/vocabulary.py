"""Ids for values: learnt from the training part, id 0 for whatever it does not contain."""

from __future__ import annotations

import numpy as np

from gba_tf.features import PADDING_ID


class Vocabulary:
    """Numbers the distinct values 1, 2, ... in ascending order.

    Args:
      values: those to learn, of any sortable type; each gets one id however often it occurs.
    """

    def __init__(self, values: np.ndarray) -> None:
        self._values = np.unique(values)

    @property
    def num_ids(self) -> int:
        """Ids in use, id 0 for unknown values included."""
        return len(self._values) + 1

    def ids(self, values: np.ndarray) -> np.ndarray:
        """Returns int32 ids of the shape of `values`; 0 where a value was not learnt."""
        positions = np.minimum(np.searchsorted(self._values, values), len(self._values) - 1)
        return np.where(self._values[positions] == values, positions + 1, 0).astype(np.int32)

    def padded_ids(self, rows: list[list[str]], max_length: int) -> np.ndarray:
        """Returns int32 ids [len(rows), max_length], each row filled up with `PADDING_ID`."""
        ids = np.full((len(rows), max_length), PADDING_ID, dtype=np.int32)
        for row, values in zip(ids, rows, strict=True):
            row[: len(values)] = self.ids(np.array(values, dtype=str)) if values else []
        return ids
