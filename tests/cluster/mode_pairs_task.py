"""The model of mode_pairs_test.py, and one of its two workers of all-reduce.

Argument: a folder with a model folder for each mode. Restores each of them and leaves what it found
in `found`; then trains, and saves what other modes are to restore.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import tensorflow as tf

import gba_tf
from gba_tf.checkpoint import Progress, TrainingCheckpoint

ALL_REDUCE = "multi_worker_mirrored"
BATCH = 4

_MODELS = pathlib.Path(__file__).with_name("checkpoint_models.py")
_spec = importlib.util.spec_from_file_location("checkpoint_models", _MODELS)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)
state_of = models.state_of


def make_model(seed):
    """With slots and a schedule in the optimizer."""
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return models.make_model(lambda: tf.keras.optimizers.Adam(schedule), seed)


def train(model, num_steps, batch=BATCH):
    """Some steps, on random examples."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, models.NUM_ROWS, (batch, models.NUM_IDS)).astype("int32")
    labels = rng.normal(size=(batch, 1)).astype("float32")
    data = tf.data.Dataset.from_tensors((ids, labels)).repeat()
    model.fit(data, steps_per_epoch=num_steps, verbose=0)


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
