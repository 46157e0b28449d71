"""One training run from settings to summary: what scripts/train.py does in the chief."""

import dataclasses
import os
import pathlib
import time
from typing import Any

from gba_tf import data, metrics, summary
from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import GBAConfig
from gba_tf.data.block_source import BlockReader, BlockSource
from gba_tf.data.blocks import Blocks
from gba_tf.models.defaults import DEEPFM
from gba_tf.progress import EpochProgress

STRATEGIES = ("gba", "parameter_server", "multi_worker_mirrored", "one_device")
MODELS = ("deepfm",)
DATASETS = data.DATASETS
_PARAMETER_SERVER_STRATEGIES = ("gba", "parameter_server")
_EVALUATION_BATCH_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of a run, complete and checked."""

    strategy: str
    model: str
    dataset: str
    data_dir: str | None
    model_dir: str
    batch: GBAConfig
    epochs: int
    optimizer: str
    learning_rate: float
    seed: int

    @classmethod
    def create(
        cls,
        *,
        dataset: str,
        global_batch_size: int | None,
        local_batch_size: int | None,
        staleness_tolerance: int,
        epochs: int | None,
        optimizer: str | None,
        learning_rate: float | None,
        seed: int,
        **others: Any,
    ) -> "Settings":
        """Fills in the data set's defaults for what is None.

        Raises:
          ValueError: A value is out of range. The text names it.
        """
        defaults = DEEPFM[dataset]
        if global_batch_size is None:
            global_batch_size = defaults.global_batch_size
        if local_batch_size is None:
            local_batch_size = global_batch_size // 4 or global_batch_size
        settings = cls(
            dataset=dataset,
            batch=GBAConfig(global_batch_size, local_batch_size, staleness_tolerance),
            epochs=defaults.epochs if epochs is None else epochs,
            optimizer=optimizer or defaults.optimizer,
            learning_rate=defaults.learning_rate if learning_rate is None else learning_rate,
            seed=seed,
            **others,
        )
        if settings.epochs < 1:
            raise ValueError(f"epochs: expected at least 1, found {settings.epochs}.")
        if not 0 < settings.learning_rate < float("inf"):
            raise ValueError(
                f"learning_rate: expected a positive number, found {settings.learning_rate}."
            )
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed: expected 0 ... {2**31 - 1}, found {seed}.")
        if settings.strategy == "multi_worker_mirrored":
            raise NotImplementedError(
                "strategy multi_worker_mirrored is not in this version; expected one of gba,"
                " parameter_server, one_device."
            )
        return settings

    @property
    def needs_cluster(self) -> bool:
        return self.strategy in _PARAMETER_SERVER_STRATEGIES


def load_dataset(settings: Settings) -> data.Dataset:
    """Loads the data set of a run. Raises gba_tf.data.DataError, one line, for bad data."""
    return data.load(settings.dataset, settings.data_dir)


def claim_model_dir(model_dir: str) -> None:
    """Creates the folder of a run.

    Raises:
      ValueError: It holds something already, which a second run must not overwrite.
    """
    path = pathlib.Path(model_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"model_dir: expected a new or an empty folder, found {model_dir} in use. Choose"
            " another one, or move what is in it away."
        )
    path.mkdir(parents=True, exist_ok=True)


def train(settings: Settings, cluster_config: ClusterConfig | None) -> dict[str, Any] | None:
    """Trains, evaluates, and writes the checkpoint and the summary.

    In a task that is not the chief it serves until training ends, and does not return.

    Args:
      settings: Of the run.
      cluster_config: From TF_CONFIG; None without a cluster.

    Returns:
      The summary, as written to summary.json.
    """
    if settings.needs_cluster:
        from gba_tf import cluster

        cluster.serve_if_not_chief(cluster_config)
    dataset = load_dataset(settings)
    if cluster_config is None or not os.path.isdir(os.path.join(settings.model_dir, "logs")):
        claim_model_dir(settings.model_dir)
    return _Run(settings, cluster_config, dataset).execute()


class _Run:
    """The state of one run in the chief."""

    def __init__(
        self, settings: Settings, cluster_config: ClusterConfig | None, dataset: data.Dataset
    ):
        from gba_tf import legacy_keras

        legacy_keras.require()
        import tensorflow as tf

        # TensorFlow describes its cluster at length; absl programs would show it.
        tf.get_logger().setLevel("WARNING")
        self._settings = settings
        self._cluster_config = cluster_config
        self._dataset = dataset
        tf.keras.utils.set_random_seed(settings.seed)
        self._strategy = _create_strategy(settings, cluster_config)
        with self._strategy.scope():
            self._model = _create_model(settings, dataset)
        batch_size = settings.batch.local_batch_size
        if not settings.needs_cluster:
            batch_size = settings.batch.global_batch_size
        self._blocks = Blocks(len(dataset.train), batch_size, settings.seed)
        self._reader = BlockReader(dataset.train, self._blocks)
        self._checkpoint = tf.train.Checkpoint(model=self._model, optimizer=self._model.optimizer)

    def execute(self) -> dict[str, Any]:
        print(self._describe(), flush=True)
        seconds = self._train_epochs()
        if self._settings.strategy == "gba":
            self._strategy.flush()
        logits = self._held_out_logits()
        result = self._summary(seconds, logits)
        path = summary.write(self._settings.model_dir, result)
        print(f"\n{summary.render(result)}\n  {'summary':<10}  {path}", flush=True)
        return result

    def _describe(self) -> str:
        settings, config = self._settings, self._cluster_config
        lines = [
            f"{settings.model} on {settings.dataset}: {len(self._dataset.train):,} examples to"
            f" train on, {len(self._dataset.test):,} held out; {settings.optimizer}, learning rate"
            f" {settings.learning_rate:g}"
        ]
        if config is not None:
            lines.append(
                f"{settings.strategy} on {config.num_workers} workers and {config.num_ps} parameter"
                f" servers; G = {settings.batch.global_batch_size:,}"
                f" = {settings.batch.gradients_per_update} x B ="
                f" {settings.batch.local_batch_size:,}"
            )
        if settings.strategy == "gba":
            balance = ", ".join(f"{n / 2**20:.2f}" for n in self._strategy.variable_bytes_per_ps())
            lines.append(f"MiB of variables per parameter server: {balance}")
        return "\n".join(lines)

    def _train_epochs(self) -> float:
        """Returns the seconds spent in training, evaluation not included."""
        settings = self._settings
        num_blocks = self._blocks.num_blocks
        if settings.needs_cluster:
            source = BlockSource(self._reader, self._strategy)
        else:
            source = self._reader.dataset()
        total_seconds = 0.0
        for epoch in range(settings.epochs):
            title = f"epoch {epoch + 1}/{settings.epochs}"
            counted = EpochProgress(
                title,
                done=self._batch_counter(epoch),
                total=num_blocks,
                batch_size=self._blocks.local_batch_size,
                detail=lambda: f"global step {int(self._model.optimizer.iterations):,}",
            )
            start = time.monotonic()
            with counted:
                history = self._model.fit(
                    source,
                    steps_per_epoch=num_blocks,
                    epochs=epoch + 1,
                    initial_epoch=epoch,
                    verbose=0,
                )
            seconds = time.monotonic() - start
            total_seconds += seconds
            logits = self._held_out_logits()
            labels = self._dataset.test.labels
            print(
                f"{title}: loss {history.history['loss'][-1]:.4f}, held-out loss"
                f" {metrics.log_loss(labels, logits):.4f}, held-out AUC"
                f" {metrics.auc(labels, logits):.4f}, {num_blocks:,} batches in {seconds:.1f} s,"
                f" {len(self._dataset.train) / seconds:,.0f} examples/s",
                flush=True,
            )
        return total_seconds

    def _batch_counter(self, epoch: int):
        first = epoch * self._blocks.num_blocks
        counter = self._model._train_counter
        return lambda: max(0, int(counter) - first)

    def _held_out_logits(self):
        import numpy as np
        import tensorflow as tf

        if not hasattr(self, "_predict"):
            self._predict = tf.function(lambda columns: self._model(columns, training=False))
        test = self._dataset.test
        parts = []
        for first in range(0, len(test), _EVALUATION_BATCH_SIZE):
            batch = test.take(slice(first, first + _EVALUATION_BATCH_SIZE))
            parts.append(self._predict(dict(batch.columns)).numpy())
        return np.concatenate(parts)

    def _summary(self, seconds: float, logits) -> dict[str, Any]:
        settings, config = self._settings, self._cluster_config
        examples = len(self._dataset.train) * settings.epochs
        labels = self._dataset.test.labels
        tokens, staleness = {}, {}
        if settings.strategy == "gba":
            stats = dataclasses.asdict(self._strategy.stats())
            del stats["global_step"]
            staleness = stats.pop("staleness")
            tokens = stats
        return {
            "strategy": settings.strategy,
            "model": settings.model,
            "dataset": settings.dataset,
            "global_batch_size": settings.batch.global_batch_size,
            "local_batch_size": settings.batch.local_batch_size,
            "gradients_per_update": settings.batch.gradients_per_update,
            "num_workers": config.num_workers if config else 1,
            "num_ps": config.num_ps if config else 0,
            "global_step": int(self._model.optimizer.iterations),
            "epochs": settings.epochs,
            "examples": examples,
            "train_seconds": seconds,
            "examples_per_second": examples / seconds,
            "auc": metrics.auc(labels, logits),
            "loss": metrics.log_loss(labels, logits),
            "tokens": tokens,
            "staleness": {str(value): count for value, count in staleness.items()},
            "checkpoint": self._save(),
            "versions": summary.versions(),
        }

    def _save(self) -> str:
        step = int(self._model.optimizer.iterations)
        prefix = os.path.join(self._settings.model_dir, "checkpoints", f"ckpt-{step}")
        return self._checkpoint.write(prefix)


def _create_strategy(settings: Settings, cluster_config: ClusterConfig | None):
    import tensorflow as tf

    if settings.strategy == "one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    from gba_tf import cluster

    resolver = cluster.cluster_resolver(cluster_config)
    if settings.strategy == "parameter_server":
        return tf.distribute.ParameterServerStrategy(resolver)
    from gba_tf.strategy import GBAStrategy

    return GBAStrategy(
        resolver,
        global_batch_size=settings.batch.global_batch_size,
        local_batch_size=settings.batch.local_batch_size,
        staleness_tolerance=settings.batch.staleness_tolerance,
    )


def _create_model(settings: Settings, dataset: data.Dataset):
    """The compiled and built model; call it in the strategy's scope."""
    import tensorflow as tf

    from gba_tf import models

    try:
        optimizer = tf.keras.optimizers.get(
            {
                "class_name": settings.optimizer,
                "config": {"learning_rate": settings.learning_rate},
            }
        )
    except ValueError as error:
        raise ValueError(
            f"optimizer: expected the name of a tf.keras optimizer, such as adam or adagrad, found"
            f" {settings.optimizer!r}."
        ) from error
    defaults = DEEPFM[settings.dataset].model
    model = {"deepfm": models.DeepFM}[settings.model](
        dataset.features, seed=settings.seed, **defaults
    )
    model.compile(optimizer=optimizer)
    # Built now: variables created during a worker's first step would be created while it is traced.
    model(dict(dataset.train.take(slice(0, 2)).columns))
    return model
