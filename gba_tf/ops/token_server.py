"""[3] The handle of a token server: tokens are taken, committed and counted here."""

import dataclasses

import tensorflow as tf

from gba_tf.config import Policy
from gba_tf.ops import library


@dataclasses.dataclass(frozen=True)
class TokenStats:
    """What became of the tokens of a run, at one moment.

    issued = applied + decayed + lost + outstanding + buffered.

    Attributes:
      issued: Tokens taken by workers.
      applied: Gradients that were part of an update with weight 1.
      decayed: Gradients that came too late: part of an update with weight 0, or of none.
      lost: Tokens of workers that died or started over.
      outstanding: Gradients that are being computed.
      buffered: Committed gradients that wait for their global step to close.
      global_step: k, the number of updates.
      staleness: Global steps of delay -> number of gradients.
    """

    issued: int
    applied: int
    decayed: int
    lost: int
    outstanding: int
    buffered: int
    global_step: int
    staleness: dict[int, int]


class TokenServer:
    """A token server on a parameter server task. Works eagerly and in graphs.

    Args:
      device: Where it lives, e.g. "/job:ps/task:0/device:CPU:0".
      run_id: Names the run. Resources of other runs on that task are released.
      name: Unique in the run.
      policy: How many gradients make up an update, who waits for whom, what a late one is worth.

    Raises:
      tf.errors.InvalidArgumentError: An unknown policy, settings that do not go together, or a
        token server of that name is there with another policy.
    """

    def __init__(self, device: str, run_id: str, name: str, policy: Policy):
        self._ops = library.load()
        self.device = device
        with tf.init_scope(), tf.device(device):
            self._handle = self._ops.gba_token_server(
                run_id=run_id,
                shared_name=name,
                policy=policy.name,
                gradients_per_update=policy.gradients_per_update,
                staleness_tolerance=policy.staleness_tolerance,
                staleness_bound=policy.staleness_bound,
            )

    def take(self, worker: tf.Tensor) -> tf.Tensor:
        """Takes a token for the worker of `worker_identity()`.

        Waits under "hop_bs" and "hop_bw": for slower workers, or for the open step to close.

        Returns:
          int64 scalar: the token's id.

        Raises:
          tf.errors.CancelledError: When run: the wait ended without a token, because the step was
            cancelled, the worker was given up or takes another token, or a newer run began.
        """
        with tf.device(self.device):
            return self._ops.gba_take_token(token_server=self._handle, worker=worker).token_id

    def gives_tokens_to(self, function: tf.types.experimental.ConcreteFunction) -> bool:
        """Whether a traced function, or one that it calls, uses this token server."""
        return any(captured is self._handle for captured in function.captured_inputs)

    def commit(self, pushed_ids: list[tf.Tensor]) -> tf.Tensor:
        """Commits a token whose gradient is complete on every parameter server. Never waits.

        Args:
          pushed_ids: int64 scalars, the token's id from every parameter server's push.

        Returns:
          int64 vector: the decision, which closed steps the caller has to apply.
        """
        with tf.device(self.device):
            return self._ops.gba_commit_token(token_server=self._handle, pushed_ids=pushed_ids)

    def mark_applied(self, decision: tf.Tensor) -> tf.Operation:
        """Reports that every parameter server has applied the steps of `decision`."""
        with tf.device(self.device):
            return self._ops.gba_mark_applied(token_server=self._handle, decision=decision)

    def flush(self, close_partial: bool = True) -> tf.Tensor:
        """Hands out every closed step that is not applied yet.

        Args:
          close_partial: Whether to close the partial buffer first, divided by its own number.

        Returns:
          int64 vector: a decision like that of `commit`.
        """
        with tf.device(self.device):
            return self._ops.gba_flush(token_server=self._handle, close_partial=close_partial)

    def join(self, worker_task: int) -> tf.Operation:
        """Says that a worker has work: others may have to wait for it."""
        with tf.device(self.device):
            return self._ops.gba_join_worker(
                token_server=self._handle, worker_task=tf.constant(worker_task, tf.int64)
            )

    def leave(self, worker_task: int) -> tf.Operation:
        """Says that a worker has no work: nobody waits for it until it joins or takes a token."""
        with tf.device(self.device):
            return self._ops.gba_leave_worker(
                token_server=self._handle, worker_task=tf.constant(worker_task, tf.int64)
            )

    def give_up(self, worker_task: int) -> tf.Tensor:
        """Gives up what a dead worker holds, and ends all waits for it.

        Returns:
          int64 vector: the lost ids.
        """
        with tf.device(self.device):
            return self._ops.gba_give_up_tokens(
                token_server=self._handle, worker_task=tf.constant(worker_task, tf.int64)
            )

    def stats(self) -> TokenStats:
        """Reads the counts, all at one moment."""
        with tf.device(self.device):
            counts, staleness = self._ops.gba_token_stats(token_server=self._handle)
        issued, applied, decayed, lost, outstanding, buffered, step, *_ = counts.numpy().tolist()
        return TokenStats(
            issued=issued,
            applied=applied,
            decayed=decayed,
            lost=lost,
            outstanding=outstanding,
            buffered=buffered,
            global_step=step,
            staleness=dict(staleness.numpy().tolist()),
        )

    def worker_seconds(self) -> dict[int, tuple[int, float]]:
        """How long gradients take, from the hand-over of the token to the commit.

        Returns:
          Worker task -> (gradients it has committed, late ones included; the sum of their seconds).
        """
        with tf.device(self.device):
            columns = self._ops.gba_worker_seconds(token_server=self._handle)
        tasks, gradients, seconds = (column.numpy().tolist() for column in columns)
        return dict(zip(tasks, zip(gradients, seconds, strict=True), strict=True))

    def serialize(self) -> tf.Tensor:
        """The state for a checkpoint, a string scalar. Outstanding tokens are saved as lost."""
        with tf.device(self.device):
            return self._ops.gba_serialize_token_server(token_server=self._handle)

    def restore(self, state: tf.Tensor) -> tf.Operation:
        """Replaces the state.

        Raises:
          tf.errors.InvalidArgumentError: `state` is damaged or of another policy or M; nothing is
            changed.
        """
        with tf.device(self.device):
            return self._ops.gba_restore_token_server(token_server=self._handle, state=state)


def worker_identity() -> tf.Tensor:
    """int64[2]: task index and process incarnation of the worker that runs the op."""
    with tf.device("/device:CPU:0"):
        return library.load().gba_worker_identity().worker
