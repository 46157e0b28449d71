"""What GBAStrategy promises besides zero staleness, on real workers and parameter servers.

Most models here have one weight w and the loss (w - y)^2 / 2, whose gradient over a batch is
w - mean(y): what training has to give is worked out in numpy, label by label.
"""

import numpy as np
import pytest
import tensorflow as tf

import gba_tf
from gba_tf.features import CategoricalFeature
from gba_tf.models.deepfm import DeepFM
from gba_tf.ops import gradient_buffer

keras = tf.keras
LEARNING_RATE = 0.5
LABELS = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0, -5.0, 3.0, 5.0, 8.0, 9.0, 7.0])


def half_square(labels, outputs):
    return 0.5 * tf.square(outputs - labels)


def weight_model(optimizer=None, **compile_options):
    inputs = keras.Input([1], dtype="float64")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
    model = keras.Model(inputs, layer(inputs))
    model.compile(optimizer or keras.optimizers.SGD(LEARNING_RATE), half_square, **compile_options)
    return model


def batches(labels, batch_size=1):
    labels = np.reshape(labels, [-1, 1])
    return tf.data.Dataset.from_tensor_slices((np.ones_like(labels), labels)).batch(batch_size)


def fit(model, labels, batch_size=1):
    steps = len(labels) // batch_size
    model.fit(batches(labels, batch_size), steps_per_epoch=steps, epochs=1, verbose=0)


def descend(w, *groups):
    """w after one update per group of labels."""
    for labels in groups:
        w -= LEARNING_RATE * (w - np.mean(labels))
    return w


def weight(model):
    return float(model.get_weights()[0][0, 0])


def assert_token_equation(stats):
    ended = stats.applied + stats.decayed + stats.lost
    assert stats.issued == ended + stats.outstanding + stats.buffered
    assert sum(stats.staleness.values()) == stats.applied + stats.decayed


