"""The models that tests of checkpoints pass between modes, and what they compare."""

import numpy as np
import tensorflow as tf

from gba_tf import logical_variables, optimizer_hooks

keras = tf.keras
legacy = tf.keras.optimizers.legacy
schedules = tf.keras.optimizers.schedules

NUM_ROWS, NUM_IDS, LOCAL_BATCH = 11, 3, 4

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
            keras.layers.Embedding(NUM_ROWS, 4, initializer, input_length=NUM_IDS),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5, activation="tanh", kernel_initializer=initializer),
            keras.layers.Dense(1, kernel_initializer=initializer),
        ]
    )
    model.build([None, NUM_IDS])
    model.compile(make_optimizer(), loss="mse")
    return model


def state_of(model):
    """Key -> value of every variable of the model and its optimizer, shards put together."""
    with model.distribute_strategy.scope():
        optimizer_hooks.build(model.optimizer, model.trainable_variables)
    variables = logical_variables.of(tf.train.Checkpoint(model=model, optimizer=model.optimizer))
    return {variable.key: _whole(variable) for variable in variables}


def _whole(variable):
    parts = [part.numpy() for _, part in variable.parts]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def examples(number):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, NUM_ROWS, (number, NUM_IDS)).astype("int32")
    return ids, rng.normal(size=(number, 1)).astype("float32")


def fit(model, first_batch, num_batches):
    dataset = tf.data.Dataset.from_tensor_slices(examples(100 * LOCAL_BATCH)).batch(LOCAL_BATCH)
    dataset = dataset.skip(first_batch).take(num_batches)
    model.fit(dataset, steps_per_epoch=num_batches, verbose=0)


def in_scope(strategy, make, *args):
    with strategy.scope():
        return make(*args)


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
    table, kernel = list(state_of(model).values())[:2]
    return table, kernel
