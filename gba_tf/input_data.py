"""Splits a tf.data.Dataset given to Model.fit among the workers.

TensorFlow's own parameter-server training lets every worker read the whole of it. Here worker i of
n reads a share, chosen as under MultiWorkerMirroredStrategy: by files where there are enough, else
by elements (tf.data.Options().experimental_distribute.auto_shard_policy; OFF leaves it whole). The
share is repeated, since a fast worker takes more steps of an epoch than its share has.

The graph of a dataset is the same for all workers; which share is read is decided when it runs.
The shares are disjoint only if all workers see the same order, so a shuffle without a seed is given
one: drawn anew for every iterator, the same for all workers. What else may change the order stays
as it is: shuffle the elements with Dataset.shuffle, drop none at random, and leave
tf.data.Options().deterministic on.
"""

import contextlib
import random
import warnings

import tensorflow as tf
from tensorflow.python.distribute import input_lib, input_ops
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.framework import op_def_registry

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
        serialized = serialize_seeded(original)

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


def serialize_seeded(dataset: tf.data.Dataset) -> tf.Tensor:
    """The graph of a dataset, with seeds for what shuffles or draws: all workers see one order.

    Seeds that the user set are kept. In a function that makes datasets (flat_map, interleave) each
    of them gets the same seed, as if the user had set it.

    Args:
      dataset: Made eagerly.

    Returns:
      string scalar for deserialize_dataset_from_graph, other seeds in every call.
    """
    graph = graph_of(dataset)
    _seed_nodes(graph.node, output="")
    for function in graph.library.function:
        _seed_nodes(function.node_def, output=":output:0")
    return tf.constant(graph.SerializeToString())


def _seed_nodes(nodes, output: str) -> None:
    by_output = {node.name + output: node for node in nodes}
    # Nodes that are added have nothing to seed.
    for node in list(nodes):
        inputs = _seed_inputs(node)
        if "seed" not in inputs or "seed2" not in inputs:
            continue
        if "seed_generator" in inputs:
            # The graph names a generator of this process. Its name may mean another one, with other
            # seeds, on a worker; one that is not there is made, of the seeds.
            generator = nodes.add(name=f"{node.name}/own_generator", op="DummySeedGenerator")
            suffix = ":handle:0" if output else ""
            node.input[inputs["seed_generator"]] = generator.name + suffix
        names = ("seed", "seed2")
        constants = [by_output.get(node.input[inputs[name]]) for name in names]
        if any(_value(constant) != 0 for constant in constants):
            continue
        for name in names:
            value = tf.make_tensor_proto(random.randrange(1, 2**31), tf.int64)
            seed = nodes.add(name=f"{node.name}/same_{name}", op="Const")
            seed.attr["dtype"].type = value.dtype
            seed.attr["value"].tensor.CopyFrom(value)
            node.input[inputs[name]] = seed.name + output


def _seed_inputs(node: tf.compat.v1.NodeDef) -> dict[str, int]:
    """Name -> index of the inputs of an op that makes a dataset."""
    op = op_def_registry.get(node.op)
    if op is None or [output.type for output in op.output_arg] != [tf.variant.as_datatype_enum]:
        return {}
    return {argument.name: index for index, argument in enumerate(op.input_arg)}


def _value(constant: tf.compat.v1.NodeDef | None) -> int | None:
    """The value of an integer constant; None of what is not constant."""
    if constant is None or constant.op != "Const":
        return None
    return int(tf.make_ndarray(constant.attr["value"].tensor))


@contextlib.contextmanager
def same_order_of_arrays(dataset_fn):
    """Calling a dataset function that Keras made inside gives the same order on all workers.

    Args:
      dataset_fn: The dataset function; any other one is left alone. Called in a graph, which is
        built once for all workers.
    """
    graph = tf.compat.v1.get_default_graph()
    users_seed = graph.seed
    if users_seed is None and made_of_arrays(dataset_fn):
        graph.seed = random.randrange(1, 2**31)
    try:
        with warnings.catch_warnings():
            # TensorFlow warns that functions of the dataset use this seed, which is its purpose.
            warnings.filterwarnings("ignore", message="Seed .* from outer graph")
            yield
    finally:
        graph.seed = users_seed


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
