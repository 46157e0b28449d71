"""scripts/benchmark.py runs from end to end, with real processes of all modes."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

BENCHMARK = pathlib.Path(__file__).parents[2] / "scripts" / "benchmark.py"


def run_benchmark(folder, *flags):
    return subprocess.run(
        [sys.executable, str(BENCHMARK), f"--output={folder}/results/speed.json", *flags],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_modes_are_measured_side_by_side(tmp_path):
    run = run_benchmark(
        tmp_path,
        "--optimizers=Adagrad,Adam",
        "--local_batch_sizes=64",
        "--steps_per_execution=3",
        "--gradients_per_update=4",
        "--repeats=2",
        "--steps=10",
        "--num_workers=2",
        "--num_ps=2",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert written["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert written["settings"]["gradients_per_update"] == 4
    assert [cell["optimizer"] for cell in written["cells"]] == ["Adagrad", "Adam"]
    for cell in written["cells"]:
        of_mode = cell["measurements"]
        assert {mode: len(runs) for mode, runs in of_mode.items()} == {
            "gba": 2,
            "parameter_server": 2,
            "ceiling": 2,
        }
        # 10 steps make 12, whole executions of 3 steps on 2 workers: 3 updates of M = 4 gradients,
        # or one update for each step where nothing is aggregated.
        assert {run["steps"] for runs in of_mode.values() for run in runs} == {12}
        assert [run["updates"] for run in of_mode["gba"]] == [3, 3]
        assert [run["updates"] for run in of_mode["parameter_server"]] == [12, 12]
        assert [run["updates"] for run in of_mode["ceiling"]] == [12, 12]
        tasks = {"chief", "worker-0", "worker-1", "ps-0", "ps-1"}
        assert set(of_mode["gba"][0]["cpu_seconds"]) == tasks
        assert set(of_mode["parameter_server"][0]["cpu_seconds"]) == tasks
        assert set(of_mode["ceiling"][0]["cpu_seconds"]) == {"process"}
        rates = [
            12 * 64 / run["seconds"] * written["machine"]["cores"] for run in of_mode["ceiling"]
        ]
        assert math.isclose(cell["examples_per_second"]["ceiling"], sum(rates) / 2)
    assert "Examples per second" in run.stdout
    assert "CPU seconds per 1000 steps" in run.stdout


def test_quick_has_one_batch_size_and_the_packages_own_model_can_be_measured(tmp_path):
    run = run_benchmark(
        tmp_path,
        "--model=deepfm",
        "--quick",
        "--optimizers=Adagrad",
        "--steps_per_execution=1",
        "--repeats=1",
        "--steps=4",
        "--num_workers=1",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (cell,) = json.loads((tmp_path / "results" / "speed.json").read_text())["cells"]
    assert cell["local_batch_size"] == 512
    assert [cell["measurements"][mode][0]["updates"] for mode in ("gba", "ceiling")] == [1, 4]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--local_batch_sizes=512,x", "--local_batch_sizes: expected positive integers"),
        ("--repeats=0", "repeats"),
        ("--model=mlp", "--model=mlp"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(tmp_path, flag, message):
    run = run_benchmark(tmp_path, flag)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_an_optimizer_that_fails_ends_everything_with_its_error(tmp_path):
    run = run_benchmark(tmp_path, "--optimizers=Adagrd", "--repeats=1", "--steps=4")
    assert run.returncode == 1
    assert "Adagrd" in run.stderr
    assert not (tmp_path / "results" / "speed.json").exists()
