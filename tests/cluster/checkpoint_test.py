"""Checkpoints that pass from mode to mode, and gradients in them that wait for an update."""

import functools
import json
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.checkpoint import CheckpointError, Progress, TrainingCheckpoint, total_stats
from gba_tf.config import Policy
from gba_tf.local_cluster import LocalCluster

keras = tf.keras
legacy = tf.keras.optimizers.legacy
schedules = tf.keras.optimizers.schedules

TASK = pathlib.Path(__file__).with_name("checkpoint_task.py")
NUM_ROWS, NUM_IDS, LOCAL_BATCH = 11, 3, 4
TWO_SHARDS = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)

OPTIMIZERS = {
    "Adam with a schedule": lambda: keras.optimizers.Adam(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "SGD with averages": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "legacy Adam with a schedule": lambda: legacy.Adam(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "dynamic loss scale": lambda: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(0.1)
    ),
}


def make_model(make_optimizer, seed=0):
    """An embedding, a layer with moving averages, and dense layers."""
    initializer = keras.initializers.RandomNormal(seed=seed)
    model = keras.Sequential(
        [
            keras.layers.Embedding(
                NUM_ROWS, 4, embeddings_initializer=initializer, input_length=NUM_IDS
            ),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5, activation="tanh", kernel_initializer=initializer),
            keras.layers.Dense(1, kernel_initializer=initializer),
        ]
    )
    model.build([None, NUM_IDS])
    model.compile(make_optimizer(), loss="mse")
    return model


def examples(number):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, NUM_ROWS, (number, NUM_IDS)).astype("int32")
    return ids, rng.normal(size=(number, 1)).astype("float32")


def fit(model, first_batch, num_batches):
    dataset = tf.data.Dataset.from_tensor_slices(examples(100 * LOCAL_BATCH)).batch(LOCAL_BATCH)
    dataset = dataset.skip(first_batch).take(num_batches)
    model.fit(dataset, steps_per_epoch=num_batches, verbose=0)


def state_of(checkpoint):
    """Key -> value of every variable, shards put together."""
    return {v.key: _whole(v.variable) for v in checkpoint._variables()}


def _whole(variable):
    shards = getattr(variable, "variables", None)
    return np.concatenate([s.numpy() for s in shards]) if shards else variable.numpy()


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert np.array_equal(found[key], value), key


def in_scope(strategy, make, *args):
    with strategy.scope():
        return make(*args)


@pytest.fixture
def gba(cluster):
    """gba(num_workers, num_ps, gradients_per_update, ...) -> GBAStrategy."""

    def make(num_workers=1, num_ps=2, gradients_per_update=4, **options):
        return cluster.strategy(
            num_workers,
            num_ps,
            global_batch_size=gradients_per_update * LOCAL_BATCH,
            local_batch_size=LOCAL_BATCH,
            **options,
        )

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_passes_from_one_process_to_three_parameter_servers_and_back(name, gba, tmp_path):
    make = functools.partial(make_model, OPTIMIZERS[name])
    model = make()
    fit(model, 0, 3)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    checkpoint.save(Progress(epoch=1, examples=12, train_seconds=1.5))
    expected = state_of(checkpoint)
    assert int(model.optimizer.iterations) == 3

    sharded = in_scope(gba(num_ps=3, variable_partitioner=TWO_SHARDS), make, 1)
    restored = TrainingCheckpoint(tmp_path, sharded)
    assert restored.restore() == Progress(1, 12, 1.5, "one_device")
    assert_same_bits(state_of(restored), expected)

    fit(sharded, 3, 8)
    assert int(sharded.optimizer.iterations) == 5
    path = restored.save(Progress(epoch=2, examples=0))
    expected = state_of(restored)
    back = make(2)
    restored = TrainingCheckpoint(tmp_path, back)
    assert restored.restore() == Progress(2, 0, 0.0, "gba")
    assert_same_bits(state_of(restored), expected)
    reader = tf.train.load_checkpoint(path)
    for key, value in expected.items():
        assert np.array_equal(reader.get_tensor(key), value)


class FixedTable(keras.initializers.Initializer):
    """The same values in a single process and, cut into shards, on parameter servers."""

    def __call__(self, shape, dtype=None):
        return tf.constant(np.random.default_rng(1).normal(size=shape), dtype)


