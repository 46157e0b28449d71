"""summary.json has exactly the keys that other tools read, whole or not at all."""

import json
import math

import pytest

from gba_tf import summary

SUMMARY = {
    "strategy": "gba",
    "model": "deepfm",
    "dataset": "criteo",
    "global_batch_size": 2048,
    "local_batch_size": 512,
    "gradients_per_update": 4,
    "num_workers": 3,
    "num_ps": 1,
    "global_step": 1250,
    "epochs": 1,
    "examples": 2_560_000,
    "train_seconds": 20.0,
    "examples_per_second": 128_000.0,
    "auc": 0.78125,
    "loss": 0.45,
    "tokens": {
        "issued": 5003,
        "applied": 4990,
        "decayed": 10,
        "lost": 3,
        "outstanding": 0,
        "buffered": 0,
    },
    "staleness": {"-1": 50, "0": 4500, "2": 450},
    "checkpoint": "runs/a/checkpoints/ckpt-1250",
    "switches": [],
    "versions": {"gba_tf": "1", "tensorflow": "2", "tf_keras": "3"},
}


def test_the_file_holds_what_was_given_and_nothing_is_left_beside_it(tmp_path):
    path = summary.write(tmp_path, SUMMARY)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == SUMMARY
    assert list(tmp_path.iterdir()) == [path]


def test_the_keys_are_those_of_the_design():
    assert set(summary.KEYS) == set(SUMMARY)
    assert set(summary.versions()) == set(SUMMARY["versions"])


def test_a_key_that_is_missing_is_named_and_nothing_is_written(tmp_path):
    incomplete = {key: value for key, value in SUMMARY.items() if key != "auc"}
    with pytest.raises(ValueError, match=r"found none of \['auc'\]"):
        summary.write(tmp_path, incomplete)
    assert not list(tmp_path.iterdir())


def test_a_value_that_json_does_not_know_leaves_the_older_file_as_it_was(tmp_path):
    path = summary.write(tmp_path, SUMMARY)
    with pytest.raises(TypeError):
        summary.write(tmp_path, {**SUMMARY, "checkpoint": object()})
    assert json.loads(path.read_text()) == SUMMARY
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_are_null_in_the_file_and_undefined_in_the_block(tmp_path):
    undefined = {**SUMMARY, "auc": math.nan, "loss": math.inf}
    text = summary.write(tmp_path, undefined).read_text()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(text, parse_constant=refuse) == {**SUMMARY, "auc": None, "loss": None}
    assert "held out    AUC undefined, loss undefined" in summary.render(undefined, "x")


def test_the_block_shows_everything_that_counts():
    assert summary.render(SUMMARY, "runs/a/summary.json").splitlines() == [
        "  model       deepfm on criteo",
        "  strategy    gba, 3 workers, 1 parameter server",
        "  update      G = 2,048 examples = 4 gradients of B = 512",
        "  trained     1 epoch, 2,560,000 examples, 1,250 global steps",
        "  speed       128,000 examples/s (20.0 s of training)",
        "  held out    AUC 0.7812, loss 0.4500",
        "  tokens      5,003 issued = 4,990 applied + 10 decayed + 3 lost",
        "              + 0 outstanding + 0 buffered",
        "  staleness   -1: 1.0 %, 0: 90.0 %, 2: 9.0 %",
        "              (global steps late: share of gradients)",
        "  checkpoint  runs/a/checkpoints/ckpt-1250",
        "  summary     runs/a/summary.json",
    ]


def test_paths_are_shown_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    block = summary.render(SUMMARY, tmp_path / "here" / "run" / "summary.json")
    assert block.endswith("  summary     run/summary.json")
    block = summary.render(SUMMARY, tmp_path / "there" / "summary.json")
    assert block.endswith(f"  summary     {tmp_path / 'there' / 'summary.json'}")


def test_a_mode_without_tokens_and_servers_shows_neither():
    plain = {
        **SUMMARY,
        "strategy": "one_device",
        "local_batch_size": 2048,
        "gradients_per_update": 1,
        "num_workers": 1,
        "num_ps": 0,
        "tokens": {},
        "staleness": {},
    }
    block = summary.render(plain, "x")
    assert "strategy    one_device\n" in block
    assert "update      1 gradient of 2,048 examples\n" in block
    assert "tokens" not in block and "staleness" not in block


def test_each_switch_is_a_line():
    seconds = {"save": 0.5, "restart": 2.0, "restore": 0.25, "first_step": 3.25}
    switches = [
        {"to": "gba", "global_step": 1200, "seconds": seconds},
        {"to": "multi_worker_mirrored", "global_step": 3400, "seconds": {"save": 1.0}},
    ]
    block = summary.render({**SUMMARY, "switches": switches}, "x")
    assert (
        "  switches    to gba at global step 1,200, in 6.0 s\n"
        "              to multi_worker_mirrored at global step 3,400, in 1.0 s\n"
    ) in block


def test_a_long_tail_of_staleness_is_one_entry():
    # In JSON the keys are text, in which 10 comes before 2.
    staleness = {str(steps): 100 for steps in range(10, -1, -1)}
    block = summary.render({**SUMMARY, "staleness": staleness}, "x")
    assert "0: 9.1 %, 1: 9.1 %, 2: 9.1 %, 3: 9.1 %, 4: 9.1 %, 5 or more: 54.5 %\n" in block
