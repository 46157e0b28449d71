"""What G, B, the workers and the examples mean in each mode: gradients, updates, steps, epochs.

| mode                    | examples per gradient (B) | gradients per update | examples per step |
|-------------------------|---------------------------|----------------------|-------------------|
| `multi_worker_mirrored` | G / N                     | N, all-reduced       | G                 |
| `gba`, `bsp`            | B                         | M = G / B            | B                 |
| `parameter_server`      | B                         | 1                    | B                 |
| `hop_bs`                | B                         | 1                    | B                 |
| `hop_bw`                | G / (N - backup workers)  | N - backup workers   | B                 |
| `one_device`            | G                         | 1                    | G                 |

A step is one batch of the dataset that Model.fit is given. Imports no TensorFlow.
"""

import dataclasses
import math

from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import GBAConfig

STRATEGIES = (
    "multi_worker_mirrored",
    "gba",
    "parameter_server",
    "bsp",
    "hop_bs",
    "hop_bw",
    "one_device",
)
# Policies of this project's token server; parameter_server is TensorFlow's own.
TOKEN_STRATEGIES = ("gba", "bsp", "hop_bs", "hop_bw")
PS_STRATEGIES = (*TOKEN_STRATEGIES, "parameter_server")
DEFAULT_BACKUP_WORKERS = 1


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How examples make up gradients, steps, updates and epochs in one mode; made by `create`.

    Attributes:
      strategy: One of STRATEGIES.
      global_batch_size: G, examples per update of synchronous training, the same in every mode.
      local_batch_size: B, examples per gradient.
      gradients_per_update: Gradients that make up one update.
      num_workers: Workers that compute gradients.
    """

    strategy: str
    global_batch_size: int
    local_batch_size: int
    gradients_per_update: int
    num_workers: int

    @classmethod
    def create(
        cls,
        strategy: str,
        global_batch_size: int,
        local_batch_size: int | None = None,
        num_workers: int = 1,
        backup_workers: int = DEFAULT_BACKUP_WORKERS,
    ) -> "BatchPlan":
        """Checks that the sizes fit and derives the others.

        Args:
          strategy: One of STRATEGIES.
          global_batch_size: G.
          local_batch_size: B, where the mode leaves a choice (gba, bsp, parameter_server, hop_bs);
            the others derive it from G and do not look at it. Default: `default_local_batch_size`.
          num_workers: N. The chief and parameter servers are not counted.
          backup_workers: Of hop_bw.

        Raises:
          ValueError: The strategy is unknown; or a size is out of range, or no whole number.
        """
        check_strategy(strategy)
        if local_batch_size is None:
            local_batch_size = default_local_batch_size(global_batch_size)
        # Of every mode, so that a run which is fine in one does not fail when the flag is flipped.
        config = GBAConfig(global_batch_size, local_batch_size)
        if strategy == "one_device":
            return cls(strategy, global_batch_size, global_batch_size, 1, 1)
        if strategy == "multi_worker_mirrored":
            if global_batch_size % num_workers:
                raise ValueError(
                    f"multi_worker_mirrored: expected global_batch_size G={global_batch_size} to be"
                    f" a whole multiple of the {num_workers} workers, each of which takes an equal"
                    f" part; G / {num_workers} is {global_batch_size / num_workers:g}. Choose"
                    f" G={_next_multiple(global_batch_size, num_workers)}, or another number of"
                    " workers."
                )
            part = global_batch_size // num_workers
            return cls(strategy, global_batch_size, part, num_workers, num_workers)
        gradients = 1
        if strategy in ("gba", "bsp"):
            gradients = config.gradients_per_update
        if strategy == "hop_bw":
            gradients = _gradients_with_backups(global_batch_size, num_workers, backup_workers)
            local_batch_size = global_batch_size // gradients
        return cls(strategy, global_batch_size, local_batch_size, gradients, num_workers)

    @classmethod
    def for_cluster(
        cls,
        strategy: str,
        config: ClusterConfig | None,
        global_batch_size: int,
        local_batch_size: int | None = None,
        backup_workers: int = DEFAULT_BACKUP_WORKERS,
    ) -> "BatchPlan":
        """As `create`, with the workers of a cluster; None is a process without TF_CONFIG.

        Raises:
          ValueError: As `create`; or the cluster is not one for the strategy.
        """
        check_strategy(strategy)
        num_workers = 1
        if strategy in PS_STRATEGIES:
            if config is None:
                raise ValueError(
                    f"{strategy}: expected TF_CONFIG in the environment, found none. Start the"
                    " program with scripts/launch_local.py, or set TF_CONFIG in every task of the"
                    " cluster."
                )
            num_workers = config.num_workers
        elif config is not None and strategy == "multi_worker_mirrored":
            num_workers = config.for_all_reduce().num_workers
        elif config is not None and (config.num_workers or config.num_ps):
            raise ValueError(
                "one_device trains in one process; expected no TF_CONFIG, found one with"
                f" {config.num_workers} workers and {config.num_ps} parameter servers. Unset it, or"
                " choose another strategy."
            )
        return cls.create(
            strategy, global_batch_size, local_batch_size, num_workers, backup_workers
        )

    @property
    def examples_per_step(self) -> int:
        """The batch size of the dataset for Model.fit: of all workers' parts under all-reduce."""
        if self.strategy == "multi_worker_mirrored":
            return self.global_batch_size
        return self.local_batch_size

    def steps_per_epoch(self, num_examples: int) -> int:
        """Steps in which an epoch has every example once; the last one may have fewer.

        Raises:
          ValueError: num_examples is less than 1.
        """
        if num_examples < 1:
            raise ValueError(f"num_examples: expected at least 1, found {num_examples}.")
        return -(-num_examples // self.examples_per_step)

    @property
    def examples_per_update(self) -> int:
        """G, but B where every gradient is an update."""
        return self.local_batch_size * self.gradients_per_update


def check_strategy(strategy: str) -> None:
    """Raises ValueError, with the known names, for an unknown one."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}; found {strategy!r}.")


def default_local_batch_size(global_batch_size: int) -> int:
    """G / 4 if that is whole, else G / 2 or G."""
    return global_batch_size // math.gcd(global_batch_size, 4)


def _gradients_with_backups(global_batch_size: int, num_workers: int, backup_workers: int) -> int:
    if not 0 <= backup_workers < num_workers:
        raise ValueError(
            f"hop_bw: expected backup_workers from 0 to {num_workers - 1}, fewer than the"
            f" {num_workers} workers, found {backup_workers}: a global step that closes with the"
            " first (workers - backup_workers) gradients would never close."
        )
    gradients = num_workers - backup_workers
    if global_batch_size % gradients:
        raise ValueError(
            f"hop_bw: expected global_batch_size G={global_batch_size} to be a whole multiple of"
            f" the {gradients} gradients (workers - backup_workers = {num_workers} -"
            f" {backup_workers}) of an update; G / {gradients} is"
            f" {global_batch_size / gradients:g}. Choose"
            f" G={_next_multiple(global_batch_size, gradients)}, or another number of workers or"
            " backups."
        )
    return gradients


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor
