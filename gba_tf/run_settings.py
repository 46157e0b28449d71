"""The settings of a training run, checked in one place.

Imports no TensorFlow: scripts/train.py refuses a bad flag before anything is started.
"""

import dataclasses
import os
from typing import Any

from gba_tf import batch_plan, data, switching
from gba_tf.batch_plan import BatchPlan
from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import DEFAULT_STALENESS_BOUND, GBAConfig, Policy
from gba_tf.injected_delay import InjectedDelay
from gba_tf.models.defaults import DEEPFM
from gba_tf.switching import SwitchRule

# Moves between all-reduce and gba while it trains.
AUTO = "auto"
STRATEGIES = (*batch_plan.STRATEGIES, AUTO)
MODELS = ("deepfm",)
DATASETS = data.DATASETS
# Of tf.keras.optimizers; those for which GBA equals synchronous training.
OPTIMIZERS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "ftrl", "rmsprop", "sgd")
# The defaults of other sizes follow from it: any whole number of examples that TensorFlow counts.
MAX_SIZE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run is told, complete and checked.

    Attributes:
      strategy: One of STRATEGIES.
      model: One of MODELS.
      dataset: One of DATASETS.
      data_dir: Where the files of the data set are; None to fetch them.
      model_dir: Where the run writes; an absolute path.
      batch: G, B and iota.
      staleness_bound: Of hop_bs, in gradients.
      backup_workers: Of hop_bw.
      epochs: Passes over the training data.
      optimizer: One of OPTIMIZERS.
      learning_rate: Of the optimizer.
      seed: Of initial values and of the order of the examples.
      resume: Whether to go on from the newest checkpoint in model_dir.
      save_every_steps: Steps between checkpoints within an epoch; None for one after each epoch.
      max_checkpoints: Checkpoints to keep, the newest; None for all.
      switch_rule: Of auto.
      inject_delay: A worker to slow down; None for none.
    """

    strategy: str
    model: str
    dataset: str
    data_dir: str | None
    model_dir: str
    batch: GBAConfig
    staleness_bound: int
    backup_workers: int
    epochs: int
    optimizer: str
    learning_rate: float
    seed: int
    resume: bool
    save_every_steps: int | None
    max_checkpoints: int | None
    switch_rule: SwitchRule
    inject_delay: InjectedDelay | None

    @classmethod
    def create(
        cls,
        *,
        strategy: str,
        model: str,
        dataset: str,
        data_dir: str | None,
        model_dir: str,
        global_batch_size: int | None,
        local_batch_size: int | None,
        staleness_tolerance: int,
        epochs: int | None,
        optimizer: str | None,
        learning_rate: float | None,
        seed: int,
        staleness_bound: int = DEFAULT_STALENESS_BOUND,
        backup_workers: int = batch_plan.DEFAULT_BACKUP_WORKERS,
        resume: bool = True,
        save_every_steps: int | None = None,
        max_checkpoints: int | None = None,
        switch_rule: SwitchRule | None = None,
        inject_delay: InjectedDelay | None = None,
    ) -> "RunSettings":
        """Fills in the data set's defaults for what is None; B is G / 4 if that is whole.

        Raises:
          ValueError: A value is out of range. The text names it.
        """
        if strategy not in STRATEGIES:
            raise ValueError(
                f"strategy: expected one of {', '.join(STRATEGIES)}; found {strategy!r}."
            )
        defaults = DEEPFM[dataset]
        if global_batch_size is None:
            global_batch_size = defaults.global_batch_size
        if local_batch_size is None:
            local_batch_size = batch_plan.default_local_batch_size(global_batch_size)
        if learning_rate is None:
            learning_rate = defaults.learning_rate
        if not 0 < learning_rate < float("inf"):
            raise ValueError(f"learning_rate: expected a positive number, found {learning_rate}.")
        for mode in _modes(strategy):  # Raises for what is refused.
            Policy(mode, 1, staleness_tolerance, staleness_bound)
        return cls(
            strategy=strategy,
            model=model,
            dataset=dataset,
            data_dir=data_dir,
            model_dir=os.path.abspath(model_dir),
            batch=GBAConfig(global_batch_size, local_batch_size, staleness_tolerance),
            staleness_bound=staleness_bound,
            backup_workers=backup_workers,
            epochs=defaults.epochs if epochs is None else epochs,
            optimizer=optimizer or defaults.optimizer,
            learning_rate=learning_rate,
            seed=seed,
            resume=resume,
            save_every_steps=save_every_steps,
            max_checkpoints=max_checkpoints,
            switch_rule=switch_rule or SwitchRule(),
            inject_delay=inject_delay,
        )

    @property
    def needs_parameter_servers(self) -> bool:
        return any(mode in batch_plan.PS_STRATEGIES for mode in _modes(self.strategy))

    def check_cluster(self, config: ClusterConfig | None) -> None:
        """Raises ValueError, as `BatchPlan.for_cluster` does, where they do not fit a cluster."""
        for mode in _modes(self.strategy):
            plan = BatchPlan.for_cluster(mode, config, *self._sizes())
        self._check_delay(plan.num_workers)

    def check_workers(self, num_workers: int) -> None:
        """Raises ValueError, as `BatchPlan.create` does, where so many workers do not fit."""
        size, local_size, backups = self._sizes()
        for mode in _modes(self.strategy):
            plan = BatchPlan.create(mode, size, local_size, num_workers, backups)
        self._check_delay(plan.num_workers)

    def _sizes(self) -> tuple[int, int, int]:
        return self.batch.global_batch_size, self.batch.local_batch_size, self.backup_workers

    def _check_delay(self, num_workers: int) -> None:
        if self.inject_delay is not None:
            self.inject_delay.check(num_workers)

    def what_is_trained(self) -> dict[str, Any]:
        """What may not change when a run goes on from a checkpoint; the mode and B may."""
        return {
            "model": self.model,
            "dataset": self.dataset,
            "global_batch_size": self.batch.global_batch_size,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
        }


def _modes(strategy: str) -> tuple[str, ...]:
    """The modes that a run may train in."""
    return switching.MODES if strategy == AUTO else (strategy,)
