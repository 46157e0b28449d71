"""The settings of GBA, validated in one place."""

import dataclasses
import numbers
from typing import Literal

DEFAULT_STALENESS_TOLERANCE = 4
DEFAULT_STALENESS_BOUND = 4
SparseDivisor = Literal["gradients_per_update", "gradients_with_row"]


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rule of a token server: what tells gba, bsp, hop_bs and hop_bw apart.

    Attributes:
      name: "gba", "bsp", "hop_bs" or "hop_bw".
      gradients_per_update: Committed gradients that close a global step.
      staleness_tolerance: Of "gba": a gradient that is more global steps late has weight 0.
      staleness_bound: Of "hop_bs": gradients by which a worker may be ahead of the slowest one.

    Raises:
      ValueError: A value is out of range, or would let nobody start.
    """

    name: str
    gradients_per_update: int
    staleness_tolerance: int = DEFAULT_STALENESS_TOLERANCE
    staleness_bound: int = DEFAULT_STALENESS_BOUND

    def __post_init__(self):
        _require_integer("gradients_per_update", self.gradients_per_update, 1, "gradients")
        _require_integer("staleness_tolerance", self.staleness_tolerance, 0, "global steps")
        # With 0, no worker may take the first step ahead of the others, and all wait for ever.
        _require_integer("staleness_bound", self.staleness_bound, 1, "gradients")


@dataclasses.dataclass(frozen=True)
class GBAConfig:
    """What a training run with GBA has to be told.

    Attributes:
      global_batch_size: G, examples per optimizer update: the batch size of synchronous training.
      local_batch_size: B, examples per gradient. G / B gradients make up one update.
      staleness_tolerance: iota, in global steps: a gradient that is later than this gets weight 0
        (arXiv 2205.11048, section 4). Default 4.
      sparse_divisor: What a row of a sparse gradient is divided by. "gradients_per_update" (the
        default) is M and equals synchronous training; "gradients_with_row" is the number of
        gradients that contain the row.

    Raises:
      ValueError: A value is out of range, or G / B is not a whole number of at least 1.
      TypeError: A value is of the wrong type.
    """

    global_batch_size: int
    local_batch_size: int
    staleness_tolerance: int = DEFAULT_STALENESS_TOLERANCE
    sparse_divisor: SparseDivisor = "gradients_per_update"

    def __post_init__(self):
        for name in ("global_batch_size", "local_batch_size"):
            _require_integer(name, getattr(self, name), minimum=1, unit="examples")
        _require_integer(
            "staleness_tolerance", self.staleness_tolerance, minimum=0, unit="global steps"
        )
        if self.sparse_divisor not in SparseDivisor.__args__:
            raise ValueError(
                f"sparse_divisor: expected one of {SparseDivisor.__args__}, found"
                f" {self.sparse_divisor!r}."
            )
        if self.global_batch_size % self.local_batch_size:
            raise ValueError(
                f"global_batch_size G={self.global_batch_size} must be a whole multiple of"
                f" local_batch_size B={self.local_batch_size}, so that G / B gradients make up one"
                f" update; G / B is {self.global_batch_size / self.local_batch_size:g}. Choose B"
                " as a divisor of G."
            )

    @property
    def gradients_per_update(self) -> int:
        """M = G / B."""
        return self.global_batch_size // self.local_batch_size


def _require_integer(name: str, value: object, minimum: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name}: expected an integer number of {unit}, found {value!r} of type"
            f" {type(value).__name__}."
        )
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum} {unit}, found {value}.")
