"""The central test: with nobody late, GBA equals plain Keras training with batches of G.

One worker takes M local batches per update, in order. Parameters, all optimizer slots and the
iterations must then equal those of a single process that trains on batches of G = M * B; only the
order in which a sum of G terms is rounded differs.

float64 models are compared to 1e-10 of the largest value of a tensor: their rounding is 1e-16, and
a square root of a small second moment amplifies it by less than the million that is left. float32
rounds to 6e-8 and is compared to 1e-5 for the same reason, with less to amplify.
"""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.

keras = tf.keras
legacy = tf.keras.optimizers.legacy
schedules = tf.keras.optimizers.schedules

LOCAL_BATCH = 4
NUM_UPDATES = 4
# A local batch has 12 ids, so rows repeat within it and from one to the next.
NUM_ROWS, NUM_IDS, NUM_NUMBERS = 11, 3, 4
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

# Parameter servers, and shards of every variable.
SHAPES = {"1 PS": (1, None), "2 PS": (2, None), "3 PS, 2 shards": (3, 2)}

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "SGD Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "Adam amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "RMSprop centered": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.9),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.001),
    "legacy SGD": lambda: legacy.SGD(0.1),
    "legacy SGD momentum": lambda: legacy.SGD(0.1, momentum=0.9),
    "legacy SGD Nesterov": lambda: legacy.SGD(0.1, momentum=0.9, nesterov=True),
    "legacy Adagrad": lambda: legacy.Adagrad(0.1),
    "legacy Adadelta": lambda: legacy.Adadelta(0.1),
    "legacy Adam": lambda: legacy.Adam(0.1),
    "legacy Adam amsgrad": lambda: legacy.Adam(0.1, amsgrad=True),
    "legacy Adamax": lambda: legacy.Adamax(0.1),
    "legacy Nadam": lambda: legacy.Nadam(0.1),
    "legacy RMSprop centered": lambda: legacy.RMSprop(0.1, centered=True, momentum=0.9),
    "legacy Ftrl": lambda: legacy.Ftrl(0.1, l1_regularization_strength=0.001),
    "exponential decay": lambda: keras.optimizers.Adam(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "piecewise constant": lambda: keras.optimizers.SGD(
        schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01]), momentum=0.9
    ),
    "legacy exponential decay": lambda: legacy.Adam(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "legacy decay": lambda: legacy.SGD(0.1, momentum=0.9, decay=0.3),
    "weight decay": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7),
    "EMA overwriting": lambda: keras.optimizers.Adam(
        0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    ),
    "fixed loss scale": lambda: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), dynamic=False, initial_scale=8.0
    ),
    "legacy fixed loss scale": lambda: keras.mixed_precision.LossScaleOptimizer(
        legacy.SGD(0.1, momentum=0.9), dynamic=False, initial_scale=8.0
    ),
}


# Tight enough to change every update.
CLIPPING = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.001),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    "Adam with clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.01),
    "legacy clipnorm": lambda: legacy.SGD(0.1, clipnorm=0.01),
    "legacy clipvalue": lambda: legacy.SGD(0.1, clipvalue=0.001),
    "legacy global_clipnorm": lambda: legacy.SGD(0.1, global_clipnorm=0.01),
}


class FixedValues(keras.initializers.Initializer):
    """The same values in a single process and, cut into shards, on parameter servers."""

    def __init__(self, seed):
        self._seed = seed

    def __call__(self, shape, dtype=None):
        values = np.random.default_rng(self._seed).normal(0.0, 0.5, shape)
        return tf.constant(values, dtype)


class WithUnusedWeight(keras.layers.Layer):
    """Passes its input on; its weight has no gradient."""

    def build(self, input_shape):
        self.unused = self.add_weight(
            "unused", [5], initializer=FixedValues(9), dtype=self.variable_dtype
        )

    def call(self, inputs):
        return inputs


def make_model(dtype):
    """An embedding whose rows repeat, dense layers, a frozen layer, a weight without gradient."""
    ids = keras.Input([NUM_IDS], dtype="int32")
    numbers = keras.Input([NUM_NUMBERS], dtype="float64" if dtype == "float64" else "float32")

    def dense(units, seed, name, **kwargs):
        return keras.layers.Dense(
            units,
            kernel_initializer=FixedValues(seed),
            bias_initializer=FixedValues(seed + 100),
            dtype=dtype,
            name=name,
            **kwargs,
        )

    embedding = keras.layers.Embedding(
        NUM_ROWS, 4, embeddings_initializer=FixedValues(1), dtype=dtype, name="embedding"
    )
    x = keras.layers.Flatten(dtype=dtype)(embedding(ids))
    x = keras.layers.Concatenate(dtype=dtype)([x, tf.cast(numbers, x.dtype)])
    x = dense(6, 2, "hidden", activation="tanh")(x)
    x = WithUnusedWeight(dtype=dtype, name="unused")(x)
    x = dense(5, 3, "frozen", activation="tanh", trainable=False)(x)
    return keras.Model([ids, numbers], dense(1, 4, "output")(x))


