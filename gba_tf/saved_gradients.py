"""The form in which gradients that wait for their update are saved.

Every parameter server writes one file, with the packed gradients of its buffer. The rest is JSON: a
"group" says which token server and buffers they were, and of which variable each gradient is.
"""

import base64
import pathlib
from typing import Any

import tensorflow as tf

from gba_tf.ops.gradient_buffer import BufferContent, GradientBuffer, GradientSpec

_TENSORS = ("token_ids", "blocks", "applied_steps")
_DTYPES = (tf.int64, tf.string, tf.int64)


def write(buffer: GradientBuffer, prefix: pathlib.Path) -> None:
    """Writes what a buffer holds, on its own parameter server."""
    with tf.device(buffer.device):  # Gradients do not leave their parameter server.
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=_TENSORS,
            shape_and_slices=[""] * len(_TENSORS),
            tensors=buffer.serialize(),
        )


def read(device: str, prefix: pathlib.Path) -> BufferContent:
    """What `write` wrote, for GradientBuffer.restore of a buffer on `device`."""
    with tf.device(device):
        return tf.raw_ops.RestoreV2(
            prefix=str(prefix),
            tensor_names=_TENSORS,
            shape_and_slices=[""] * len(_TENSORS),
            dtypes=_DTYPES,
        )


def described(spec: GradientSpec) -> dict[str, Any]:
    """The form of a gradient, for JSON."""
    return {
        "name": spec.name,
        "shape": spec.shape.as_list(),
        "dtype": spec.dtype.name,
        "ids_dtype": spec.ids_dtype.name if spec.sparse else None,
        "merge_rows": spec.merge_rows,
    }


def spec_of(entry: dict[str, Any]) -> GradientSpec:
    """The inverse of `described`."""
    return GradientSpec(
        entry["name"],
        tf.as_dtype(entry["dtype"]),
        tf.TensorShape(entry["shape"]),
        tf.as_dtype(entry["ids_dtype"]) if entry["ids_dtype"] else None,
        entry["merge_rows"],
    )


def token_state(group: dict[str, Any]) -> tf.Tensor:
    """For TokenServer.restore."""
    return tf.constant(base64.b64decode(group["token_server"]))


def file_name(group: dict[str, Any], task: int) -> str:
    """Of what a parameter server task wrote."""
    return f"{group['files']}-ps{task}"
