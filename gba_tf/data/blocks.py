"""The order of the examples in an epoch, and how they are cut into batches.

Every mode, worker and restart asks the same function, so nobody has to agree on anything but the
number of an epoch and how many of its examples are done. The order within an epoch does not depend
on the size of the batches: a run may go on in the middle of an epoch with batches of another size.
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
    number of examples, the seed and the epoch; it is the same in every process and on every
    machine.

    Attributes:
      num_examples: examples in an epoch.
      local_batch_size: examples per block; the last block of an epoch may have fewer.
      seed: 0 or more; another seed gives another order.
      shuffle: False keeps the examples in ascending order in every epoch.
      first_epoch: the epoch of position 0.
      first_example: examples of that epoch that are done before position 0: where a run that was
        interrupted goes on.

    Raises:
      ValueError: a count is not positive, the seed is negative, or the start is outside of an
        epoch.
    """

    num_examples: int
    local_batch_size: int
    seed: int
    shuffle: bool = True
    first_epoch: int = 0
    first_example: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (
            ("num_examples", 1),
            ("local_batch_size", 1),
            ("seed", 0),
            ("first_epoch", 0),
            ("first_example", 0),
        ):
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(f"expected {name} to be at least {lowest}, found {value}")
        if self.first_example >= self.num_examples:
            raise ValueError(
                f"expected first_example to be below num_examples={self.num_examples}, found"
                f" {self.first_example}"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks in a whole epoch: num_examples / local_batch_size, rounded up."""
        return -(-self.num_examples // self.local_batch_size)

    @property
    def num_first_blocks(self) -> int:
        """Blocks in what is left of the first epoch."""
        return -(-(self.num_examples - self.first_example) // self.local_batch_size)

    def blocks_before_epoch(self, epoch: int) -> int:
        """The position at which an epoch after the first one begins; 0 for the first one."""
        if epoch <= self.first_epoch:
            return 0
        return self.num_first_blocks + (epoch - self.first_epoch - 1) * self.num_blocks

    def progress_at(self, position: int) -> tuple[int, int]:
        """Where training stands when all blocks before `position` are done.

        Returns:
          (epoch, examples of that epoch that are done), whatever the size of the blocks.
        """
        if position < self.num_first_blocks:
            return self.first_epoch, self.first_example + position * self.local_batch_size
        epochs, block = divmod(position - self.num_first_blocks, self.num_blocks)
        return self.first_epoch + 1 + epochs, block * self.local_batch_size

    def indices_at(self, position: int | tf.Tensor) -> tf.Tensor:
        """The examples of the block at a position. Works eagerly and in graphs.

        The order is computed for these examples alone (a keyed permutation of the numbers below
        num_examples), so that the cost does not grow with the data.

        Args:
          position: Blocks since the start, 0 or more, int64 scalar. Without a start in the middle
            it is block position % num_blocks of epoch position // num_blocks.

        Returns:
          int64 [local_batch_size], fewer in the last block of an epoch.

        Raises:
          ValueError: position is a negative Python integer.
        """
        return self._shuffled(*self._unshuffled_at(position))

    def part_at(
        self, position: int | tf.Tensor, part: int, num_parts: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One of the equal parts of a block, for a worker that shares each block with others.

        All parts have the same number of examples: a part of a smaller block is filled up with
        examples of weight 0, and the weights of the others make up for it, so that the mean over
        the parts of (the sum over a part of weight * loss / its size) is the mean over the block.

        Args:
          position: As for `indices_at`.
          part: 0 to num_parts - 1.
          num_parts: Workers.

        Returns:
          int64 [size] indices, and float32 [size] weights, 1 for all in a whole block that can be
          divided.
        """
        import tensorflow as tf

        epoch, block = self._unshuffled_at(position)
        number = tf.shape(block, tf.int64)[0]
        size = -(-number // num_parts)
        places = tf.range(part * size, (part + 1) * size)
        is_real = places < number
        indices = tf.gather(block, tf.minimum(places, number - 1))
        weight = tf.cast(size * num_parts, tf.float32) / tf.cast(number, tf.float32)
        weights = tf.where(is_real, weight, 0.0)
        return self._shuffled(epoch, indices), weights

    def _unshuffled_at(self, position: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The epoch of the block at a position, and the places of its examples in the epoch."""
        import tensorflow as tf

        if isinstance(position, int) and position < 0:
            raise ValueError(f"expected position to be at least 0, found {position}")
        position = tf.cast(position, tf.int64)
        later = position - self.num_first_blocks
        first_epoch = tf.constant(self.first_epoch, tf.int64)
        epoch = tf.where(later < 0, first_epoch, first_epoch + 1 + later // self.num_blocks)
        first = tf.where(
            later < 0,
            self.first_example + position * self.local_batch_size,
            later % self.num_blocks * self.local_batch_size,
        )
        return epoch, tf.range(first, tf.minimum(first + self.local_batch_size, self.num_examples))

    def _shuffled(self, epoch: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        if not self.shuffle:
            return indices
        seed = tf.stack([tf.constant(self.seed, tf.int64), epoch])
        return tf.random.experimental.index_shuffle(
            indices, seed, tf.constant(self.num_examples - 1, tf.int64)
        )
