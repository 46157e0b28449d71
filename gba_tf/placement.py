"""Which parameter server task owns a variable."""

import tensorflow as tf


class BalancedPlacement:
    """Puts each variable on the task with the fewest bytes so far.

    Scalars all go to task 0: they are the state that every task shares (iterations, learning rate),
    which the update of a global step reads in one place.

    Args:
      num_ps: Number of parameter server tasks.
    """

    def __init__(self, num_ps: int):
        self._bytes = [0] * num_ps

    @property
    def bytes_per_task(self) -> tuple[int, ...]:
        """Bytes of variables on each task, optimizer slots not included."""
        return tuple(self._bytes)

    def place(self, shape: tf.TensorShape | None, dtype: tf.DType | None) -> int:
        """Chooses the task of a new variable; a shape that is unknown counts as one element."""
        shape = tf.TensorShape(shape)
        if shape.rank == 0:
            return 0
        elements = shape.num_elements() if shape.is_fully_defined() else 1
        size = tf.as_dtype(dtype).size if dtype is not None else 4
        task = min(range(len(self._bytes)), key=lambda index: (self._bytes[index], index))
        self._bytes[task] += max(1, elements * size)
        return task


def ps_device(task: int) -> str:
    """The device of a parameter server task."""
    return f"/job:ps/replica:0/task:{task}/device:CPU:0"


def task_of(variable: tf.Variable) -> int:
    """The parameter server task of a variable.

    Raises:
      ValueError: It is not on a parameter server.
    """
    device = tf.DeviceSpec.from_string(variable.device)
    if device.job != "ps" or device.task is None:
        raise ValueError(
            f"Variable {variable.name}: expected it on a parameter server, found it on"
            f" {variable.device or 'no device'}. Create the model and the optimizer inside"
            " strategy.scope()."
        )
    return device.task
