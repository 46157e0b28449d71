"""Checkpoints that pass from mode to mode, and gradients in them that wait for an update."""

import functools
import importlib.util
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

TASK = pathlib.Path(__file__).with_name("checkpoint_task.py")
MODELS = pathlib.Path(__file__).with_name("checkpoint_models.py")
_spec = importlib.util.spec_from_file_location("checkpoint_models", MODELS)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
OPTIMIZERS, LOCAL_BATCH = models.OPTIMIZERS, models.LOCAL_BATCH
examples, fit, in_scope = models.examples, models.fit, models.in_scope
make_model, state_of = models.make_model, models.state_of
make_linear_model, linear_state = models.make_linear_model, models.linear_state
after_update = models.after_update
TWO_SHARDS = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert np.array_equal(found[key], value), key


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
    expected = state_of(model)
    assert int(model.optimizer.iterations) == 3

    sharded = in_scope(gba(num_ps=3, variable_partitioner=TWO_SHARDS), make, 1)
    restored = TrainingCheckpoint(tmp_path, sharded)
    assert restored.restore() == Progress(1, 12, 1.5, "one_device")
    assert_same_bits(state_of(sharded), expected)

    fit(sharded, 3, 8)
    assert int(sharded.optimizer.iterations) == 5
    path = restored.save(Progress(epoch=2, examples=0))
    expected = state_of(sharded)
    back = make(2)
    restored = TrainingCheckpoint(tmp_path, back)
    assert restored.restore() == Progress(2, 0, 0.0, "gba")
    assert_same_bits(state_of(back), expected)
    reader = tf.train.load_checkpoint(path)
    for key, value in expected.items():
        assert np.array_equal(reader.get_tensor(key), value)


def test_a_run_resumed_in_the_middle_of_a_global_step_ends_with_the_same_bits(gba, tmp_path):
    make = functools.partial(make_model, OPTIMIZERS["Adam with a schedule"])
    options = {"num_ps": 3, "variable_partitioner": TWO_SHARDS}
    model = in_scope(gba(**options), make)
    fit(model, 0, 12)
    expected = state_of(model)
    assert int(model.optimizer.iterations) == 3

    model = in_scope(gba(**options), make)
    fit(model, 0, 6)
    TrainingCheckpoint(tmp_path, model).save(Progress(epoch=0, examples=6 * LOCAL_BATCH))
    # What decides over the weight of late gradients, or what gba does not use, may be another.
    strategy = gba(**options, policy=Policy("gba", 4, staleness_tolerance=9, staleness_bound=8))
    model = in_scope(strategy, make, 1)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    assert checkpoint.restore() == Progress(0, 6 * LOCAL_BATCH, 0.0, "gba")
    assert not checkpoint.changed_by_restore
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
    assert_same_bits(state_of(model), expected)
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
        checkpoint = TrainingCheckpoint(tmp_path, model)
        assert checkpoint.restore().examples == 7 * LOCAL_BATCH
        assert checkpoint.changed_by_restore
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
    path = checkpoint.save(Progress(epoch=0, examples=9 * LOCAL_BATCH))
    assert not checkpoint.changed_by_restore
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
    expected = state_of(model)
    fit(model, 8, 3)
    for _ in range(2):
        checkpoint.restore()
        stats = total_stats(strategy)
        assert (stats.issued, stats.applied, stats.buffered, stats.global_step) == (6, 4, 2, 1)
        fit(model, 6, 2)
        assert_same_bits(state_of(model), expected)
    assert strategy.stats().global_step == 2


def test_tokens_of_another_model_are_counted_once(gba, tmp_path):
    strategy = gba()
    model, other = (in_scope(strategy, make_linear_model) for _ in range(2))
    fit(model, 0, 6)
    fit(other, 0, 4)
    checkpoint = TrainingCheckpoint(tmp_path, model)
    checkpoint.save(Progress(epoch=0, examples=0))
    fit(model, 6, 5)
    fit(other, 4, 5)
    checkpoint.restore()
    # 6 of the model, as at the save; 9 of the other one, which were not taken back.
    stats = total_stats(strategy)
    assert (stats.issued, stats.applied, stats.buffered) == (6 + 9, 4 + 8, 2 + 1)
    strategy = gba()
    checkpoint = TrainingCheckpoint(tmp_path, in_scope(strategy, make_linear_model))
    checkpoint.restore()
    stats = total_stats(strategy)
    assert (stats.issued, stats.applied, stats.buffered) == (6 + 4, 4 + 4, 2)


