"""Checkpoints of training in one process; those that pass between modes are in tests/cluster."""

import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.
from gba_tf.checkpoint import CheckpointError, Progress, TrainingCheckpoint, total_stats
from gba_tf.ops.token_server import TokenStats

keras = tf.keras
legacy = tf.keras.optimizers.legacy

DATA = np.arange(24.0).reshape(8, 3).astype("float32") / 24, np.arange(8.0)[:, None]

# Goes on with what it finds, saves in an endless loop, and is killed at some moment.
SAVES_FOR_EVER = """
import sys
import gba_tf, numpy as np, tensorflow as tf
from gba_tf.checkpoint import Progress, TrainingCheckpoint

model = tf.keras.Sequential([tf.keras.layers.Dense(500, use_bias=False) for _ in range(4)])
model.build([None, 500])
model.compile("adam", "mse")
checkpoint = TrainingCheckpoint(sys.argv[1], model, max_to_keep=2)
progress = checkpoint.restore()
step = int(model.optimizer.iterations)
assert (progress.examples if progress else 0) == step
for variable in model.weights if progress else ():
    assert np.all(variable.numpy() == step)
while True:
    step += 1
    model.optimizer.iterations.assign(step)
    for variable in model.weights:
        variable.assign(tf.fill(variable.shape, float(step)))
    checkpoint.save(Progress(epoch=0, examples=step))
    print(step, flush=True)
"""


def make_model(optimizer="adam", units=(4, 1), dtype=None):
    names = ["hidden", "output", "extra"]
    model = keras.Sequential(
        [
            keras.layers.Dense(n, name=name, dtype=dtype)
            for n, name in zip(units, names, strict=False)
        ]
    )
    model.build([None, 3])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def train(model, steps=2):
    data = tf.data.Dataset.from_tensors(DATA).repeat()
    model.fit(data, steps_per_epoch=steps, verbose=0)


def state_of(model):
    variables = model.optimizer.variables
    variables = variables() if callable(variables) else variables
    return [variable.numpy().tolist() for variable in [*model.weights, *variables]]


@pytest.fixture
def saved(tmp_path):
    """The folder of a run with a checkpoint of make_model() after two steps."""
    model = make_model()
    train(model)
    TrainingCheckpoint(tmp_path, model).save(Progress(epoch=2, examples=0))
    return tmp_path


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: keras.optimizers.AdamW(0.1, use_ema=True, amsgrad=True),
        lambda: legacy.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: legacy.SGD(0.1, momentum=0.9, decay=0.1),
        lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    ],
)
def test_training_goes_on_with_the_same_bits(make_optimizer, tmp_path):
    model = make_model(make_optimizer())
    train(model)
    path = TrainingCheckpoint(tmp_path, model).save(Progress(1, 16, 2.5))
    assert path == str(tmp_path / "checkpoints" / "00000002" / "variables")
    restored = make_model(make_optimizer())
    assert TrainingCheckpoint(tmp_path, restored).restore() == Progress(1, 16, 2.5, "one_device")
    assert state_of(restored) == state_of(model)
    train(model)
    train(restored)
    assert state_of(restored) == state_of(model)
    assert int(restored.optimizer.iterations) == 4


def test_what_is_saved_can_be_read_without_gba_tf(saved):
    path = tf.train.latest_checkpoint(saved / "checkpoints")
    assert path == tf.train.latest_checkpoint(saved / "checkpoints" / "00000002")
    kernel = make_model()
    TrainingCheckpoint(saved, kernel).restore()
    found = tf.train.load_checkpoint(path).get_tensor(
        "model/layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE"
    )
    assert found.tolist() == kernel.layers[0].kernel.numpy().tolist()


