"""What an optimizer needs to know of the gradients of all parameter server tasks at once.

Clipping by the global norm and dynamic loss scaling look at every gradient before any is applied.
Where these are spread over several tasks, each task first reports what it has (`inspect`), and the
update of each task is traced with the reports of all (`WholeGradient`).
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from gba_tf import optimizer_hooks

Gradient = tf.Tensor | tf.IndexedSlices


def is_needed(optimizer) -> bool:
    """Whether the optimizer's update of one variable depends on the gradients of others."""
    inner = optimizer_hooks.unwrapped(optimizer)
    return bool(getattr(optimizer, "dynamic", False) or getattr(inner, "global_clipnorm", None))


def inspect(gradients: Sequence[Gradient]) -> tf.Tensor:
    """One task's report.

    Args:
      gradients: Those of the task's variables.

    Returns:
      float64[2]: the sum of squares, and the number of gradients that are not finite.
    """
    report = tf.zeros([2], tf.float64)
    for gradient in gradients:
        values = tf.cast(_values(gradient), tf.float64)
        is_finite = tf.reduce_all(tf.math.is_finite(values))
        report += tf.stack([tf.reduce_sum(values * values), 1.0 - tf.cast(is_finite, tf.float64)])
    return report


class WholeGradient:
    """The gradients of all tasks, as far as an update needs to know.

    Args:
      reports: float64[2] of every task.
    """

    def __init__(self, reports: Sequence[tf.Tensor]):
        total = tf.add_n(list(reports))
        self._norm = tf.sqrt(total[0])
        self._is_finite = tf.equal(total[1], 0.0)

    @contextlib.contextmanager
    def prepared(self, optimizer, gradients: Sequence[Gradient]):
        """Yields one task's gradients, to be applied within the context.

        They are clipped by the norm of all gradients, and not finite if any gradient is not, as a
        dynamic loss scale expects. The optimizer's own clipping by global norm is off meanwhile.
        """
        inner = optimizer_hooks.unwrapped(optimizer)
        clipnorm = getattr(inner, "global_clipnorm", None)
        if clipnorm:
            norm = tf.cast(self._norm, _values(gradients[0]).dtype)
            gradients, _ = tf.clip_by_global_norm(gradients, clipnorm, use_norm=norm)
        if getattr(optimizer, "dynamic", False):
            gradients = [self._not_finite_if_any_is_not(gradient) for gradient in gradients]
        # Optimizers of tf.keras.optimizers.legacy have a property of this name.
        name = "_global_clipnorm" if hasattr(inner, "_global_clipnorm") else "global_clipnorm"
        setattr(inner, name, None)
        try:
            yield gradients
        finally:
            setattr(inner, name, clipnorm)

    def zero_if_finite(self) -> tf.Tensor:
        """A gradient for nobody: 0, or NaN if any gradient is not finite."""
        return self._not_finite_if_any_is_not(tf.zeros([]))

    def _not_finite_if_any_is_not(self, gradient: Gradient) -> Gradient:
        values = _values(gradient)
        values = tf.where(self._is_finite, values, tf.constant(float("nan"), values.dtype))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return values


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
