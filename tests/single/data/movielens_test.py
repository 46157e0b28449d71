"""Tests of both MovieLens loaders: small files, malformed ones, and the real data."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from gba_tf.data import DataError, load, movielens
from gba_tf.features import CategoricalFeature

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"

# User 1 rated five items, user 2 six; the lines are not in order of time.
ORDERED = [
    (1, 11, 5, 0), (1, 12, 4, 1), (1, 13, 3, 2), (1, 11, 1, 4), (1, 12, 2, 3),
    (2, 11, 5, 0), (2, 12, 5, 1), (2, 13, 5, 2), (2, 11, 5, 3), (2, 12, 5, 4), (2, 14, 3, 5),
]  # fmt: skip
USERS = ["1\tF\t1\t10\t48067", "2\tM\t56\t16\t70072"]
ITEMS = [
    "11\tToy Story (1995)\tComedy|War",
    "12\tHeat\tWar",
    "13\tÉté\tComedy",
    "14\tNew\tNoir|War",
]


def write_ordered(folder, ratings=ORDERED, users=USERS, items=ITEMS):
    lines = ["user,movie,rating,pos", *(",".join(map(str, row)) for row in ratings)]
    (folder / "ml1m_ordered.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "ml1m_users.dat").write_text("\n".join(users) + "\n", encoding="utf-8")
    (folder / "ml1m_items.dat").write_text("\n".join(items) + "\n", encoding="utf-8")


def write_grouplens(folder):
    def convert(lines):
        return "".join(line.replace("\t", "::") + "\n" for line in lines).encode("latin-1")

    ratings = ["\t".join(map(str, (u, m, r, 978_300_000 + pos))) for u, m, r, pos in ORDERED]
    (folder / "ratings.dat").write_bytes(convert(ratings))
    (folder / "users.dat").write_bytes(convert(USERS))
    (folder / "movies.dat").write_bytes(convert(ITEMS))


@pytest.mark.parametrize("write", [write_ordered, write_grouplens])
def test_the_last_fifth_of_each_user_is_held_out(tmp_path, write):
    write(tmp_path)
    dataset = load("movielens_1m", str(tmp_path))
    # 5 // 5 and 6 // 5 ratings: the last in time of either user.
    assert dataset.test.columns["user"].tolist() == [1, 2]
    assert dataset.test.labels.tolist() == [0, 0]
    assert dataset.train.columns["user"].tolist() == [1] * 4 + [2] * 5
    assert dataset.train.columns["item"].tolist() == [1, 2, 3, 2, 1, 2, 3, 1, 2]
    assert dataset.train.labels.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("write", [write_ordered, write_grouplens])
def test_what_training_has_not_seen_is_id_0(tmp_path, write):
    write(tmp_path)
    dataset = load("movielens_1m", str(tmp_path))
    assert dataset.features[1] == CategoricalFeature("item", 4)
    assert dataset.test.columns["item"].tolist() == [1, 0]
    # Comedy is 1, War is 2; Noir is on no item of the training part.
    assert dataset.test.columns["genres"].tolist() == [[1, 2], [0, 2]]
    assert dataset.train.columns["genres"][1:3].tolist() == [[2, -1], [1, -1]]


def test_ages_become_the_groups_of_movielens_1m():
    ages = np.array([7, 17, 18, 24, 25, 49, 50, 55, 56, 73])
    assert movielens.age_group(ages).tolist() == [1, 1, 18, 18, 25, 45, 50, 50, 56, 56]


def test_zip_codes_become_their_first_character():
    assert movielens.zip_area(np.array(["98107-2117", "T8H1N"])).tolist() == ["9", "T"]


@pytest.mark.parametrize(
    "change, text",
    [
        ({"ratings": [(1, 11, 6, 0)]},
         "ml1m_ordered.csv.gz:2: expected 1 or 2 or 3 or 4 or 5 in column 3"),
        ({"ratings": [(1, 11, 5, 0), (1, 11, 5)]},
         "ml1m_ordered.csv.gz:3: expected 4 comma-separated"),
        ({"ratings": [(1, 11, 5, 0), (1, "x", 5, 1)]},
         r"ml1m_ordered.csv.gz:3: expected an integer in column 2 \(movie\), found 'x'"),
        ({"ratings": [(1, 11, 5, 0), (3, 11, 5, 0)]},
         "ml1m_ordered.csv.gz:3: expected a user listed in ml1m_users.dat, found 3"),
        ({"ratings": [(1, 11, 5, 0), (1, 99, 5, 0)]},
         "ml1m_ordered.csv.gz:3: expected a movie listed in ml1m_items.dat, found 99"),
        ({"ratings": ORDERED[:4]}, "expected a user with at least 5 ratings"),
        ({"users": ["1\tF\t1\t10"]}, "ml1m_users.dat:1: expected 5 tab-separated columns"),
        ({"users": [*USERS, "", USERS[0]]},
         "ml1m_users.dat:4: expected each user once, found 1 again"),
        ({"items": [*ITEMS, "15\tX\t"]},
         r"ml1m_items.dat:5: expected a value \(text\) in column 3"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_its_line(tmp_path, change, text):
    write_ordered(tmp_path, **change)
    with pytest.raises(DataError, match=text):
        load("movielens_1m", str(tmp_path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        DataError, match="or ratings.dat, users.dat and movies.dat, found none of them"
    ):
        load("movielens_1m", str(tmp_path))
    write_ordered(tmp_path)
    (tmp_path / "ml1m_items.dat").unlink()
    with pytest.raises(DataError, match="found no ml1m_items.dat"):
        load("movielens_1m", str(tmp_path))
    with pytest.raises(DataError, match="gone: expected a folder with .* found no such folder"):
        load("movielens_1m", str(tmp_path / "gone"))


def test_movielens_1m_has_the_known_sizes_and_rate():
    if not (SHARED_DATA / "movielens_1m").is_dir():
        pytest.skip(f"needs {SHARED_DATA / 'movielens_1m'}, whose owners forbid to copy it")
    dataset = load("movielens_1m", str(SHARED_DATA / "movielens_1m"))
    assert len(dataset.train) + len(dataset.test) == 1_000_209
    positive = dataset.train.labels.sum() + dataset.test.labels.sum()
    assert positive / 1_000_209 == pytest.approx(0.575, abs=0.0005)
    # All 6040 users have at least 20 ratings; the shares are rounded down one by one.
    users = [part.columns["user"] for part in (dataset.train, dataset.test)]
    counts = np.bincount(np.concatenate(users))[1:]
    assert len(dataset.test) == sum(int(count) // 5 for count in counts)


@pytest.fixture(scope="module")
def movielens_100k():
    try:
        return load("movielens_100k")
    except DataError as error:
        pytest.skip(f"needs a network or a filled cache: {error}")


def test_movielens_100k_has_the_known_sizes_and_rate(movielens_100k):
    train, test = movielens_100k.train, movielens_100k.test
    assert (len(train), len(test)) == (80_000, 20_000)
    assert (train.labels.sum() + test.labels.sum()) / 100_000 == pytest.approx(0.55375)


def test_movielens_100k_begins_at_the_first_second(movielens_100k):
    # The first ratings are of 20 September 1997, a Saturday, 3:05 UTC: hour 3 and weekday 5 are the
    # 4th and 6th values, as every hour and weekday occurs in training.
    columns = movielens_100k.train.columns
    assert columns["hour"][0] == 4
    assert columns["weekday"][0] == 6


def test_movielens_100k_knows_nothing_of_the_held_out_part(movielens_100k):
    for feature in movielens_100k.features:
        train = movielens_100k.train.columns[feature.name]
        # Every id but 0 was seen in training, so none was made for the held-out part alone.
        assert set(np.unique(train[train >= 0])) == set(range(1, feature.num_ids))


def test_movielens_100k_reads_files_from_a_folder(movielens_100k, tmp_path):
    from gba_tf.data.movielens_100k import SOURCE
    from gba_tf.data.wheel_files import cache_dir

    for name in SOURCE.files:
        (tmp_path / name).write_bytes((cache_dir() / name).read_bytes())
    dataset = load("movielens_100k", str(tmp_path))
    assert (dataset.train.columns["item"] == movielens_100k.train.columns["item"]).all()
    (tmp_path / next(iter(SOURCE.files))).write_bytes(b"x")
    with pytest.raises(DataError, match="expected the published file with sha256"):
        load("movielens_100k", str(tmp_path))
