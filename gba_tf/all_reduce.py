"""Synchronous training by all-reduce, with TensorFlow's MultiWorkerMirroredStrategy.

Every worker runs the same program and creates the strategy; TensorFlow connects them. What is added
here: workers that do not come are named, those that came are counted, input with fewer files than
workers is shared all the same, and a worker that ends because another one is gone says which.
"""

import re
import sys
import types
from collections.abc import Iterator

import tensorflow as tf

from gba_tf import cluster, missing_workers
from gba_tf.cluster_config import ClusterConfig

_WORKER = re.compile(r"/job:worker/(?:replica:0/)?task:(\d+)")
# TensorFlow's text for what happens when a peer is gone, in the middle of training or at its start.
_PEER_FAILURE = re.compile(r"Collective ops is aborted|coordination service|CoordinationService")
# A request to the service of heartbeats, which runs in worker 0, was in vain.
_COORDINATOR_FAILURE = re.compile(r"RPC: /tensorflow\.CoordinationService/")


class WorkerLostError(RuntimeError):
    """This worker cannot go on, because another one is gone; TensorFlow's error is the cause."""


class WorkersNotReadyError(RuntimeError):
    """A worker is connected and cannot train, and so no worker can."""


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's own, but for input from fewer files than there are workers.

    Where a dataset reads files, TensorFlow gives each worker files of its own, and a worker for
    which there is none makes the others wait (tensorflow#35878). Such a dataset is split by element
    here, unless its options say how to split it.
    """

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> tf.distribute.DistributedDataset:
        """See `tf.distribute.Strategy.experimental_distribute_dataset`."""
        policies = tf.data.experimental.AutoShardPolicy
        chosen = dataset.options().experimental_distribute.auto_shard_policy
        if chosen == policies.AUTO and not _can_share_files(dataset, self.num_replicas_in_sync):
            by_element = tf.data.Options()
            by_element.experimental_distribute.auto_shard_policy = policies.DATA
            dataset = dataset.with_options(by_element)
        return super().experimental_distribute_dataset(dataset, options)


def create_strategy(
    config: ClusterConfig | None, ready: bool = True
) -> MultiWorkerMirroredStrategy:
    """The strategy of a worker; returns when all workers are connected, and says how many.

    Has to come before any other TensorFlow operation. Each worker is one replica, on its CPU. When
    a worker dies or hangs, the operation that needs it fails in all others, at once or when
    TensorFlow has missed its heartbeats for about 10 seconds. If nobody catches that error, the
    last line of the traceback is a `WorkerLostError` that names the lost worker.

    Args:
      config: From `ClusterConfig.for_all_reduce()`, of a worker; None trains in this process alone.
      ready: False of a worker that cannot train: it comes only to end the others, which would wait
        for it. Default: True.

    Returns:
      A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
      ValueError: If the configuration is not one for all-reduce, or this task is no worker.
      RuntimeError: If TensorFlow has already started in this process, if the address of this task
        is not free, or if the number of connected workers is not that of the configuration.
      WorkersNotReadyError: In all workers, if one of them is not ready.
    """
    if config is None:
        cluster.say("all-reduce: found no TF_CONFIG, this process trains alone")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        return MultiWorkerMirroredStrategy(resolver)
    if not config.all_reduce or config.task_type != "worker":
        raise ValueError(
            f"all-reduce: expected a worker of a configuration for all-reduce, found "
            f"{config.task_name}. Call gba_tf.create_strategy in every task, which returns in "
            "workers only"
        )
    _name_lost_workers(config)
    with missing_workers.named(config):
        try:
            strategy = MultiWorkerMirroredStrategy(cluster.cluster_resolver(config))
        except RuntimeError as error:
            if "must be configured at program startup" not in str(error):
                raise
            raise RuntimeError(
                "all-reduce: expected the strategy to be the first thing that TensorFlow is told "
                "to do, found that it has run an operation already. Move gba_tf.create_strategy "
                "to the start of main(), and what makes tensors, variables or datasets, at import "
                "time too, behind it"
            ) from None
        connected, num_ready = _count_workers(strategy, ready)
    if connected != config.num_workers:
        raise RuntimeError(
            f"all-reduce: expected the {config.num_workers} workers of TF_CONFIG to be connected, "
            f"found {connected}. Give every task the same cluster in TF_CONFIG"
        )
    if num_ready != connected:
        raise WorkersNotReadyError(
            f"{config.task_name} ends: expected {connected} workers that can train, found"
            f" {num_ready}. What the others print says why"
        )
    cluster.say(f"{config.task_name}: {connected} of {config.num_workers} workers are connected")
    return strategy


def lost_worker_error(config: ClusterConfig, error: BaseException) -> WorkerLostError | None:
    """What to say instead of TensorFlow's error about a peer; None for any other error.

    Args:
      config: Of the worker that caught the error.
      error: The error.
    """
    if not isinstance(error, tf.errors.OpError) or not _PEER_FAILURE.search(error.message):
        return None
    workers = config.cluster["worker"]
    # TensorFlow names the peer from which it waits for something; others may be gone as well.
    named = {int(index) for index in _WORKER.findall(error.message)}
    if _COORDINATOR_FAILURE.search(error.message):
        named.add(0)
    lost = [
        f"worker {index} at {address}"
        for index, address in enumerate(workers)
        if index != config.task_index and (index in named or not cluster.answers(address))
    ]
    return WorkerLostError(
        f"{config.task_name} lost {' and '.join(lost) or 'another worker'}, and all-reduce needs "
        "every worker. The log of the lost one says why it ended. Start the program again in "
        "every task"
    )


def _name_lost_workers(config: ClusterConfig) -> None:
    previous_hook = sys.excepthook

    def name_lost_worker(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        lost = lost_worker_error(config, error)
        if lost is None:
            previous_hook(kind, error, traceback)
            return
        lost.__cause__ = error.with_traceback(traceback)
        previous_hook(type(lost), lost, None)

    sys.excepthook = name_lost_worker


def _count_workers(strategy: tf.distribute.Strategy, ready: bool) -> tuple[int, int]:
    """Adds numbers from each worker, which shows that they really work together.

    Returns:
      The workers, and those of them that are ready.
    """

    @tf.function(autograph=False)
    def count() -> tf.Tensor:
        numbers = strategy.run(lambda: tf.constant([1.0, float(ready)]))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, numbers, axis=None)

    connected, num_ready = count().numpy().tolist()
    return int(connected), int(num_ready)


def _can_share_files(dataset: tf.data.Dataset, num_workers: int) -> bool:
    """Whether every list of files or other source of a dataset has an element for each worker."""
    infinite = tf.data.INFINITE_CARDINALITY
    # The number of a source that does not tell its own is negative: it may be too small.
    numbers = [int(source.cardinality()) for source in _sources(dataset)]
    return all(number == infinite or number >= num_workers for number in numbers)


def _sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    inputs = dataset._inputs()
    # A reader of text lines hides the dataset of its file names.
    if not inputs and hasattr(dataset, "_impl"):
        inputs = [dataset._impl]
    if not inputs:
        yield dataset
    for each in inputs:
        yield from _sources(each)
