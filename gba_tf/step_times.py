"""How long each worker's gradients take, measured in both modes of `--strategy=auto`.

Under all-reduce a worker's own time ends when its gradients are ready, before it waits for those of
the others. Under gba the token server sees every gradient from its token to its commit.
"""

from collections.abc import Iterable

import tensorflow as tf

from gba_tf.injected_delay import InjectedDelay
from gba_tf.ops import process
from gba_tf.ops.token_server import worker_identity
from gba_tf.strategy import GBAStrategy

# No clock measures less, and the rule divides by it.
_MIN_SECONDS_PER_EXAMPLE = 1e-9


def time_gradients(
    model: tf.keras.Model, delay: InjectedDelay | None = None, worker: int | None = None
) -> None:
    """Lets every training step of a model record its own seconds, and be slowed down on request.

    From when the batch is there to when the gradients are ready to be handed to the optimizer, with
    the injected delay. Call it before the first `fit`. See `ops.process.step_seconds`.

    Args:
      model: Compiled; its train_step calls apply_gradients (or minimize) of its optimizer.
      delay: Which worker is slow, and when. Default: none.
      worker: The task index of this process. None where the step runs in other processes: they
        find out.
    """
    timer = _StepTimer(model.optimizer, delay, worker)
    model.train_step = timer.around(model.train_step)
    model.optimizer.apply_gradients = timer.before(model.optimizer.apply_gradients)


class _StepTimer:
    def __init__(self, optimizer, delay: InjectedDelay | None, worker: int | None):
        self._optimizer = optimizer
        self._delay = delay
        self._worker = worker
        self._start: tf.Tensor | None = None

    def around(self, train_step):
        def timed_train_step(data):
            batch = [t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)]
            with tf.control_dependencies(batch):
                self._start = tf.timestamp()
            with tf.control_dependencies([self._start]):
                return train_step(data)

        return timed_train_step

    def before(self, apply_gradients):
        def timed_apply_gradients(grads_and_vars, *args, **kwargs):
            start, self._start = self._start, None
            if start is None:  # The update that gba makes of the gradients of a step or more.
                return apply_gradients(grads_and_vars, *args, **kwargs)
            grads_and_vars = list(grads_and_vars)
            gradients = [gradient for gradient, _ in grads_and_vars]
            done = self._record(start, gradients)
            with tf.control_dependencies([done]):
                gradients = tf.nest.map_structure(
                    lambda g: None if g is None else tf.identity(g),
                    gradients,
                    expand_composites=True,
                )
            variables = [variable for _, variable in grads_and_vars]
            pairs = list(zip(gradients, variables, strict=True))
            return apply_gradients(pairs, *args, **kwargs)

        return timed_apply_gradients

    def _record(self, start: tf.Tensor, gradients) -> tf.Operation:
        # Where the step runs, not on the parameter server of a variable.
        with tf.device("/device:CPU:0"):
            with tf.control_dependencies(_tensors(gradients)):
                seconds = _seconds_since(start)
            if self._delay is None:
                return process.record_step_seconds(seconds)
            woken = process.sleep(start, (self._factor() - 1) * seconds)
            with tf.control_dependencies([woken]):
                return process.record_step_seconds(_seconds_since(start))

    def _factor(self) -> tf.Tensor:
        delay = self._delay
        worker = worker_identity()[0] if self._worker is None else self._worker
        step = tf.cast(self._optimizer.iterations, tf.int64)
        is_slow = (step >= delay.from_step) & (step < delay.to_step)
        is_slow &= tf.cast(worker, tf.int64) == delay.worker
        return tf.where(is_slow, tf.constant(delay.factor, tf.float64), 1.0)


def _seconds_since(start: tf.Tensor) -> tf.Tensor:
    # The clock of the machine may be set back meanwhile.
    return tf.maximum(tf.timestamp() - start, 0.0)


def _tensors(gradients: Iterable) -> list[tf.Tensor]:
    flat = tf.nest.flatten(list(gradients), expand_composites=True)
    return [tensor for tensor in flat if tensor is not None]


class AllReduceTimes:
    """Of the workers under all-reduce, each of which has to call everything at the same step.

    Args:
      strategy: A MultiWorkerMirroredStrategy; `time_gradients` was called in every worker.
      local_batch_size: Examples per gradient.
    """

    def __init__(self, strategy: tf.distribute.Strategy, local_batch_size: int):
        self._strategy = strategy
        self._local_batch_size = local_batch_size
        self._count, self._seconds = self._read()

        def gather(row):
            # Of this replica's device, which all_gather asks for.
            return tf.distribute.get_replica_context().all_gather(tf.identity(row), axis=0)

        @tf.function(autograph=False)
        def gather_in_replicas(row):
            return strategy.run(gather, (row,))

        self._gather = gather_in_replicas

    def end_window(self, stay_seconds: float) -> tuple[float, tuple[float, ...]]:
        """What all workers say about the steps since the last call.

        Args:
          stay_seconds: On this worker.

        Returns:
          `stay_seconds` of worker 0, and seconds per example of each worker, more than 0: the same
          numbers on all workers.
        """
        count, seconds = self._read()
        steps = max(count - self._count, 1)
        mean = (seconds - self._seconds) / (steps * self._local_batch_size)
        mean = max(mean, _MIN_SECONDS_PER_EXAMPLE)
        self._count, self._seconds = count, seconds
        row = tf.constant([[stay_seconds, mean]], tf.float64)
        rows = self._strategy.experimental_local_results(self._gather(row))[0].numpy()
        return float(rows[0, 0]), tuple(rows[:, 1].tolist())

    def _read(self) -> tuple[int, float]:
        count, seconds = process.step_seconds()
        return int(count), float(seconds)


class TokenTimes:
    """Of the workers under gba, on the chief.

    Args:
      strategy: Which has trained a step.
      local_batch_size: Examples per gradient.
      num_workers: N.
    """

    def __init__(self, strategy: GBAStrategy, local_batch_size: int, num_workers: int):
        (group,) = strategy.update_groups()
        self._server = group.token_server
        self._local_batch_size = local_batch_size
        self._num_workers = num_workers
        self._last = self._server.worker_seconds()
        self._idle_seconds = [0.0] * num_workers
        self._seconds_per_example = [0.0] * num_workers

    def end_window(self, window_seconds: float) -> tuple[float, tuple[float, ...]]:
        """What the token server says about the steps since the last call.

        Args:
          window_seconds: Of training since then, positive.

        Returns:
          Examples per second of all workers, and seconds per example of each one, at least; more
          than 0.
        """
        now = self._server.worker_seconds()
        gradients = 0
        for worker in range(self._num_workers):
            count, seconds = now.get(worker, (0, 0.0))
            last_count, last_seconds = self._last.get(worker, (0, 0.0))
            if count > last_count:
                gradients += count - last_count
                self._idle_seconds[worker] = 0.0
                each = (seconds - last_seconds) / (count - last_count) / self._local_batch_size
            else:
                # It has been at one gradient for so long at least.
                self._idle_seconds[worker] += window_seconds
                at_least = self._idle_seconds[worker] / self._local_batch_size
                each = max(self._seconds_per_example[worker], at_least)
            self._seconds_per_example[worker] = max(each, _MIN_SECONDS_PER_EXAMPLE)
        self._last = now
        speed = gradients * self._local_batch_size / window_seconds
        return speed, tuple(self._seconds_per_example)
