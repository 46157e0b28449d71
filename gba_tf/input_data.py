"""Splits a tf.data.Dataset given to Model.fit among the workers.

TensorFlow's own parameter-server training lets every worker read the whole of it. Here worker i of
n reads a share, chosen as under MultiWorkerMirroredStrategy: by files where there are enough, else
by elements (tf.data.Options().experimental_distribute.auto_shard_policy; OFF leaves it whole). The
share is repeated, since a fast worker takes more steps of an epoch than its share has.

The graph of a dataset is the same for all workers; which share is read is decided when it runs.
"""

import warnings

import tensorflow as tf
from tensorflow.python.distribute import input_lib, input_ops
from tensorflow.python.distribute.coordinator import values as coordinator_values

from gba_tf.ops.token_server import worker_identity

_PYTHON_OPS = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})


def worker_context(num_workers: int) -> tf.distribute.InputContext:
    """The context of the worker that runs the graph: `input_pipeline_id` is a tensor."""
    return tf.distribute.InputContext(
        num_input_pipelines=num_workers,
        input_pipeline_id=worker_identity()[0],
        num_replicas_in_sync=1,
    )


def share_datasets(coordinator, num_workers: int) -> None:
    """Lets the coordinator split the datasets that a GBAStrategy distributed."""
    create_per_worker_dataset = coordinator.create_per_worker_dataset

    def create(dataset):
        if isinstance(dataset, input_lib.DistributedDataset):
            if _may_be_shared(dataset._original_dataset):
                return SharedDataset(dataset, coordinator, num_workers)
        return create_per_worker_dataset(dataset)

    coordinator.create_per_worker_dataset = create


class SharedDataset:
    """A dataset per worker: a share of it when iterated, the whole of it when built.

    Keras iterates to train and evaluate; its exact evaluation builds the dataset in order to cut it
    into shards of its own.

    Args:
      dataset: From strategy.experimental_distribute_dataset, not built yet.
      coordinator: The ClusterCoordinator.
      num_workers: Number of shares.
    """

    def __init__(self, dataset: input_lib.DistributedDataset, coordinator, num_workers: int):
        self._dataset = dataset
        self._coordinator = coordinator
        self._num_workers = num_workers

    @property
    def element_spec(self):
        return self._dataset._original_dataset.element_spec

    def build(self):
        whole = coordinator_values.PerWorkerDatasetFromDataset(self._dataset, self._coordinator)
        return whole.build()

    def __iter__(self):
        original = self._dataset._original_dataset
        serialized = coordinator_values.serialize_dataset_to_graph(original)

        def share_of_worker():
            whole = coordinator_values.deserialize_dataset_from_graph(
                serialized, original.element_spec
            )
            return input_lib.DistributedDataset(
                self._dataset._input_workers,
                self._dataset._strategy,
                share(whole, worker_context(self._num_workers)),
                num_replicas_in_sync=1,
                options=self._dataset._options,
            )

        with warnings.catch_warnings():
            # TensorFlow warns that options cannot be read in a graph; they were read before it.
            warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data")
            per_worker = coordinator_values.PerWorkerDatasetFromDatasetFunction(
                share_of_worker, self._coordinator
            )
            return iter(per_worker)


def share(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The endless share of the worker that runs the graph."""
    return input_ops.auto_shard_dataset(
        dataset.repeat(), context.num_input_pipelines, context.input_pipeline_id
    )


def _may_be_shared(dataset: tf.data.Dataset) -> bool:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy != tf.data.experimental.AutoShardPolicy.OFF


def made_of_arrays(dataset_fn) -> bool:
    """Whether Keras made the dataset function from arrays, for all workers alike."""
    name = getattr(getattr(dataset_fn, "dataset_fn", None), "__qualname__", "")
    return name.startswith("_ClusterCoordinatorDataHandler.")


def refuse_python(graph: tf.compat.v1.GraphDef) -> None:
    """Refuses datasets that call Python, which cannot travel to a worker.

    Args:
      graph: The graph of a dataset, see `graph_of`, or of a dataset function.

    Raises:
      ValueError: from_generator, py_function or numpy_function is part of it.
    """
    nodes = [node.op for node in graph.node]
    nodes += [node.op for function in graph.library.function for node in function.node_def]
    found = sorted(_PYTHON_OPS.intersection(nodes))
    if found:
        raise ValueError(
            "Expected a dataset that can run on any worker, found one that calls Python"
            f" ({found[0]}: Dataset.from_generator, tf.py_function or tf.numpy_function). The"
            " Python function is in this process only. Write the data to TFRecord or CSV files and"
            " read them with tf.data, or pass arrays."
        )


def graph_of(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef:
    """The graph of a dataset that was made eagerly."""
    serialized = coordinator_values.serialize_dataset_to_graph(dataset)
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())
