"""Shares the blocks of in-memory examples among workers: whoever is free takes the next one.

Handing out blocks one by one, instead of a fixed share to each worker, keeps an epoch exact when
workers differ in speed: every example is trained on once per epoch, and no worker on all of them.
The position is one counter on a parameter server, so it is also what a checkpoint needs to go on in
the middle of an epoch. A block that a dying worker took is lost with its gradient: the step is
repeated with the next one.
"""

from __future__ import annotations

import tensorflow as tf

from gba_tf.data.blocks import Blocks
from gba_tf.data.dataset import Examples

Batch = tuple[dict[str, tf.Tensor], tf.Tensor]

# The examples are constants of the function that reads them, and a function is one message.
_MAX_BYTES = 2**31 - 2**24


class BlockReader:
    """Reads blocks of examples as tensors, from copies on the device that reads.

    Args:
      examples: What to read; less than 2 GiB.
      blocks: Their order and how they are cut.

    Raises:
      ValueError: `blocks` are of another number of examples, or the examples are too large.
    """

    def __init__(self, examples: Examples, blocks: Blocks):
        if blocks.num_examples != len(examples):
            raise ValueError(
                f"blocks: expected {len(examples)} examples, found blocks of {blocks.num_examples}."
            )
        num_bytes = sum(column.nbytes for column in (*examples.columns.values(), examples.labels))
        if num_bytes > _MAX_BYTES:
            raise ValueError(
                f"examples: expected at most {_MAX_BYTES:,} bytes in memory, found {num_bytes:,}."
                " Train on fewer examples, or on a tf.data.Dataset that reads them from files."
            )
        self._examples = examples
        self.blocks = blocks

    def read(self, position: tf.Tensor) -> Batch:
        """The batch at `position`, see `Blocks.indices_at`.

        Args:
          position: int64 scalar.

        Returns:
          (name -> values [batch, ...], labels float32 [batch]).
        """
        return self._gather(self.blocks.indices_at(position))

    def _gather(self, indices: tf.Tensor) -> Batch:
        columns = {
            name: tf.gather(tf.constant(column), indices)
            for name, column in self._examples.columns.items()
        }
        return columns, tf.gather(tf.constant(self._examples.labels), indices)

    def dataset(self, first_position: int = 0) -> tf.data.Dataset:
        """The endless stream of batches, for training in one process."""
        return _stream(first_position, self.read)

    def dataset_of_parts(self, first_position: int, part: int, num_parts: int) -> tf.data.Dataset:
        """The endless stream of one worker's equal part of each batch, for all-reduce.

        Its elements are (columns, labels, weights float32 [size]), see `Blocks.part_at`: all
        workers have as many batches of the same size, also where the examples cannot be divided.
        """

        def read(position):
            indices, weights = self.blocks.part_at(position, part, num_parts)
            return *self._gather(indices), weights

        return _stream(first_position, read)


def _stream(first_position: int, read) -> tf.data.Dataset:
    positions = tf.data.Dataset.counter(first_position, dtype=tf.int64)
    options = tf.data.Options()
    # Nothing is tuned here, and the thread that tunes would sleep, for up to as long as the dataset
    # has been read, while the end of fit() waits for it.
    options.autotune.enabled = False
    return positions.map(read, num_parallel_calls=1).prefetch(2).with_options(options)


class BlockSource(tf.distribute.DistributedDataset):
    """The training data of a run with a ClusterCoordinator: pass it to Model.fit as `x`.

    Give `steps_per_epoch=reader.blocks.num_blocks` for epochs that cover the data once.

    Args:
      reader: What to read; the data travel to each worker once, with the training function.
      strategy: A ParameterServerStrategy, also a GBAStrategy.
    """

    def __init__(
        self,
        reader: BlockReader,
        strategy: tf.distribute.experimental.ParameterServerStrategy,
    ):
        self._reader = reader
        with strategy.scope():
            self._position = tf.Variable(0, dtype=tf.int64, trainable=False, name="position")
        # Always the same one: with another, each epoch would trace the training function again and
        # send the examples to the workers again.
        self._iterator = _BlockIterator(reader, self._position)
        _pass_block_sources_through(
            tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        )

    @property
    def position(self) -> int:
        """Blocks handed out so far."""
        return int(self._position)

    @property
    def element_spec(self) -> tuple[dict[str, tf.TensorSpec], tf.TensorSpec]:
        columns = {
            name: tf.TensorSpec([None, *column.shape[1:]], column.dtype)
            for name, column in self._reader._examples.columns.items()
        }
        return columns, tf.TensorSpec([None], tf.float32)

    def __iter__(self) -> _BlockIterator:
        return self._iterator


class _BlockIterator:
    """What a worker's step calls next() on, in its graph.

    Not the source itself: Keras takes an object with both __iter__ and __next__ for a generator.
    """

    def __init__(self, reader: BlockReader, position: tf.Variable):
        self._reader = reader
        self._position = position

    def __iter__(self) -> _BlockIterator:
        return self

    def __next__(self) -> Batch:
        # Takes and advances in one op: two workers never get the same block.
        with tf.device(self._position.device):
            position = tf.raw_ops.ResourceCountUpTo(
                resource=self._position.handle, limit=tf.int64.max, T=tf.int64
            )
        with tf.device("/device:CPU:0"):
            return self._reader.read(position)


def _pass_block_sources_through(
    coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator,
) -> None:
    """Model.fit makes a dataset per worker of what it is given; a block source serves them all."""
    create_per_worker_dataset = coordinator.create_per_worker_dataset

    def create(dataset):
        if isinstance(dataset, BlockSource):
            return dataset
        return create_per_worker_dataset(dataset)

    coordinator.create_per_worker_dataset = create