def test_the_learning_rate_that_training_had_reached_is_restored(tmp_path):
    model = make_model()
    model.optimizer.learning_rate = 0.125
    TrainingCheckpoint(tmp_path, model).save(Progress(0, 0))
    restored = make_model()
    TrainingCheckpoint(tmp_path, restored).restore()
    assert float(restored.optimizer.learning_rate) == 0.125


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    model = make_model()
    before = state_of(model)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    assert checkpoint.restore() is None
    assert not checkpoint.changed_by_restore
    assert state_of(model)[: len(before)] == before
    assert total_stats(model.distribute_strategy) == TokenStats(0, 0, 0, 0, 0, 0, 0, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_model(units=(5, 1)),
            r"hidden/kernel \(model/layer_with_weights-0/kernel.*\): the model has shape \[3, 5\],"
            r" the checkpoint \[3, 4\]",
        ),
        (
            lambda: make_model(dtype="float64"),
            r"hidden/kernel .* the model has dtype float64, the checkpoint float32",
        ),
        (
            lambda: make_model(units=(4, 1, 1)),
            r"extra/kernel \(model/layer_with_weights-2/kernel.*\): the checkpoint has no such",
        ),
        (
            lambda: make_model(units=(4,)),
            r"output/kernel \(model/layer_with_weights-1/kernel.*\): the model has no such",
        ),
        (
            lambda: make_model("nadam"),
            "it was written with optimizer Adam, and the model is compiled with Nadam",
        ),
        (
            lambda: make_model(keras.optimizers.Adam(amsgrad=True)),
            r"v(hat)?/\S+ \(optimizer/.*\): the checkpoint has no such variable",
        ),
        (
            lambda: make_model(legacy.Adam()),
            "it was written with optimizer Adam, and the model is compiled with legacy Adam",
        ),
        (
            lambda: make_model(
                keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
            ),
            r"current_learning_rate .* the checkpoint has no such variable",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(make, message, saved):
    model = make()
    checkpoint = TrainingCheckpoint(saved, model)
    checkpoint._variables()  # Creates the slots.
    before = state_of(model)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.restore()
    error.match("Nothing was restored")
    error.match(str(saved / "checkpoints" / "00000002"))
    assert state_of(model) == before


def test_other_metrics_and_names_of_layers_do_not_matter(saved):
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.build([None, 3])
    model.compile("adam", "mse", metrics=["mse", "mape"])
    train(model)
    assert TrainingCheckpoint(saved, model).restore().epoch == 2
    assert int(model.optimizer.iterations) == 2


def test_other_settings_are_refused(tmp_path):
    settings = {"dataset": "movielens", "layers": (8, 4)}
    TrainingCheckpoint(tmp_path, make_model(), settings).save(Progress(0, 0))
    TrainingCheckpoint(tmp_path, make_model(), {**settings, "new": 1}).restore()
    with pytest.raises(
        CheckpointError,
        match=r"written with layers=\[8, 4\], and this run has layers=\[8, 2\]. Nothing was rest",
    ):
        TrainingCheckpoint(tmp_path, make_model(), {**settings, "layers": (8, 2)}).restore()


def test_a_damaged_checkpoint_is_refused_and_nothing_else_is_restored_instead(saved):
    model = make_model()
    checkpoint = TrainingCheckpoint(saved, model)
    checkpoint.restore()
    train(model, 1)
    path = pathlib.Path(checkpoint.save(Progress(3, 0)) + ".data-00000-of-00001")
    content = bytearray(path.read_bytes())
    content[7] ^= 4
    path.write_bytes(content)
    restored = make_model()
    before = [weight.numpy().tolist() for weight in restored.weights]
    with pytest.raises(CheckpointError, match=r"checksum of \S*variables.data.* global step 2\."):
        TrainingCheckpoint(saved, restored).restore()
    assert [weight.numpy().tolist() for weight in restored.weights] == before


def test_who_only_restores_leaves_alone_what_another_process_is_writing(saved):
    writing = saved / "checkpoints" / ".00000003.writing"
    writing.mkdir()
    assert TrainingCheckpoint(saved, make_model()).restore().epoch == 2
    assert writing.exists()


def test_a_model_that_is_not_ready_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="expected a compiled model, found one without an optim"):
        TrainingCheckpoint(tmp_path, model)
    model.compile("sgd")
    checkpoint = TrainingCheckpoint(tmp_path, model)
    with pytest.raises(ValueError, match="expected a model with variables, found one that is not"):
        checkpoint.save(Progress(0, 0))


def test_a_disk_that_is_too_small_leaves_the_checkpoint_before(saved):
    """The limit on the size of a file stands in for it: the same calls fail."""
    model = make_model()
    checkpoint = TrainingCheckpoint(saved, model)
    checkpoint.restore()
    train(model, 1)
    state = state_of(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 200, 2000):  # In the first file, and after some.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                OSError,
                match=r"expected about 264 bytes of space .*, found [\d,]+ bytes free \(File",
            ) as error:
                checkpoint.save(Progress(3, 0))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        error.match(r"The earlier one of global step 2 is complete: \S*00000002")
        names = {path.name for path in (saved / "checkpoints").iterdir()} - {".lock"}
        assert names == {"00000002", "checkpoint"}
        latest = tf.train.latest_checkpoint(saved / "checkpoints")
        assert latest == str(saved / "checkpoints" / "00000002" / "variables")
    # As soon as there is room it goes on.
    path = checkpoint.save(Progress(3, 0))
    assert tf.train.latest_checkpoint(saved / "checkpoints") == path
    restored = make_model()
    assert TrainingCheckpoint(saved, restored).restore().epoch == 3
    assert state_of(restored) == state


def test_a_process_killed_while_it_saves_leaves_a_checkpoint_to_go_on_with(tmp_path):
    rng = random.Random(0)
    steps = [0]
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = process.stdout.readline()  # Restored, checked, and saved once.
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        printed, errors = process.communicate()
        assert line and process.returncode == -signal.SIGKILL, errors[-3000:]
        assert int(line) > steps[-1]
        steps.append(int([line, *printed.splitlines()][-1]))
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert max(int(name) for name in names if name.isdigit()) in (steps[-1], steps[-1] + 1)


def test_the_callback_saves_after_every_epoch_and_every_so_many_steps(tmp_path):
    model = make_model()
    data = tf.data.Dataset.from_tensors(DATA).repeat()
    checkpoint = TrainingCheckpoint(tmp_path / "epochs", model)
    fit = {"x": data, "steps_per_epoch": 5, "epochs": 2, "verbose": 0}
    model.fit(**fit, callbacks=[checkpoint.callback()])
    assert checkpoint._files.steps() == [5, 10]
    assert checkpoint.restore() == Progress(2, 0, 0.0, "one_device")

    def progress():
        return Progress(0, int(model.optimizer.iterations) * 8)

    checkpoint = TrainingCheckpoint(tmp_path / "steps", model)
    model.fit(**fit, callbacks=[checkpoint.callback(progress, save_every_steps=2)])
    assert checkpoint._files.steps() == [12, 14, 15, 17, 19, 20]
    assert checkpoint._files.read(17).metadata["progress"]["examples"] == 17 * 8
    with pytest.raises(ValueError, match="save_every_steps: expected `progress` too"):
        checkpoint.callback(save_every_steps=2)
    with pytest.raises(ValueError, match="save_every_steps: expected at least 1, found 0"):
        checkpoint.callback(progress, save_every_steps=0)
