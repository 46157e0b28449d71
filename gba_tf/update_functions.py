"""[7] Traces the function that applies a closed global step on one parameter server task.

The function is the optimizer's own apply_gradients, as in a single process, on the variables of
that task alone. What all tasks need of the optimizer is a few scalars on task 0: iterations, the
learning rate. The task that owns them hands their values before the update to the others, which set
copies of their own (`mirrors`) and run on those; what they write to a copy is dropped.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from gba_tf import optimizer_hooks, whole_gradient
from gba_tf.ops.gradient_buffer import GradientBuffer
from gba_tf.placement import ps_device, task_of
from gba_tf.step_record import OptimizerCall

OWNER_OF_SHARED_STATE = 0


@dataclasses.dataclass
class Shard:
    """The part of an update that one parameter server task applies.

    Attributes:
      task: Index of the parameter server task.
      buffer: Its gradient buffer.
      gradient_indices: Which of the step's gradients belong to its variables.
      inspection: Reports on the task's gradients for the updates of all tasks; None if no optimizer
        needs that.
      update: Applies the task's gradients.
      captured: The tensors that `update` captures.
      mirrors: Copies of the shared variables on this task.
    """

    task: int
    buffer: GradientBuffer
    gradient_indices: list[int]
    inspection: object = None
    update: object = None
    captured: list[tf.Tensor] = dataclasses.field(default_factory=list)
    mirrors: list[tf.Variable] = dataclasses.field(default_factory=list)

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """What GbaApplyUpdate and GbaInspectUpdate pass for the gradients."""
        return [argument for spec in self.buffer.specs for argument in spec.argument_specs()]

    def gradients(self, arguments: Sequence[tf.Tensor]) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """Index in the step -> gradient, from arguments of `signature`."""
        remaining = iter(arguments)
        return {
            index: spec.from_arguments([next(remaining) for _ in spec.argument_specs()])
            for index, spec in zip(self.gradient_indices, self.buffer.specs, strict=True)
        }


def trace(
    calls: list[OptimizerCall], state_variables: list[tf.Variable], shards: list[Shard]
) -> None:
    """Sets `inspection`, `update` and `captured` of every shard.

    Args:
      calls: The optimizers and their variables, in the order of the step's gradients.
      state_variables: Variables that the forward pass moves; their changes follow the gradients.
      shards: One per parameter server task, the owner of the shared state first.

    Raises:
      NotImplementedError: An optimizer needs more of another task than can be shared.
    """
    _refuse_what_needs_whole_variables(calls, len(shards))
    reports = 0
    if len(shards) > 1 and any(whole_gradient.is_needed(call.optimizer) for call in calls):
        reports = len(shards)
        for shard in shards:
            shard.inspection = _trace_inspection(shard, calls)
    updates = [_trace_update(shard, calls, state_variables, reports, []) for shard in shards]
    shared = _shared_variables(calls, shards, updates)
    if shared:
        updates = [
            _trace_update(shard, calls, state_variables, reports, shared) for shard in shards
        ]
    for shard, update in zip(shards, updates, strict=True):
        shard.update = update
        shard.captured = list(update.captured_inputs)
        if shared and shard.task != OWNER_OF_SHARED_STATE:
            shard.captured = _with_mirrors(shard, shared)


def _refuse_what_needs_whole_variables(calls: list[OptimizerCall], num_tasks: int) -> None:
    for call in calls:
        inner = optimizer_hooks.unwrapped(call.optimizer)
        name = type(inner).__name__
        sharded = [v.name for v in call.variables if hasattr(v, "_sharded_container")]
        if sharded and getattr(inner, "clipnorm", None) is not None:
            raise NotImplementedError(
                f"{name}(clipnorm=...) needs the whole gradient of each variable,"
                f" and {sharded[0]} is one of several shards. Use global_clipnorm, clipvalue (per"
                " element), or no variable_partitioner."
            )
        if name == "Adafactor" and (sharded or num_tasks > 1):
            raise NotImplementedError(
                "Adafactor scales by the whole of each variable and shares more than scalars"
                " between variables. Use one parameter server task and no variable_partitioner, or"
                " another optimizer."
            )
        if getattr(inner, "gradient_transformers", None) and (sharded or num_tasks > 1):
            raise NotImplementedError(
                f"{name}(gradient_transformers=...) may need all gradients at once, and they are on"
                f" {num_tasks} parameter server tasks or split into shards. Use clipnorm,"
                " global_clipnorm or clipvalue, or one task and no variable_partitioner."
            )


def _own_gradients(call_index: int, calls: list[OptimizerCall], gradients: dict[int, tf.Tensor]):
    """(gradient, variable) of one optimizer, as far as they are on this task."""
    first = sum(len(call.variables) for call in calls[:call_index])
    return [
        (gradients[first + i], variable)
        for i, variable in enumerate(calls[call_index].variables)
        if first + i in gradients
    ]


def _trace_inspection(shard: Shard, calls: list[OptimizerCall]):
    def inspection(*arguments):
        gradients = shard.gradients(arguments)
        reports = [
            whole_gradient.inspect([g for g, _ in _own_gradients(i, calls, gradients)])
            for i in range(len(calls))
        ]
        return [tf.io.serialize_tensor(tf.stack(reports))]

    return _concrete(inspection, shard.signature)


def _trace_update(
    shard: Shard,
    calls: list[OptimizerCall],
    state_variables: list[tf.Variable],
    reports: int,
    shared: list[tf.Variable],
):
    """The optimizers' update of the shard's variables.

    Takes the gradients, then, serialized, the reports of all tasks on them and, unless the task
    owns them, the shared variables before the update. The owner returns these.
    """
    is_owner = shard.task == OWNER_OF_SHARED_STATE

    def update(*arguments):
        from gba_tf.training import plain_replica_context

        num_gradients = len(shard.signature)
        gradients = shard.gradients(arguments[:num_gradients])
        found = _parse_reports(arguments[num_gradients : num_gradients + reports], len(calls))
        states = arguments[num_gradients + reports :]
        with plain_replica_context():
            if is_owner:
                states = [tf.io.serialize_tensor(variable.read_value()) for variable in shared]
            else:
                for variable, state in zip(shared, states, strict=True):
                    value = tf.io.parse_tensor(state, variable.dtype)
                    variable.assign(tf.ensure_shape(value, variable.shape))
            for i, call in enumerate(calls):
                whole = None
                if reports and whole_gradient.is_needed(call.optimizer):
                    whole = whole_gradient.WholeGradient([report[i] for report in found])
                _apply_gradients(call, _own_gradients(i, calls, gradients), whole)
            first = sum(len(call.variables) for call in calls)
            for i, variable in enumerate(state_variables):
                if first + i in gradients:
                    variable.assign_add(gradients[first + i])
        return states if is_owner else []

    strings = reports if is_owner else reports + len(shared)
    return _concrete(update, [*shard.signature, *[tf.TensorSpec([], tf.string)] * strings])


def _parse_reports(serialized: Sequence[tf.Tensor], num_calls: int) -> list[tf.Tensor]:
    """float64[calls, 2] of every task."""
    return [tf.ensure_shape(tf.io.parse_tensor(s, tf.float64), [num_calls, 2]) for s in serialized]


def _apply_gradients(call: OptimizerCall, own, whole) -> None:
    optimizer = call.optimizer
    if not own:
        _advance_without_variables(optimizer, whole)
        return
    gradients, variables = zip(*own, strict=True)
    prepared = contextlib.nullcontext(gradients)
    if whole is not None:
        prepared = whole.prepared(optimizer, gradients)
    # First of the two: whether rows are merged is seen before `prepared` turns clipping off.
    with optimizer_hooks.rows_merged(optimizer), prepared as ready:
        optimizer.apply_gradients(list(zip(ready, variables, strict=True)), **call.options)


def _shared_variables(calls: list[OptimizerCall], shards: list[Shard], updates) -> list:
    """The scalars on the owner's task that the updates of other tasks use."""
    foreign = {}
    for shard, update in zip(shards, updates, strict=True):
        for external, _ in update.graph.captures:
            owner = _task_of_handle(external)
            if owner is not None and owner != shard.task:
                foreign[id(external)] = _shared_variable(calls, external, shard.task)
    return list(foreign.values())


