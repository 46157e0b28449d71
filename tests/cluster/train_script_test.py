"""scripts/train.py end to end: real processes, and what a run leaves behind.

What is refused before anything starts is in tests/single/train_script_test.py.
"""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import gba_tf
from gba_tf import data, models
from gba_tf.local_cluster import LocalCluster
from gba_tf.model_dir import ModelDir
from gba_tf.models.defaults import DEEPFM

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
TIMEOUT_SECONDS = 300
# A fifth is held out: 472 examples to train on are 30 blocks of 16, the last one of 8.
NUM_ROWS, NUM_TRAIN, NUM_TEST = 590, 472, 118
BATCHES = ["--global_batch_size=64", "--local_batch_size=16"]
NUM_BLOCKS, M = 30, 4
NOISE = re.compile(r"^[IWE]\d{4} |absl::|oneDNN|cuda|GRPC|^ *key:|^\S+ *{$", re.MULTILINE)


def write_criteo(path, num_rows, label_of=lambda row, category: category % 2):
    """Rows in Criteo's own format, in which the label depends on a category."""
    generator = np.random.default_rng(4)
    lines = []
    for row in range(num_rows):
        numbers = [str(number) for number in generator.integers(20, size=13)]
        categories = generator.integers(6, size=26)
        label = label_of(row, int(categories[0]))
        lines.append("\t".join([str(label), *numbers, *(f"{c:08x}" for c in categories)]))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteo")
    write_criteo(folder / "train.txt", NUM_ROWS)
    return folder


def environment():
    return {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}


def train_command(criteo, model_dir, *flags):
    fixed = ["--dataset=criteo", f"--data_dir={criteo}", f"--model_dir={model_dir}"]
    return [sys.executable, str(SCRIPTS / "train.py"), *fixed, *BATCHES, *flags]


def run(command):
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert not tasks_of(command), "processes are left"
    return result


def tasks_of(command):
    """Task name -> process id of the tasks that run a train.py command."""
    (model_dir,) = (flag for flag in command if flag.startswith("--model_dir="))
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            variables = (folder / "environ").read_bytes().decode().split("\0")
        except OSError:  # It ended meanwhile.
            continue
        config = dict(v.split("=", 1) for v in variables if "=" in v).get("TF_CONFIG")
        if model_dir in arguments and config:
            task = json.loads(config)["task"]
            found[f"{task['type']}-{task['index']}"] = int(folder.name)
    return found


class Running:
    """A run of train.py that a test disturbs while it trains."""

    def __init__(self, command, **settings):
        self.command = command
        self.process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings
        )
        self.output = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while piece := os.read(self.process.stdout.fileno(), 1 << 16):
            with self._changed:
                self.output += piece.decode()
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text):
        with self._changed:
            assert self._changed.wait_for(
                lambda: text in self.output or not self._reader.is_alive(), TIMEOUT_SECONDS
            ), self.output
            assert text in self.output, self.output

    def end(self):
        """Returns the exit code; checks that no process is left."""
        code = self.process.wait(TIMEOUT_SECONDS)
        self._reader.join(TIMEOUT_SECONDS)
        deadline = time.monotonic() + 30
        while tasks_of(self.command) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not tasks_of(self.command), "processes are left"
        return code


def read_summary(model_dir):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads((model_dir / "summary.json").read_text(), parse_constant=refuse)


def restore(criteo, checkpoint, optimizer):
    """The model and its optimizer in this process, without any strategy."""
    dataset = data.load("criteo", str(criteo))
    model = models.DeepFM(dataset.features, **DEEPFM["criteo"].model)
    model(dict(dataset.train.take(slice(0, 2)).columns))
    optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=optimizer).restore(checkpoint)
    status.assert_existing_objects_matched()
    return dataset, model


def auc_over_all_pairs(labels, scores):
    positives, negatives = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return np.mean((positives > negatives) + (positives == negatives) / 2)


def log_loss(model, examples):
    logits = model(dict(examples.columns)).numpy().astype(np.float64)
    probabilities = 1 / (1 + np.exp(-logits))
    return -np.mean(np.log(np.where(examples.labels == 1, probabilities, 1 - probabilities)))


