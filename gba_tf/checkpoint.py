"""Checkpoints that any mode writes and any mode restores, bit for bit.

    checkpoint = TrainingCheckpoint(model_dir, model)
    progress = checkpoint.restore() or Progress(epoch=0, examples=0)
    ...
    checkpoint.save(Progress(epoch=3, examples=0))

model_dir/checkpoints/<global step, 8 digits>/ holds `variables.*`, which plain
tf.train.load_checkpoint reads too, gradients that wait for their update (buffered_gradients), and
`training.json` with everything else. How it is kept whole: checkpoint_files.
"""

import dataclasses
import glob
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gba_tf import buffered_gradients, logical_variables, optimizer_hooks, tf_state_file
from gba_tf.checkpoint_files import (
    METADATA,
    PREFIX,
    CheckpointError,
    CheckpointFiles,
    SavedCheckpoint,
)
from gba_tf.logical_variables import LogicalVariable
from gba_tf.placement import ps_device
from gba_tf.strategy import GBAStrategy
from gba_tf.token_totals import set_earlier_stats, total_stats
from gba_tf.worker_agreement import WorkerAgreement

__all__ = ["CheckpointError", "Progress", "TrainingCheckpoint", "total_stats"]

_FOLDER = "checkpoints"


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far training is, in terms that every mode understands.

    Attributes:
      epoch: Epochs that are finished.
      examples: Of the running epoch, those that were handed out.
      train_seconds: Spent on training, in all runs together. Default 0.
      strategy: The mode that saved it; set by `TrainingCheckpoint.save`.
    """

    epoch: int
    examples: int
    train_seconds: float = 0.0
    strategy: str = ""


class TrainingCheckpoint:
    """Saves and restores the training of one model, whatever its strategy.

    Every task that trains uses it in the same way: the chief with parameter servers, each worker
    under tf.distribute.MultiWorkerMirroredStrategy, of which the first writes. `model_dir` is a
    folder that all tasks of the cluster share, parameter servers too. After the first save no other
    process may save there, until this one ends or the object is gone; anybody may restore.

    Args:
      model_dir: The folder of the run.
      model: Compiled, and built before `save` and `restore`.
      settings: What may not change when training goes on; JSON values. Default: nothing.
      max_to_keep: After a save, older checkpoints beyond this number are removed. Default: all are
        kept.

    Attributes:
      path: Of the checkpoint that was saved or restored last; None before.
      changed_by_restore: Whether `restore` has applied gradients that waited, so that the model is
        one update ahead of the checkpoint at `path`, until the next `save`.

    Raises:
      ValueError: The model is not compiled, or max_to_keep is less than 1.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        model: tf.keras.Model,
        settings: Mapping[str, Any] | None = None,
        max_to_keep: int | None = None,
    ):
        if getattr(model, "optimizer", None) is None:
            raise ValueError(
                "TrainingCheckpoint: expected a compiled model, found one without an optimizer."
                " Call model.compile() first."
            )
        self._model = model
        self._optimizer = model.optimizer
        self._strategy = model.distribute_strategy
        # As JSON gives them back, to be compared.
        self._settings = json.loads(json.dumps(dict(settings or {})))
        self._workers = WorkerAgreement(self._strategy)
        helpers = _tasks_of(self._strategy) if self._workers.has_others else ()
        self._files = CheckpointFiles(pathlib.Path(model_dir) / _FOLDER, max_to_keep, helpers)
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=self._optimizer)
        # Created when it is first asked for; plain tf.train.Checkpoint.restore expects it.
        _ = self._checkpoint.save_counter
        self.path: str | None = None
        self.changed_by_restore = False

    def save(
        self, progress: Progress | Callable[[], Progress], *, keep_partial: bool = True
    ) -> str:
        """Saves a consistent cut: waits for steps that are scheduled, and schedules none.

        Args:
          progress: How far training is; or a function that says so once no step is running.
          keep_partial: Whether gradients that wait for their global step are saved as they are.
            False applies them first, divided by their number, as before a switch to another mode,
            and says so.

        Returns:
          The checkpoint's path, for tf.train.load_checkpoint.

        Raises:
          ValueError: The model is not built, was compiled again, or trains variables that are not
            its own.
          OSError: The disk is full. Earlier checkpoints are as they were.
          RuntimeError: Another process saves in the folder, or another worker could not save.
        """
        self._settle(keep_partial)
        if callable(progress):
            progress = progress()
        variables = self._variables()
        step = int(self._optimizer.iterations.numpy())

        def write(folder: pathlib.Path) -> dict[str, Any]:
            self._workers.agree()
            self._require_shared(folder)
            self._write_variables(folder)
            tf_state_file.write(folder, PREFIX)
            return {
                "strategy": _mode(self._strategy),
                "progress": _without_strategy(progress),
                "settings": self._settings,
                "optimizer": _class_of(self._optimizer),
                "variables": [variable.described() for variable in variables],
                **buffered_gradients.save(self._strategy, self._optimizer, variables, folder),
            }

        with self._workers.together(f"The checkpoint of global step {step} was not saved"):
            if self._workers.is_first:
                num_bytes = sum(variable.num_bytes for variable in variables)
                num_bytes += buffered_gradients.num_bytes(self._strategy)
                self._files.save(step, write, num_bytes)
            else:
                self._take_part()
        buffered_gradients.mark_saved(self._strategy)
        self.path = str(self._files.folder(step) / PREFIX)
        self.changed_by_restore = False
        return self.path

    def restore(self) -> Progress | None:
        """Restores the newest checkpoint, or nothing at all.

        Model variables, optimizer slots, iterations and the learning rate get the very bits that
        were saved. Gradients that waited for their update wait again in a run of the same mode,
        shape and sizes; in any other they are applied now, divided by their number, which is said.

        Returns:
          How far training was, None if there is no checkpoint.

        Raises:
          CheckpointError: The newest checkpoint is damaged, or of other variables, another
            optimizer or other settings; the text names the first that differs. Nothing is changed.
          ValueError: The model is not built, or was compiled again.
          RuntimeError: Another worker could not restore it.
        """
        with self._workers.together("The checkpoint was not restored on every worker"):
            return self._restore()

    def _restore(self) -> Progress | None:
        saved = self._newest()
        if saved is None:
            return None
        metadata = saved.metadata
        where = str(saved.folder)
        self._refuse_other_settings(metadata["settings"], where)
        variables = self._variables()
        logical_variables.refuse_differences(
            metadata["variables"],
            variables,
            (metadata["optimizer"], _class_of(self._optimizer)),
            where,
        )
        self._require_shared(saved.folder / METADATA)
        self._workers.agree()
        self._settle(keep_partial=True)
        # What is left over are metrics, which another run may have or not.
        self._checkpoint.read(str(saved.folder / PREFIX)).expect_partial()
        earlier, self.changed_by_restore = buffered_gradients.restore(
            self._strategy, self._optimizer, variables, saved.folder, metadata
        )
        set_earlier_stats(self._strategy, earlier)
        self.path = str(saved.folder / PREFIX)
        return Progress(**metadata["progress"], strategy=metadata["strategy"])

    def callback(
        self,
        progress: Callable[[], Progress] | None = None,
        save_every_steps: int | None = None,
    ) -> tf.keras.callbacks.Callback:
        """A callback for Model.fit that saves at the end of every epoch.

        Args:
          progress: Says how far training is. Default: whole epochs of fit().
          save_every_steps: Saves within epochs too, after so many steps of fit(). Needs `progress`,
            since Keras does not know which examples a dataset has handed out.

        Raises:
          ValueError: save_every_steps without `progress`, or less than 1.
        """
        return _SaveCallback(self, progress, save_every_steps)

    def _settle(self, keep_partial: bool) -> None:
        coordinator = getattr(self._strategy, "_cluster_coordinator", None)
        if coordinator is not None:
            coordinator.join()
        if isinstance(self._strategy, GBAStrategy):
            buffered_gradients.settle(self._strategy, keep_partial)

    def _require_shared(self, path: pathlib.Path) -> None:
        """Parameter servers write and read their part of a checkpoint themselves."""
        if not isinstance(self._strategy, tf.distribute.ParameterServerStrategy):
            return
        for task in range(self._strategy.extended._num_ps):
            with tf.device(ps_device(task)):
                found = tf.io.matching_files(glob.escape(str(path)))
            if not found.shape[0]:
                raise CheckpointError(
                    f"Parameter server task {task} does not see {path}. Expected model_dir to be a"
                    " folder that the chief and all parameter servers share. Nothing was restored"
                    " or saved."
                )

    def _variables(self) -> list[LogicalVariable]:
        """All variables; those that the optimizer would create at its first step are created."""
        if not self._model.built:
            raise ValueError(
                "TrainingCheckpoint: expected a model with variables, found one that is not built."
                " Call it on one batch, or model.build(), inside strategy.scope()."
            )
        if self._model.optimizer is not self._optimizer:
            raise ValueError(
                "TrainingCheckpoint: expected the optimizer that the model had, found another one."
                " Make a new TrainingCheckpoint after model.compile()."
            )
        with self._strategy.scope():
            # Else what they hold would be neither saved nor restored.
            optimizer_hooks.build(self._optimizer, self._model.trainable_variables)
        return logical_variables.of(self._checkpoint)

    def _take_part(self) -> None:
        """Of a worker that does not write: some variables are read by all workers together."""
        resolver = self._strategy.cluster_resolver
        with self._files.scratch(_task_name(resolver.task_type, resolver.task_id)) as folder:
            self._workers.agree()
            self._write_variables(folder)

    def _write_variables(self, folder: pathlib.Path) -> None:
        logger = tf.get_logger()
        logger.addFilter(_is_not_about_retracing)
        try:
            self._checkpoint.write(str(folder / PREFIX))
        finally:
            logger.removeFilter(_is_not_about_retracing)

    def _newest(self) -> SavedCheckpoint | None:
        steps = self._files.steps()
        found = self._workers.numbers(steps[-1] if steps else -1)
        if len(set(found)) > 1:
            names = ["none" if step < 0 else f"step {step}" for step in found]
            raise CheckpointError(
                f"TrainingCheckpoint: expected the same newest checkpoint on every worker in"
                f" {self._files.directory}, found {', '.join(names)} on workers 0 to"
                f" {len(found) - 1}. model_dir has to be a folder that all workers share."
            )
        return self._files.read(steps[-1]) if steps else None

    def _refuse_other_settings(self, saved: Mapping[str, Any], where: str) -> None:
        for name, value in self._settings.items():
            if name in saved and saved[name] != value:
                raise CheckpointError(
                    f"Checkpoint {where} does not fit: it was written with {name}={saved[name]!r},"
                    f" and this run has {name}={value!r}. Nothing was restored. Use the same"
                    f" {name}, or another model_dir."
                )


