"""A worker that is made slow on purpose, for tests and demonstrations. Imports no TensorFlow."""

import dataclasses
import math

FORM = "worker:INDEX:FACTOR:FROM_STEP:TO_STEP"


@dataclasses.dataclass(frozen=True)
class InjectedDelay:
    """Within some global steps a worker's gradient takes `factor` times as long.

    Attributes:
      worker: Its task index.
      factor: 1 or more.
      from_step: The first global step (updates that were applied before) of the delay.
      to_step: The first one after it.
    """

    worker: int
    factor: float
    from_step: int
    to_step: int

    @classmethod
    def parse(cls, text: str) -> "InjectedDelay":
        """Reads "worker:1:8:200:600": worker 1 is 8 times as slow in the steps 200 to 599.

        Raises:
          ValueError: The text is of another form, or a number is out of its range.
        """
        job, *numbers = text.split(":")
        try:
            worker, factor, from_step, to_step = numbers
            delay = cls(int(worker), float(factor), int(from_step), int(to_step))
        except ValueError:
            job = ""
        if job != "worker":
            raise ValueError(
                f"inject_delay: expected {FORM}, such as worker:1:8:200:600, found {text!r}."
            )
        if delay.worker < 0 or not 1 <= delay.factor < math.inf:
            raise ValueError(
                "inject_delay: expected an index of 0 or more and a factor of 1 or more, found"
                f" {text!r}."
            )
        if not 0 <= delay.from_step < delay.to_step:
            raise ValueError(
                "inject_delay: expected FROM_STEP of 0 or more and TO_STEP above it, found"
                f" {text!r}."
            )
        return delay

    def check(self, num_workers: int) -> None:
        """Raises ValueError where there is no such worker."""
        if self.worker >= num_workers:
            raise ValueError(
                f"inject_delay: expected the index of one of the {num_workers} workers, 0 to"
                f" {num_workers - 1}, found {self.worker}."
            )
