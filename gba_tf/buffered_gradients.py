"""Gradients that wait for their global step, in a checkpoint.

They are saved as the gradient buffers hold them, each parameter server its own, together with the
state of the token server. A run of the same mode, sizes and parameter servers puts them back; what
decides over weights and waits may be another (the staleness tolerance, the bound). Any other run
has no place for them: their mean is applied to what was restored, as one more update.
"""

import base64
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gba_tf import (
    leftover_update,
    optimizer_hooks,
    saved_gradients,
    summary,
    token_totals,
)
from gba_tf.apply import UpdateGroup
from gba_tf.logical_variables import LogicalVariable
from gba_tf.ops.token_server import TokenStats
from gba_tf.placement import task_of
from gba_tf.step_record import OptimizerCall, StateDelta, StepRecord
from gba_tf.strategy import GBAStrategy

# What became of tokens that no update group of the run counts.
_EARLIER = "earlier"


def settle(strategy: GBAStrategy, keep_partial: bool) -> None:
    """Leaves no step half done; applies partial buffers too, and says so, unless they are kept."""
    strategy.settle(close_partial=False)
    if keep_partial:
        return
    waiting = sum(group.stats().buffered for group in strategy.update_groups())
    if waiting:
        strategy.settle(close_partial=True)
        print(
            f"{summary.count(waiting, 'gradient')} left in the buffers: applied, divided by"
            f" {waiting}",
            flush=True,
        )


def num_bytes(strategy: tf.distribute.Strategy) -> int:
    """Of the gradients that `save` would write."""
    return sum(
        shard.buffer.stats()["num_bytes"]
        for group in _groups_of(strategy)
        for shard in group.shards
    )