class _SaveCallback(tf.keras.callbacks.Callback):
    def __init__(self, checkpoint, progress, save_every_steps):
        super().__init__()
        if save_every_steps is not None:
            if save_every_steps < 1:
                raise ValueError(
                    f"save_every_steps: expected at least 1, found {save_every_steps}."
                )
            if progress is None:
                raise ValueError(
                    "save_every_steps: expected `progress` too, a function that says how many"
                    " examples of the epoch were handed out, found none."
                )
        # Else Keras refuses to call it after a batch with parameter servers.
        self._supports_tf_logs = True
        self._checkpoint = checkpoint
        self._progress = progress
        self._every = save_every_steps
        self._last = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._last = 0

    def on_train_batch_end(self, batch, logs=None):
        # With steps_per_execution, not every batch is seen.
        if self._every is not None and batch + 1 - self._last >= self._every:
            self._last = batch + 1
            self._checkpoint.save(self._progress)

    def on_epoch_end(self, epoch, logs=None):
        self._checkpoint.save(self._progress or Progress(epoch=epoch + 1, examples=0))


def _is_not_about_retracing(record: logging.LogRecord) -> bool:
    # TensorFlow traces a new function at each save, and warns about that after the fifth.
    return "triggered tf.function retracing" not in record.getMessage()


def _tasks_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> list[str]:
    tasks = strategy.cluster_resolver.cluster_spec()
    return [_task_name(job, index) for job in tasks.jobs for index in tasks.task_indices(job)]


def _task_name(job: str, index: int) -> str:
    return f"{job}-{index}"


def _mode(strategy: tf.distribute.Strategy) -> str:
    if isinstance(strategy, GBAStrategy):
        return strategy.policy.name
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return "multi_worker_mirrored"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "parameter_server"
    return "one_device"


def _class_of(optimizer) -> str:
    inner = optimizer_hooks.unwrapped(optimizer)
    name = type(inner).__name__
    return name if hasattr(inner, "build") else f"legacy {name}"


def _without_strategy(progress: Progress) -> dict[str, Any]:
    fields = dataclasses.asdict(progress)
    del fields["strategy"]
    return fields