def test_a_run_on_a_cluster_of_its_own(criteo, tmp_path):
    model_dir = tmp_path / "run"
    result = run(
        train_command(
            criteo,
            model_dir,
            "--epochs=3",
            "--num_ps=2",
            "--optimizer=Adam",
            "--learning_rate=0.01",
        )
    )
    assert result.returncode == 0, result.stderr + result.stdout
    summary = read_summary(model_dir)
    tokens, staleness = summary.pop("tokens"), summary.pop("staleness")
    auc, loss = summary.pop("auc"), summary.pop("loss")
    seconds, speed = summary.pop("train_seconds"), summary.pop("examples_per_second")
    assert summary == {
        "strategy": "gba",
        "model": "deepfm",
        "dataset": "criteo",
        "global_batch_size": 64,
        "local_batch_size": 16,
        "gradients_per_update": M,
        "num_workers": 2,
        "num_ps": 2,
        # 90 gradients are 22 updates of 4, and one of the 2 that are left.
        "global_step": math.ceil(3 * NUM_BLOCKS / M),
        "epochs": 3,
        "examples": 3 * NUM_TRAIN,
        "checkpoint": str(model_dir / "checkpoints" / "00000023" / "variables"),
        "switches": [],
        "versions": {
            "gba_tf": gba_tf.__version__,
            "tensorflow": tf.__version__,
            "tf_keras": tf_keras.__version__,
        },
    }
    assert tokens.pop("issued") == sum(tokens.values()) == 3 * NUM_BLOCKS
    assert set(tokens) == {"applied", "decayed", "lost", "outstanding", "buffered"}
    assert tokens["lost"] == tokens["outstanding"] == tokens["buffered"] == 0
    assert sum(staleness.values()) == tokens["applied"] + tokens["decayed"]
    assert speed == pytest.approx(3 * NUM_TRAIN / seconds)

    optimizer = tf.keras.optimizers.Adam(0.01)
    dataset, model = restore(criteo, summary["checkpoint"], optimizer)
    assert tf.train.latest_checkpoint(str(model_dir / "checkpoints")) == summary["checkpoint"]
    logits = model(dict(dataset.test.columns)).numpy()
    assert auc == pytest.approx(auc_over_all_pairs(dataset.test.labels, logits), abs=1e-4)
    assert loss == pytest.approx(log_loss(model, dataset.test), abs=1e-4)
    assert int(optimizer.iterations) == 23
    slots = [variable for variable in optimizer.variables if variable.shape.rank]
    assert len(slots) == 2 * len(model.trainable_variables)
    assert all(np.count_nonzero(slot.numpy()) for slot in slots)

    assert re.search(
        r"^epoch 1/3: loss \d\.\d{4}, held-out loss \d\.\d{4}, AUC \d\.\d{4}, [\d,]+ examples/s$",
        result.stdout,
        re.MULTILINE,
    )
    assert f"held out    AUC {auc:.4f}, loss {loss:.4f}\n" in result.stdout
    assert "tokens      90 issued = " in result.stdout
    assert f"summary     {model_dir / 'summary.json'}\n" in result.stdout
    assert not NOISE.search(result.stdout + result.stderr), result.stdout + result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert {path.name for path in (model_dir / "logs").iterdir()} == {
        f"{task}.log" for task in ("chief", "worker-0", "worker-1", "ps-0", "ps-1")
    }


def test_with_tf_config_every_task_runs_the_script_also_an_evaluator(criteo, tmp_path):
    model_dir = tmp_path / "run"
    train = train_command(
        criteo, model_dir, "--epochs=2", "--optimizer=sgd", "--learning_rate=1e-9"
    )
    launch = [sys.executable, str(SCRIPTS / "launch_local.py"), "--num_workers=2", "--num_ps=1"]
    launch += ["--evaluator", f"--log_dir={tmp_path / 'logs'}", "--", *train]
    # 0 only if all of them, the evaluator too, ended with 0.
    result = run(launch)
    assert result.returncode == 0, result.stderr + result.stdout
    summary = read_summary(model_dir)
    assert (summary["num_workers"], summary["num_ps"]) == (2, 1)
    assert summary["global_step"] == 2 * NUM_BLOCKS / M
    names = {path.name for path in model_dir.iterdir()}
    assert names == {"checkpoints", "summary.json", "logs", ".lock"}

    # At this learning rate the model stays what it was: the training loss of an epoch is that of
    # the model on all training examples, each counted once.
    dataset, model = restore(criteo, summary["checkpoint"], tf.keras.optimizers.SGD())
    losses = re.findall(r"^epoch ./2: loss (\S+),", result.stdout, re.MULTILINE)
    expected = log_loss(model, dataset.train)
    assert [float(loss) for loss in losses] == pytest.approx([expected] * 2, abs=1e-4)

    again = run([*launch, "--noresume"])
    # 2 is that of the chief, 1 that of the tasks that it tells to end: the first one counts.
    assert again.returncode in (1, 2)
    assert f"train: model_dir: expected a new or an empty folder, found a run in {model_dir}" in (
        again.stderr
    )
    assert "Traceback" not in again.stderr
    assert read_summary(model_dir) == summary


