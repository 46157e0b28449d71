"""[3] The handle of a gradient buffer: gradients are packed, pushed and applied here."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from gba_tf.config import SparseDivisor
from gba_tf.ops import library

VALUE_DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
ID_DTYPES = (tf.int32, tf.int64)
# Token ids int64[n], packed gradients string[n], applied steps int64.
BufferContent = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """The form of one variable's gradient.

    Attributes:
      name: The variable's name, for messages.
      dtype: One of float32, float64, float16, bfloat16.
      shape: The variable's shape, fully known.
      ids_dtype: None for a dense gradient; int32 or int64 for IndexedSlices.
      merge_rows: Whether the occurrences of a row of IndexedSlices are summed, the default. If not,
        all of them stay apart, in token-id order and as the worker has them, each divided as the
        sum would be: what an optimizer needs that clips before it merges, as plain Keras does.
        Ignored for a dense gradient.
    """

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    ids_dtype: tf.DType | None = None
    merge_rows: bool = True

    @classmethod
    def of(
        cls,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: tf.Variable,
        merge_rows: bool = True,
    ) -> "GradientSpec":
        """Raises ValueError for a gradient that a buffer cannot hold."""
        if not variable.shape.is_fully_defined():
            raise ValueError(
                f"Variable {variable.name}: expected a fully defined shape, found"
                f" {variable.shape}. Build the model before training."
            )
        sparse = isinstance(gradient, tf.IndexedSlices)
        if gradient.dtype not in VALUE_DTYPES:
            raise ValueError(
                f"Variable {variable.name}: expected a gradient of one of"
                f" {[dtype.name for dtype in VALUE_DTYPES]}, found {gradient.dtype.name}."
            )
        if sparse and gradient.indices.dtype not in ID_DTYPES:
            raise ValueError(
                f"Variable {variable.name}: expected IndexedSlices with int32 or int64 ids, found"
                f" {gradient.indices.dtype.name}."
            )
        return cls(
            variable.name,
            gradient.dtype,
            variable.shape,
            gradient.indices.dtype if sparse else None,
            merge_rows or not sparse,
        )

    @property
    def sparse(self) -> bool:
        return self.ids_dtype is not None

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.sparse else 0

    @property
    def row_width(self) -> int:
        return self.shape[1:].num_elements() if self.sparse else 0

    def argument_specs(self) -> list[tf.TensorSpec]:
        """What the update function of `GradientBuffer.apply` receives for this variable."""
        if not self.sparse:
            return [tf.TensorSpec([self.shape.num_elements()], self.dtype)]
        return [
            tf.TensorSpec([None], self.ids_dtype),
            tf.TensorSpec([None, self.row_width], self.dtype),
        ]

    def from_arguments(self, arguments: Sequence[tf.Tensor]) -> tf.Tensor | tf.IndexedSlices:
        """The inverse: tensors of `argument_specs` -> the variable's gradient."""
        if not self.sparse:
            return tf.reshape(arguments[0], self.shape)
        ids, rows = arguments
        return tf.IndexedSlices(
            tf.reshape(rows, [-1, *self.shape[1:]]),
            ids,
            tf.constant(self.shape.as_list(), ids.dtype),
        )


def pack(
    specs: Sequence[GradientSpec], gradients: Sequence[tf.Tensor | tf.IndexedSlices]
) -> tf.Tensor:
    """Packs one parameter server's gradients into one block, on the device of the caller.

    Args:
      specs: The form of each gradient.
      gradients: Dense tensors or IndexedSlices, in the same order.

    Returns:
      uint8 vector.

    Raises:
      tf.errors.InvalidArgumentError: When run: a row id is out of range.
    """
    sparse = [spec.sparse for spec in specs]
    return library.load().gba_pack_gradient(
        values=[g.values if s else g for g, s in zip(gradients, sparse, strict=True)],
        ids=[g.indices for g, s in zip(gradients, sparse, strict=True) if s],
        num_rows=[spec.num_rows for spec in specs],
        sparse=sparse,
        merge_rows=[spec.merge_rows for spec in specs],
    )


