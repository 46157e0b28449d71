"""[7] The closed global step -> the Keras optimizer.

Each parameter server task runs one function per update, traced here from the optimizer's own
apply_gradients as in a single process, on the variables of that task alone (GbaApplyUpdate).
Nothing leaves the task while it runs, so that a dying worker cannot tear an update apart.

What all tasks need of the optimizer is a few scalars on task 0: iterations, the learning rate. The
task that owns them hands their values before the update to the others, which set copies of their
own (`mirrors`) and run on those; what they write to a copy is dropped.
"""

import dataclasses

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from gba_tf import optimizer_hooks
from gba_tf.config import GBAConfig
from gba_tf.ops.gradient_buffer import GradientBuffer, GradientSpec
from gba_tf.ops.token_server import TokenServer
from gba_tf.placement import task_of
from gba_tf.step_record import StepRecord

OWNER_OF_SHARED_STATE = 0


@dataclasses.dataclass
class Shard:
    """The part of an update that one parameter server task applies.

    Attributes:
      task: Index of the parameter server task.
      buffer: Its gradient buffer.
      gradient_indices: Which of the step's gradients belong to its variables.
      update: What GbaApplyUpdate runs, and the tensors that it captures.
    """

    task: int
    buffer: GradientBuffer
    gradient_indices: list[int]
    update: object = None
    captured: list[tf.Tensor] = dataclasses.field(default_factory=list)


class UpdateGroup:
    """Everything that is updated together: one token server, one global step k.

    Made from the first trace of a step, in an init_scope; later traces of the same step share it.

    Args:
      config: G, B, iota.
      run_id: Names the run.
      name: Unique in the run.
      record: The optimizers, variables and forms of gradients.
      num_ps: Number of parameter server tasks.
    """

    def __init__(self, config: GBAConfig, run_id: str, name: str, record: StepRecord, num_ps: int):
        self._calls = [dataclasses.replace(call, gradients=[]) for call in record.calls]
        self._state_variables = [state.variable for state in record.state_deltas]
        self._variables = record.variables()
        self._specs = [
            GradientSpec.of(gradient, variable)
            for gradient, variable in zip(record.gradients(), self._variables, strict=True)
        ]
        # k of a token server starts at 0; an optimizer that was trained before does not.
        self._first_step = int(self._calls[0].optimizer.iterations)
        tasks = [task_of(variable) for variable in self._variables]
        self.token_server = TokenServer(
            _device(0), run_id, name, config.gradients_per_update, config.staleness_tolerance
        )
        self.shards = []
        for task in range(num_ps):
            indices = [i for i, owner in enumerate(tasks) if owner == task]
            # Task 0 owns the iterations, so it takes part even where it owns no variable.
            if indices or task == OWNER_OF_SHARED_STATE:
                specs = [self._specs[i] for i in indices]
                buffer = GradientBuffer(_device(task), run_id, name, specs, config.sparse_divisor)
                self.shards.append(Shard(task, buffer, indices))
        self._refuse_what_needs_every_gradient()
        self._trace_updates()

    @staticmethod
    def key(record: StepRecord) -> tuple:
        """Equal for steps that update the same variables by the same optimizers."""
        optimizers = tuple(id(call.optimizer) for call in record.calls)
        forms = tuple(
            (id(variable), GradientSpec.of(gradient, variable))
            for gradient, variable in zip(record.gradients(), record.variables(), strict=True)
        )
        return optimizers, forms

    @property
    def optimizers(self) -> list:
        return [call.optimizer for call in self._calls]

    def apply(self, decision: tf.Tensor) -> None:
        """Applies the closed steps of a decision on every task, and reports it."""
        owner, *others = self.shards
        shared_state = owner.buffer.apply(decision, owner.update, owner.captured)
        done = [shared_state]
        if others:
            # Parameter servers do not talk to each other: by way of the caller.
            with tf.device("/device:CPU:0"):
                decision_here = tf.identity(decision)
                shared_here = tf.identity(shared_state)
            done += [
                shard.buffer.apply(decision_here, shard.update, shard.captured, shared_here)
                for shard in others
            ]
        with tf.control_dependencies(done):
            self.token_server.mark_applied(decision)

    def flush(self) -> None:
        """Applies a partial buffer, divided by its own number of gradients."""
        self.apply(self.token_server.flush())

    def give_up(self, worker_task: int) -> None:
        """Gives up what a dead worker holds, and frees its gradients."""
        lost_ids = self.token_server.give_up(worker_task)
        for shard in self.shards:
            shard.buffer.drop(lost_ids)

    def stats(self):
        stats = self.token_server.stats()
        return dataclasses.replace(stats, global_step=self._first_step + stats.global_step)

    def _refuse_what_needs_every_gradient(self) -> None:
        for call in self._calls:
            inner = getattr(call.optimizer, "inner_optimizer", call.optimizer)
            name = type(inner).__name__
            tasks = len(self.shards)
            sharded = [v.name for v in call.variables if hasattr(v, "_sharded_container")]
            if sharded and getattr(inner, "clipnorm", None) is not None:
                raise NotImplementedError(
                    f"{name}(clipnorm=...) needs the whole gradient of each variable, and"
                    f" {sharded[0]} is one of several shards. Use clipvalue (per element), or no"
                    " variable_partitioner."
                )
            if tasks == 1:
                continue
            if getattr(inner, "global_clipnorm", None) is not None:
                raise NotImplementedError(
                    f"{name}(global_clipnorm=...) needs the gradients of all variables at once, and"
                    f" they are on {tasks} parameter server tasks. Use clipnorm (per variable), or"
                    " one parameter server task."
                )
            if getattr(call.optimizer, "dynamic", False):
                raise NotImplementedError(
                    "A dynamic loss scale needs the gradients of all variables at once, and they"
                    f" are on {tasks} parameter server tasks. Use LossScaleOptimizer({name},"
                    " dynamic=False, initial_scale=...), or one parameter server task."
                )

    def _trace_updates(self) -> None:
        bodies = [self._trace_body(shard) for shard in self.shards]
        foreign = {}
        for shard, body in zip(self.shards, bodies, strict=True):
            for external, _ in body.graph.captures:
                owner = _task_of_handle(external)
                if owner is not None and owner != shard.task:
                    foreign[id(external)] = self._shared_variable(external, shard.task)
        shared = list(foreign.values())
        for shard, body in zip(self.shards, bodies, strict=True):
            if shard.task == OWNER_OF_SHARED_STATE:
                update = _trace_with_state_output(body, shared)
            else:
                update = _trace_with_state_input(body, shared, shard.task)
            shard.update = update
            shard.captured = list(update.captured_inputs)

    def _trace_body(self, shard: Shard):
        """The optimizers' update of the shard's variables, from its aggregated gradients."""
        specs = shard.buffer.specs
        signature = [argument for spec in specs for argument in spec.argument_specs()]

        def body(*arguments):
            from gba_tf.training import plain_replica_context

            remaining = iter(arguments)
            gradients = {}
            for index, spec in zip(shard.gradient_indices, specs, strict=True):
                parts = [next(remaining) for _ in spec.argument_specs()]
                gradients[index] = spec.from_arguments(parts)
            with plain_replica_context():
                index = 0
                for call in self._calls:
                    mine = []
                    for variable in call.variables:
                        if index in gradients:
                            mine.append((gradients[index], variable))
                        index += 1
                    _apply_gradients(call, mine)
                for variable in self._state_variables:
                    if index in gradients:
                        variable.assign_add(gradients[index])
                    index += 1

        return tf.function(body, input_signature=signature, autograph=False).get_concrete_function()

    def _shared_variable(self, handle: tf.Tensor, task: int) -> tf.Variable:
        """The scalar on the owner's task that the update of another task uses."""
        for call in self._calls:
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


