"""Reads delimited text, plain or gzipped, and names the line of the first mistake.

pyarrow parses at full speed. Only when it refuses the file, or a value is not allowed, does a
second pass in Python go through the lines to find which one is wrong and why.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from gba_tf.data.dataset import DataError

_BLOCK_BYTES = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DELIMITER_NAMES = {"\t": "tab", ",": "comma", "::": "'::'"}
_ARROW_TYPES = {
    "integer": pa.int64(),
    "number": pa.float64(),
    "text": pa.dictionary(pa.int32(), pa.string()),
}


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a file: its name, what it holds, whether it may be blank, values allowed."""

    name: str
    kind: Literal["integer", "number", "text"]
    required: bool = True
    allowed: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A kind of delimited file.

    Attributes:
      columns: in the order of the file.
      delimiter: between columns.
      summary: the columns in words, for messages.
      header: whether the first line must be the columns' names.
      quoted: whether values may stand in double quotes.
      encoding: of the text.
    """

    columns: tuple[Column, ...]
    delimiter: str
    summary: str
    header: bool = False
    quoted: bool = False
    encoding: str = "utf-8"

    @property
    def header_line(self) -> str:
        """The first line that a file with a header must have."""
        return self.delimiter.join(column.name for column in self.columns)

    @property
    def shape(self) -> str:
        """The number of columns and what they are, for messages."""
        name = _DELIMITER_NAMES[self.delimiter]
        return f"{len(self.columns)} {name}-separated columns ({self.summary})"


def read_table(path: Path, file_format: FileFormat) -> pa.Table:
    """Reads a whole file. Empty lines are skipped; a blank value is null.

    Args:
      path: the file, gzipped or not: its first bytes decide, not its name.
      file_format: what it must look like.

    Returns:
      One column per declared column: int64, float64, or text as a dictionary, each in one chunk.

    Raises:
      DataError: the file cannot be read, is empty, or a line is not as `file_format` says.
    """
    _check_header(path, file_format)
    reason = "a value that is not allowed"
    try:
        with _open(path) as stream:
            table = _parse(stream, file_format)
        if all(_valid(table[column.name], column) for column in file_format.columns):
            if not table.num_rows:
                raise DataError(f"{path}: expected {file_format.shape}, found no rows")
            return table.unify_dictionaries().combine_chunks()
    except (pa.ArrowException, EOFError, zlib.error, OSError, UnicodeError) as error:
        reason = " ".join(str(error).split())
    _raise_first_fault(path, file_format)
    raise DataError(f"{path}: expected {file_format.shape}, found {reason}")


def first_line(path: Path) -> str:
    """Returns the first line of a file without its end, to tell formats apart.

    Raises:
      DataError: the file cannot be read or is empty.
    """
    for _, line in _lines(path):
        return line.decode("utf-8", errors="replace")
    raise DataError(f"{path}: expected rows of data, found an empty file")


def _check_header(path: Path, file_format: FileFormat) -> None:
    """Checks the first line of a file.

    Raises:
      DataError: the file cannot be read or is empty, or it lacks a header that belongs there.
    """
    line = first_line(path)
    if file_format.header and line.removeprefix("\ufeff") != file_format.header_line:
        raise DataError(
            f"{path}:1: expected the header {file_format.header_line!r}, found {_shorten(line)}"
        )


def line_of_row(path: Path, file_format: FileFormat, row: int) -> int:
    """Returns the number of the line (from 1) that row `row` (from 0) of `read_table` came from."""
    remaining = row + int(file_format.header)
    for number, line in _lines(path):
        if line:
            if remaining == 0:
                return number
            remaining -= 1
    raise IndexError(f"{path}: no row {row}")


def _open(path: Path) -> BinaryIO:
    with open(path, "rb") as stream:
        compressed = stream.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if compressed else open(path, "rb")


def _parse(stream: BinaryIO, file_format: FileFormat) -> pa.Table:
    delimiter = file_format.delimiter
    if len(delimiter) > 1:
        # pyarrow splits at single characters only.
        stream = io.BytesIO(stream.read().replace(delimiter.encode(), b"\t"))
        delimiter = "\t"
    names = [column.name for column in file_format.columns]
    return arrow_csv.read_csv(
        stream,
        read_options=arrow_csv.ReadOptions(
            block_size=_BLOCK_BYTES,
            column_names=names,
            skip_rows=int(file_format.header),
            encoding=file_format.encoding,
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if file_format.quoted else False
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={c.name: _ARROW_TYPES[c.kind] for c in file_format.columns},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _valid(values: pa.ChunkedArray, column: Column) -> bool:
    if column.required and values.null_count:
        return False
    if column.kind == "number" and pc.all(pc.is_finite(values)).as_py() not in (True, None):
        return False
    if column.allowed is not None:
        return bool(np.isin(values.drop_null().to_numpy(), column.allowed).all())
    return True


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line without its end). Raises DataError where the file breaks off."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line.rstrip(b"\r\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}:{number + 1}: expected a complete gzip file, found that it is damaged or ends "
            f"early ({error}); get the file again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: expected a readable file, found: {error.strerror or error}"
        ) from error


def _raise_first_fault(path: Path, file_format: FileFormat) -> None:
    """Raises a DataError for the first line that is wrong; returns if there is none."""
    for number, line in _lines(path):
        if not line or (number == 1 and file_format.header):
            continue
        fault = _fault(line, file_format)
        if fault:
            raise DataError(f"{path}:{number}: {fault}")


def _fault(line: bytes, file_format: FileFormat) -> str | None:
    try:
        text = line.decode(file_format.encoding)
    except UnicodeDecodeError as error:
        return (
            f"expected {file_format.encoding} text, "
            f"found the byte 0x{line[error.start]:02x} at position {error.start + 1}"
        )
    if file_format.quoted:
        values = next(csv.reader([text]), [])
    else:
        values = text.split(file_format.delimiter)
    if len(values) != len(file_format.columns):
        return f"expected {file_format.shape}, found {len(values)}"
    for position, (column, value) in enumerate(
        zip(file_format.columns, values, strict=True), start=1
    ):
        expected = _expected(column, value)
        if expected:
            return (
                f"expected {expected} in column {position} ({column.name}), found {_shorten(value)}"
            )
    return None


def _expected(column: Column, value: str) -> str | None:
    """Says what should stand in place of `value`, or None if it may stand."""
    if not value:
        return f"a value ({column.kind})" if column.required else None
    if column.allowed is not None:
        fits = _INTEGER.fullmatch(value) and int(value) in column.allowed
        return None if fits else " or ".join(map(str, column.allowed))
    if column.kind == "integer":
        return None if _INTEGER.fullmatch(value) else "an integer"
    if column.kind == "number":
        try:
            return None if math.isfinite(float(value)) and "_" not in value else "a finite number"
        except ValueError:
            return "a number"
    return None


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
