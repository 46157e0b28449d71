"""One of two workers of all-reduce that go on with the checkpoints of tests.

Arguments: the file of checkpoint_test.py, two model folders, and a folder for what is found.
"""

import importlib.util
import json
import os
import pathlib
import resource
import sys

import numpy as np
import tensorflow as tf


def main() -> None:
    test_path, model_dir, linear_model_dir, found_dir = sys.argv[1:]
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    # First of all: collective operations have to be set up before anything runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    spec = importlib.util.spec_from_file_location("checkpoint_test", test_path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    from gba_tf.checkpoint import Progress, TrainingCheckpoint, total_stats

    def write(name, state):
        np.savez(pathlib.Path(found_dir) / f"{name}-{task}.npz", **state)

    make_optimizer = tests.OPTIMIZERS["Adam with a schedule"]
    model = tests.in_scope(strategy, tests.make_model, make_optimizer, 1)
    checkpoint = TrainingCheckpoint(model_dir, model, max_to_keep=2)
    progress = checkpoint.restore()
    write("restored", tests.state_of(checkpoint))
    print("progress", progress, flush=True)
    checkpoint.save(progress)
    model.fit(
        tf.data.Dataset.from_tensors(tests.examples(8)).repeat(),
        steps_per_epoch=2,
        verbose=0,
        callbacks=[checkpoint.callback(lambda: Progress(7, 0), save_every_steps=1)],
    )
    write("trained", tests.state_of(checkpoint))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if task == "chief":
        # Enough for the semaphores of TensorFlow's collective operations.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        checkpoint.save(Progress(8, 0))
    except (OSError, RuntimeError) as error:
        print("not saved:", error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    keras_callbacks = tf.keras.callbacks
    history = model.fit(
        tf.data.Dataset.from_tensors(tests.examples(8)).repeat(),
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

    model = tests.in_scope(strategy, tests.make_linear_model)
    checkpoint = TrainingCheckpoint(linear_model_dir, model)
    checkpoint.restore()
    write("linear", tests.state_of(checkpoint))
    print("applied", total_stats(strategy).applied, flush=True)


if __name__ == "__main__":
    main()
