"""Data sets: `load(name)` gives examples in memory and the declarations of their columns."""

from __future__ import annotations

from gba_tf.data import criteo, movielens_1m, movielens_100k
from gba_tf.data.blocks import Blocks
from gba_tf.data.dataset import DataError, Dataset, Examples

__all__ = ["DATASETS", "Blocks", "DataError", "Dataset", "Examples", "load"]

_LOADERS = {
    "movielens_100k": movielens_100k.load,
    "criteo": criteo.load,
    "movielens_1m": movielens_1m.load,
}
# The names that `load` knows.
DATASETS = tuple(_LOADERS)


def load(name: str, data_dir: str | None = None, **settings) -> Dataset:
    """Loads a data set into memory.

    Args:
      name: one of `DATASETS`.
      data_dir: where its files are. `movielens_100k` does without: it is fetched and cached.
      **settings: passed to the loader of this name (`criteo`: `test_fraction`, `hash_size`).

    Returns:
      The data set, split into a training and a held-out part.

    Raises:
      ValueError: the name is unknown.
      DataError: `data_dir` is needed and not given, or a file is missing or malformed.
    """
    if name not in _LOADERS:
        raise ValueError(f"expected a data set of {', '.join(DATASETS)}, found {name!r}")
    if data_dir is None and name != "movielens_100k":
        raise DataError(f"{name}: expected data_dir, the folder with its files, found none")
    return _LOADERS[name](data_dir, **settings)