def test_one_training_goes_through_the_modes_by_the_flag_alone(criteo, tmp_path):
    model_dir = tmp_path / "run"
    # Mode, workers, parameter servers, examples per gradient, global steps of its epoch of 472.
    modes = [
        ("multi_worker_mirrored", 2, 0, 32, 8),
        ("gba", 2, 1, 16, 8),
        ("parameter_server", 2, 1, 16, 30),
        ("one_device", 1, 0, 64, 8),
    ]
    global_step = 0
    for epoch, (strategy, num_workers, num_ps, local_batch_size, steps) in enumerate(modes, 1):
        result = run(
            train_command(criteo, model_dir, f"--strategy={strategy}", f"--epochs={epoch}")
        )
        assert result.returncode == 0, result.stderr + result.stdout
        assert result.stdout.count(": loss ") == 1, result.stdout
        if epoch > 1:
            resumed = (
                f"resumed from global step {global_step}, saved by {modes[epoch - 2][0]}: epoch"
            )
            assert f"{resumed} {epoch}, after 0 of its examples\n" in result.stdout
        global_step += steps
        summary = read_summary(model_dir)
        assert (summary["num_workers"], summary["num_ps"]) == (num_workers, num_ps)
        assert (summary["global_batch_size"], summary["local_batch_size"]) == (64, local_batch_size)
        assert summary["gradients_per_update"] == {32: 2, 16: 4, 64: 1}[local_batch_size] or (
            strategy == "parameter_server" and summary["gradients_per_update"] == 1
        )
        assert summary["global_step"] == global_step
        assert (summary["epochs"], summary["examples"]) == (epoch, epoch * NUM_TRAIN)
        # The 30 tokens of the epoch under GBA stay in the books.
        assert summary["tokens"].get("issued", 0) == (NUM_BLOCKS if epoch > 1 else 0)
        assert summary["auc"] > 0.5
        assert not NOISE.search(result.stdout + result.stderr), result.stdout + result.stderr

    saved = sorted(folder.name for folder in (model_dir / "checkpoints").glob("0*"))
    assert saved == ["00000008", "00000016", "00000046", "00000054"]
    again = run(train_command(criteo, model_dir, "--strategy=one_device", "--epochs=4"))
    assert again.returncode == 0 and "4 epochs of 4 are trained already" in again.stdout
    changed = {"auc", "loss"}
    assert {k: v for k, v in read_summary(model_dir).items() if k not in changed} == {
        k: v for k, v in summary.items() if k not in changed
    }

    other = run(train_command(criteo, model_dir, "--strategy=one_device", "--learning_rate=0.5"))
    assert other.returncode == 2
    assert "learning_rate" in other.stderr and "Traceback" not in other.stderr


def variables_of(checkpoint):
    """Key -> value of what is trained, the optimizer's variables too."""
    reader = tf.train.load_checkpoint(checkpoint)
    keys = [key for key in reader.get_variable_to_shape_map() if key.endswith("VARIABLE_VALUE")]
    # Metrics and counters of saves are of one process.
    keys = [key for key in keys if not re.match("model/_mean_loss|model/keras_api|save_co", key)]
    return {key: reader.get_tensor(key) for key in keys}


