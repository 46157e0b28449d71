"""Tests of examples, data sets and feature declarations."""

import numpy as np
import pytest

from gba_tf import features
from gba_tf.data import Dataset, Examples, load
from gba_tf.features import CategoricalFeature, MultiCategoricalFeature, NumericFeature

FEATURES = (
    CategoricalFeature("city", 3),
    MultiCategoricalFeature("tags", 4, max_length=2),
    NumericFeature("price", missing_value=-1.0),
)


def make_columns(**changes):
    columns = {
        "city": np.array([0, 1, 2], dtype=np.int32),
        "tags": np.array([[1, -1], [2, 3], [-1, -1]], dtype=np.int32),
        "price": np.array([0.5, -1.0, 2.0], dtype=np.float32),
    }
    return {**columns, **changes}


def make_examples(**changes):
    return Examples(make_columns(**changes), np.array([0, 1, 1], dtype=np.float32))


def test_take_keeps_the_order_asked_for():
    taken = make_examples().take(np.array([2, 0]))
    assert len(taken) == 2
    assert taken.columns["city"].tolist() == [2, 0]
    assert taken.columns["tags"].tolist() == [[-1, -1], [1, -1]]
    assert taken.labels.tolist() == [1.0, 0.0]


def test_columns_of_another_length_than_the_labels_are_refused():
    with pytest.raises(ValueError, match="column 'city': expected 3 rows as in labels"):
        make_examples(city=np.array([1], dtype=np.int32))


def test_labels_of_another_type_are_refused():
    with pytest.raises(
        ValueError, match=r"expected labels to be float32 .*found int64 of shape \[3\]"
    ):
        Examples(make_columns(), np.array([0, 1, 1]))


def test_a_matching_data_set_is_accepted():
    dataset = Dataset("toy", make_examples(), make_examples(), FEATURES)
    assert dataset.features == FEATURES


@pytest.mark.parametrize(
    "change, text",
    [
        ({"city": np.array([0, 1, 3], np.int32)}, "'city': expected ids from 0 to 2, found 0 to 3"),
        (
            {"city": np.array([-1, 1, 2], np.int32)},
            "'city': expected ids from 0 to 2, found -1 to 2",
        ),
        ({"city": np.zeros(3, np.float32)}, r"'city': expected int32 or int64 of shape \[3\]"),
        (
            {"tags": np.zeros((3, 1), np.int32)},
            r"'tags': expected int32 or int64 of shape \[3, 2\]",
        ),
        (
            {"tags": np.full((3, 2), -2, np.int64)},
            "'tags': expected ids from -1 to 3, found -2 to -2",
        ),
        ({"price": np.zeros(3)}, r"'price': expected float32 of shape \[n\], found float64"),
        ({"price": np.full(3, np.nan, np.float32)}, "'price': expected finite numbers, found NaN"),
        ({"extra": np.zeros(3, np.float32)}, r"expected the columns \['city', 'price', 'tags'\]"),
    ],
)
def test_columns_that_contradict_their_declaration_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        Dataset("toy", make_examples(), make_examples(**change), FEATURES)


def test_an_empty_part_is_refused():
    with pytest.raises(ValueError, match="toy: expected examples in test, found none"):
        Dataset("toy", make_examples(), make_examples().take(slice(0, 0)), FEATURES)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="movielens_100k, criteo, movielens_1m, found 'avazu'"):
        load("avazu")


def test_a_missing_folder_is_asked_for():
    with pytest.raises(ValueError, match="criteo: expected data_dir"):
        load("criteo")


def test_features_survive_their_configuration():
    config = features.features_to_config(FEATURES)
    assert config[0] == {
        "kind": "CategoricalFeature",
        "name": "city",
        "num_ids": 3,
        "embedding_dim": None,
    }
    assert features.features_from_config(config) == FEATURES


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: CategoricalFeature("a", 0),
            "'a': expected num_ids to be a positive integer, found 0",
        ),
        (lambda: CategoricalFeature("", 1), "expected a feature's name to be a non-empty string"),
        (lambda: CategoricalFeature("a", 2, 0), "'a': expected embedding_dim to be a positive"),
        (lambda: MultiCategoricalFeature("a", 2, 0), "'a': expected max_length to be a positive"),
        (lambda: features.check_features([]), "expected at least one feature, found none"),
        (lambda: features.check_features(["a"]), "expected one of CategoricalFeature, .*found 'a'"),
        (
            lambda: features.check_features([NumericFeature("a"), NumericFeature("a")]),
            "expected unique feature names, found 'a' twice",
        ),
        (lambda: features.features_from_config([{"kind": "x"}]), "expected a feature of kind"),
    ],
)
def test_wrong_declarations_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