def _apply_gradients(call, gradients_and_variables) -> None:
    optimizer = call.optimizer
    if not gradients_and_variables:
        # Nothing to update on this task, but k counts all the same.
        optimizer.iterations.assign_add(1)
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with _distinct_rows(inner):
        optimizer.apply_gradients(gradients_and_variables, **call.options)


class _distinct_rows:
    """Spares the optimizer the merging of repeated rows: aggregated rows are distinct."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __enter__(self):
        if hasattr(self._optimizer, "_deduplicate_sparse_grad"):
            self._optimizer._deduplicate_sparse_grad = lambda gradients: gradients

    def __exit__(self, *unused):
        self._optimizer.__dict__.pop("_deduplicate_sparse_grad", None)


def _trace_with_state_output(body, shared: list[tf.Variable]):
    """`body`, returning the shared variables as they were before it."""

    def update(*gradients):
        states = [tf.io.serialize_tensor(variable.read_value()) for variable in shared]
        with tf.control_dependencies(states):
            body._call_flat(list(gradients), body.captured_inputs)
        return states

    return tf.function(update, autograph=False).get_concrete_function(*_signature(body))


def _trace_with_state_input(body, shared: list[tf.Variable], task: int):
    """`body`, on copies of the shared variables, which it sets from the values it is given."""
    with tf.device(_device(task)):
        # Not tf.Variable: the strategy's scope would place it.
        mirrors = [
            ResourceVariable(tf.zeros(v.shape, v.dtype), trainable=False, name="mirror")
            for v in shared
        ]
    replacement = {
        id(variable.handle): mirror.handle for variable, mirror in zip(shared, mirrors, strict=True)
    }
    captured = [replacement.get(id(tensor), tensor) for tensor in body.captured_inputs]
    gradient_specs = _signature(body)

    def update(*arguments):
        gradients = arguments[: len(gradient_specs)]
        states = arguments[len(gradient_specs) :]
        assigned = [
            mirror.assign(tf.reshape(tf.io.parse_tensor(state, mirror.dtype), mirror.shape))
            for mirror, state in zip(mirrors, states, strict=True)
        ]
        with tf.control_dependencies(assigned):
            body._call_flat(list(gradients), captured)

    states = [tf.TensorSpec([], tf.string) for _ in shared]
    function = tf.function(update, autograph=False).get_concrete_function(*gradient_specs, *states)
    function._gba_tf_mirrors = mirrors  # Variables are released with their last Python reference.
    return function


def _signature(function) -> list[tf.TensorSpec]:
    num_captures = len(function.captured_inputs)
    inputs = function.inputs[: len(function.inputs) - num_captures]
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]


def _device(task: int) -> str:
    return f"/job:ps/replica:0/task:{task}/device:CPU:0"


def _task_of_handle(tensor: tf.Tensor) -> int | None:
    if tensor.dtype != tf.resource:
        return None
    device = tf.DeviceSpec.from_string(tensor.device)
    return device.task if device.job == "ps" else -1