def test_an_optimizer_that_takes_over_counts_the_tokens_of_the_one_before_once(gba, tmp_path):
    strategy = gba()
    model = in_scope(strategy, make_linear_model)
    fit(model, 0, 6)
    TrainingCheckpoint(tmp_path, model).save(Progress(epoch=0, examples=0))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.5), loss="mse")
    checkpoint = TrainingCheckpoint(tmp_path, model)
    checkpoint.restore()
    fit(model, 6, 3)
    stats = total_stats(strategy)
    assert (stats.issued, stats.applied, stats.buffered) == (9, 8, 1)
    assert int(model.optimizer.iterations) == 2


def test_two_workers_of_all_reduce_go_on_with_what_three_parameter_servers_saved(
    gba, tmp_path, capfd
):
    make = functools.partial(make_model, OPTIMIZERS["Adam with a schedule"])
    model = in_scope(gba(num_ps=3, variable_partitioner=TWO_SHARDS), make)
    fit(model, 0, 8)
    checkpoint = TrainingCheckpoint(tmp_path / "model", model)
    checkpoint.save(Progress(epoch=4, examples=2))
    expected = state_of(model)
    # Nobody else may save there while it could save again.
    del checkpoint
    for helper in ("worker-0", "worker-7"):
        (tmp_path / "model" / "checkpoints" / f".{helper}.scratch").mkdir()
    linear_model = in_scope(gba(), make_linear_model)
    start = [value.astype("float64") for value in linear_state(linear_model)]
    fit(linear_model, 0, 3)
    TrainingCheckpoint(tmp_path / "linear", linear_model).save(Progress(epoch=0, examples=12))

    found = tmp_path / "found"
    found.mkdir()
    arguments = [str(a) for a in (tmp_path / "model", tmp_path / "linear", found)]
    with LocalCluster(
        [sys.executable, str(TASK), *arguments], num_workers=1, num_ps=0, log_dir=tmp_path / "logs"
    ) as workers:
        assert workers.wait() == 0, (tmp_path / "logs" / "worker-0.log").read_text()[-3000:]
        other_said = (tmp_path / "logs" / "worker-0.log").read_text()
    said = capfd.readouterr().out
    assert "progress Progress(epoch=4, examples=2, train_seconds=0.0, strategy='gba')" in said
    assert said.count("3 gradients of the checkpoint waited") == 1
    assert "applied 3" in said
    # The writer has no place or no room for one, and the other worker does not wait for it.
    assert "without a place: not saved: [Errno 17] File exists: " in said
    assert "without room: not saved: [Errno 28] The checkpoint of global step 4 could not" in said
    for case in ("without a place", "without room"):
        assert (
            f"{case}: not saved: The checkpoint of global step 4 was not saved, because worker 0"
            " failed; see its error."
        ) in other_said
    assert "it was written with layers=2, and this run has layers=1. Nothing was restored" in said
    assert (
        "not restored: The checkpoint was not restored on every worker, because worker 0 failed;"
        " see its error."
    ) in other_said
    # Keras' own callbacks work there too.
    assert "epochs [0, 1]" in said
    assert (found / "chief-epoch-2").is_dir()

    for task in ("chief", "worker"):
        assert_same_bits(dict(np.load(found / f"restored-{task}.npz")), expected)
        table, kernel = list(np.load(found / f"linear-{task}.npz").values())[:2]
        expected_table, expected_kernel = after_update(*start, range(3))
        np.testing.assert_allclose(table, expected_table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kernel, expected_kernel, rtol=1e-5, atol=1e-6)
    # The oldest is gone, and so is what the second worker had to write, now or when it was killed.
    names = {path.name for path in (tmp_path / "model" / "checkpoints").iterdir()}
    assert names == {"00000003", "00000004", "checkpoint", ".lock"}
    latest = tf.train.latest_checkpoint(tmp_path / "model" / "checkpoints")
    assert latest == str(tmp_path / "model" / "checkpoints" / "00000004" / "variables")
    restored = make(2)
    progress = TrainingCheckpoint(tmp_path / "model", restored).restore()
    assert progress == Progress(7, 0, 0.0, "multi_worker_mirrored")
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
        expected = state_of(model)
        model = make(1)
        TrainingCheckpoint(tmp_path / name, model).restore()
        found = state_of(model)
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
    before = state_of(model)
    with pytest.raises(
        CheckpointError, match=r"embedding\S*/embeddings .* \[11, 2\], .* \[11, 4\]"
    ):
        checkpoint.restore()
    assert_same_bits(state_of(model), before)
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
    assert [path.name for path in checkpoint._files.directory.iterdir()] == [".lock"]
    strategy.flush()
    checkpoint.save(Progress(epoch=0, examples=0))
    assert checkpoint._files.steps() == [0]
