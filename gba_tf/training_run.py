"""One training run from settings to summary: what scripts/train.py does in the tasks that train."""

import contextlib
import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

from gba_tf import batch_plan, checkpoint, data, metrics, models, strategies, summary
from gba_tf.checkpoint import Progress, TrainingCheckpoint
from gba_tf.cluster_config import ClusterConfig
from gba_tf.data.block_source import BlockReader, BlockSource
from gba_tf.data.blocks import Blocks
from gba_tf.models.defaults import DEEPFM
from gba_tf.progress import EpochProgress
from gba_tf.run_settings import AUTO, RunSettings
from gba_tf.step_times import time_gradients
from gba_tf.switch_monitor import SwitchMonitor
from gba_tf.switching import ALL_REDUCE

_EVALUATION_BATCH_SIZE = 4096


class TrainingRun:
    """A run in a process that trains: the chief, the only one, or each worker under all-reduce.

    Args:
      settings: Of the run; its model_dir exists.
      config: From TF_CONFIG; every other task of it serves, trains, or is about to.
      dataset: What to train on.
      monitor: Of a segment of auto, which it may end before the training is done. Default: none.

    Raises:
      ImportError: tf.keras is Keras 3, or gba_tf was not built for this TensorFlow.
      ValueError: The newest checkpoint in model_dir does not fit.
    """

    def __init__(
        self,
        settings: RunSettings,
        config: ClusterConfig,
        dataset: data.Dataset,
        monitor: SwitchMonitor | None = None,
    ):
        self._settings = settings
        self._monitor = monitor
        self._config = config
        self._dataset = dataset
        self._strategy = strategies.create_strategy(
            settings.strategy,
            global_batch_size=settings.batch.global_batch_size,
            local_batch_size=settings.batch.local_batch_size,
            staleness_tolerance=settings.batch.staleness_tolerance,
            staleness_bound=settings.staleness_bound,
            backup_workers=settings.backup_workers,
            cluster_config=config,
        )
        self._plan = strategies.plan_of(self._strategy)
        # Of the initial values.
        tf.keras.utils.set_random_seed(settings.seed)
        with self._strategy.scope():
            self._model = _create_model(settings, dataset)
        self._checkpoint = TrainingCheckpoint(
            settings.model_dir,
            self._model,
            # The place in the data means nothing in other data.
            {**settings.what_is_trained(), "training_data": f"{dataset.train.checksum():08x}"},
            settings.max_checkpoints,
        )
        if monitor is not None:
            monitor.restore_begins()
        self._start = self._checkpoint.restore() if settings.resume else None
        start = self._start or Progress(epoch=0, examples=0)
        self._train_seconds = start.train_seconds
        self._epoch_start: float | None = None  # While an epoch is trained.
        self._blocks = Blocks(
            len(dataset.train),
            self._plan.examples_per_step,
            settings.seed,
            first_epoch=start.epoch,
            first_example=start.examples,
        )
        self._reader = BlockReader(dataset.train, self._blocks)
        self._source = None
        if settings.needs_parameter_servers:
            self._source = BlockSource(self._reader, self._strategy)
        self._steps = _StepCallback(self)
        is_all_reduce = settings.strategy == ALL_REDUCE
        if settings.inject_delay is not None or (monitor is not None and is_all_reduce):
            worker = config.task_index if is_all_reduce else None
            time_gradients(self._model, settings.inject_delay, worker)
        if monitor is not None:
            num_steps = self._blocks.blocks_before_epoch(settings.epochs)
            monitor.restored(self._strategy, self._plan, num_steps, self.is_leader)
        self._predict = tf.function(
            lambda columns: self._model(columns, training=False), reduce_retracing=True
        )

    @property
    def is_leader(self) -> bool:
        """Whether this process prints and writes the summary; each worker trains in all-reduce."""
        return self._settings.strategy != ALL_REDUCE or (self._config.for_all_reduce().is_chief)

    def execute(self) -> dict[str, Any] | None:
        """Trains, evaluates and saves after each epoch, and writes summary.json.

        Returns:
          The summary; None where the monitor decided for another mode before the end.
        """
        self._say(self._describe())
        epoch = self._blocks.first_epoch
        auc = loss = None
        while epoch < self._settings.epochs:
            seconds, examples = self._train_epoch(epoch)
            if self._position < self._blocks.blocks_before_epoch(epoch + 1):
                return self._end_segment(trained=False)
            auc, loss = self._evaluate()
            self._say(
                f"{self._title(epoch)}: loss {summary.decimal(self._training_loss())}, held-out"
                f" loss {summary.decimal(loss)}, AUC {summary.decimal(auc)},"
                f" {examples / seconds:,.0f} examples/s"
            )
            epoch += 1
            if self._is_switching and epoch < self._settings.epochs:
                return self._end_segment(trained=False)
        if auc is None:
            self._say(
                f"{summary.count(epoch, 'epoch')} of {self._settings.epochs} are trained already"
            )
            if self._checkpoint.changed_by_restore:  # What is evaluated is what is saved.
                self.save()
            auc, loss = self._evaluate()
        result = self._summary(auc, loss)
        if self.is_leader:
            path = summary.write(self._settings.model_dir, result)
            self._say(f"\n{summary.render(result, path)}")
        self._end_segment(trained=True)
        return result

    @property
    def _is_switching(self) -> bool:
        return self._monitor is not None and self._monitor.decision is not None

    def _end_segment(self, trained: bool) -> None:
        if self._monitor is not None:
            self._monitor.end_segment(self._global_step, trained)

    def _say(self, text: str) -> None:
        if self.is_leader:
            print(text, flush=True)

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._settings.epochs}"

    def _describe(self) -> str:
        settings, plan, start = self._settings, self._plan, self._start
        lines = [
            f"{settings.model} on {settings.dataset}: {len(self._dataset.train):,} examples to"
            f" train on, {len(self._dataset.test):,} held out",
            f"{settings.optimizer}, learning rate {settings.learning_rate:g}, an update from"
            f" {summary.count(plan.gradients_per_update, 'gradient')} of"
            f" {summary.count(plan.local_batch_size, 'example')}",
        ]
        if settings.strategy != "one_device":
            lines.append(f"{settings.strategy} on {summary.count(plan.num_workers, 'worker')}")
        if settings.needs_parameter_servers:
            lines[-1] += f" and {summary.count(self._config.num_ps, 'parameter server')}"
        if settings.strategy in batch_plan.TOKEN_STRATEGIES:
            sizes = [f"{size / 2**20:.2f}" for size in self._strategy.variable_bytes_per_ps()]
            lines[-1] += f" with {', '.join(sizes)} MiB of variables"
        if start is not None:
            lines.append(
                f"resumed from global step {self._global_step:,}, saved by {start.strategy}:"
                f" epoch {start.epoch + 1}, after {start.examples:,} of its examples"
            )
        return "\n".join(lines)

    def _train_epoch(self, epoch: int) -> tuple[float, int]:
        """Returns the seconds that training took, and its examples."""
        first = self._position
        num_steps = self._blocks.blocks_before_epoch(epoch + 1) - first
        # Steps repeated for a worker that died may have taken all blocks of a short epoch.
        has_steps = num_steps > 0
        examples = len(self._dataset.train) - self._blocks.progress_at(first)[1] if has_steps else 0
        progress = EpochProgress(
            self._title(epoch),
            done=lambda: self._position - first,
            total=num_steps,
            examples=examples,
            detail=lambda: f"loss {self._training_loss():.4f}",
            silent=not (self.is_leader and has_steps),
        )
        start = self._epoch_start = time.monotonic()
        with progress:
            if has_steps:
                self._model.fit(
                    self._data(),
                    steps_per_epoch=num_steps,
                    epochs=epoch + 1,
                    initial_epoch=epoch,
                    verbose=0,
                    callbacks=[self._steps, *([] if self._monitor is None else [self._monitor])],
                )
            if epoch + 1 == self._settings.epochs and not self._is_switching:
                strategies.flush(self._strategy)
        seconds = time.monotonic() - start
        self._train_seconds += seconds
        self._epoch_start = None
        self.save()
        return seconds, examples

    def _data(self) -> Any:
        """What Model.fit trains on from the current position."""
        if self._source is not None:
            return self._source  # Always the same one: it goes on where it is.
        if self._settings.strategy == ALL_REDUCE:
            return self._strategy.distribute_datasets_from_function(
                lambda context: self._reader.dataset_of_parts(
                    self._position, context.input_pipeline_id, context.num_input_pipelines
                )
            )
        return self._reader.dataset(self._position)

    @property
    def _global_step(self) -> int:
        return int(self._model.optimizer.iterations.numpy())

    @property
    def _position(self) -> int:
        """Blocks handed out since the start of this process."""
        return self._steps.count if self._source is None else self._source.position

    def save(self) -> None:
        """Writes a checkpoint. Every task that trains has to call it."""
        # Another mode could not go on with what is left in the buffers.
        self._checkpoint.save(self._progress, keep_partial=not self._is_switching)

    def _progress(self) -> Progress:
        epoch, examples = self._blocks.progress_at(self._position)
        seconds = self._train_seconds
        if self._epoch_start is not None:
            seconds += time.monotonic() - self._epoch_start
        return Progress(epoch=epoch, examples=examples, train_seconds=seconds)

    def _training_loss(self) -> float:
        """The mean over the examples of this epoch so far, as each was when it was trained on."""
        if self._settings.strategy == ALL_REDUCE:
            # Reading the metric would be a collective operation, which all workers have to join.
            return float(self._steps.logs.get("loss", float("nan")))
        # Not what fit() returns: that is the result of the step that was scheduled last, which
        # other steps may outlive.
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

    def _summary(self, auc: float, loss: float) -> dict[str, Any]:
        settings, plan = self._settings, self._plan
        epochs, examples = self._blocks.progress_at(self._position)
        examples += len(self._dataset.train) * epochs
        stats = checkpoint.total_stats(self._strategy)
        tokens = dataclasses.asdict(stats)
        del tokens["global_step"]
        staleness = tokens.pop("staleness")
        return {
            "strategy": settings.strategy if self._monitor is None else AUTO,
            "model": settings.model,
            "dataset": settings.dataset,
            "global_batch_size": settings.batch.global_batch_size,
            "local_batch_size": plan.local_batch_size,
            "gradients_per_update": plan.gradients_per_update,
            "num_workers": plan.num_workers,
            "num_ps": self._config.num_ps if settings.needs_parameter_servers else 0,
            "global_step": self._global_step,
            "epochs": epochs,
            "examples": examples,
            "train_seconds": self._train_seconds,
            "examples_per_second": examples / self._train_seconds,
            "auc": auc,
            "loss": loss,
            "tokens": tokens if stats.issued else {},
            "staleness": {str(steps): number for steps, number in sorted(staleness.items())},
            "checkpoint": self._checkpoint.path,
            "switches": [] if self._monitor is None else self._monitor.switches(),
            "versions": summary.versions(),
        }


class _StepCallback(tf.keras.callbacks.Callback):
    """Counts steps, keeps the latest results, and saves within an epoch."""

    def __init__(self, run: TrainingRun):
        super().__init__()
        # Else Keras waits for every step to tell its results, and refuses parameter servers.
        self._supports_tf_logs = True
        self._run = run
        self.count = 0
        self.logs: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.count += 1
        self.logs = logs or {}
        every, monitor = self._run._settings.save_every_steps, self._run._monitor
        if every is not None and self.count % every == 0:
            with contextlib.nullcontext() if monitor is None else monitor.paused():
                self._run.save()


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
