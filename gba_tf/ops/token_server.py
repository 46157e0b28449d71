"""[3] The handle of a token server: tokens are taken, committed and counted here."""

import dataclasses

import tensorflow as tf

from gba_tf.ops import library


@dataclasses.dataclass(frozen=True)
class TokenStats:
    """What became of the tokens of a run, at one moment.

    issued = applied + decayed + lost + outstanding + buffered.

    Attributes:
      issued: Tokens taken by workers.
      applied: Gradients that were part of an update with weight 1.
      decayed: Gradients that came too late and were part of an update with weight 0.
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
      gradients_per_update: M.
      staleness_tolerance: In global steps.
    """

    def __init__(
        self,
        device: str,
        run_id: str,
        name: str,
        gradients_per_update: int,
        staleness_tolerance: int,
    ):
        self._ops = library.load()
        self.device = device
        with tf.init_scope(), tf.device(device):
            self._handle = self._ops.gba_token_server(
                run_id=run_id,
                shared_name=name,
                gradients_per_update=gradients_per_update,
                staleness_tolerance=staleness_tolerance,
            )

    def take(self, worker: tf.Tensor) -> tf.Tensor:
        """Takes a token for the worker of `worker_identity()`.

        Returns:
          int64 scalar: the token's id.
        """
        with tf.device(self.device):
            return self._ops.gba_take_token(token_server=self._handle, worker=worker).token_id

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

    def flush(self) -> tf.Tensor:
        """Closes the partial buffer. Returns a decision like `commit`."""
        with tf.device(self.device):
            return self._ops.gba_flush(token_server=self._handle)

    def give_up(self, worker_task: int) -> tf.Tensor:
        """Gives up what a dead worker holds. Returns the lost ids, an int64 vector."""
        with tf.device(self.device):
            return self._ops.gba_give_up_tokens(
                token_server=self._handle, worker_task=tf.constant(worker_task, tf.int64)
            )

    def stats(self) -> TokenStats:
        """Reads the counts, all at one moment."""
        with tf.device(self.device):
            counts, staleness = self._ops.gba_token_stats(token_server=self._handle)
        issued, applied, decayed, lost, outstanding, buffered, step, _ = counts.numpy().tolist()
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

    def serialize(self) -> tf.Tensor:
        """The state for a checkpoint, a string scalar. Outstanding tokens are saved as lost."""
        with tf.device(self.device):
            return self._ops.gba_serialize_token_server(token_server=self._handle)

    def restore(self, state: tf.Tensor) -> tf.Operation:
        """Replaces the state.

        Raises:
          tf.errors.InvalidArgumentError: `state` is damaged or of another M; nothing is changed.
        """
        with tf.device(self.device):
            return self._ops.gba_restore_token_server(token_server=self._handle, state=state)


def worker_identity() -> tf.Tensor:
    """int64[2]: task index and process incarnation of the worker that runs the op."""
    with tf.device("/device:CPU:0"):
        return library.load().gba_worker_identity().worker