def test_several_steps_per_execution_are_as_many_gradients(cluster):
    strategy = cluster.strategy(1, 2, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        model = weight_model(steps_per_execution=4)
    fit(model, LABELS[:8])
    expected = descend(0.0, LABELS[:2], LABELS[2:4], LABELS[4:6], LABELS[6:8])
    assert weight(model) == pytest.approx(expected, rel=1e-14)
    assert strategy.stats().issued == 8
    assert strategy.stats().global_step == int(model.optimizer.iterations) == 4


def wide_and_deep_model():
    wide = keras.experimental.LinearModel(kernel_initializer=keras.initializers.Constant(0.1))
    ones = keras.initializers.Constant(1.0)
    deep = keras.Sequential([keras.layers.Dense(1, kernel_initializer=ones)])
    model = keras.experimental.WideDeepModel(wide, deep)
    model.compile([keras.optimizers.legacy.Ftrl(0.1), keras.optimizers.Adam(0.1)], "mse")
    return model


@pytest.mark.parametrize("num_ps", [1, 2])
def test_two_optimizers_in_one_step_share_its_token(cluster, num_ps):
    rng = np.random.default_rng(0)
    features = rng.normal(size=[32, 3]).astype("float32")
    labels = rng.normal(size=[32, 1]).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(((features, features[:, ::-1]), labels))
    strategy = cluster.strategy(1, num_ps, global_batch_size=8, local_batch_size=2)
    plain = wide_and_deep_model()
    plain.fit(data.batch(8), verbose=0)
    with strategy.scope():
        model = wide_and_deep_model()
    model.fit(data.batch(2), steps_per_epoch=16, epochs=1, verbose=0)
    for found, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert strategy.stats().issued == 16
    for optimizer in model.optimizer:
        assert int(optimizer.iterations) == 4
        assert strategy.stats(optimizer).global_step == 4


def test_two_models_one_after_the_other_count_apart(cluster):
    strategy = cluster.strategy(1, 2, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        first, second = weight_model(), weight_model()
    assert strategy.stats() == gba_tf.TokenStats(0, 0, 0, 0, 0, 0, 0, {})
    fit(first, LABELS[:6])
    fit(second, LABELS[6:9])
    assert weight(first) == pytest.approx(descend(0.0, *np.split(LABELS[:6], 3)), rel=1e-14)
    assert weight(second) == pytest.approx(descend(0.0, LABELS[6:8]), rel=1e-14)
    of_first = strategy.stats(optimizer=first.optimizer)
    assert (of_first.issued, of_first.buffered, of_first.global_step) == (6, 0, 3)
    of_second = strategy.stats(optimizer=second.optimizer)
    assert (of_second.issued, of_second.buffered, of_second.global_step) == (3, 1, 1)
    assert strategy.stats() == of_second
    with pytest.raises(ValueError, match="expected an optimizer that was trained under this"):
        strategy.stats(optimizer=keras.optimizers.SGD())


def test_evaluation_and_prediction_take_no_tokens(cluster):
    strategy = cluster.strategy(1, 2, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        model = weight_model(metrics=["mae"])
    loss, mae = model.evaluate(batches(LABELS[:4]), steps=4, verbose=0)
    assert (loss, mae) == (np.mean(LABELS[:4] ** 2) / 2, np.mean(np.abs(LABELS[:4])))
    assert strategy.stats().issued == 0
    fit(model, LABELS[:5])
    before, w = strategy.stats(), weight(model)
    assert before.issued == 5
    _, mae = model.evaluate(batches(LABELS[:4]), steps=4, verbose=0)
    assert mae == pytest.approx(np.mean(np.abs(LABELS[:4] - w)), rel=1e-6)
    np.testing.assert_allclose(model.predict(np.ones([3, 1]), steps=3, verbose=0), [[w]] * 3)
    assert strategy.stats() == before


@pytest.mark.parametrize("num_ps", [1, 2])
def test_batch_statistics_move_once_per_update_by_the_mean_over_its_gradients(cluster, num_ps):
    strategy = cluster.strategy(1, num_ps, global_batch_size=6, local_batch_size=2)
    with strategy.scope():
        inputs = keras.Input([2], dtype="float64")
        normalization = keras.layers.BatchNormalization(momentum=0.75, dtype="float64")
        model = keras.Model(inputs, keras.layers.Dense(1, dtype="float64")(normalization(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    features = np.random.default_rng(0).normal(3.0, 2.0, [12, 2])
    data = tf.data.Dataset.from_tensor_slices((features, features[:, :1]))
    model.fit(data.batch(2), steps_per_epoch=6, epochs=1, verbose=0)

    # Two updates of three replicas with two examples each, as in synchronous training.
    local_batches = features.reshape(2, 3, 2, 2)
    mean, variance = np.zeros(2), np.ones(2)
    for replicas in local_batches:
        mean = 0.75 * mean + 0.25 * replicas.mean(axis=1).mean(axis=0)
        variance = 0.75 * variance + 0.25 * replicas.var(axis=1).mean(axis=0)
    np.testing.assert_allclose(normalization.moving_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(normalization.moving_variance.numpy(), variance, rtol=1e-12)
    # Outside of training it is assigned as usual.
    normalization.moving_mean.assign([1.0, 2.0])
    assert normalization.moving_mean.numpy().tolist() == [1.0, 2.0]


def test_a_model_may_call_functions_of_its_own(cluster):
    class Squared(keras.layers.Layer):
        def build(self, input_shape):
            self.w = self.add_weight("w", [1, 1], "float64", initializer="ones")

        @tf.function
        def call(self, inputs):
            return tf.cond(tf.reduce_any(inputs > 0), lambda: inputs * self.w, lambda: inputs)

    strategy = cluster.strategy(1, 2, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([1], dtype="float64"), Squared(dtype="float64")])
        model.compile(keras.optimizers.SGD(LEARNING_RATE), half_square)
    fit(model, LABELS[:4])
    expected = descend(1.0, LABELS[:2], LABELS[2:4])
    assert weight(model) == pytest.approx(expected, rel=1e-14)


def test_flush_applies_what_is_left_divided_by_its_own_number(cluster):
    strategy = cluster.strategy(1, 2, global_batch_size=4, local_batch_size=1)
    with strategy.scope():
        model = weight_model()
    fit(model, LABELS[:6])
    stats = strategy.stats()
    assert (stats.applied, stats.buffered, stats.global_step) == (4, 2, 1)
    assert weight(model) == pytest.approx(descend(0.0, LABELS[:4]), rel=1e-14)

    strategy.flush()
    stats = strategy.stats()
    assert (stats.applied, stats.buffered, stats.global_step) == (6, 0, 2)
    expected = descend(0.0, LABELS[:4], LABELS[4:6])
    assert weight(model) == pytest.approx(expected, rel=1e-14)
    assert int(model.optimizer.iterations) == 2
    assert held_gradients(strategy) == 0

    strategy.flush()
    assert strategy.stats() == stats
    fit(model, LABELS[6:10])
    assert weight(model) == pytest.approx(descend(expected, LABELS[6:10]), rel=1e-14)
    assert_token_equation(strategy.stats())


def test_a_partial_buffer_is_kept_for_the_next_fit(cluster):
    strategy = cluster.strategy(1, 1, global_batch_size=4, local_batch_size=1)
    with strategy.scope():
        model = weight_model()
    fit(model, LABELS[:3])
    assert weight(model) == 0.0
    assert held_gradients(strategy) == 3
    fit(model, LABELS[3:4])
    assert weight(model) == pytest.approx(descend(0.0, LABELS[:4]), rel=1e-14)
    assert held_gradients(strategy) == 0


def held_gradients(strategy):
    groups = strategy._groups.values()
    return sum(shard.buffer.stats()["num_gradients"] for g in groups for shard in g.shards)


def test_three_workers_push_what_three_parameter_servers_apply(cluster):
    strategy = cluster.strategy(3, 3, global_batch_size=8, local_batch_size=2)
    columns = [CategoricalFeature("user", 50), CategoricalFeature("item", 70)]
    with strategy.scope():
        model = DeepFM(columns, embedding_dim=8, hidden_units=[16], seed=1)
        model.compile(optimizer="adam")
    rng = np.random.default_rng(0)
    inputs = {"user": rng.integers(0, 50, 400), "item": rng.integers(0, 70, 400)}
    labels = rng.integers(0, 2, 400).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().batch(2)
    model.fit(data, steps_per_epoch=203, epochs=1, verbose=0)
    stats = strategy.stats()
    assert_token_equation(stats)
    assert (stats.issued, stats.outstanding, stats.lost) == (203, 0, 0)
    assert stats.global_step == int(model.optimizer.iterations) == 50
    assert (stats.applied + stats.decayed, stats.buffered) == (200, 3)
    assert held_gradients(strategy) == 3 * 3
    for group in strategy._groups.values():
        assert [shard.buffer.stats()["applied_steps"] for shard in group.shards] == [50] * 3


def test_variables_are_balanced_by_bytes(cluster):
    strategy = cluster.strategy(1, 3, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        shapes = [[100, 4], [50, 4], [40, 4], [10, 4], [], [60, 1]]
        variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i, shape in enumerate(shapes)]
    tasks = [tf.DeviceSpec.from_string(variable.device).task for variable in variables]
    # 1600 bytes; 800; 640; 160 more on the least, task 2; scalars on task 0; 240 on task 1, as 800
    # bytes are on both and the first wins.
    assert tasks == [0, 1, 2, 2, 0, 1]
    assert strategy.variable_bytes_per_ps() == (1600, 800 + 240, 640 + 160)


def test_a_second_run_on_living_parameter_servers_starts_without_tokens(cluster, monkeypatch):
    strategy = cluster.strategy(1, 1, global_batch_size=4, local_batch_size=1)
    with strategy.scope():
        model = weight_model()
    fit(model, LABELS[:5])
    assert held_gradients(strategy) == 1
    [group] = strategy._groups.values()
    old_run, old_name = gba_tf.strategy._RUN_ID, f"{strategy._name}/0"
    specs = group.shards[0].buffer.specs

    # What another process would have.
    monkeypatch.setattr(gba_tf.strategy, "_RUN_ID", "run-2")
    second = cluster.strategy(1, 1, global_batch_size=4, local_batch_size=1)
    with second.scope():
        model = weight_model()
    fit(model, LABELS[:4])
    assert second.stats() == gba_tf.TokenStats(4, 4, 0, 0, 0, 0, 1, {0: 4})
    assert weight(model) == pytest.approx(descend(0.0, LABELS[:4]), rel=1e-14)
    # The memory of the first run is free: under its name there is a new, empty buffer.
    device = group.shards[0].buffer.device
    reopened = gradient_buffer.GradientBuffer(device, old_run, old_name, specs)
    assert reopened.stats() == {"num_gradients": 0, "num_bytes": 0, "applied_steps": 0}
