"""The order of the examples in an epoch, and how they are cut into local batches.

Every mode, worker and restart asks the same function, so nobody has to agree on anything but the
number of an epoch and of a block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Cuts each epoch over `num_examples` into blocks of `local_batch_size` indices.

    Within one epoch every example is in exactly one block. The order depends on nothing but the
    fields below and the epoch; it is the same in every process and on every machine.

    Attributes:
      num_examples: examples in an epoch.
      local_batch_size: examples per block; the last block of an epoch may have fewer.
      seed: 0 or more; another seed gives another order.
      shuffle: False keeps the examples in ascending order in every epoch.

    Raises:
      ValueError: a count is not positive, or the seed is negative.
    """

    num_examples: int
    local_batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, lowest in (("num_examples", 1), ("local_batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(f"expected {name} to be at least {lowest}, found {value}")

    @property
    def num_blocks(self) -> int:
        """Blocks in an epoch: num_examples / local_batch_size, rounded up."""
        return -(-self.num_examples // self.local_batch_size)

    def indices_at(self, position: int | tf.Tensor) -> tf.Tensor:
        """The examples of the block at a position. Works eagerly and in graphs.

        The order is computed for these examples alone (a keyed permutation of the numbers below
        num_examples), so that the cost does not grow with the data.

        Args:
          position: Blocks since the start of training, 0 or more, int64 scalar: block
            position % num_blocks of epoch position // num_blocks.

        Returns:
          int64 [local_batch_size], fewer in the last block of an epoch.

        Raises:
          ValueError: position is a negative Python integer.
        """
        import tensorflow as tf

        if isinstance(position, int) and position < 0:
            raise ValueError(f"expected position to be at least 0, found {position}")
        position = tf.cast(position, tf.int64)
        first = position % self.num_blocks * self.local_batch_size
        indices = tf.range(first, tf.minimum(first + self.local_batch_size, self.num_examples))
        if not self.shuffle:
            return indices
        epoch = position // self.num_blocks
        seed = tf.stack([tf.constant(self.seed, tf.int64), epoch])
        return tf.random.experimental.index_shuffle(
            indices, seed, tf.constant(self.num_examples - 1, tf.int64)
        )
