"""The model of mode_pairs_test.py, and one of its two workers of all-reduce.

Argument: a folder with a model folder for each mode. Restores each of them and leaves what it found
in `found`; then trains, and saves what other modes are to restore.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

import gba_tf
from gba_tf.checkpoint import Progress, TrainingCheckpoint

ALL_REDUCE = "multi_worker_mirrored"
NUM_ROWS, NUM_IDS, BATCH = 11, 3, 4


def make_model(seed):
    """An embedding, moving averages, a dense layer; slots and a schedule in the optimizer."""
    initializer = tf.keras.initializers.RandomNormal(seed=seed)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(NUM_ROWS, 4, initializer, input_length=NUM_IDS),
            tf.keras.layers.Flatten(),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(1, kernel_initializer=initializer),
        ]
    )
    model.build([None, NUM_IDS])
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(tf.keras.optimizers.Adam(schedule), loss="mse")
    return model


def train(model, num_steps, batch=BATCH):
    """Some steps, on random examples."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, NUM_ROWS, (batch, NUM_IDS)).astype("int32")
    labels = rng.normal(size=(batch, 1)).astype("float32")
    data = tf.data.Dataset.from_tensors((ids, labels)).repeat()
    model.fit(data, steps_per_epoch=num_steps, verbose=0)


def state_of(model):
    """Key -> value of every variable of the model and its optimizer, shards put together."""
    state = {}
    for logical in TrainingCheckpoint("", model)._variables():
        shards = getattr(logical.variable, "variables", [logical.variable])
        values = [shard.numpy() for shard in shards]
        state[logical.key] = np.concatenate(values) if len(values) > 1 else values[0]
    return state


def save(folder, model, number):
    """Saves a model that was trained; returns its state."""
    TrainingCheckpoint(folder, model).save(Progress(epoch=number, examples=number + 1))
    return state_of(model)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    strategy = gba_tf.create_strategy(ALL_REDUCE, global_batch_size=2 * BATCH)
    leads = strategy.extended.should_checkpoint
    for model_dir in sorted(folder.glob("from-*")):
        with strategy.scope():
            model = make_model(seed=99)
        progress = TrainingCheckpoint(model_dir, model).restore()
        state = state_of(model)
        if leads:
            numbers = np.array([progress.epoch, progress.examples])
            np.savez(folder / "found" / f"{progress.strategy}.npz", progress=numbers, **state)
    # Keras gives each worker half of a batch.
    train(model, 5, 2 * BATCH)
    state = save(folder / f"from-{ALL_REDUCE}", model, 7)
    if leads:
        np.savez(folder / f"{ALL_REDUCE}.npz", **state)


if __name__ == "__main__":
    main()