def make_linear_model(learning_rate=0.5):
    """prediction = sum_j table[id_j] . kernel_j; what an update does is easy to say in numpy."""
    model = keras.Sequential(
        [
            keras.layers.Embedding(
                NUM_ROWS,
                2,
                embeddings_initializer=FixedTable(),
                input_length=NUM_IDS,
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    model.build([None, NUM_IDS])
    model.compile(keras.optimizers.SGD(learning_rate), loss="mse")
    return model


def linear_gradients(table, kernel, ids, labels):
    """Of mean((prediction - label) ** 2), float64."""
    kernel = kernel.reshape(NUM_IDS, 2)
    errors = np.einsum("bjk,jk->b", table[ids], kernel) - labels[:, 0]
    factors = 2.0 / len(ids) * errors
    table_gradient = np.zeros_like(table)
    for j in range(NUM_IDS):
        np.add.at(table_gradient, ids[:, j], factors[:, None] * kernel[j])
    kernel_gradient = np.einsum("b,bjk->jk", factors, table[ids])
    return table_gradient, kernel_gradient.reshape(-1, 1)


def after_update(table, kernel, batches, learning_rate=0.5):
    """What plain SGD makes of the mean gradient of some batches, numbered as by fit()."""
    ids, labels = examples(100 * LOCAL_BATCH)
    parts = [slice(b * LOCAL_BATCH, (b + 1) * LOCAL_BATCH) for b in batches]
    gradients = [linear_gradients(table, kernel, ids[p], labels[p]) for p in parts]
    table_gradient, kernel_gradient = (np.mean(g, axis=0) for g in zip(*gradients, strict=True))
    return table - learning_rate * table_gradient, kernel - learning_rate * kernel_gradient


def linear_state(model):
    table, kernel = (_whole(v.variable) for v in TrainingCheckpoint("", model)._variables()[:2])
    return table, kernel


def test_a_run_resumed_in_the_middle_of_a_global_step_ends_with_the_same_bits(gba, tmp_path):
    make = functools.partial(make_model, OPTIMIZERS["Adam with a schedule"])
    options = {"num_ps": 3, "variable_partitioner": TWO_SHARDS}
    model = in_scope(gba(**options), make)
    fit(model, 0, 12)
    expected = state_of(TrainingCheckpoint(tmp_path, model))
    assert int(model.optimizer.iterations) == 3

    model = in_scope(gba(**options), make)
    fit(model, 0, 6)
    TrainingCheckpoint(tmp_path, model).save(Progress(epoch=0, examples=6 * LOCAL_BATCH))
    strategy = gba(**options)
    model = in_scope(strategy, make, 1)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    assert checkpoint.restore() == Progress(0, 6 * LOCAL_BATCH, 0.0, "gba")
    stats = total_stats(strategy)
    assert (stats.issued, stats.applied, stats.buffered, stats.global_step) == (6, 4, 2, 1)
    fit(model, 6, 3)
    # Twice more, once in the middle again.
    checkpoint.save(Progress(epoch=0, examples=9 * LOCAL_BATCH))
    strategy = gba(**options)
    model = in_scope(strategy, make, 1)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    checkpoint.restore()
    fit(model, 9, 3)
    assert_same_bits(state_of(checkpoint), expected)
    stats = total_stats(strategy)
    assert (stats.issued, stats.applied, stats.buffered, stats.global_step) == (12, 12, 0, 3)
    assert strategy.stats().global_step == 3
    assert stats.staleness == {0: 12}


def test_gradients_that_wait_are_applied_where_another_run_goes_on(gba, cluster, tmp_path, capfd):
    model = in_scope(gba(num_ps=2, variable_partitioner=TWO_SHARDS), make_linear_model)
    table, kernel = (value.astype("float64") for value in linear_state(model))
    fit(model, 0, 7)
    table, kernel = after_update(table, kernel, range(0, 4))
    for found, expected in zip(linear_state(model), (table, kernel), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    TrainingCheckpoint(tmp_path, model).save(Progress(epoch=0, examples=7 * LOCAL_BATCH))
    expected = after_update(table, kernel, range(4, 7))
    capfd.readouterr()

    for make_strategy in (
        lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
        lambda: gba(num_ps=2, gradients_per_update=2, variable_partitioner=TWO_SHARDS),
        lambda: gba(num_ps=3),
        lambda: gba(num_ps=2, policy=Policy("bsp", 4)),
        lambda: cluster.tensorflows_strategy(1, 3, TWO_SHARDS),
    ):
        strategy = make_strategy()
        model = in_scope(strategy, make_linear_model)
        assert TrainingCheckpoint(tmp_path, model).restore().examples == 7 * LOCAL_BATCH
        said = capfd.readouterr().out
        assert "3 gradients of the checkpoint waited for an update" in said
        assert "applied, divided by 3, as global step 2" in said
        for found, value in zip(linear_state(model), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
        assert int(model.optimizer.iterations) == 2
        stats = total_stats(strategy)
        assert (stats.issued, stats.applied, stats.buffered, stats.global_step) == (7, 7, 0, 2)
        assert stats.staleness == {0: 7}
    # The last one is TensorFlow's own.
    fit(model, 7, 2)
    expected = linear_state(model)
    path = TrainingCheckpoint(tmp_path, model).save(Progress(epoch=0, examples=9 * LOCAL_BATCH))
    assert pathlib.Path(path).parent.name == "00000004"
    model = make_linear_model()
    checkpoint = TrainingCheckpoint(tmp_path, model)
    assert checkpoint.restore() == Progress(0, 9 * LOCAL_BATCH, 0.0, "parameter_server")
    for found, value in zip(linear_state(model), expected, strict=True):
        assert np.array_equal(found, value)
    assert total_stats(model.distribute_strategy).applied == 7


def test_a_switch_of_modes_applies_what_waits_before_it_saves(gba, tmp_path, capfd):
    model = in_scope(gba(), make_linear_model)
    start = [value.astype("float64") for value in linear_state(model)]
    fit(model, 0, 3)
    path = TrainingCheckpoint(tmp_path, model).save(
        Progress(epoch=0, examples=3 * LOCAL_BATCH), keep_partial=False
    )
    assert "3 gradients left in the buffers: applied, divided by 3" in capfd.readouterr().out
    folder = pathlib.Path(path).parent
    assert folder.name == "00000001"
    assert json.loads((folder / "training.json").read_text())["buffered_gradients"] == []
    model = make_linear_model()
    TrainingCheckpoint(tmp_path, model).restore()
    for found, value in zip(linear_state(model), after_update(*start, range(3)), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_replaces_what_the_same_run_has_in_its_buffers(gba, tmp_path):
    strategy = gba()
    model = in_scope(strategy, make_linear_model)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    fit(model, 0, 6)
    checkpoint.save(Progress(epoch=0, examples=6 * LOCAL_BATCH))
    fit(model, 6, 2)
    expected = state_of(checkpoint)
    fit(model, 8, 3)
    for _ in range(2):
        checkpoint.restore()
        stats = total_stats(strategy)
        assert (stats.issued, stats.applied, stats.buffered, stats.global_step) == (6, 4, 2, 1)
        fit(model, 6, 2)
        assert_same_bits(state_of(checkpoint), expected)
    assert strategy.stats().global_step == 2


def test_two_workers_of_all_reduce_go_on_with_what_three_parameter_servers_saved(
    gba, tmp_path, capfd
):
    make = functools.partial(make_model, OPTIMIZERS["Adam with a schedule"])
    model = in_scope(gba(num_ps=3, variable_partitioner=TWO_SHARDS), make)
    fit(model, 0, 8)
    checkpoint = TrainingCheckpoint(tmp_path / "model", model)
    checkpoint.save(Progress(epoch=4, examples=2))
    expected = state_of(checkpoint)
    linear_model = in_scope(gba(), make_linear_model)
    start = [value.astype("float64") for value in linear_state(linear_model)]
    fit(linear_model, 0, 3)
    TrainingCheckpoint(tmp_path / "linear", linear_model).save(Progress(epoch=0, examples=12))

    found = tmp_path / "found"
    found.mkdir()
    arguments = [str(a) for a in (__file__, tmp_path / "model", tmp_path / "linear", found)]
    with LocalCluster(
        [sys.executable, str(TASK), *arguments], num_workers=1, num_ps=0, log_dir=tmp_path / "logs"
    ) as workers:
        assert workers.wait() == 0, (tmp_path / "logs" / "worker-0.log").read_text()[-3000:]
        other_said = (tmp_path / "logs" / "worker-0.log").read_text()
    said = capfd.readouterr().out
    assert "progress Progress(epoch=4, examples=2, train_seconds=0.0, strategy='gba')" in said
    assert said.count("3 gradients of the checkpoint waited") == 1
    assert "applied 3" in said
    # The writer has no room for one, and the other worker does not wait for it.
    assert "not saved: [Errno 28] The checkpoint of global step 4 could not be saved" in said
    assert "because worker 0 could not write it" in other_said
    # Keras' own callbacks work there too.
    assert "epochs [0, 1]" in said
    assert (found / "chief-epoch-2").is_dir()

    for task in ("chief", "worker"):
        assert_same_bits(dict(np.load(found / f"restored-{task}.npz")), expected)
        table, kernel = list(np.load(found / f"linear-{task}.npz").values())[:2]
        expected_table, expected_kernel = after_update(*start, range(3))
        np.testing.assert_allclose(table, expected_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kernel, expected_kernel, rtol=1e-5, atol=1e-6)
    # The oldest is gone, and so is what the second worker had to write.
    names = sorted(path.name for path in (tmp_path / "model" / "checkpoints").iterdir())
    assert names == ["00000003", "00000004"]
    restored = TrainingCheckpoint(tmp_path / "model", make(2))
    assert restored.restore() == Progress(7, 0, 0.0, "multi_worker_mirrored")
    assert_same_bits(state_of(restored), dict(np.load(found / "trained-chief.npz")))


def test_what_waits_is_the_same_update_in_one_process_as_on_its_parameter_servers(gba, tmp_path):
    """Moving averages and the state of the optimizer too."""
    options = {"num_ps": 3, "variable_partitioner": TWO_SHARDS}
    for name in ("SGD with averages", "legacy Adam with a schedule", "dynamic loss scale"):
        make = functools.partial(make_model, OPTIMIZERS[name])
        strategy = gba(**options)
        model = in_scope(strategy, make)
        fit(model, 0, 7)
        checkpoint = TrainingCheckpoint(tmp_path / name, model)
        checkpoint.save(Progress(epoch=0, examples=0))
        strategy.flush()
        expected = state_of(checkpoint)
        checkpoint = TrainingCheckpoint(tmp_path / name, make(1))
        checkpoint.restore()
        found = state_of(checkpoint)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_the_callback_saves_within_an_epoch_while_workers_train(gba, tmp_path):
    strategy = gba(num_workers=2)
    model = in_scope(strategy, make_linear_model)
    checkpoint = TrainingCheckpoint(tmp_path / "a [name] with *", model)

    def progress():
        # Nothing is running when it is asked.
        stats = strategy.stats()
        assert stats.outstanding == 0
        return Progress(epoch=0, examples=stats.issued * LOCAL_BATCH)

    dataset = tf.data.Dataset.from_tensor_slices(examples(8)).batch(LOCAL_BATCH).repeat()
    callback = checkpoint.callback(progress, save_every_steps=3)
    model.fit(dataset, steps_per_epoch=7, verbose=0, callbacks=[callback])
    saved = [checkpoint._files.read(step).metadata for step in checkpoint._files.steps()]
    # After 3, 6 and 7 of 7 steps, of which the last two are of one global step.
    assert [m["progress"]["examples"] for m in saved] == [3 * LOCAL_BATCH, 7 * LOCAL_BATCH]
    assert [m["buffered_gradients"][0]["tokens"]["buffered"] for m in saved] == [3, 3]


def test_a_checkpoint_that_does_not_fit_changes_nothing_on_parameter_servers(gba, tmp_path):
    make = functools.partial(make_model, OPTIMIZERS["Adagrad"])
    TrainingCheckpoint(tmp_path, make()).save(Progress(epoch=0, examples=0))
    model = in_scope(gba(variable_partitioner=TWO_SHARDS), make_linear_model)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    before = state_of(checkpoint)
    with pytest.raises(
        CheckpointError, match=r"embedding\S*/embeddings .* \[11, 2\], .* \[11, 4\]"
    ):
        checkpoint.restore()
    assert_same_bits(state_of(checkpoint), before)
    with pytest.raises(CheckpointError, match="Parameter server task 0 does not see .*elsewhere"):
        checkpoint._require_shared(tmp_path / "elsewhere")


def test_gradients_of_another_optimizer_are_not_left_out(gba, tmp_path):
    strategy = gba()
    model = in_scope(strategy, make_linear_model)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    fit(model, 0, 1)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(ValueError, match="expected the optimizer that the model had, found anoth"):
        checkpoint.save(Progress(epoch=0, examples=0))
    checkpoint = TrainingCheckpoint(tmp_path, model)
    message = r"1 gradient for \['SGD'\] in the buffers.* strategy.flush\(\) first"
    with pytest.raises(ValueError, match=message):
        checkpoint.save(Progress(epoch=0, examples=0))
    assert list(checkpoint._files.directory.iterdir()) == []
    strategy.flush()
    checkpoint.save(Progress(epoch=0, examples=0))
    assert checkpoint._files.steps() == [0]
