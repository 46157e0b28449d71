"""One training run from settings to summary: what scripts/train.py does in the chief."""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gba_tf import cluster, data, legacy_keras, metrics, models, summary
from gba_tf.cluster_config import ClusterConfig
from gba_tf.data.block_source import BlockReader, BlockSource
from gba_tf.data.blocks import Blocks
from gba_tf.models.defaults import DEEPFM
from gba_tf.progress import EpochProgress
from gba_tf.run_settings import RunSettings
from gba_tf.strategy import GBAStrategy

_EVALUATION_BATCH_SIZE = 4096


class TrainingRun:
    """A run in the process that trains: the chief, or the only one.

    Args:
      settings: Of the run; its model_dir exists.
      config: From TF_CONFIG; every other task of it serves already or is about to.
      dataset: What to train on.

    Raises:
      ImportError: tf.keras is Keras 3, or gba_tf was not built for this TensorFlow.
    """

    def __init__(self, settings: RunSettings, config: ClusterConfig, dataset: data.Dataset):
        legacy_keras.require()
        self._settings = settings
        self._config = config
        self._dataset = dataset
        tf.keras.utils.set_random_seed(settings.seed)
        self._strategy = _create_strategy(settings, config)
        with self._strategy.scope():
            self._model = _create_model(settings, dataset)
        blocks = Blocks(len(dataset.train), settings.examples_per_gradient, settings.seed)
        self._num_batches = blocks.num_blocks
        self._reader = BlockReader(dataset.train, blocks)
        self._source = None
        if settings.needs_parameter_servers:
            self._source = BlockSource(self._reader, self._strategy)
        self._predict = tf.function(
            lambda columns: self._model(columns, training=False), reduce_retracing=True
        )
        self._checkpoints = tf.train.CheckpointManager(
            tf.train.Checkpoint(model=self._model, optimizer=self._model.optimizer),
            os.path.join(settings.model_dir, "checkpoints"),
            max_to_keep=None,
        )

    def execute(self) -> dict[str, Any]:
        """Trains, evaluates after each epoch, and writes the checkpoint and summary.json.

        Returns:
          The summary.
        """
        print(self._describe(), flush=True)
        train_seconds = 0.0
        for epoch in range(self._settings.epochs):
            seconds = self._train_epoch(epoch)
            train_seconds += seconds
            auc, loss = self._evaluate()
            print(
                f"{self._title(epoch)}: loss {summary.decimal(self._training_loss())}, held-out"
                f" loss {summary.decimal(loss)}, AUC {summary.decimal(auc)},"
                f" {len(self._dataset.train) / seconds:,.0f} examples/s",
                flush=True,
            )
        result = self._summary(train_seconds, auc, loss)
        path = summary.write(self._settings.model_dir, result)
        print(f"\n{summary.render(result, path)}", flush=True)
        return result

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._settings.epochs}"

    def _describe(self) -> str:
        settings = self._settings
        lines = [
            f"{settings.model} on {settings.dataset}: {len(self._dataset.train):,} examples to"
            f" train on, {len(self._dataset.test):,} held out",
            f"{settings.optimizer}, learning rate {settings.learning_rate:g}, an update from"
            f" {summary.count(settings.gradients_per_update, 'gradient')} of"
            f" {summary.count(settings.examples_per_gradient, 'example')}",
        ]
        if settings.needs_parameter_servers:
            lines.append(
                f"{settings.strategy} on {summary.count(self._config.num_workers, 'worker')} and"
                f" {summary.count(self._config.num_ps, 'parameter server')}"
            )
        if settings.strategy == "gba":
            sizes = [f"{size / 2**20:.2f}" for size in self._strategy.variable_bytes_per_ps()]
            lines[-1] += f" with {', '.join(sizes)} MiB of variables"
        return "\n".join(lines)

    def _train_epoch(self, epoch: int) -> float:
        """Returns the seconds that training took."""
        progress = EpochProgress(
            self._title(epoch),
            done=self._batch_counter(),
            total=self._num_batches,
            examples=len(self._dataset.train),
            detail=lambda: f"loss {self._training_loss():.4f}",
        )
        start = time.monotonic()
        with progress:
            self._model.fit(
                # A stream starts anew with each fit().
                self._source or self._reader.dataset(epoch * self._num_batches),
                steps_per_epoch=self._num_batches,
                epochs=epoch + 1,
                initial_epoch=epoch,
                verbose=0,
            )
            if self._settings.strategy == "gba" and epoch + 1 == self._settings.epochs:
                self._strategy.flush()
        return time.monotonic() - start

    def _batch_counter(self) -> Callable[[], int]:
        """Returns a function that counts the batches from now on."""

        def position() -> int:
            if self._source is not None:
                return self._source.position
            return int(self._model.optimizer.iterations)

        first = position()
        return lambda: position() - first

    def _training_loss(self) -> float:
        """The mean over the examples of this epoch so far, as each was when it was trained on.

        From the metric itself: what fit() returns is the result of the step that was scheduled
        last, which other steps may outlive.
        """
        (loss,) = (metric for metric in self._model.metrics if metric.name == "loss")
        return float(loss.result())

    def _evaluate(self) -> tuple[float, float]:
        """Returns AUC and log loss on the held-out examples."""
        test = self._dataset.test
        logits = []
        for first in range(0, len(test), _EVALUATION_BATCH_SIZE):
            batch = test.take(slice(first, first + _EVALUATION_BATCH_SIZE))
            logits.append(self._predict(dict(batch.columns)).numpy())
        logits = np.concatenate(logits)
        return metrics.auc(test.labels, logits), metrics.log_loss(test.labels, logits)

    def _summary(self, seconds: float, auc: float, loss: float) -> dict[str, Any]:
        settings, config = self._settings, self._config
        examples = len(self._dataset.train) * settings.epochs
        tokens, staleness = {}, {}
        if settings.strategy == "gba":
            tokens = dataclasses.asdict(self._strategy.stats())
            del tokens["global_step"]
            staleness = tokens.pop("staleness")
        return {
            "strategy": settings.strategy,
            "model": settings.model,
            "dataset": settings.dataset,
            "global_batch_size": settings.batch.global_batch_size,
            "local_batch_size": settings.examples_per_gradient,
            "gradients_per_update": settings.gradients_per_update,
            "num_workers": config.num_workers if settings.needs_parameter_servers else 1,
            "num_ps": config.num_ps,
            "global_step": int(self._model.optimizer.iterations),
            "epochs": settings.epochs,
            "examples": examples,
            "train_seconds": seconds,
            "examples_per_second": examples / seconds,
            "auc": auc,
            "loss": loss,
            "tokens": tokens,
            "staleness": {str(steps): number for steps, number in sorted(staleness.items())},
            "checkpoint": self._save(),
            "versions": summary.versions(),
        }

    def _save(self) -> str:
        step = int(self._model.optimizer.iterations)
        return self._checkpoints.save(checkpoint_number=step)


def _create_strategy(settings: RunSettings, config: ClusterConfig) -> tf.distribute.Strategy:
    if settings.strategy == "one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    resolver = cluster.cluster_resolver(config)
    if settings.strategy == "parameter_server":
        return tf.distribute.ParameterServerStrategy(resolver)
    return GBAStrategy(
        resolver,
        global_batch_size=settings.batch.global_batch_size,
        local_batch_size=settings.batch.local_batch_size,
        staleness_tolerance=settings.batch.staleness_tolerance,
    )


def _create_model(settings: RunSettings, dataset: data.Dataset) -> tf.keras.Model:
    """The compiled and built model; call it in the strategy's scope."""
    classes = {"deepfm": models.DeepFM}
    model = classes[settings.model](
        dataset.features, seed=settings.seed, **DEEPFM[settings.dataset].model
    )
    optimizer = tf.keras.optimizers.get(settings.optimizer)
    optimizer.learning_rate = settings.learning_rate
    model.compile(optimizer=optimizer)
    # Built now: variables created during a worker's first step would be created while it is traced.
    model(dict(dataset.train.take(slice(0, 2)).columns))
    return model