def make_data(gradients_per_update):
    rng = np.random.default_rng(0)
    examples = LOCAL_BATCH * gradients_per_update * NUM_UPDATES
    ids = rng.integers(0, NUM_ROWS, (examples, NUM_IDS)).astype("int32")
    numbers = rng.normal(size=(examples, NUM_NUMBERS))
    labels = rng.normal(size=(examples, 1))
    return (ids, numbers), labels


def dataset(batch_size, gradients_per_update):
    examples = tf.data.Dataset.from_tensor_slices(make_data(gradients_per_update))
    return examples.batch(batch_size, drop_remainder=True)


def values_of(variables):
    """The values, shards of one variable put together."""
    whole = {}
    for position, variable in enumerate(variables):
        part = re.search(r"/part_\d+", variable.name)
        key = variable.name.replace(part[0], "") if part else position
        shards = getattr(variable, "variables", [variable])
        whole.setdefault(key, []).extend(shard.numpy() for shard in shards)
    return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in whole.values()]


def state_of(model):
    variables = model.optimizer.variables
    return {
        "parameters": values_of(model.weights),
        "slots": values_of(variables() if callable(variables) else variables),
        "iterations": int(model.optimizer.iterations),
    }


@functools.cache
def plain_keras(make_optimizer, dtype="float64", gradients_per_update=4):
    """What a single process gets, without a strategy and with batches of G."""
    model = make_model(dtype)
    model.compile(optimizer=make_optimizer(), loss="mse")
    model.fit(dataset(LOCAL_BATCH * gradients_per_update, gradients_per_update), verbose=0)
    return state_of(model)


def train_with_gba(strategy, make_optimizer, dtype="float64"):
    gradients_per_update = strategy.config.gradients_per_update
    with strategy.scope():
        model = make_model(dtype)
        model.compile(optimizer=make_optimizer(), loss="mse")
    model.fit(
        dataset(LOCAL_BATCH, gradients_per_update),
        steps_per_epoch=NUM_UPDATES * gradients_per_update,
        epochs=1,
        verbose=0,
    )
    return model


def assert_equal_states(found, expected, tolerance=TOLERANCE["float64"]):
    assert found["iterations"] == expected["iterations"]
    for kind in ("parameters", "slots"):
        assert len(found[kind]) == len(expected[kind])
        for a, b in zip(found[kind], expected[kind], strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            scale = np.max(np.abs(b), initial=0.0)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


_strategies = {}


def strategy_of_shape(cluster, num_ps, shards=None, gradients_per_update=4):
    """The models of several tests are trained on one strategy, one after the other."""
    shape = num_ps, shards, gradients_per_update
    if cluster.latest_strategy is None or _strategies.get(shape) is not cluster.latest_strategy:
        partitioners = tf.distribute.experimental.partitioners
        _strategies[shape] = cluster.strategy(
            num_workers=1,
            num_ps=num_ps,
            global_batch_size=LOCAL_BATCH * gradients_per_update,
            local_batch_size=LOCAL_BATCH,
            variable_partitioner=partitioners.FixedShardsPartitioner(shards) if shards else None,
        )
    return _strategies[shape]


# The scope makes pytest run the tests of one shape together.
@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def strategy(shape, cluster):
    return strategy_of_shape(cluster, *shape)


def test_the_reference_moves_what_is_trained_and_nothing_else():
    before, after = values_of(make_model("float64").weights), plain_keras(OPTIMIZERS["SGD"])
    moved = [np.any(a != b) for a, b in zip(before, after["parameters"], strict=True)]
    # Embedding, hidden kernel and bias, unused, frozen kernel and bias, output kernel and bias.
    assert moved == [True, True, True, False, False, False, True, True]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_equals_plain_keras(strategy, name):
    model = train_with_gba(strategy, OPTIMIZERS[name])
    assert_equal_states(state_of(model), plain_keras(OPTIMIZERS[name]))
    stats = strategy.stats(model.optimizer)
    assert stats.staleness == {0: 4 * NUM_UPDATES}
    assert stats.global_step == NUM_UPDATES


@pytest.mark.parametrize("num_ps, shards", [(2, None), (3, 3)])
@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "Adam", "RMSprop", "Ftrl"])
def test_float32_training_equals_plain_keras(cluster, num_ps, shards, name):
    strategy = strategy_of_shape(cluster, num_ps, shards)
    model = train_with_gba(strategy, OPTIMIZERS[name], "float32")
    expected = plain_keras(OPTIMIZERS[name], "float32")
    assert_equal_states(state_of(model), expected, TOLERANCE["float32"])


