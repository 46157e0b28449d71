"""Criteo's display advertising data (Kaggle 2014), tab-separated as published or comma-separated.

Categories are hashed into a fixed number of ids per field. Numbers become
log(1 + value - minimum), where the minimum is a constant, so that nothing is learnt from the
held-out part; a missing number is -1, which no real value reaches.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pyarrow as pa

from gba_tf.data.dataset import DataError, Dataset, Examples
from gba_tf.data.delimited import Column, FileFormat, first_line, read_table
from gba_tf.features import CategoricalFeature, NumericFeature

NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
MISSING_NUMBER = -1.0
# The lowest value in Criteo's data; every other number starts at 0. Lower values count as the
# lowest.
_LOWEST = {"I2": -3.0}

_COLUMNS = (
    *(Column(name, "number", required=False) for name in NUMBERS),
    *(Column(name, "text", required=False) for name in CATEGORIES),
)
TAB_SEPARATED = FileFormat(
    columns=(Column("label", "integer", allowed=(0, 1)), *_COLUMNS),
    delimiter="\t",
    summary="label, 13 integers, 26 categories, no header",
)
COMMA_SEPARATED = FileFormat(
    columns=(Column("Id", "text"), Column("Label", "integer", allowed=(0, 1)), *_COLUMNS),
    delimiter=",",
    summary="Id, Label, 13 numbers, 26 categories",
    header=True,
    quoted=True,
)

_SUFFIXES = tuple(kind + packed for kind in (".txt", ".tsv", ".csv") for packed in ("", ".gz"))
_WHOLE_NUMBER = re.compile(r"(-?[0-9]+)\.0")


def load(data_dir: str, test_fraction: float = 0.2, hash_size: int = 10_000) -> Dataset:
    """Reads Criteo's files; the last rows are held out.

    Args:
      data_dir: a file, or a folder with `train*.{txt,tsv,csv}[.gz]` or, where there is none, any
        `*.{tsv,csv}[.gz]` but `test*`. Several files are read in the order of their names (numbers
        in them count as numbers). Whether they are tab- or comma-separated is told by their first
        line.
      test_fraction: the share of rows, from the end, that is held out.
      hash_size: ids per categorical field, besides id 0 for a missing one. The original data has 33
        million categories, for which 10,000 per field are few; embeddings take that many rows.

    Returns:
      13 numeric features I1 ... I13 and 26 categorical features C1 ... C26.

    Raises:
      DataError: a file is missing or malformed, formats are mixed, or there are too few rows to
        split.
      ValueError: an argument is out of range.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"expected test_fraction between 0 and 1, found {test_fraction}")
    if hash_size < 1:
        raise ValueError(f"expected hash_size to be at least 1, found {hash_size}")
    paths = _find_files(Path(data_dir))
    formats = [_detect_format(path) for path in paths]
    for path, file_format in zip(paths, formats, strict=True):
        if file_format is not formats[0]:
            raise DataError(
                f"{path}: expected {formats[0].shape} as in {paths[0].name}, found the other of "
                "Criteo's two formats; their categories are coded differently, so keep them apart"
            )
    parts = [_convert(read_table(path, formats[0]), hash_size) for path in paths]
    columns = {
        name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns
    }
    examples = Examples(columns, np.concatenate([part.labels for part in parts]))

    num_test = int(len(examples) * test_fraction)
    num_train = len(examples) - num_test
    if not num_test or not num_train:
        raise DataError(
            f"{data_dir}: expected enough rows to hold out {test_fraction:g} of them, "
            f"found {len(examples)}"
        )
    features = (
        *(NumericFeature(name, missing_value=MISSING_NUMBER) for name in NUMBERS),
        *(CategoricalFeature(name, hash_size + 1) for name in CATEGORIES),
    )
    return Dataset(
        "criteo",
        examples.take(slice(0, num_train)),
        examples.take(slice(num_train, None)),
        features,
    )


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"{path}: expected Criteo's data, a folder with train.txt, train.tsv or *.csv "
            "(also gzipped) or one such file, found nothing there"
        )
    candidates = [p for p in path.iterdir() if p.is_file() and p.name.endswith(_SUFFIXES)]
    found = [p for p in candidates if p.name.startswith("train")]
    if not found:
        found = [
            p for p in candidates if not p.name.startswith("test") and ".txt" not in p.suffixes
        ]
    if not found:
        raise DataError(
            f"{path}: expected train*.txt, train*.tsv or *.csv (also gzipped), found none of them"
        )
    names = {p.name for p in found}
    for name in sorted(names):
        if f"{name}.gz" in names:
            raise DataError(
                f"{path}: expected each file once, found {name} and {name}.gz; remove one"
            )
    return sorted(found, key=_natural_order)


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    pieces = re.split(r"([0-9]+)", path.name)
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in pieces]


def _detect_format(path: Path) -> FileFormat:
    line = first_line(path)
    if "\t" in line:
        return TAB_SEPARATED
    if "," in line:
        return COMMA_SEPARATED
    raise DataError(
        f"{path}:1: expected {TAB_SEPARATED.shape}, or {COMMA_SEPARATED.shape} under a header, "
        f"found neither a tab nor a comma in {line[:60]!r}"
    )


def _convert(table: pa.Table, hash_size: int) -> Examples:
    columns: dict[str, np.ndarray] = {}
    for name in NUMBERS:
        values = table[name].to_numpy()  # Nulls become NaN.
        shifted = np.log1p(np.maximum(values - _LOWEST.get(name, 0.0), 0.0))
        columns[name] = np.where(np.isnan(values), MISSING_NUMBER, shifted).astype(np.float32)
    for name in CATEGORIES:
        columns[name] = _hash_column(table[name], name, hash_size)
    label = "label" if "label" in table.column_names else "Label"
    return Examples(columns, table[label].to_numpy().astype(np.float32))


def _hash_column(column: pa.ChunkedArray, field: str, hash_size: int) -> np.ndarray:
    """Returns int32 ids: 0 for null, else 1 + a hash of the text that is the same everywhere."""
    (chunk,) = column.chunks
    ids = [_hash(value, field, hash_size) for value in chunk.dictionary.to_pylist()]
    table = np.array([0, *ids], dtype=np.int32)
    return table[chunk.indices.fill_null(-1).to_numpy() + 1]


def _hash(value: str, field: str, hash_size: int) -> int:
    # Some tools write an integer as "84.0" once its column has a blank: the same category as "84".
    whole = _WHOLE_NUMBER.fullmatch(value)
    text = whole.group(1) if whole else value
    # The field is part of the hash, so that fields do not share their collisions.
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=field.encode()).digest()
    return 1 + int.from_bytes(digest, "little") % hash_size