def save(
    strategy: tf.distribute.Strategy,
    optimizer,
    variables: Sequence[LogicalVariable],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Writes what waits in the buffers, after `settle`.

    Args:
      strategy: Any.
      optimizer: Of the checkpoint.
      variables: Of the checkpoint.
      folder: Where each parameter server writes its file.

    Returns:
      What `restore` needs besides the files, for JSON: "tokens", the counts of all that has ended,
      by update group, and "buffered_gradients".

    Raises:
      ValueError: Gradients wait for an optimizer or a variable that is not in the checkpoint.
    """
    ended, waiting = {_EARLIER: token_totals.earlier_stats(strategy)}, []
    for group in _groups_of(strategy):
        stats = group.stats()
        if stats.buffered:
            prefix = f"gradients-{len(waiting)}"
            waiting.append(_save_group(group, stats, optimizer, variables, folder, prefix))
        else:
            ended[token_totals.group_name(group)] = stats
    return {
        "tokens": {name: token_totals.to_json(stats) for name, stats in ended.items()},
        "buffered_gradients": waiting,
    }


def mark_saved(strategy: tf.distribute.Strategy) -> None:
    """Says that a checkpoint has what is in the buffers now."""
    for group in _groups_of(strategy):
        group.issued_when_saved = group.stats().issued


def restore(
    strategy: tf.distribute.Strategy,
    optimizer,
    variables: Sequence[LogicalVariable],
    folder: pathlib.Path,
    metadata: dict[str, Any],
) -> tuple[TokenStats, bool]:
    """Puts back what `save` wrote, or applies it; after `settle`, with the variables restored.

    Args:
      strategy: Any; its own gradients, if it has some, belong to what the checkpoint replaced.
      optimizer: As for `save`.
      variables: As for `save`.
      folder: As for `save`.
      metadata: With what `save` returned.

    Returns:
      The counts of all tokens that no token server of `strategy` counts, and whether an update was
      applied.
    """
    tokens = dict(metadata["tokens"])
    replaced = {saved["name"] for saved in metadata["buffered_gradients"]}
    for group in _groups_of(strategy):
        name = token_totals.group_name(group)
        if name in replaced or any(mine is optimizer for mine in group.optimizers):
            group.reset()
        else:
            tokens.pop(name, None)  # It goes on counting them itself.
    ended = [token_totals.from_json(counts) for counts in tokens.values()]
    is_changed = False
    for saved in metadata["buffered_gradients"]:
        if _has_place(saved, strategy, optimizer, variables):
            group = strategy.update_group(_record_of(saved, optimizer, variables))
            contents = [
                saved_gradients.read(
                    shard.buffer.device, folder / saved_gradients.file_name(saved, shard.task)
                )
                for shard in group.shards
            ]
            group.restore(saved_gradients.token_state(saved), contents)
            group.issued_when_saved = group.stats().issued
        else:
            ended.append(leftover_update.apply(saved, strategy, optimizer, variables, folder))
            is_changed = True
    return token_totals.total(ended), is_changed


def _groups_of(strategy: tf.distribute.Strategy) -> list[UpdateGroup]:
    return strategy.update_groups() if isinstance(strategy, GBAStrategy) else []


def _save_group(
    group: UpdateGroup,
    stats: TokenStats,
    optimizer,
    variables: Sequence[LogicalVariable],
    folder: pathlib.Path,
    prefix: str,
) -> dict[str, Any]:
    if not (len(group.optimizers) == 1 and group.optimizers[0] is optimizer):
        raise ValueError(
            f"{summary.count(stats.buffered, 'gradient')} for"
            f" {[type(o).__name__ for o in group.optimizers]} in the buffers: expected those of the"
            " optimizer of model.compile() alone, which the checkpoint holds. Call"
            " strategy.flush() first."
        )
    owners = {
        id(part.handle): (variable.key, first)
        for variable in variables
        for first, part in variable.parts
    }
    gradients: list[dict[str, Any] | None] = [None] * sum(
        len(shard.gradient_indices) for shard in group.shards
    )
    changed = [*group.trained_variables, *group.state_variables]
    for shard in group.shards:
        for index, spec in zip(shard.gradient_indices, shard.buffer.specs, strict=True):
            if id(changed[index].handle) not in owners:
                raise ValueError(
                    f"A gradient for {spec.name} waits for an update, and the variable is not one"
                    " of the model's. Make it an attribute of the model, or call strategy.flush()"
                    " first."
                )
            key, first_row = owners[id(changed[index].handle)]
            gradients[index] = {
                "task": shard.task,
                "key": key,
                "first_row": first_row,
                "is_state": index >= len(group.trained_variables),
                **saved_gradients.described(spec),
            }
        saved_gradients.write(shard.buffer, folder / f"{prefix}-ps{shard.task}")
    return {
        "name": token_totals.group_name(group),
        "policy": dataclasses.asdict(group.policy),
        "sparse_divisor": group.sparse_divisor,
        "num_ps": group.num_ps,
        "files": prefix,
        "tokens": token_totals.to_json(stats),
        "token_server": base64.b64encode(group.token_server.serialize().numpy()).decode(),
        "gradients": gradients,
    }


def _has_place(
    saved: dict[str, Any],
    strategy: tf.distribute.Strategy,
    optimizer,
    variables: Sequence[LogicalVariable],
) -> bool:
    """Whether the buffers of this run are those that were saved."""
    if not isinstance(strategy, GBAStrategy):
        return False
    policy, here = saved["policy"], strategy.policy
    same_policy = (policy["name"], policy["gradients_per_update"]) == (
        here.name,
        here.gradients_per_update,
    )
    if not same_policy or (saved["sparse_divisor"], saved["num_ps"]) != (
        strategy.config.sparse_divisor,
        strategy.extended._num_ps,
    ):
        return False
    parts = _parts_of(variables)
    merges = optimizer_hooks.merges_rows_first(optimizer)
    return all(
        (place := parts.get((gradient["key"], gradient["first_row"]))) is not None
        and place.shape.as_list() == gradient["shape"]
        and task_of(place) == gradient["task"]
        and (
            gradient["is_state"]
            or gradient["ids_dtype"] is None
            or gradient["merge_rows"] == merges
        )
        for gradient in saved["gradients"]
    )


def _record_of(
    saved: dict[str, Any], optimizer, variables: Sequence[LogicalVariable]
) -> StepRecord:
    """What the trace of the training step will record: the group is found by it."""
    parts = _parts_of(variables)
    record = StepRecord()
    call = OptimizerCall(optimizer=optimizer, variables=[], gradients=[], options={})
    for entry in saved["gradients"]:
        variable = parts[entry["key"], entry["first_row"]]
        # Only the form counts.
        gradient = tf.zeros([0], entry["dtype"])
        if entry["ids_dtype"] is not None:
            gradient = tf.IndexedSlices(gradient, tf.zeros([0], entry["ids_dtype"]))
        if entry["is_state"]:
            record.state_deltas.append(StateDelta(variable, gradient))
        else:
            call.variables.append(variable)
            call.gradients.append(gradient)
    record.calls.append(call)
    return record


def _parts_of(variables: Sequence[LogicalVariable]) -> dict[tuple[str, int], tf.Variable]:
    return {(variable.key, first): part for variable in variables for first, part in variable.parts}
