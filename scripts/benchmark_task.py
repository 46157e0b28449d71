"""One process of scripts/benchmark.py: chief, worker or parameter server of a mode, or the ceiling.

The chief trains what the benchmark asks for over a Unix socket: for each request, a dictionary of
the settings below, it trains a model anew, answers "ready" after a warm-up, and then times one
epoch for each "go". None ends it, and with it the other tasks.
"""

import multiprocessing.connection
import os
import sys
import time

from gba_tf import benchmarking, cluster
from gba_tf.cluster_config import ClusterConfig

NUM_FIELDS = 26
ROWS_PER_FIELD = 10_000
EMBEDDING_DIM = 16
NUM_NUMERIC = 13
HIDDEN_UNITS = (256, 128)
EXAMPLES = 32_768  # Each worker trains on these again and again.
# In the ids' distribution half of a batch of 512 examples are distinct rows.
ZIPF_EXPONENT = 1.2


def create_one_table(optimizer: str, steps_per_execution: int):
    """DeepFM-like, in plain Keras: one table for all fields, looked up without deduplication."""
    import tensorflow as tf

    keras = tf.keras
    ids = keras.Input((NUM_FIELDS,), dtype=tf.int32)
    numeric = keras.Input((NUM_NUMERIC,))
    rows = NUM_FIELDS * ROWS_PER_FIELD
    embeddings = keras.layers.Embedding(rows, EMBEDDING_DIM)(ids)
    weights = keras.layers.Embedding(rows, 1)(ids)
    total = tf.reduce_sum(embeddings, axis=1)
    squares = tf.reduce_sum(embeddings * embeddings, axis=1)
    second_order = 0.5 * tf.reduce_sum(total * total - squares, axis=1, keepdims=True)
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(embeddings), numeric])
    for units in HIDDEN_UNITS:
        deep = keras.layers.Dense(units, "relu")(deep)
    first_order = tf.reduce_sum(weights, axis=1) + keras.layers.Dense(1)(numeric)
    logits = first_order + second_order + keras.layers.Dense(1)(deep)
    model = keras.Model([ids, numeric], logits)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model


def create_deepfm(optimizer: str, steps_per_execution: int):
    """gba_tf.models.DeepFM: one table as well, of which it looks up distinct rows only."""
    from gba_tf.features import CategoricalFeature, NumericFeature
    from gba_tf.models import DeepFM

    features = [CategoricalFeature(f"c{i}", ROWS_PER_FIELD) for i in range(NUM_FIELDS)]
    features += [NumericFeature(f"n{i}") for i in range(NUM_NUMERIC)]
    model = DeepFM(features, EMBEDDING_DIM, HIDDEN_UNITS)
    model.compile(optimizer=optimizer, steps_per_execution=steps_per_execution)
    ids, numeric, _ = _examples(2)
    # Built now: variables must not be created while a worker's first step is traced.
    model(_columns(ids, numeric))
    return model


MODELS = {"one_table": create_one_table, "deepfm": create_deepfm}


def _examples(count: int):
    """(ids within their field [count, 26], numbers [count, 13], labels [count, 1])."""
    import numpy as np

    rng = np.random.default_rng(0)
    ids = (rng.zipf(ZIPF_EXPONENT, (count, NUM_FIELDS)) - 1) % ROWS_PER_FIELD
    numeric = rng.random((count, NUM_NUMERIC), dtype=np.float32)
    labels = rng.integers(0, 2, (count, 1)).astype(np.float32)
    return ids.astype(np.int32), numeric, labels


def _columns(ids, numeric) -> dict:
    columns = {f"c{i}": ids[..., i] for i in range(NUM_FIELDS)}
    columns.update({f"n{i}": numeric[..., i] for i in range(NUM_NUMERIC)})
    return columns


def create_dataset(model: str, batch_size: int):
    """Batches without end that are ready in memory, so that no mode waits for data."""
    import numpy as np
    import tensorflow as tf

    num_batches = max(1, EXAMPLES // batch_size)
    ids, numeric, labels = (
        part.reshape(num_batches, batch_size, -1) for part in _examples(num_batches * batch_size)
    )
    if model == "deepfm":
        features = _columns(ids, numeric)
        labels = labels[..., 0]
    else:
        first_rows = np.arange(NUM_FIELDS, dtype=np.int32) * ROWS_PER_FIELD
        features = (ids + first_rows, numeric)
    batches = tf.data.Dataset.from_tensor_slices((features, labels))
    return batches.cache().repeat().prefetch(2)


def create_strategy(mode: str, gradients_per_update: int, config: ClusterConfig | None):
    """The strategy of a mode; the ceiling has TensorFlow's default one."""
    import tensorflow as tf

    if mode == benchmarking.CEILING:
        return tf.distribute.get_strategy()
    resolver = cluster.cluster_resolver(config)
    if mode == benchmarking.PARAMETER_SERVER:
        return tf.distribute.ParameterServerStrategy(resolver)
    import gba_tf

    # One strategy for all batch sizes: of G and B it needs to know G / B only.
    return gba_tf.GBAStrategy(resolver, global_batch_size=gradients_per_update, local_batch_size=1)


def train(request: dict, strategy, connection: multiprocessing.connection.Connection) -> None:
    """Trains one model: a warm-up epoch, then a timed one for each "go"."""
    import tensorflow as tf

    class TimedEpochs(tf.keras.callbacks.Callback):
        """Holds each epoch but the first back until it is asked for; reports what it took.

        All in one fit(), so that tracing and the making of the workers' data sets stay outside.
        Keras joins all workers before it ends an epoch.
        """

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                return
            connection.recv()
            self._updates = int(self.model.optimizer.iterations)
            self._start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                connection.send("ready")
                return
            seconds = time.perf_counter() - self._start
            updates = int(self.model.optimizer.iterations) - self._updates
            connection.send({"seconds": seconds, "updates": updates})

    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MODELS[request["model"]](request["optimizer"], request["steps_per_execution"])

    def dataset_fn(context):
        del context  # All workers train on the same batches; only the speed matters.
        return create_dataset(request["model"], request["local_batch_size"])

    if strategy is tf.distribute.get_strategy():
        source = dataset_fn(None)
    else:
        source = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
    model.fit(
        source,
        steps_per_epoch=request["steps"],
        epochs=1 + request["repeats"],
        callbacks=[TimedEpochs()],
        verbose=0,
    )


def main(argv: list[str]) -> None:
    mode, address, gradients_per_update = argv[1], argv[2], int(argv[3])
    config = None
    if mode == benchmarking.CEILING:
        # Before TensorFlow counts the cores. The last core: interrupts tend to be on the first.
        os.sched_setaffinity(0, {benchmarking.available_cores()[-1]})
    else:
        config = ClusterConfig.from_env()
        cluster.serve_if_not_chief(config)
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    if mode == benchmarking.CEILING:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = create_strategy(mode, gradients_per_update, config)
    with (
        multiprocessing.connection.Listener(address, family="AF_UNIX") as listener,
        listener.accept() as connection,
    ):
        while (request := connection.recv()) is not None:
            train(request, strategy, connection)


if __name__ == "__main__":
    main(sys.argv)
