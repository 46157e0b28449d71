"""Saved gradients -> one more update of a run that has no buffers for them.

The token server and the buffers that held them are set up again in this process, and asked for the
mean. It is cut as the variables are here, and applied by the optimizer as any other gradient.
"""

import dataclasses
import functools
import itertools
import pathlib
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gba_tf import saved_gradients, summary
from gba_tf.config import Policy
from gba_tf.logical_variables import LogicalVariable
from gba_tf.ops.gradient_buffer import GradientBuffer
from gba_tf.ops.token_server import TokenServer, TokenStats
from gba_tf.training import plain_replica_context

_CPU = "/device:CPU:0"
# Of token servers and buffers that are set up in this process.
_RUN_ID = uuid.uuid4().hex
_names = itertools.count()

Gradient = tf.Tensor | tf.IndexedSlices


def apply(
    saved: dict[str, Any],
    strategy: tf.distribute.Strategy,
    optimizer,
    variables: Sequence[LogicalVariable],
    folder: pathlib.Path,
) -> TokenStats:
    """Applies the mean of saved gradients, and says so.

    Args:
      saved: The group, see saved_gradients.
      strategy: Of this run, any.
      optimizer: What applies them.
      variables: Of the checkpoint, restored.
      folder: Where the files of the group are.

    Returns:
      What became of the tokens of the group, with the global step that this update made.
    """
    aggregated, stats = _aggregate(saved, folder)
    whole = {
        (key, is_state): _joined(
            [
                (entry["first_row"], gradient)
                for entry, gradient in zip(saved["gradients"], aggregated, strict=True)
                if (entry["key"], entry["is_state"]) == (key, is_state)
            ]
        )
        for key, is_state in dict.fromkeys((e["key"], e["is_state"]) for e in saved["gradients"])
    }
    by_key = {variable.key: variable for variable in variables}
    trained, moved = [], []
    for (key, is_state), gradient in whole.items():
        for first_row, part in by_key[key].parts:
            (moved if is_state else trained).append((_cut(gradient, first_row, part), part))

    def update(**options):
        optimizer.apply_gradients(trained, **options)
        for delta, variable in moved:
            variable.assign_add(delta)

    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        # Every worker has the whole gradient.
        is_legacy = not hasattr(optimizer, "build")
        name = "experimental_aggregate_gradients" if is_legacy else "skip_gradients_aggregation"
        update = functools.partial(strategy.run, functools.partial(update, **{name: not is_legacy}))
    else:
        update = functools.partial(_in_plain_context, update)
    tf.function(update, autograph=False)()
    number = stats.applied + stats.decayed - _ended(saved["tokens"])
    if strategy.extended.should_checkpoint:
        print(
            f"{summary.count(number, 'gradient')} of the checkpoint waited for an update that this"
            f" run does not go on with: applied, divided by {number}, as global step"
            f" {int(optimizer.iterations.numpy())}",
            flush=True,
        )
    return dataclasses.replace(stats, global_step=int(optimizer.iterations.numpy()))


def _aggregate(saved: dict[str, Any], folder: pathlib.Path) -> tuple[list[Gradient], TokenStats]:
    """The mean of each gradient, from the old token server and buffers, set up in this process."""
    name = f"restored/{next(_names)}"
    server = TokenServer(_CPU, _RUN_ID, name, Policy(**saved["policy"]))
    server.restore(saved_gradients.token_state(saved))
    buffers = {}
    for task in sorted({entry["task"] for entry in saved["gradients"]}):
        specs = [
            saved_gradients.spec_of(entry) for entry in saved["gradients"] if entry["task"] == task
        ]
        buffer = GradientBuffer(_CPU, _RUN_ID, f"{name}/{task}", specs, saved["sparse_divisor"])
        buffer.restore(*saved_gradients.read(_CPU, folder / saved_gradients.file_name(saved, task)))
        buffers[task] = buffer
    gradients = tf.function(functools.partial(_flushed, server, buffers), autograph=False)()
    for buffer in buffers.values():
        buffer.clear()
    remaining = {task: iter(values) for task, values in gradients.items()}
    return [next(remaining[entry["task"]]) for entry in saved["gradients"]], server.stats()


def _flushed(server: TokenServer, buffers: dict[int, GradientBuffer]) -> dict[int, list[Gradient]]:
    decision = server.flush(close_partial=True)
    gradients = {}
    for task, buffer in buffers.items():
        signature = [argument for spec in buffer.specs for argument in spec.argument_specs()]
        serialize = tf.function(
            lambda *arguments: [tf.io.serialize_tensor(argument) for argument in arguments],
            input_signature=signature,
            autograph=False,
        ).get_concrete_function()
        found = buffer.inspect(decision, serialize)[0]
        arguments = iter(
            tf.ensure_shape(tf.io.parse_tensor(found[i], argument.dtype), argument.shape)
            for i, argument in enumerate(signature)
        )
        gradients[task] = [
            spec.from_arguments([next(arguments) for _ in spec.argument_specs()])
            for spec in buffer.specs
        ]
    return gradients


def _joined(parts: list[tuple[int, Gradient]]) -> Gradient:
    """The gradient of a whole variable, from those of its shards: (first row, gradient)."""
    parts = sorted(parts, key=lambda part: part[0])
    if len(parts) == 1:
        return parts[0][1]
    if not isinstance(parts[0][1], tf.IndexedSlices):
        return tf.concat([gradient for _, gradient in parts], axis=0)
    return tf.IndexedSlices(
        tf.concat([gradient.values for _, gradient in parts], axis=0),
        tf.concat(
            [
                gradient.indices + tf.cast(first, gradient.indices.dtype)
                for first, gradient in parts
            ],
            axis=0,
        ),
    )


def _cut(gradient: Gradient, first_row: int, part: tf.Variable) -> Gradient:
    """The rows of one shard."""
    if not part.shape.rank:
        return gradient
    num_rows = part.shape[0]
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[first_row : first_row + num_rows]
    rows = gradient.indices - tf.cast(first_row, gradient.indices.dtype)
    own = (rows >= 0) & (rows < tf.cast(num_rows, rows.dtype))
    return tf.IndexedSlices(
        tf.boolean_mask(gradient.values, own),
        tf.boolean_mask(rows, own),
        tf.constant(part.shape.as_list(), rows.dtype),
    )


def _in_plain_context(update) -> None:
    with plain_replica_context():
        update()


def _ended(tokens: dict[str, Any]) -> int:
    return tokens["applied"] + tokens["decayed"]
