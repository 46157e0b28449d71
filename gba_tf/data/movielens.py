"""What the two MovieLens loaders share: fields, and how they become ids."""

from __future__ import annotations

import dataclasses

import numpy as np

from gba_tf.data.dataset import Dataset, Examples
from gba_tf.data.vocabulary import Vocabulary
from gba_tf.features import CategoricalFeature, Feature, MultiCategoricalFeature

# A rating of at least this much counts as liked: label 1.
LIKED_RATING = 4
# The lowest ages of the groups in which MovieLens-1M gives ages; younger people are in the first.
AGE_GROUPS = (1, 18, 25, 35, 45, 50, 56)


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings joined with who gave them to what; every array has one entry per rating.

    Attributes:
      fields: name -> values of a categorical field, not yet ids.
      item_rows: int, which entry of `item_genres` belongs to the rating.
      item_genres: the genres of each item.
      stars: int, the ratings.
      is_test: bool, True for held-out ratings.
    """

    fields: dict[str, np.ndarray]
    item_rows: np.ndarray
    item_genres: list[list[str]]
    stars: np.ndarray
    is_test: np.ndarray


def build_dataset(name: str, ratings: Ratings) -> Dataset:
    """Returns the data set; vocabularies hold what the training part contains, nothing else."""
    is_train = ~ratings.is_test
    columns: dict[str, np.ndarray] = {}
    features: list[Feature] = []
    for field, values in ratings.fields.items():
        vocabulary = Vocabulary(values[is_train])
        columns[field] = vocabulary.ids(values)
        features.append(CategoricalFeature(field, vocabulary.num_ids))

    seen_items = np.unique(ratings.item_rows[is_train])
    seen_genres = [genre for row in seen_items for genre in ratings.item_genres[row]]
    genres = Vocabulary(np.array(seen_genres, dtype=str))
    max_length = max(map(len, ratings.item_genres))
    columns["genres"] = genres.padded_ids(ratings.item_genres, max_length)[ratings.item_rows]
    features.append(MultiCategoricalFeature("genres", genres.num_ids, max_length))

    examples = Examples(columns, (ratings.stars >= LIKED_RATING).astype(np.float32))
    return Dataset(
        name,
        examples.take(np.flatnonzero(is_train)),
        examples.take(np.flatnonzero(ratings.is_test)),
        tuple(features),
    )


def age_group(ages: np.ndarray) -> np.ndarray:
    """Returns the lowest age of the group that each age belongs to."""
    groups = np.array(AGE_GROUPS)
    return groups[np.maximum(np.searchsorted(groups, ages, side="right") - 1, 0)]


def zip_area(zip_codes: np.ndarray) -> np.ndarray:
    """Returns the first character: ten areas of the USA, or a letter for Canadian codes.

    A full code would be as good as the user's number, since hardly two users share one.
    """
    return zip_codes.astype("U1")


def rows_of(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns for each of `wanted` where it is in `keys` (unique integers); -1 if it is not."""
    order = np.argsort(keys, kind="stable")
    places = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    return np.where(keys[order][places] == wanted, order[places], -1)
