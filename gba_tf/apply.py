"""[7] The closed global step -> the Keras optimizer.

Each parameter server task runs one function per update (update_functions), in one kernel
(GbaApplyUpdate). Nothing leaves the task while it runs, so that a dying worker cannot tear an
update apart.
"""

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from gba_tf import optimizer_hooks, update_functions
from gba_tf.config import Policy, SparseDivisor
from gba_tf.ops.gradient_buffer import BufferContent, GradientBuffer, GradientSpec
from gba_tf.ops.token_server import TokenServer, TokenStats
from gba_tf.placement import ps_device, task_of
from gba_tf.step_record import StepRecord
from gba_tf.update_functions import OWNER_OF_SHARED_STATE, Shard


class UpdateGroup:
    """Everything that is updated together: one token server, one global step k.

    Made from the first trace of a step, in an init_scope; later traces of the same step share it.

    Args:
      policy: Of the token server.
      sparse_divisor: See GBAConfig.
      run_id: Names the run.
      name: Unique in the run.
      record: The optimizers, variables and forms of gradients.
      num_ps: Number of parameter server tasks.

    Raises:
      NotImplementedError: An optimizer cannot be applied on several parameter server tasks.
    """

    def __init__(
        self,
        policy: Policy,
        sparse_divisor: SparseDivisor,
        run_id: str,
        name: str,
        record: StepRecord,
        num_ps: int,
    ):
        calls = [dataclasses.replace(call, gradients=[]) for call in record.calls]
        self.policy = policy
        self.sparse_divisor = sparse_divisor
        self.num_ps = num_ps
        self.optimizers = [call.optimizer for call in calls]
        self.trained_variables = [variable for call in calls for variable in call.variables]
        self.state_variables = [state.variable for state in record.state_deltas]
        specs = _specs(record)
        tasks = [task_of(variable) for variable in record.variables()]
        # k of a token server starts at 0; an optimizer that was trained before does not.
        self._first_step = int(self.optimizers[0].iterations)
        # Tokens issued when the buffers were last saved: a checkpoint has what was in them.
        self.issued_when_saved = 0
        self.token_server = TokenServer(ps_device(0), run_id, name, policy)
        self._initial_state = self.token_server.serialize()
        self.shards = []
        for task in range(num_ps):
            indices = [i for i, owner in enumerate(tasks) if owner == task]
            # Task 0 owns the iterations, so it takes part even where it owns no variable.
            if indices or task == OWNER_OF_SHARED_STATE:
                own_specs = [specs[i] for i in indices]
                buffer = GradientBuffer(ps_device(task), run_id, name, own_specs, sparse_divisor)
                self.shards.append(Shard(task, buffer, indices))
        update_functions.trace(calls, self.state_variables, self.shards)

    @staticmethod
    def key(record: StepRecord) -> tuple:
        """Equal for steps that update the same variables by the same optimizers."""
        optimizers = tuple(id(call.optimizer) for call in record.calls)
        return optimizers, tuple(id(v) for v in record.variables()), tuple(_specs(record))

    def apply(self, decision: tf.Tensor) -> None:
        """Applies the closed steps of a decision on every task, and reports it."""
        owner, *others = self.shards
        if not others:
            done = [owner.buffer.apply(decision, owner.update, owner.captured)]
        else:
            done = self._apply_on_all(decision)
        with tf.control_dependencies(done):
            self.token_server.mark_applied(decision)

    def _apply_on_all(self, decision: tf.Tensor) -> list[tf.Tensor]:
        # Parameter servers do not talk to each other: everything goes by way of the caller.
        caller = "/device:CPU:0"
        owner, *others = self.shards
        with tf.device(caller):
            decision = tf.identity(decision)
        reports = None
        if owner.inspection is not None:
            findings = [shard.buffer.inspect(decision, shard.inspection) for shard in self.shards]
            with tf.device(caller):
                reports = tf.concat(findings, axis=1)
        state = owner.buffer.apply(decision, owner.update, owner.captured, reports)
        with tf.device(caller):
            inputs = tf.identity(state) if reports is None else tf.concat([reports, state], axis=1)
        return [state] + [
            shard.buffer.apply(decision, shard.update, shard.captured, inputs) for shard in others
        ]

    def flush(self, close_partial: bool) -> None:
        """Applies closed steps that are not applied yet, as those of a worker that died. Eager.

        Args:
          close_partial: Whether a partial buffer is closed first, divided by its own number of
            gradients.
        """
        decision = self.token_server.flush(close_partial)
        num_steps = int(decision[1])
        if num_steps:  # Tracing takes longer than asking.
            tf.function(self.apply, autograph=False)(decision)

    def restore(self, state: tf.Tensor, buffers: Iterable[BufferContent]) -> None:
        """Puts back what `token_server.serialize` and `buffer.serialize` of each shard returned.

        The optimizer is that of the same moment.
        """
        for shard, content in zip(self.shards, buffers, strict=True):
            shard.buffer.restore(*content)
        self._restore_tokens(state)

    def reset(self) -> None:
        """Forgets all tokens and gradients: the variables are of another moment now."""
        for shard in self.shards:
            shard.buffer.clear()
        self._restore_tokens(self._initial_state)

    def _restore_tokens(self, state: tf.Tensor) -> None:
        self.token_server.restore(state)
        closed_steps = self.token_server.stats().global_step
        self._first_step = int(self.optimizers[0].iterations) - closed_steps

    def give_up(self, worker_task: int) -> None:
        """Gives up what a dead worker holds, and frees its gradients."""
        lost_ids = self.token_server.give_up(worker_task)
        for shard in self.shards:
            shard.buffer.drop(lost_ids)

    def stats(self) -> TokenStats:
        """The token counts, with the global step of the optimizer."""
        stats = self.token_server.stats()
        return dataclasses.replace(stats, global_step=self._first_step + stats.global_step)


def _specs(record: StepRecord) -> list[GradientSpec]:
    specs = [
        GradientSpec.of(gradient, variable, optimizer_hooks.merges_rows_first(call.optimizer))
        for call in record.calls
        for gradient, variable in zip(call.gradients, call.variables, strict=True)
    ]
    return specs + [GradientSpec.of(state.delta, state.variable) for state in record.state_deltas]