def test_a_run_that_was_killed_in_the_middle_of_an_update_ends_with_the_bits_of_one_that_was_not(
    criteo, tmp_path
):
    # One worker makes its gradients in order. A save after every 5th of them; an update has 4.
    flags = ["--epochs=2", "--num_workers=1", "--optimizer=adam", "--save_every_steps=5"]
    whole = run(train_command(criteo, tmp_path / "whole", *flags))
    assert whole.returncode == 0, whole.stderr + whole.stdout
    summary = read_summary(tmp_path / "whole")

    model_dir = tmp_path / "killed"
    running = Running(train_command(criteo, model_dir, *flags), stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(list(model_dir.glob("checkpoints/0*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    running.process.kill()
    running.end()
    assert not (model_dir / "summary.json").exists()
    newest = max(model_dir.glob("checkpoints/0*"))
    [buffered] = json.loads((newest / "training.json").read_text())["buffered_gradients"]
    assert buffered["tokens"]["buffered"] > 0, "it was to be killed in the middle of an update"

    again = run(train_command(criteo, model_dir, *flags))
    assert again.returncode == 0, again.stderr + again.stdout
    assert f"resumed from global step {int(newest.name)}, saved by gba: epoch 1," in again.stdout
    resumed = read_summary(model_dir)
    for key in ("global_step", "epochs", "examples", "tokens", "auc", "loss"):
        assert resumed[key] == summary[key], key
    expected, found = variables_of(summary["checkpoint"]), variables_of(resumed["checkpoint"])
    assert found.keys() == expected.keys() and len(expected) > 20
    for key, value in expected.items():
        assert np.array_equal(found[key], value), key


def test_other_data_are_not_gone_on_with(criteo, tmp_path):
    model_dir, flags = tmp_path / "run", ["--strategy=one_device", "--epochs=1"]
    assert run(train_command(criteo, model_dir, *flags)).returncode == 0
    (tmp_path / "data").mkdir()
    write_criteo(tmp_path / "data" / "train.txt", NUM_ROWS, lambda row, category: row % 2)
    result = run(train_command(tmp_path / "data", model_dir, *flags))
    assert result.returncode == 2
    assert "training_data" in result.stderr and "Traceback" not in result.stderr


def test_no_worker_of_all_reduce_waits_for_one_that_may_not_write(criteo, tmp_path):
    model_dir = tmp_path / "run"
    command = train_command(criteo, model_dir, "--strategy=multi_worker_mirrored")
    claim = ModelDir(model_dir, resume=True)
    tasks = LocalCluster(command, 2, 0, log_dir=tmp_path / "logs")
    with tasks:
        # Not `wait`, which ends all when one has failed: here they have to end by themselves.
        codes = {task: p.wait(TIMEOUT_SECONDS) for task, p in tasks.processes.items()}
    claim.release()
    assert codes == {"chief": 1, "worker-0": 2, "worker-1": 2}
    said = [tasks.log_path(f"worker-{index}").read_text() for index in range(2)]
    assert "in use by another run" in said[0]
    assert "expected 2 workers that can train, found 1" in said[1]
    assert "Traceback" not in said[0] + said[1]


def test_few_examples_and_held_out_ones_of_one_class(tmp_path):
    # 8 to train on, less than a batch; 2 held out, both of class 0.
    write_criteo(tmp_path / "train.txt", 10, lambda row, category: int(row < 5))
    model_dir = tmp_path / "run"
    result = run(train_command(tmp_path, model_dir, "--epochs=6", "--num_workers=1", "--num_ps=2"))
    assert result.returncode == 0, result.stderr + result.stdout
    summary = read_summary(model_dir)
    assert summary["auc"] is None
    # A block of 8 per epoch: one update of 4, and one of the 2 that are left.
    assert (summary["tokens"]["issued"], summary["global_step"]) == (6, 2)
    assert summary["examples"] == 6 * 8
    assert "AUC undefined" in result.stdout


def test_ctrl_c_in_a_terminal_leaves_no_process_and_no_summary(criteo, tmp_path):
    model_dir = tmp_path / "run"
    command = train_command(criteo, model_dir, "--epochs=10000")
    # A terminal of 80 columns, in which what is written to the standard input is typed.
    in_terminal = (
        "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )
    running = Running(
        [sys.executable, "-c", in_terminal, *command], stdin=subprocess.PIPE, bufsize=0
    )
    running.wait_for("epoch 2/10000: loss")
    running.wait_for("\repoch")
    running.process.stdin.write(b"\x03")
    assert running.end() == 130
    assert "stopped by SIGINT" in running.output
    assert "Traceback" not in running.output
    assert not (model_dir / "summary.json").exists()
    # What was saved after an epoch is whole.
    assert tf.train.latest_checkpoint(str(model_dir / "checkpoints")) is not None


def test_a_worker_that_dies_costs_its_token_and_not_the_run(criteo, tmp_path):
    model_dir = tmp_path / "run"
    epochs = 30
    running = Running(train_command(criteo, model_dir, f"--epochs={epochs}"))
    running.wait_for("epoch 2/30: loss")
    os.kill(tasks_of(running.command)["worker-1"], signal.SIGKILL)
    assert running.end() == 0, running.output
    assert running.output.count("worker-1 was killed by signal 9 (Killed); the others go on") == 1
    assert "GRPC" not in running.output, "one line, not what gRPC has to say"
    summary = read_summary(model_dir)
    tokens = summary["tokens"]
    # The step of the dead worker is repeated by the other one. Its own token is lost, or counts if
    # it died between the commit and the answer.
    steps = epochs * NUM_BLOCKS
    done = tokens["applied"] + tokens["decayed"]
    assert tokens["issued"] == done + tokens["lost"]
    assert tokens["issued"] in (steps, steps + 1) and done in (steps, steps + 1)
    assert tokens["outstanding"] == tokens["buffered"] == 0
    assert sum(summary["staleness"].values()) == done
    assert summary["global_step"] == math.ceil(done / M)


def test_without_any_worker_the_run_ends(criteo, tmp_path):
    running = Running(train_command(criteo, tmp_path / "run", "--epochs=10000"))
    running.wait_for("epoch 1/10000: loss")
    tasks = tasks_of(running.command)
    for worker in ("worker-0", "worker-1"):
        os.kill(tasks[worker], signal.SIGKILL)
    assert running.end() == 128 + signal.SIGKILL
    assert "was killed by signal 9 (Killed); the last lines of" in running.output
