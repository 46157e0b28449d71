"""Non-trainable state that the forward pass moves, such as batch normalisation's averages."""

import tensorflow as tf
from tensorflow.python.distribute import ps_values

from gba_tf.step_record import StateDelta


class StateVariable(ps_values.AggregatingVariable):
    """A variable whose changes by the forward pass travel with the gradients.

    An assignment in a worker's step is recorded as a difference; the mean of the differences of the
    gradients that make up a global step is added once when the step is applied. Synchronous
    training moves the state in the same way: once per update, by the mean over its replicas.
    Everywhere else it is assigned directly.
    """

    def assign(self, value, *args, **kwargs):
        record = _record()
        if record is None:
            return super().assign(value, *args, **kwargs)
        return self._move(record, tf.convert_to_tensor(value, self.dtype) - self.read_value())

    def assign_add(self, delta, *args, **kwargs):
        record = _record()
        if record is None:
            return super().assign_add(delta, *args, **kwargs)
        return self._move(record, tf.convert_to_tensor(delta, self.dtype))

    def assign_sub(self, delta, *args, **kwargs):
        record = _record()
        if record is None:
            return super().assign_sub(delta, *args, **kwargs)
        return self._move(record, -tf.convert_to_tensor(delta, self.dtype))

    def _move(self, record, delta: tf.Tensor) -> tf.Tensor:
        record.add_state_delta(StateDelta(self, delta))
        return self.read_value() + delta


def _record():
    from gba_tf.optimizer_hooks import gba_context

    context = gba_context()
    return context.record if context is not None else None
