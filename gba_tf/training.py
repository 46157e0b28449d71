"""[2] A worker's step: token, gradient, push, commit.

`strategy.run(fn)` traces `fn` into a function of its own that computes gradients and hands them to
the optimizer; what the optimizer is handed is recorded instead of applied (optimizer_hooks). Around
that function stands the protocol: a token is taken before it runs, and its gradients are pushed and
committed after it. A function that trains nothing, such as an evaluation step, takes no token.
"""

import contextlib

import tensorflow as tf
from tensorflow.core.function.polymorphism import function_type
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph as func_graph_lib

from gba_tf import direct_updates
from gba_tf.ops import gradient_buffer, token_server
from gba_tf.step_record import StepRecord


class GBAReplicaContext(distribute_lib.ReplicaContext):
    """The replica context of a worker's step: knows where gradients are recorded.

    Args:
      strategy: The GBAStrategy.
      record: Where to record; None outside a tf.function, where nothing can be trained.
    """

    def __init__(self, strategy, record: StepRecord | None):
        super().__init__(strategy, replica_id_in_sync_group=0)
        self.record = record

    def merge_call(self, merge_fn, args=(), kwargs=None):
        # Overridden here and not in _merge_call: there, AutoGraph has wrapped a legacy optimizer's
        # functools.partial, and it is no longer seen who is calling.
        optimizer = _optimizer_of(merge_fn)
        if optimizer is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__} updates variables on a path that GBA does not control"
                f" ({merge_fn}): its gradients would bypass the gradient buffer. Expected"
                " apply_gradients() of a tf-keras optimizer, from"
                " tf.keras.optimizers or tf.keras.optimizers.legacy, not overridden."
            )
        return super().merge_call(merge_fn, args, kwargs)


def _optimizer_of(merge_fn) -> object | None:
    function = getattr(merge_fn, "func", merge_fn)  # Legacy optimizers pass a functools.partial.
    owner = getattr(function, "__self__", None)
    return owner if hasattr(owner, "apply_gradients") else None


def run_step(strategy, fn, args, kwargs):
    """Runs `fn` in replica context; trains with GBA if it hands gradients to an optimizer."""
    if tf.executing_eagerly():
        with GBAReplicaContext(strategy, record=None):
            return fn(*args, **kwargs)
    record = StepRecord()
    outputs = _OutputStructure()

    def compute():
        record.graph = tf.compat.v1.get_default_graph()
        with GBAReplicaContext(strategy, record):
            result = fn(*args, **kwargs)
        return outputs.flatten(result), record.gradients()

    graph = func_graph_lib.func_graph_from_py_func("gba_gradient", compute, (), {})
    direct_updates.refuse(graph, strategy.trained_variables(record))
    gradient_function = concrete_function.ConcreteFunction.from_func_graph(
        graph,
        function_type.from_structured_signature(
            ((), {}), graph.structured_outputs, graph.function_captures.capture_types
        ),
        {},
    )
    if not record.trains:
        _refuse_state_without_training(record)
        flat_outputs, _ = gradient_function()
        return outputs.pack(flat_outputs)
    group = strategy.update_group(record)
    # Not before the batch is there: waiting for data must not make a gradient stale.
    batch = [t for t in tf.nest.flatten((args, kwargs), expand_composites=True) if tf.is_tensor(t)]
    with tf.control_dependencies(batch):
        token_id = group.token_server.take(token_server.worker_identity())
    # Parameters are read, and batch statistics computed, only after the token is taken.
    with tf.control_dependencies([token_id]):
        flat_outputs, gradients = gradient_function()
    _push_and_commit(group, token_id, gradients)
    return outputs.pack(flat_outputs)


def _refuse_state_without_training(record: StepRecord) -> None:
    if record.state_deltas:
        names = [state.variable.name for state in record.state_deltas]
        raise RuntimeError(
            f"{names} are changed in a strategy.run() that hands no gradient to an optimizer:"
            " such state advances with the updates of a training step only. Change it outside"
            " strategy.run(), on the chief."
        )


def _push_and_commit(group, token_id, gradients) -> None:
    pushed = []
    for shard in group.shards:
        block = gradient_buffer.pack(
            shard.buffer.specs, [gradients[index] for index in shard.gradient_indices]
        )
        pushed.append(shard.buffer.push(token_id, block))
    decision = group.token_server.commit(pushed)
    group.apply(decision)


class _OutputStructure:
    """Carries what a step returns across a function call: tensors pass, other objects are kept."""

    def flatten(self, result) -> list[tf.Tensor]:
        result = tf.nest.map_structure(
            lambda leaf: leaf.read_value() if isinstance(leaf, tf.Variable) else leaf, result
        )
        self._structure = result
        self._leaves = tf.nest.flatten(result, expand_composites=True)
        return [leaf for leaf in self._leaves if tf.is_tensor(leaf)]

    def pack(self, tensors: list[tf.Tensor]):
        remaining = iter(tensors)
        leaves = [next(remaining) if tf.is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


@contextlib.contextmanager
def plain_replica_context():
    """Leaves the strategy: optimizers behave as in a single process with one replica."""
    mode = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
