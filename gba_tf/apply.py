"""[7] The closed global step -> the Keras optimizer.

Each parameter server task runs one function per update (update_functions), in one kernel
(GbaApplyUpdate). Nothing leaves the task while it runs, so that a dying worker cannot tear an
update apart.
"""

import dataclasses

import tensorflow as tf

from gba_tf import optimizer_hooks, update_functions
from gba_tf.config import GBAConfig
from gba_tf.ops.gradient_buffer import GradientBuffer, GradientSpec
from gba_tf.ops.token_server import TokenServer, TokenStats
from gba_tf.placement import ps_device, task_of
from gba_tf.step_record import StepRecord
from gba_tf.update_functions import OWNER_OF_SHARED_STATE, Shard


class UpdateGroup:
    """Everything that is updated together: one token server, one global step k.

    Made from the first trace of a step, in an init_scope; later traces of the same step share it.

    Args:
      config: G, B, iota.
      run_id: Names the run.
      name: Unique in the run.
      record: The optimizers, variables and forms of gradients.
      num_ps: Number of parameter server tasks.

    Raises:
      NotImplementedError: An optimizer cannot be applied on several parameter server tasks.
    """

    def __init__(self, config: GBAConfig, run_id: str, name: str, record: StepRecord, num_ps: int):
        calls = [dataclasses.replace(call, gradients=[]) for call in record.calls]
        self.optimizers = [call.optimizer for call in calls]
        variables = record.variables()
        specs = _specs(record)
        tasks = [task_of(variable) for variable in variables]
        # k of a token server starts at 0; an optimizer that was trained before does not.
        self._first_step = int(self.optimizers[0].iterations)
        self.token_server = TokenServer(
            ps_device(0), run_id, name, config.gradients_per_update, config.staleness_tolerance
        )
        self.shards = []
        for task in range(num_ps):
            indices = [i for i, owner in enumerate(tasks) if owner == task]
            # Task 0 owns the iterations, so it takes part even where it owns no variable.
            if indices or task == OWNER_OF_SHARED_STATE:
                own_specs = [specs[i] for i in indices]
                buffer = GradientBuffer(
                    ps_device(task), run_id, name, own_specs, config.sparse_divisor
                )
                self.shards.append(Shard(task, buffer, indices))
        update_functions.trace(calls, [s.variable for s in record.state_deltas], self.shards)

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

    def flush(self) -> None:
        """Applies a partial buffer, divided by its own number of gradients."""
        self.apply(self.token_server.flush())

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
