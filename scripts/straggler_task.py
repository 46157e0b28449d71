"""One process of scripts/benchmark.py --suite=stragglers: any task of a cluster, in one mode.

The tasks that train (the chief; under multi_worker_mirrored every worker) take requests of
gba_tf.straggler_benchmark.Cell over Unix sockets, FOLDER/MODE-INDEX, train for each one with
Model.fit, and answer with what they counted in the timed part. None ends them, and with them the
other tasks.
"""

import json
import multiprocessing.connection
import os
import sys
import threading
import time

import tensorflow as tf

import gba_tf
from gba_tf.cluster_config import ClusterConfig
from gba_tf.ops import process
from gba_tf.ops.token_server import worker_identity
from gba_tf.straggler_benchmark import ALL_REDUCE, EXAMPLES_PER_GRADIENT

keras = tf.keras
NUM_FIELDS = 4
ROWS = 1000
EXAMPLES = 4096  # Each worker trains on these again and again.
_EDGE_POLL_SECONDS = 0.002


class Compute(keras.layers.Layer):
    """Stands for the computation of a large model: passes its input on after a while.

    Args:
      seconds: On all workers but worker 0, which takes `slow_factor` times as long.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def build(self, input_shape):
        # A variable, so that all factors are measured with one trace.
        self.slow_factor = self.add_weight(
            "slow_factor", (), initializer="ones", trainable=False, experimental_autocast=False
        )

    def call(self, inputs):
        is_slow = tf.equal(worker_identity()[0], 0)
        return process.sleep(inputs, self._seconds * tf.where(is_slow, self.slow_factor, 1.0))


class TimedPart(keras.callbacks.Callback):
    """Times a part of a fit() of one epoch, and counts gradients from update to update.

    Under all-reduce it is timed between steps. In the other modes fit() schedules steps, many more
    than are done so far, and a thread looks at the clock.

    Args:
      request: See gba_tf.straggler_benchmark.Cell.
      count: Returns the numbers of gradients applied and dropped so far.
      num_workers: N.
      all_reduce: Whether a step is done when it ends for fit().
    """

    def __init__(self, request: dict, count, num_workers: int, all_reduce: bool):
        super().__init__()
        self._supports_tf_logs = True
        self._request = request
        self._count = count
        self._num_workers = num_workers
        self._all_reduce = all_reduce
        self._training_ended = threading.Event()
        self._thread = threading.Thread(target=self._time_in_background, daemon=True)
        self.result: dict | None = None

    def on_train_begin(self, logs=None):
        self._before = sum(self._count())
        if not self._all_reduce:
            self._thread.start()

    def on_train_batch_end(self, batch, logs=None):
        if self._all_reduce and batch == self._request["warm_up_steps"] - 1:
            self._begin()
        elif self._all_reduce and batch == self.params["steps"] - 1:
            self._end()

    def on_train_end(self, logs=None):
        self._training_ended.set()
        if not self._all_reduce:
            self._thread.join()
        if self.result is None:
            raise RuntimeError(
                f"expected the timed part to end before the {self.params['steps']} steps; the"
                " machine may be too busy with other programs"
            )

    def _time_in_background(self) -> None:
        self._wait_for_update()
        time.sleep(self._request["warm_up_seconds"])
        self._wait_for_update()
        self._begin()
        time.sleep(self._request["seconds"])
        self._wait_for_update()
        # Every worker has a step still, besides those that wait for the rest of their update.
        if self.params["steps"] - (sum(self._count()) - self._before) >= 2 * self._num_workers:
            self._end()

    def _wait_for_update(self) -> None:
        before = self._count()
        while self._count() == before and not self._training_ended.wait(_EDGE_POLL_SECONDS):
            pass

    def _begin(self) -> None:
        self._start = self._now()

    def _end(self) -> None:
        seconds, applied, dropped = (b - a for a, b in zip(self._start, self._now(), strict=True))
        self.result = {"seconds": seconds, "applied": applied, "dropped": dropped}

    def _now(self) -> tuple[float, int, int]:
        return time.perf_counter(), *self._count()


def create_model(compute_seconds: float) -> keras.Model:
    """A small model, compiled, whose forward pass waits."""
    ids = keras.Input((NUM_FIELDS,), dtype=tf.int32)
    hidden = keras.layers.Flatten()(keras.layers.Embedding(NUM_FIELDS * ROWS, 8)(ids))
    hidden = keras.layers.Dense(32, "relu")(hidden)
    hidden = Compute(compute_seconds)(hidden)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile("Adagrad", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def create_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Batches of one gradient, without end."""
    del context  # All workers train on the same batches; only the speed matters.
    first_rows = tf.range(NUM_FIELDS, dtype=tf.int32) * ROWS
    shape = (EXAMPLES // EXAMPLES_PER_GRADIENT, EXAMPLES_PER_GRADIENT)
    ids = tf.random.stateless_uniform((*shape, NUM_FIELDS), (1, 2), 0, ROWS, tf.int32)
    labels = tf.cast(tf.random.stateless_uniform((*shape, 1), (3, 4)) < 0.5, tf.float32)
    return tf.data.Dataset.from_tensor_slices((ids + first_rows, labels)).cache().repeat()


def train(connection: multiprocessing.connection.Connection, settings: dict, strategy) -> None:
    """Answers requests until there are no more."""
    all_reduce = settings["mode"] == ALL_REDUCE
    with strategy.scope():
        model = create_model(settings["compute_seconds"])
    (compute,) = (layer for layer in model.layers if isinstance(layer, Compute))
    plan = gba_tf.plan_of(strategy)

    def count() -> tuple[int, int]:
        if isinstance(strategy, gba_tf.GBAStrategy):
            stats = strategy.stats()
            return stats.applied, stats.decayed
        return int(model.optimizer.iterations.numpy()) * plan.gradients_per_update, 0

    while (request := connection.recv()) is not None:
        compute.slow_factor.assign(request["slow_factor"])
        timed_part = TimedPart(request, count, plan.num_workers, all_reduce)
        model.fit(
            keras.utils.experimental.DatasetCreator(create_dataset),
            steps_per_epoch=request["steps"] + request.get("warm_up_steps", 0),
            callbacks=[timed_part],
            verbose=0,
        )
        connection.send(timed_part.result)
    gba_tf.flush(strategy)


def main(argv: list[str]) -> None:
    settings = json.loads(argv[1])
    strategy = gba_tf.create_strategy(
        settings["mode"],
        global_batch_size=settings["global_batch_size"],
        local_batch_size=settings["local_batch_size"],
    )
    tf.get_logger().setLevel("ERROR")
    index = ClusterConfig.from_env().task_index
    address = os.path.join(settings["folder"], f"{settings['mode']}-{index}")
    with (
        multiprocessing.connection.Listener(address, family="AF_UNIX") as listener,
        listener.accept() as connection,
    ):
        train(connection, settings, strategy)


if __name__ == "__main__":
    main(sys.argv)
