"""One of two workers of all-reduce that go on with the checkpoints of tests.

Arguments: two model folders, and a folder for what is found.
"""

import json
import os
import pathlib
import resource
import sys

import numpy as np
import tensorflow as tf


def main() -> None:
    model_dir, linear_model_dir, found_dir = sys.argv[1:]
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    # First of all: collective operations have to be set up before anything runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import checkpoint_models as models

    from gba_tf.checkpoint import Progress, TrainingCheckpoint, total_stats

    def write(name, state):
        np.savez(pathlib.Path(found_dir) / f"{name}-{task}.npz", **state)

    make_optimizer = models.OPTIMIZERS["Adam with a schedule"]
    model = models.in_scope(strategy, models.make_model, make_optimizer, 1)
    settings = {"layers": 2}
    checkpoint = TrainingCheckpoint(model_dir, model, settings, max_to_keep=2)
    progress = checkpoint.restore()
    write("restored", models.state_of(model))
    print("progress", progress, flush=True)
    checkpoint.save(progress)
    model.fit(
        tf.data.Dataset.from_tensors(models.examples(8)).repeat(),
        steps_per_epoch=2,
        verbose=0,
        callbacks=[checkpoint.callback(lambda: Progress(7, 0), save_every_steps=1)],
    )
    write("trained", models.state_of(model))

    def save(case):
        try:
            checkpoint.save(Progress(8, 0))
        except (OSError, RuntimeError) as error:
            print(f"{case}: not saved: {error}", flush=True)

    # The writer fails before the variables are read, which all workers do together, and after it.
    in_the_way = pathlib.Path(model_dir) / "checkpoints" / ".00000004.writing"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if task == "chief":
        in_the_way.touch()
    save("without a place")
    if task == "chief":
        in_the_way.unlink()
        # Enough for the semaphores of TensorFlow's collective operations.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    save("without room")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    # One worker does not go on with what another one has refused.
    before = models.state_of(model)
    settings = {"layers": 1 if task == "chief" else 2}
    try:
        TrainingCheckpoint(model_dir, model, settings).restore()
    except (ValueError, RuntimeError) as error:
        print(f"not restored: {error}", flush=True)
    after = models.state_of(model)
    assert all(np.array_equal(after[key], value) for key, value in before.items())

    keras_callbacks = tf.keras.callbacks
    history = model.fit(
        tf.data.Dataset.from_tensors(models.examples(8)).repeat(),
        steps_per_epoch=2,
        epochs=5,
        verbose=0,
        callbacks=[
            keras_callbacks.BackupAndRestore(f"{found_dir}/backup"),
            keras_callbacks.ModelCheckpoint(f"{found_dir}/{task}-epoch-{{epoch}}"),
            # Nothing is an improvement by 1e9, so that the first epoch stays the best one.
            keras_callbacks.EarlyStopping("loss", patience=1, min_delta=1e9),
        ],
    )
    print("epochs", history.epoch, flush=True)

    model = models.in_scope(strategy, models.make_linear_model)
    checkpoint = TrainingCheckpoint(linear_model_dir, model)
    checkpoint.restore()
    write("linear", models.state_of(model))
    print("applied", total_stats(strategy).applied, flush=True)


if __name__ == "__main__":
    main()