def _with_mirrors(shard: Shard, shared: list[tf.Variable]) -> list[tf.Tensor]:
    """What the update captures, with copies on its own task in place of the shared variables."""
    with tf.device(ps_device(shard.task)):
        # Not tf.Variable: the strategy's scope would place it.
        mirrors = [
            ResourceVariable(tf.zeros(v.shape, v.dtype), trainable=False, name="mirror")
            for v in shared
        ]
    shard.mirrors = mirrors  # Variables are released with their last Python reference.
    replacement = {
        id(variable.handle): mirror.handle for variable, mirror in zip(shared, mirrors, strict=True)
    }
    return [replacement.get(id(tensor), tensor) for tensor in shard.update.captured_inputs]


def _advance_without_variables(optimizer, whole) -> None:
    """Moves the optimizer's shared state where it has no variable on this task: k counts too."""
    inner = optimizer_hooks.unwrapped(optimizer)
    if type(inner).__name__ == "Nadam":
        raise NotImplementedError(
            "Nadam moves its momentum schedule together with a variable, and none of its variables"
            " is on parameter server task 0. Use one parameter server task, or Adam or AdamW."
        )
    if hasattr(inner, "_compute_current_learning_rate"):
        inner._compute_current_learning_rate()
    if getattr(optimizer, "dynamic", False):
        optimizer._loss_scale.update([whole.zero_if_finite()])
    optimizer.iterations.assign_add(1)


def _shared_variable(calls: list[OptimizerCall], handle: tf.Tensor, task: int) -> tf.Variable:
    """The scalar on the owner's task that the update of another task uses."""
    for call in calls:
        for variable in optimizer_hooks.all_variables(call.optimizer):
            if getattr(variable, "handle", None) is handle:
                if variable.shape.rank == 0 and task_of(variable) == OWNER_OF_SHARED_STATE:
                    return variable
                raise NotImplementedError(
                    f"{type(call.optimizer).__name__} needs variable {variable.name} of shape"
                    f" {variable.shape} for an update on parameter server task {task}, but it"
                    f" is on task {task_of(variable)}. Only scalars are shared: use one"
                    " parameter server task with this optimizer."
                )
    raise NotImplementedError(
        f"An update on parameter server task {task} needs a variable of"
        f" {handle.device}, which is none of the optimizer's. Create everything that the"
        " optimizer uses inside strategy.scope(), or use one parameter server task."
    )


def _concrete(function, signature: list[tf.TensorSpec]):
    traced = tf.function(function, input_signature=signature, autograph=False)
    return traced.get_concrete_function()


def _task_of_handle(tensor: tf.Tensor) -> int | None:
    """The task of a variable's handle, -1 if it is on no parameter server, None if it is none."""
    if tensor.dtype != tf.resource:
        return None
    device = tf.DeviceSpec.from_string(tensor.device)
    return device.task if device.job == "ps" else -1
