"""The settings of a training run, checked in one place, and the folder that it writes to.

Imports no TensorFlow: scripts/train.py refuses a bad flag before anything is started.
"""

import dataclasses
import math
import os
import pathlib

from gba_tf import data
from gba_tf.config import GBAConfig
from gba_tf.models.defaults import DEEPFM

STRATEGIES = ("gba", "parameter_server", "multi_worker_mirrored", "one_device")
MODELS = ("deepfm",)
DATASETS = data.DATASETS
# Of tf.keras.optimizers; those for which GBA equals synchronous training.
OPTIMIZERS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "ftrl", "rmsprop", "sgd")
# The defaults of other sizes follow from it: any whole number of examples that TensorFlow counts.
MAX_SIZE = 2**31 - 1
LOGS = "logs"


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
      epochs: Passes over the training data.
      optimizer: One of OPTIMIZERS.
      learning_rate: Of the optimizer.
      seed: Of initial values and of the order of the examples.
    """

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
    ) -> "RunSettings":
        """Fills in the data set's defaults for what is None; B is G / 4 if that is whole.

        Raises:
          ValueError: A value is out of range. The text names it.
          NotImplementedError: A strategy that has its place but is not there yet.
        """
        if strategy == "multi_worker_mirrored":
            raise NotImplementedError(
                "strategy: expected one of gba, parameter_server, one_device, found"
                " multi_worker_mirrored, which comes in a later version."
            )
        defaults = DEEPFM[dataset]
        if global_batch_size is None:
            global_batch_size = defaults.global_batch_size
        if local_batch_size is None:
            local_batch_size = global_batch_size // math.gcd(global_batch_size, 4)
        if learning_rate is None:
            learning_rate = defaults.learning_rate
        if not 0 < learning_rate < float("inf"):
            raise ValueError(f"learning_rate: expected a positive number, found {learning_rate}.")
        return cls(
            strategy=strategy,
            model=model,
            dataset=dataset,
            data_dir=data_dir,
            model_dir=os.path.abspath(model_dir),
            batch=GBAConfig(global_batch_size, local_batch_size, staleness_tolerance),
            epochs=defaults.epochs if epochs is None else epochs,
            optimizer=optimizer or defaults.optimizer,
            learning_rate=learning_rate,
            seed=seed,
        )

    @property
    def needs_parameter_servers(self) -> bool:
        return self.strategy in ("gba", "parameter_server")

    @property
    def examples_per_gradient(self) -> int:
        """B over parameter servers; G in one process."""
        if self.needs_parameter_servers:
            return self.batch.local_batch_size
        return self.batch.global_batch_size

    @property
    def gradients_per_update(self) -> int:
        """M with GBA; 1 where every gradient is an update."""
        return self.batch.gradients_per_update if self.strategy == "gba" else 1


def claim_model_dir(model_dir: str) -> None:
    """Creates the folder of a run and, in it, that of its logs: only one of two runs can.

    Raises:
      ValueError: It holds something already, which a second run must not overwrite.
      OSError: It cannot be created.
    """
    path = pathlib.Path(model_dir)
    in_use = ValueError(
        f"model_dir: expected a new or an empty folder, found {model_dir} in use. Choose another"
        " one, or move what is in it away."
    )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise in_use
    path.mkdir(parents=True, exist_ok=True)
    try:
        (path / LOGS).mkdir()
    except FileExistsError:
        raise in_use from None


def release_model_dir(model_dir: str) -> None:
    """Removes the folder again, if nothing was written to it."""
    path = pathlib.Path(model_dir)
    for folder in (path / LOGS, path):
        try:
            folder.rmdir()
        except OSError:  # Something is in it.
            return
