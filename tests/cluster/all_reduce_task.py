"""A task of an all-reduce cluster: all_reduce_task.py FOLDER WHAT; see all_reduce_test.py.

A worker writes what it found to FOLDER/worker-N.json.
"""

import json
import os
import pathlib
import signal
import sys
import time

from gba_tf import cluster

LEARNING_RATE = 0.01


def one_weight(strategy):
    """y = w x with w = 0, trained on the mean squared error."""
    import tensorflow as tf

    with strategy.scope():
        layer = tf.keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
        model = tf.keras.Sequential([layer])
        model.compile(tf.keras.optimizers.SGD(LEARNING_RATE), "mse")
    return model


def numbers(texts):
    """A dataset of lines "x" becomes one of batches of 4 (x, 2 x)."""
    import tensorflow as tf

    def example(text):
        x = tf.strings.to_number(text)[tf.newaxis]
        return x, 2.0 * x

    return texts.map(example).batch(4)


def train_on_uneven_data(strategy, folder):
    """Fits on data that do not divide by the workers; returns what the test knows better."""
    import tensorflow as tf

    from gba_tf import models
    from gba_tf.features import CategoricalFeature, NumericFeature

    found = {}

    def fit(name, dataset, **settings):
        model = one_weight(strategy)
        model.fit(dataset, verbose=0, **settings)
        found[name] = [float(model.get_weights()[0][0, 0]), float(model.evaluate(lines, verbose=0))]

    lines = numbers(tf.data.Dataset.from_tensor_slices([str(x) for x in range(1, 8)]))
    fit("partial last batch", lines, epochs=2)
    fit("one example", numbers(tf.data.Dataset.from_tensor_slices(["3"])))
    fit("a single file", numbers(tf.data.TextLineDataset([str(folder / "1-to-7.txt")])))
    files = tf.data.Dataset.list_files(str(folder / "1-to-7.txt"))
    fit("a single listed file", numbers(files.interleave(tf.data.TextLineDataset)))
    paths = [str(folder / name) for name in ("1-to-7.txt", "8.txt")]
    fit("a file for each", numbers(tf.data.TextLineDataset(paths)), epochs=2)

    def shard(context):
        # Nothing at all for worker 1.
        return lines.unbatch().take(4 if context.input_pipeline_id == 0 else 0).batch(2)

    shards = strategy.distribute_datasets_from_function(shard)
    fit("an empty shard", shards, steps_per_epoch=2)

    with strategy.scope():
        features = (CategoricalFeature("a", 5), NumericFeature("x"))
        ranking = models.DeepFM(features, embedding_dim=4, hidden_units=(8,), seed=1)
        ranking.compile(tf.keras.optimizers.Adagrad(0.5))

    def part(context):
        # Global batches of 4 and 2 examples, in parts of 3 and 1, then of 2 and none.
        places = [[0, 1, 2], [4, 5]] if context.input_pipeline_id == 0 else [[3]]
        weights = [[1.5] * 3, [2.0] * 2] if context.input_pipeline_id == 0 else [[0.5]]
        arrays = json.loads((folder / "ranking.json").read_text())
        examples = tf.data.Dataset.from_tensor_slices(
            (
                {"a": tf.constant(arrays["a"]), "x": tf.constant(arrays["x"])},
                tf.constant(arrays["labels"]),
            )
        )
        batches = None
        for indices, weight in zip(places, weights, strict=True):
            chosen = examples.skip(indices[0]).take(len(indices)).batch(len(indices))
            batch = chosen.map(lambda columns, labels, w=weight: (columns, labels, tf.constant(w)))
            batches = batch if batches is None else batches.concatenate(batch)
        return batches

    history = ranking.fit(
        strategy.distribute_datasets_from_function(part), steps_per_epoch=2, verbose=0
    ).history
    found["ranking"] = [weight.tolist() for weight in ranking.get_weights()]
    found["ranking loss"] = history["loss"]
    return found


def train_until_the_end_of(strategy, task_index, signum):
    """Trains; worker `task_index` sends itself a signal in the middle of an epoch."""
    import tensorflow as tf

    class Die(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            own_index = strategy.cluster_resolver.task_id
            if batch == 2 and own_index == task_index:
                os.kill(os.getpid(), signum)

    endless = numbers(tf.data.Dataset.from_tensor_slices(["1", "2", "3", "4"]).repeat())
    one_weight(strategy).fit(endless, steps_per_epoch=10**6, verbose=0, callbacks=[Die()])


def main() -> None:
    folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    if what == "stop worker 0 of workers only":
        tf_config = json.loads(os.environ["TF_CONFIG"])
        if tf_config["task"]["type"] == "chief":
            time.sleep(3600)
        tf_config["cluster"] = {"worker": tf_config["cluster"]["worker"]}
        os.environ["TF_CONFIG"] = json.dumps(tf_config)
    config = cluster.ClusterConfig.from_env(require_ps=False).for_all_reduce()
    cluster.serve_if_not_worker(config)
    from gba_tf import all_reduce

    strategy = all_reduce.create_strategy(config)
    if what == "train":
        print(f"worker {config.task_index} trains", flush=True)
        found = train_on_uneven_data(strategy, folder)
        (folder / f"worker-{config.task_index}.json").write_text(json.dumps(found))
    elif what == "kill worker 1":
        train_until_the_end_of(strategy, 1, signal.SIGKILL)
    else:
        train_until_the_end_of(strategy, 0, signal.SIGSTOP)


if __name__ == "__main__":
    main()
