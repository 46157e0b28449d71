"""Refuses steps that change variables without passing the gradient buffer."""

import tensorflow as tf

# What an update changes it may change: GbaApplyUpdate is the way through the buffer.
_ALLOWED = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
    "GbaApplyUpdate",
)
# Ops that change a variable by their first resource input.
_WRITE_PREFIXES = ("Assign", "Resource", "ScatterNd", "Stateful")
# Named like one, but what it does is up to the function that it calls.
_CALL = "StatefulPartitionedCall"


def refuse(graph: tf.Graph, guarded: dict[int, tf.Variable]) -> None:
    """Checks a traced step, including the functions that it calls.

    Args:
      graph: The FuncGraph of the step.
      guarded: id of a variable's handle -> variable, for the variables that only an update may
        change.

    Raises:
      RuntimeError: An op of the step writes to one of them.
    """
    captured = {
        id(internal): guarded[id(external)]
        for external, internal in graph.captures
        if id(external) in guarded
    }
    for op in graph.get_operations():
        written = [captured[id(tensor)] for tensor in op.inputs if id(tensor) in captured]
        if not written or op.type in _ALLOWED:
            continue
        if _writes(op.type) or _function_writes(graph, op, captured):
            raise RuntimeError(
                f"Variable {written[0].name} is changed by the op {op.type} ({op.name}) in the step"
                " itself: this would bypass the gradient buffer, once per gradient instead of once"
                " per global step. Let a tf-keras optimizer's apply_gradients() change it; for"
                " state that the forward pass moves, create it with"
                " aggregation=tf.VariableAggregation.MEAN and trainable=False."
            )


def _writes(op_type: str) -> bool:
    return op_type.startswith(_WRITE_PREFIXES) and op_type != _CALL


def _function_writes(graph: tf.Graph, op: tf.Operation, captured: dict[int, tf.Variable]) -> bool:
    """Whether a called function (also of a condition or loop) writes to a captured variable."""
    positions = [i for i, tensor in enumerate(op.inputs) if id(tensor) in captured]
    names = [
        attr.func.name for attr in op.node_def.attr.values() if attr.WhichOneof("value") == "func"
    ] + [
        func.name
        for attr in op.node_def.attr.values()
        if attr.WhichOneof("value") == "list"
        for func in attr.list.func
    ]
    # A condition's branches and a loop's body do not take its predicate.
    offset = 1 if op.type in ("If", "StatelessIf", "Case", "StatelessCase") else 0
    return any(
        _definition_writes(graph, name, {position - offset for position in positions})
        for name in names
    )


def _definition_writes(graph: tf.Graph, name: str, positions: set[int]) -> bool:
    definition = graph._get_function(name)
    if definition is None:
        return False
    definition = definition.cached_definition
    arguments = [arg.name for arg in definition.signature.input_arg]
    watched = {arguments[position] for position in positions if position < len(arguments)}
    for node in definition.node_def:
        inputs = [i for i, value in enumerate(node.input) if value in watched]
        if not inputs or node.op in _ALLOWED:
            continue
        if _writes(node.op):
            return True
        offset = 1 if node.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        for attr in node.attr.values():
            called = [attr.func] if attr.WhichOneof("value") == "func" else attr.list.func
            for func in called:
                if _definition_writes(graph, func.name, {i - offset for i in inputs}):
                    return True
    return False
