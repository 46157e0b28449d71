"""A real run of `--strategy=auto`: to gba and back, for a worker that is slow for a while.

How supervisors start, restart and end processes is in supervisor_test.
"""

import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from gba_tf import data, models
from gba_tf.models.defaults import DEEPFM

TRAIN = pathlib.Path(__file__).parents[2] / "scripts" / "train.py"
TIMEOUT_SECONDS = 300
# A fifth is held out; an epoch is 30 batches of 64 and one of 8.
NUM_ROWS, NUM_TRAIN, EPOCHS, G, B = 2410, 1928, 5, 64, 16


def write_criteo(path):
    generator = np.random.default_rng(4)
    lines = []
    for _ in range(NUM_ROWS):
        numbers = [str(number) for number in generator.integers(20, size=13)]
        categories = generator.integers(6, size=26)
        label = str(categories[0] % 2)
        lines.append("\t".join([label, *numbers, *(f"{c:08x}" for c in categories)]))
    path.write_text("\n".join(lines) + "\n")


def processes_of(model_dir):
    """Supervisors and their children alike."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"--model_dir={model_dir}" in (folder / "cmdline").read_bytes().decode().split("\0"):
                found.append(int(folder.name))
        except OSError:  # It ended meanwhile.
            continue
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(model_dir, output, data_dir) of a run that has ended."""
    folder = tmp_path_factory.mktemp("auto")
    write_criteo(folder / "train.txt")
    model_dir = folder / "run"
    flags = {
        "strategy": "auto",
        "dataset": "criteo",
        "data_dir": folder,
        "model_dir": model_dir,
        "global_batch_size": G,
        "local_batch_size": B,
        "epochs": EPOCHS,
        "switch_threshold": 3,
        "switch_windows": 1,
        "switch_minimum_stay": 0,
        # (1 + 20) / 2 = 10.5 times as fast by gba, less what it costs.
        "inject_delay": "worker:1:20:0:60",
    }
    command = [sys.executable, TRAIN, *(f"--{name}={value}" for name, value in flags.items())]
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stdout
    assert not processes_of(model_dir), "processes are left"
    return model_dir, result.stdout, folder


def progress_at(model_dir, step):
    path = model_dir / "checkpoints" / f"{step:08d}" / "training.json"
    progress = json.loads(path.read_text())["progress"]
    return progress["epoch"], progress["examples"]


def steps_between(start, end, size):
    """Batches of `size` from one position in the data to another, a new one in each epoch."""
    (first, done), (last, rest) = start, end
    if first == last:
        return math.ceil((rest - done) / size)
    whole = math.ceil(NUM_TRAIN / size)
    return (
        math.ceil((NUM_TRAIN - done) / size) + (last - first - 1) * whole + math.ceil(rest / size)
    )


def test_it_switches_to_gba_and_back_and_trains_on_every_example_once_per_epoch(run):
    model_dir, output, _ = run
    summary = json.loads((model_dir / "summary.json").read_text())
    assert (summary["strategy"], summary["epochs"]) == ("auto", EPOCHS)
    assert summary["examples"] == EPOCHS * NUM_TRAIN
    switches = summary["switches"]
    assert [(switch["from"], switch["to"]) for switch in switches] == [
        ("multi_worker_mirrored", "gba"),
        ("gba", "multi_worker_mirrored"),
    ], output
    for switch in switches:
        slow, fast = max(switch["seconds_per_example"]), min(switch["seconds_per_example"])
        ratio = switch["efficiency"] * (1 + slow / fast) / 2
        assert switch["ratio"] == pytest.approx(ratio)
        assert set(switch["seconds"]) == {"save", "restart", "restore", "first_step"}
        assert all(seconds >= 0 for seconds in switch["seconds"].values())
    there, back = switches
    # A window of 20 updates, after 4.
    assert (there["global_step"], there["efficiency"]) == (24, 0.9)
    assert there["ratio"] >= 3
    assert back["ratio"] <= 3 * 0.8
    for switch in switches:
        assert f"the switch to {switch['to']} at global step {switch['global_step']:,}" in output

    seconds = switches[0]["seconds_per_example"]
    assert seconds[1] > 5 * seconds[0]

    start = progress_at(model_dir, there["global_step"])
    end = progress_at(model_dir, back["global_step"])
    assert start == (0, 24 * G)
    gradients = steps_between(start, end, B)
    tokens = summary["tokens"]
    assert tokens["issued"] == tokens["applied"] + tokens["decayed"] == gradients
    # What is left in the buffer at the switch is an update too.
    assert back["global_step"] == 24 + math.ceil(gradients / (G / B))
    assert progress_at(model_dir, summary["global_step"]) == (EPOCHS, 0)
    rest = steps_between(end, (EPOCHS, 0), G)
    assert summary["global_step"] == back["global_step"] + rest


def test_every_epoch_is_shown_whoever_leads(run):
    _, output, _ = run
    epochs = re.findall(r"^epoch (\d+)/\d+: loss ", output, re.MULTILINE)
    assert [int(epoch) for epoch in epochs] == list(range(1, EPOCHS + 1))


def test_the_checkpoint_loads_into_one_process_and_gives_the_same_auc(run):
    model_dir, _, data_dir = run
    summary = json.loads((model_dir / "summary.json").read_text())
    dataset = data.load("criteo", str(data_dir))
    model = models.DeepFM(dataset.features, **DEEPFM["criteo"].model)
    model(dict(dataset.train.take(slice(0, 2)).columns))
    optimizer = tf.keras.optimizers.Adagrad()
    optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=optimizer).restore(summary["checkpoint"])
    status.assert_existing_objects_matched()
    assert int(optimizer.iterations) == summary["global_step"]
    scores = model(dict(dataset.test.columns)).numpy()
    positives = scores[dataset.test.labels == 1][:, None]
    negatives = scores[dataset.test.labels == 0][None, :]
    auc = np.mean((positives > negatives) + (positives == negatives) / 2)
    assert summary["auc"] == pytest.approx(auc, abs=1e-4)
