"""MovieLens-1M: a million ratings; the last 20 % of each user's are held out.

Two layouts are read: `ml1m_ordered.csv.gz`, `ml1m_users.dat`, `ml1m_items.dat` (tabs, UTF-8), and
GroupLens' own `ratings.dat`, `users.dat`, `movies.dat` (`::`, Latin-1).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from gba_tf.data import movielens
from gba_tf.data.dataset import DataError, Dataset
from gba_tf.data.delimited import Column, FileFormat, line_of_row, read_table

_STARS = Column("rating", "integer", allowed=(1, 2, 3, 4, 5))
_RATING_COLUMNS = (Column("user", "integer"), Column("movie", "integer"), _STARS)
_USER_COLUMNS = (
    Column("id", "integer"),
    Column("gender", "text"),
    Column("age", "integer"),
    Column("occupation", "integer"),
    Column("zip", "text"),
)
_ITEM_COLUMNS = (Column("id", "integer"), Column("title", "text"), Column("genres", "text"))
_USER_SUMMARY = "id, gender, age, occupation, zip"
_ITEM_SUMMARY = "id, title, genres"


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Names and formats of the three files; `order` is the column that orders a user's ratings."""

    ratings: str
    users: str
    items: str
    order: str
    ratings_format: FileFormat
    users_format: FileFormat
    items_format: FileFormat

    @property
    def names(self) -> str:
        return f"{self.ratings}, {self.users} and {self.items}"


_ORDERED = _Layout(
    ratings="ml1m_ordered.csv.gz",
    users="ml1m_users.dat",
    items="ml1m_items.dat",
    order="pos",
    ratings_format=FileFormat(
        (*_RATING_COLUMNS, Column("pos", "integer")), ",", "user, movie, rating, pos", header=True
    ),
    users_format=FileFormat(_USER_COLUMNS, "\t", _USER_SUMMARY),
    items_format=FileFormat(_ITEM_COLUMNS, "\t", _ITEM_SUMMARY),
)
_GROUPLENS = _Layout(
    ratings="ratings.dat",
    users="users.dat",
    items="movies.dat",
    order="timestamp",
    ratings_format=FileFormat(
        (*_RATING_COLUMNS, Column("timestamp", "integer")),
        "::",
        "user, movie, rating, timestamp",
        encoding="latin-1",
    ),
    users_format=FileFormat(_USER_COLUMNS, "::", _USER_SUMMARY, encoding="latin-1"),
    items_format=FileFormat(_ITEM_COLUMNS, "::", _ITEM_SUMMARY, encoding="latin-1"),
)


def load(data_dir: str) -> Dataset:
    """Returns the data set from a folder with the three files of either layout.

    A user with n ratings has the last n // 5 of them held out. Both parts are ordered by user, then
    by time; GroupLens' ratings of the same second stay in the order of the file.

    Args:
      data_dir: the folder.

    Returns:
      Categorical features user, item, gender, age (group), occupation, zip (first character), and
      the genres of the item.

    Raises:
      DataError: a file is missing or malformed, or refers to a user or movie that is not listed.
    """
    folder = Path(data_dir)
    layout = _find_layout(folder)
    ratings = read_table(folder / layout.ratings, layout.ratings_format)
    users = read_table(folder / layout.users, layout.users_format)
    items = read_table(folder / layout.items, layout.items_format)

    user_rows = _references(folder, layout, ratings["user"], users["id"], layout.users, "user")
    item_rows = _references(folder, layout, ratings["movie"], items["id"], layout.items, "movie")
    user = ratings["user"].to_numpy()
    order = np.lexsort((ratings[layout.order].to_numpy(), user))
    user, user_rows, item_rows = user[order], user_rows[order], item_rows[order]
    is_test = _last_fifth(user)
    if not is_test.any():
        raise DataError(
            f"{folder / layout.ratings}: expected a user with at least 5 ratings, to hold "
            "out the last 20 % of, found none"
        )
    genres = items["genres"].to_pylist()
    return movielens.build_dataset(
        "movielens_1m",
        movielens.Ratings(
            fields={
                "user": user,
                "item": ratings["movie"].to_numpy()[order],
                "gender": _texts(users["gender"])[user_rows],
                "age": movielens.age_group(users["age"].to_numpy())[user_rows],
                "occupation": users["occupation"].to_numpy()[user_rows],
                "zip": movielens.zip_area(_texts(users["zip"]))[user_rows],
            },
            item_rows=item_rows,
            item_genres=[text.split("|") for text in genres],
            stars=ratings["rating"].to_numpy()[order],
            is_test=is_test,
        ),
    )


def _find_layout(folder: Path) -> _Layout:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: expected a folder with {_ORDERED.names}, or {_GROUPLENS.names}, "
            "found no such folder"
        )
    for layout in (_ORDERED, _GROUPLENS):
        missing = [
            name
            for name in (layout.ratings, layout.users, layout.items)
            if not (folder / name).is_file()
        ]
        if not missing:
            return layout
        if len(missing) < 3:
            raise DataError(
                f"{folder}: expected {layout.names}, found no {' and no '.join(missing)}"
            )
    raise DataError(
        f"{folder}: expected {_ORDERED.names}, or {_GROUPLENS.names}, found none of them"
    )


def _references(
    folder: Path,
    layout: _Layout,
    wanted: pa.ChunkedArray,
    keys: pa.ChunkedArray,
    table: str,
    kind: str,
) -> np.ndarray:
    """Returns where in `table` each rating's user or movie is."""
    path = folder / table
    listed = keys.to_numpy()
    _, first_rows = np.unique(listed, return_index=True)
    if len(first_rows) < len(listed):
        row = int(np.setdiff1d(np.arange(len(listed)), first_rows)[0])
        file_format = layout.users_format if kind == "user" else layout.items_format
        raise DataError(
            f"{path}:{line_of_row(path, file_format, row)}: expected each {kind} once, "
            f"found {listed[row]} again"
        )
    rows = movielens.rows_of(listed, wanted.to_numpy())
    if (rows < 0).any():
        row = int(np.flatnonzero(rows < 0)[0])
        ratings = folder / layout.ratings
        raise DataError(
            f"{ratings}:{line_of_row(ratings, layout.ratings_format, row)}: expected a {kind} "
            f"listed in {table}, found {wanted[row]}"
        )
    return rows


def _last_fifth(user: np.ndarray) -> np.ndarray:
    """Marks the last n // 5 of each user's n entries; equal users stand together."""
    _, starts, counts = np.unique(user, return_index=True, return_counts=True)
    position = np.arange(len(user)) - np.repeat(starts, counts)
    return position >= np.repeat(counts - counts // 5, counts)


def _texts(column: pa.ChunkedArray) -> np.ndarray:
    return np.array(column.to_pylist(), dtype=str)