@pytest.mark.parametrize("name", list(CLIPPING))
def test_clipping_acts_on_the_aggregated_gradient(strategy, shape, name):
    _, shards = shape
    if shards and "clipnorm" in name and "global" not in name:
        with pytest.raises(NotImplementedError, match="needs the whole gradient of each variable"):
            train_with_gba(strategy, CLIPPING[name])
        return
    expected = plain_keras(CLIPPING[name])
    unclipped = plain_keras(OPTIMIZERS["Adam" if "Adam" in name else "SGD"])
    assert not np.allclose(expected["parameters"][0], unclipped["parameters"][0], rtol=1e-3)
    assert_equal_states(state_of(train_with_gba(strategy, CLIPPING[name])), expected)


# tf-keras itself refuses mixed precision for sharded variables.
@pytest.fixture(scope="module", params=[1, 2])
def unsharded_num_ps(request):
    return request.param


@pytest.fixture
def unsharded(unsharded_num_ps, cluster):
    return strategy_of_shape(cluster, unsharded_num_ps)


def moves(dtype, state):
    before = values_of(make_model(dtype).weights)
    return [b - a for a, b in zip(before, state["parameters"], strict=True)]


@pytest.mark.parametrize("policy, tolerance", [("mixed_float16", 2**-9), ("mixed_bfloat16", 2**-6)])
def test_mixed_precision_equals_plain_keras_to_the_rounding_of_its_gradients(
    unsharded, policy, tolerance
):
    # Keras rounds a sum over G examples to 11 (8) bits, GBA the M sums over B examples.
    def optimizer():
        sgd = keras.optimizers.SGD(0.1)
        if policy == "mixed_bfloat16":
            return sgd
        return keras.mixed_precision.LossScaleOptimizer(sgd, dynamic=False, initial_scale=64.0)

    found = state_of(train_with_gba(unsharded, optimizer, policy))
    expected = plain_keras(optimizer, policy)
    assert found["iterations"] == expected["iterations"] == NUM_UPDATES
    for a, b in zip(moves(policy, found), moves(policy, expected), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b)))


# A scale of 16 doubles after every second update. From 2**20 on every gradient here overflows,
# update after update, which halves the scale and leaves the parameters.
@pytest.mark.parametrize("initial_scale, final_scale", [(2.0**4, 2.0**6), (2.0**24, 2.0**20)])
def test_a_dynamic_loss_scale_moves_once_per_update(unsharded, initial_scale, final_scale):
    def optimizer():
        return keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=initial_scale, dynamic_growth_steps=2
        )

    model = train_with_gba(unsharded, optimizer, "mixed_float16")
    found, expected = state_of(model), plain_keras(optimizer, "mixed_float16")
    assert float(model.optimizer.loss_scale) == final_scale
    assert found["iterations"] == expected["iterations"] == NUM_UPDATES
    for a, b in zip(moves("mixed_float16", found), moves("mixed_float16", expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-9 * np.max(np.abs(b)))
    assert np.any(moves("mixed_float16", found)[0]) == (initial_scale < final_scale)


@pytest.mark.parametrize("name", ["Adam", "legacy SGD momentum"])
def test_a_custom_loop_equals_plain_keras(strategy, name):
    with strategy.scope():
        model = make_model("float64")
        model.optimizer = optimizer = OPTIMIZERS[name]()

    @tf.function
    def step(iterator):
        def compute(features, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(features) - labels))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(compute, args=next(iterator))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset(LOCAL_BATCH, 4)))
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(4 * NUM_UPDATES)]
    coordinator.join()
    assert_equal_states(state_of(model), plain_keras(OPTIMIZERS[name]))
    # The first M losses are those of the parameters before the first update.
    (ids, numbers), labels = make_data(4)
    outputs = make_model("float64")([ids[:16], numbers[:16]]).numpy()
    squares = np.square(outputs - labels[:16]).reshape(4, LOCAL_BATCH)
    found = [loss.fetch() for loss in losses[:4]]
    np.testing.assert_allclose(found, squares.mean(axis=1), rtol=1e-12)


def test_a_number_of_gradients_that_is_no_power_of_two(cluster):
    strategy = strategy_of_shape(cluster, num_ps=2, gradients_per_update=3)
    model = train_with_gba(strategy, OPTIMIZERS["Adam"])
    expected = plain_keras(OPTIMIZERS["Adam"], gradients_per_update=3)
    assert_equal_states(state_of(model), expected)
