"""scripts/benchmark.py --suite=stragglers runs from end to end, with real processes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

BENCHMARK = pathlib.Path(__file__).parents[2] / "scripts" / "benchmark.py"


def run_benchmark(folder, *flags, **environment):
    return subprocess.run(
        [
            *(sys.executable, str(BENCHMARK), "--suite=stragglers"),
            *(f"--output={folder}/results/stragglers.json", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_modes_are_measured_beside_the_ideal(tmp_path):
    # Found before the one that may be installed.
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    run = run_benchmark(
        tmp_path,
        "--modes=gba,multi_worker_mirrored",
        "--num_workers=2",
        "--slow_factors=1,5",
        "--compute_seconds=0.02",
        "--measure_seconds=0.3",
        "--repeats=2",
        f"--plot={tmp_path}/plot.png",
        PYTHONPATH=str(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads((tmp_path / "results" / "stragglers.json").read_text())
    assert written["settings"]["num_workers"] == 2
    assert [cell["slow_factor"] for cell in written["cells"]] == [1, 5]
    # 64 x (1 / 0.02 + 1 / 0.02) and 64 x (1 / 0.1 + 1 / 0.02).
    assert [cell["ideal"] for cell in written["cells"]] == pytest.approx([6400, 3840])
    for cell, all_reduce_steps, gradients_per_second in zip(
        written["cells"], (15, 6), (100, 60), strict=True
    ):
        runs = cell["measurements"]
        assert list(runs) == ["multi_worker_mirrored", "gba"]
        # 0.3 s of steps of 0.02 s, then 6 steps at the least; of 2 gradients each.
        assert [run["applied"] for run in runs["multi_worker_mirrored"]] == [
            2 * all_reduce_steps
        ] * 2
        for mode, of_mode in runs.items():
            rates = [run["applied"] * 64 / run["seconds"] for run in of_mode]
            assert cell["examples_per_second"][mode] == pytest.approx(sum(rates) / 2)
            for run_of_mode in of_mode:
                gradients = run_of_mode["applied"] + run_of_mode["dropped"]
                # From update to update, where one of gba is made of 2 gradients.
                assert gradients > 0 and (mode != "gba" or gradients % 2 == 0)
                # No worker is faster than its waits, but for the one that was under way.
                assert gradients <= gradients_per_second * run_of_mode["seconds"] + 4
    assert [
        (check["floor"], check["slow_factor"], check["expected"]) for check in written["floors"]
    ] == [
        ("gba / ideal", 1, 0.9),
        ("gba / ideal", 5, 0.9),
        ("gba / multi_worker_mirrored", 1, 0.95),
        ("gba / multi_worker_mirrored", 5, 2.4),
    ]
    for check in written["floors"]:
        assert check["met"] == (check["found"] >= check["expected"])
    assert "Examples per second" in run.stdout
    assert run.stdout.count("pip install 'gba_tf[plot]'") == 1
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--modes=gba,sync", "--modes: expected some of multi_worker_mirrored,gba,"),
        ("--slow_factors=1,0.5", "--slow_factors: expected numbers of 1 or more"),
        ("--num_workers=1", "--num_workers: expected 2 or more"),
        ("--plot=speed.bmp", "--plot: expected a file name ending in .png or .svg"),
        ("--steps=10", "--suite=stragglers has no --steps; --suite=throughput has"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(tmp_path, flag, message):
    run = run_benchmark(tmp_path, flag)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()
