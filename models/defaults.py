"""Settings under which a model does well on a data set, chosen on a part of the training data.

Each had the best AUC of those tried, or was within 0.001 of it, on the last fifth of the training
part (in time, in rows, or per user, as the data set itself is split).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class TrainingDefaults:
    """One tried combination; its parts belong together.

    Attributes:
      model: arguments of the model's constructor, besides `features` and `seed`.
      optimizer: as `tf.keras.optimizers.get` takes it.
      learning_rate: of the optimizer.
      global_batch_size: examples per update.
      epochs: passes over the training part.
    """

    model: Mapping[str, Any]
    optimizer: str
    learning_rate: float
    global_batch_size: int
    epochs: int


# Name of a data set in `gba_tf.data.DATASETS` -> settings of `DeepFM`.
DEEPFM: Mapping[str, TrainingDefaults] = MappingProxyType(
    {
        "movielens_100k": TrainingDefaults(
            model={"embedding_dim": 16, "hidden_units": (128, 64), "l2": 0.1},
            optimizer="adam",
            learning_rate=0.001,
            global_batch_size=512,
            epochs=5,
        ),
        # The categories are mostly rare: Adam is past its best after two passes, Adagrad is not.
        "criteo": TrainingDefaults(
            model={"embedding_dim": 16, "hidden_units": (128, 64), "l2": 0.03},
            optimizer="adagrad",
            learning_rate=0.1,
            global_batch_size=256,
            epochs=6,
        ),
        "movielens_1m": TrainingDefaults(
            model={"embedding_dim": 16, "hidden_units": (128, 64), "l2": 0.01},
            optimizer="adam",
            learning_rate=0.001,
            global_batch_size=2048,
            epochs=7,
        ),
    }
)