class GradientBuffer:
    """The gradient buffer of one parameter server task. Works eagerly and in graphs.

    Args:
      device: Where it lives, e.g. "/job:ps/task:1/device:CPU:0".
      run_id: Names the run, see TokenServer.
      name: Unique in the run.
      specs: The form of the gradient of each variable of that task.
      sparse_divisor: See GBAConfig.
    """

    def __init__(
        self,
        device: str,
        run_id: str,
        name: str,
        specs: Sequence[GradientSpec],
        sparse_divisor: SparseDivisor = "gradients_per_update",
    ):
        self._ops = library.load()
        self.device = device
        self.specs = tuple(specs)
        with tf.init_scope(), tf.device(device):
            self._handle = self._ops.gba_gradient_buffer(
                run_id=run_id,
                shared_name=name,
                value_types=[spec.dtype for spec in specs],
                id_types=[spec.ids_dtype or tf.int64 for spec in specs],
                num_elements=[0 if spec.sparse else spec.shape.num_elements() for spec in specs],
                num_rows=[spec.num_rows for spec in specs],
                row_widths=[spec.row_width for spec in specs],
                sparse=[spec.sparse for spec in specs],
                merge_rows=[spec.merge_rows for spec in specs],
                sparse_divisor=sparse_divisor,
            )

    def push(self, token_id: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
        """Stores a packed gradient under its token. Returns `token_id` once it is stored."""
        with tf.device(self.device):
            return self._ops.gba_push_gradient(buffer=self._handle, token_id=token_id, block=block)

    def apply(
        self,
        decision: tf.Tensor,
        update: "tf.types.experimental.ConcreteFunction",
        captured: Sequence[tf.Tensor],
        shared_state: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Applies the steps of `decision` that this task has not applied yet, in order.

        Args:
          decision: From TokenServer.commit or flush.
          update: Takes the gradients (see GradientSpec.argument_specs), then the shared state of a
            step, then `captured`; returns the serialized shared state.
          captured: Tensors that `update` captures, variable handles of this task.
          shared_state: string[steps, s], what `apply` returned on the task that owns the state;
            None where `update` takes none.

        Returns:
          string[steps, s]: the shared state before each step, for the other tasks.
        """
        update.add_to_graph(tf.compat.v1.get_default_graph())
        with tf.device(self.device):
            if shared_state is None:
                shared_state = tf.zeros([0, 0], tf.string)
            return self._ops.gba_apply_update(
                buffer=self._handle,
                decision=decision,
                shared_state=shared_state,
                captured=captured,
                update=attr_value_pb2.NameAttrList(name=update.name),
            )

    def inspect(
        self, decision: tf.Tensor, inspection: "tf.types.experimental.ConcreteFunction"
    ) -> tf.Tensor:
        """Evaluates a function of the aggregated gradients of the steps of `decision`.

        Args:
          decision: From TokenServer.commit or flush.
          inspection: Takes the gradients as `update` of `apply` does, captures nothing, and returns
            a list of f string scalars.

        Returns:
          string[steps, f]: what it returned for each step.
        """
        inspection.add_to_graph(tf.compat.v1.get_default_graph())
        with tf.device(self.device):
            return self._ops.gba_inspect_update(
                buffer=self._handle,
                decision=decision,
                inspection=attr_value_pb2.NameAttrList(name=inspection.name),
            )

    def drop(self, lost_ids: tf.Tensor) -> tf.Operation:
        """Frees the gradients of lost tokens."""
        with tf.device(self.device):
            return self._ops.gba_drop_gradients(buffer=self._handle, lost_ids=lost_ids)

    def stats(self) -> dict[str, int]:
        """The gradients held, their bytes, and the global steps applied here."""
        with tf.device(self.device):
            counts = self._ops.gba_buffer_stats(buffer=self._handle)
        return dict(
            zip(
                ("num_gradients", "num_bytes", "applied_steps"),
                counts.numpy().tolist(),
                strict=True,
            )
        )

    def serialize(self) -> BufferContent:
        """The content, for a checkpoint."""
        with tf.device(self.device):
            return self._ops.gba_serialize_buffer(buffer=self._handle)

    def restore(
        self, token_ids: tf.Tensor, blocks: tf.Tensor, applied_steps: tf.Tensor
    ) -> tf.Operation:
        """Replaces the content.

        Raises:
          tf.errors.InvalidArgumentError: A block does not fit the variables; nothing is changed.
        """
        with tf.device(self.device):
            return self._ops.gba_restore_buffer(
                buffer=self._handle,
                token_ids=token_ids,
                blocks=blocks,
                applied_steps=applied_steps,
            )

    def clear(self) -> tf.Operation:
        """Frees all gradients, and forgets the steps that were applied."""
        return self.restore(
            tf.zeros([0], tf.int64), tf.zeros([0], tf.string), tf.zeros([], tf.int64)
        )
