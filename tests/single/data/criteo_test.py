"""Tests of the Criteo loader on small files of each format, on malformed ones and on real data."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from gba_tf.data import DataError, load

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"
HEADER = ",".join(
    ["Id", "Label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
)
NUMBERS = ["1", "-3", "", "0", "7", "", "2", "3", "4", "0", "1", "", "9"]
CATEGORIES = ["68fd1e64", *[f"{i:08x}" for i in range(24)], ""]


def raw_line(label="0", numbers=NUMBERS, categories=CATEGORIES):
    return "\t".join([label, *numbers, *categories])


def comma_line(label="0", numbers=NUMBERS, categories=CATEGORIES):
    return ",".join(["7", label, *numbers, *categories])


def write(path, lines, end="\n"):
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def all_of(dataset, name):
    return np.concatenate([dataset.train.columns[name], dataset.test.columns[name]])


@pytest.mark.parametrize("name", ["train.txt", "train.tsv", "train.tsv.gz"])
def test_the_raw_format_is_read_and_its_last_fifth_held_out(tmp_path, name):
    labels = ["0", "1", "0", "0", "1"] * 2
    write(tmp_path / name, [raw_line(label) for label in labels])
    dataset = load("criteo", str(tmp_path))
    assert dataset.train.labels.tolist() == [0, 1, 0, 0, 1, 0, 1, 0]
    assert dataset.test.labels.tolist() == [0, 1]
    assert len(dataset.features) == 39


@pytest.mark.parametrize("name", ["part1.csv", "part1.csv.gz", "train.csv"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_comma_separated_format_is_read(tmp_path, name, end):
    quoted = comma_line("1", numbers=['""' if n == "" else n for n in NUMBERS])
    write(
        tmp_path / name,
        [HEADER, comma_line(), quoted, comma_line(), comma_line(), comma_line()],
        end,
    )
    dataset = load("criteo", str(tmp_path))
    assert dataset.train.labels.tolist() == [0, 1, 0, 0]
    # A quoted blank is as missing as a bare one.
    assert dataset.train.columns["I3"].tolist() == [-1, -1, -1, -1]


def test_both_formats_give_the_same_columns(tmp_path):
    raw = load("criteo", str(write(tmp_path / "a.tsv", [raw_line()] * 5)))
    comma = load("criteo", str(write(tmp_path / "a.csv", [HEADER, *[comma_line()] * 5])))
    for feature in raw.features:
        assert (all_of(raw, feature.name) == all_of(comma, feature.name)).all()


def test_numbers_become_the_logarithm_of_the_shifted_value(tmp_path):
    numbers = ["1", "-2", "", "0", "7", "-5", *["3"] * 7]
    dataset = load("criteo", str(write(tmp_path / "t.tsv", [raw_line(numbers=numbers)] * 5)))
    first = [dataset.train.columns[f"I{i}"][0] for i in range(1, 7)]
    # I2 starts at -3, the others at 0; lower values count as the lowest; missing is -1.
    assert first == pytest.approx([math.log(2), math.log(2), -1.0, 0.0, math.log(8), 0.0])


def test_categories_are_hashed_alike_everywhere_and_missing_ones_are_0(tmp_path):
    categories = ["68fd1e64", "68fd1e64", *["x"] * 23, ""]
    dataset = load("criteo", str(write(tmp_path / "t.tsv", [raw_line(categories=categories)] * 5)))
    # blake2b(b"68fd1e64", digest_size=8, salt=b"C1") and salt=b"C2", little-endian, % 10000 + 1.
    assert all_of(dataset, "C1").tolist() == [5688] * 5
    assert all_of(dataset, "C2").tolist() == [7132] * 5
    assert all_of(dataset, "C26").tolist() == [0] * 5


def test_hashes_stay_within_the_size_asked_for(tmp_path):
    lines = [raw_line(categories=[f"{i:08x}"] * 26) for i in range(500)]
    dataset = load("criteo", str(write(tmp_path / "t.tsv", lines)), hash_size=7)
    assert {f.num_ids for f in dataset.features if f.name.startswith("C")} == {8}
    assert set(all_of(dataset, "C5").tolist()) == set(range(1, 8))


def test_an_integer_written_as_a_float_is_the_same_category(tmp_path):
    lines = [comma_line(categories=["84"] * 26), comma_line(categories=["84.0"] * 26)]
    dataset = load(
        "criteo", str(write(tmp_path / "t.csv", [HEADER, *lines, lines[0]])), test_fraction=0.4
    )
    assert len(set(all_of(dataset, "C1").tolist())) == 1


def test_the_held_out_share_can_be_chosen(tmp_path):
    path = write(tmp_path / "t.tsv", [raw_line()] * 10)
    assert len(load("criteo", str(path), test_fraction=0.5).test) == 5
    with pytest.raises(ValueError, match="expected test_fraction between 0 and 1, found 1.0"):
        load("criteo", str(path), test_fraction=1.0)
    with pytest.raises(ValueError, match="expected hash_size to be at least 1, found 0"):
        load("criteo", str(path), hash_size=0)


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path):
    for part, label in ((10, "1"), (2, "0"), (1, "1")):
        write(tmp_path / f"part{part}.csv", [HEADER, *[comma_line(label)] * 2])
    dataset = load("criteo", str(tmp_path), test_fraction=0.34)
    assert dataset.train.labels.tolist() == [1, 1, 0, 0]
    assert dataset.test.labels.tolist() == [1, 1]


def test_files_named_train_are_preferred_and_test_files_left_out(tmp_path):
    write(tmp_path / "train.txt", [raw_line()] * 5)
    (tmp_path / "test.txt").write_text("not read")
    (tmp_path / "readme.txt").write_text("not read")
    assert len(load("criteo", str(tmp_path)).train) == 4


@pytest.mark.parametrize(
    "lines, line, text",
    [
        ([raw_line()] * 3 + [raw_line().rsplit("\t", 1)[0]], 4, "expected 40 tab-separated columns "
         r"\(label, 13 integers, 26 categories, no header\), found 39"),
        ([raw_line(), raw_line() + "\tx"], 2, "expected 40 tab-separated columns .*, found 41"),
        ([raw_line(), raw_line("2")], 2, r"expected 0 or 1 in column 1 \(label\), found '2'"),
        ([raw_line(), "", raw_line("")], 3, r"expected a value \(integer\) in column 1 \(label\)"),
        ([raw_line(), raw_line(numbers=["x", *NUMBERS[1:]])], 2,
         r"expected a number in column 2 \(I1\), found 'x'"),
        ([raw_line(numbers=["inf", *NUMBERS[1:]])], 1,
         r"expected a finite number in column 2 \(I1\)"),
        (["\t".join(HEADER.split(",")[1:]), raw_line()], 1,
         r"expected 0 or 1 in column 1 \(label\), found 'Label'"),
        ([HEADER, comma_line(), comma_line() + ",1"], 3, "expected 41 comma-separated columns "
         r"\(Id, Label, 13 numbers, 26 categories\), found 42"),
        ([HEADER, comma_line(), HEADER], 3,
         r"expected 0 or 1 in column 2 \(Label\), found 'Label'"),
        ([comma_line(), comma_line()], 1, "expected the header 'Id,Label,I1,.*', found '7,0,1,"),
        (["hello"], 1, "found neither a tab nor a comma in 'hello'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["train.tsv", "train.tsv.gz"])
def test_a_malformed_line_is_named(tmp_path, name, lines, line, text):
    path = write(tmp_path / name, lines)
    with pytest.raises(DataError, match=text) as caught:
        load("criteo", str(tmp_path))
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_broken_utf8_is_named(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes(f"{raw_line()}\n".encode() + raw_line().encode().replace(b"68fd", b"\xff8fd"))
    with pytest.raises(
        DataError, match="train.tsv:2: expected utf-8 text, found the byte 0xff at position"
    ):
        load("criteo", str(path))


def test_a_gzip_file_that_ends_early_is_named(tmp_path):
    lines = [raw_line(categories=[f"{i * 7919 + j:08x}" for j in range(26)]) for i in range(2000)]
    path = write(tmp_path / "train.tsv.gz", lines)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"train.tsv.gz:1[0-9]{3}: expected a complete gzip file"):
        load("criteo", str(path))


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = write(tmp_path / "train.tsv.gz", [raw_line()] * 100)
    data = bytearray(path.read_bytes())
    data[-8] ^= 0xFF  # The checksum.
    path.write_bytes(data)
    with pytest.raises(DataError, match="expected a complete gzip file, found that it is damaged"):
        load("criteo", str(path))


@pytest.mark.parametrize("content", [b"", gzip.compress(b"")])
def test_an_empty_file_is_named(tmp_path, content):
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    with pytest.raises(DataError, match="train.tsv: expected rows of data, found an empty file"):
        load("criteo", str(path))


def test_a_header_without_rows_is_named(tmp_path):
    path = write(tmp_path / "train.csv", [HEADER])
    with pytest.raises(DataError, match="train.csv: expected 41 comma-separated .* found no rows"):
        load("criteo", str(path))


def test_too_few_rows_to_split_are_refused(tmp_path):
    path = write(tmp_path / "train.tsv", [raw_line()] * 4)
    with pytest.raises(DataError, match="expected enough rows to hold out 0.2 of them, found 4"):
        load("criteo", str(path))


def test_a_missing_folder_or_file_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: expected Criteo's data, .* found nothing there"):
        load("criteo", str(tmp_path / "nowhere"))
    with pytest.raises(
        DataError, match=r"expected train\*.txt, train\*.tsv or \*.csv .* found none"
    ):
        load("criteo", str(tmp_path))


def test_formats_are_not_mixed(tmp_path):
    write(tmp_path / "train1.csv", [HEADER, comma_line()])
    write(tmp_path / "train2.tsv", [raw_line()])
    with pytest.raises(
        DataError, match="train2.tsv: expected 41 comma-separated .*keep them apart"
    ):
        load("criteo", str(tmp_path))


def test_a_file_next_to_its_gzipped_self_is_not_read_twice(tmp_path):
    write(tmp_path / "train.tsv", [raw_line()] * 5)
    write(tmp_path / "train.tsv.gz", [raw_line()] * 5)
    with pytest.raises(
        DataError, match="expected each file once, found train.tsv and train.tsv.gz"
    ):
        load("criteo", str(tmp_path))


@pytest.mark.parametrize(
    "folder, train, test, positive",
    [("criteo_kaggle_20k", 16_000, 4_000, 0.243), ("criteo_kaggle_raw_10k", 8_001, 2_000, 0.218)],
)
def test_real_data_have_the_known_sizes_and_rates(folder, train, test, positive):
    if not (SHARED_DATA / folder).is_dir():
        pytest.skip(
            f"needs {SHARED_DATA / folder}, whose owners forbid to copy it into the project"
        )
    dataset = load("criteo", str(SHARED_DATA / folder))
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    assert labels.mean() == pytest.approx(positive, abs=0.0005)
