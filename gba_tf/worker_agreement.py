"""All workers of all-reduce get through what they do together, or none of them does.

A worker that failed must not leave the others waiting in a collective operation, nor run one while
they run another: TensorFlow pairs those by their order.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

_FAILED = -(2**63)


class WorkerAgreement:
    """Of the workers of tf.distribute.MultiWorkerMirroredStrategy; without others, trivial.

    Args:
      strategy: Any.

    Attributes:
      has_others: Whether there are several workers, which all call the same methods.
      is_first: Whether this is the worker that writes for all.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.has_others = (
            isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
            and strategy.extended._in_multi_worker_mode()
        )
        self.is_first = not self.has_others or strategy.extended.should_checkpoint
        self._strategy = strategy
        # TensorFlow warns of a strategy that is run eagerly.
        self._gather = tf.function(lambda numbers: strategy.run(_gather, (numbers,)))

    @contextlib.contextmanager
    def together(self, otherwise: str) -> Iterator[None]:
        """What is done within ends well on all workers, or with an exception on all.

        Collective operations may follow an `agree` or `numbers` in it, from where on a worker fails
        in none of them, or after them.

        Args:
          otherwise: Begins the message where another worker failed: what was not done.

        Raises:
          RuntimeError: Another worker failed.
        """
        try:
            yield
            self.agree()
        except _OtherWorkerFailed as error:
            raise RuntimeError(
                f"{otherwise}, because worker {error.worker} failed; see its error."
            ) from None
        except Exception:
            with contextlib.suppress(tf.errors.OpError, _OtherWorkerFailed):
                self.numbers(_FAILED)
            raise

    def agree(self) -> None:
        """Within `together`: goes on when all workers are here, and ends it if one has failed."""
        self.numbers(0)

    def numbers(self, number: int) -> list[int]:
        """Within `together`: what each worker calls this with; waits for all, as `agree` does."""
        if not self.has_others:
            return [number]
        gathered = self._gather(tf.constant([number], tf.int64))
        found = self._strategy.experimental_local_results(gathered)[0].numpy().tolist()
        if _FAILED in found:
            raise _OtherWorkerFailed(found.index(_FAILED))
        return found


class _OtherWorkerFailed(Exception):
    def __init__(self, worker: int):
        super().__init__()
        self.worker = worker


def _gather(numbers: tf.Tensor) -> tf.Tensor:
    # An argument is on no device; what is made here is on that of the replica.
    return tf.distribute.get_replica_context().all_gather(tf.identity(numbers), axis=0)
