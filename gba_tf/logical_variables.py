"""The variables of a model and its optimizer as a checkpoint sees them: whole, in any mode.

A variable that is split into shards over parameter servers, or mirrored on several workers, is one
logical variable with one key, the same as in a single process.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import graph_view
from tensorflow.python.checkpoint import util as checkpoint_util
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.trackable import base, trackable_utils
from tensorflow.python.util import object_identity

from gba_tf.checkpoint_files import CheckpointError


@dataclasses.dataclass(frozen=True)
class LogicalVariable:
    """A whole variable.

    Attributes:
      key: Of its value in a checkpoint.
      variable: A tf.Variable, or the ShardedVariable.
    """

    key: str
    variable: Any

    @property
    def name(self) -> str:
        first = self.parts[0][1].name.split(":")[0]
        return first if len(self.parts) == 1 else first.rsplit("/part_", 1)[0]

    @property
    def parts(self) -> list[tuple[int, tf.Variable]]:
        """(first row, variable) of each shard, or (0, variable)."""
        # Not hasattr(): a variable that is synchronized on read would ask all workers.
        if not isinstance(self.variable, sharded_variable.ShardedVariable):
            return [(0, self.variable)]
        shards = self.variable.variables
        first_rows = itertools.accumulate((shard.shape[0] for shard in shards), initial=0)
        return list(zip(first_rows, shards, strict=False))

    @property
    def num_bytes(self) -> int:
        return self.variable.shape.num_elements() * self.variable.dtype.size

    def described(self) -> dict[str, Any]:
        """For JSON: key, name, shape and dtype."""
        return {
            "key": self.key,
            "name": self.name,
            "shape": self.variable.shape.as_list(),
            "dtype": self.variable.dtype.name,
        }


def of(checkpoint: tf.train.Checkpoint) -> list[LogicalVariable]:
    """All variables of the model and the optimizer that are saved, the model's first.

    Those of metrics are left out: they start anew with every epoch, and another run may have
    others. So is tf.train.Checkpoint's own counter.
    """
    objects, paths = graph_view.ObjectGraphView(checkpoint).breadth_first_traversal()
    names = object_identity.ObjectIdentityDictionary()
    numbers = object_identity.ObjectIdentityDictionary()
    for number, item in enumerate(objects):
        names[item] = trackable_utils.object_path_to_string(paths[item])
        numbers[item] = number
    metrics = tuple(f"{names[o]}/" for o in objects if isinstance(o, tf.keras.metrics.Metric))
    # Adds the slots of legacy optimizers, which are nobody's attributes.
    checkpoint_util.serialize_slot_variables(objects, numbers, names)
    found = [
        LogicalVariable(trackable_utils.checkpoint_key(names[o], base.VARIABLE_VALUE_KEY), o)
        for o in objects
        if isinstance(o, tf.Variable | sharded_variable.ShardedVariable)
        and not names[o].startswith(metrics)
        and o is not checkpoint.save_counter
    ]
    return sorted(found, key=_is_of_optimizer)


def refuse_differences(
    saved: Iterable[Mapping[str, Any]],
    variables: Iterable[LogicalVariable],
    optimizers: tuple[str, str],
    where: str,
) -> None:
    """Refuses a checkpoint of other variables.

    Args:
      saved: `described()` of each variable in the checkpoint.
      variables: Those of the model and its optimizer.
      optimizers: The class of the optimizer in the checkpoint, and of the one here.
      where: The checkpoint, for the message.

    Raises:
      CheckpointError: A variable or the optimizer differs; the text names the first one.
    """
    rest = {entry["key"]: entry for entry in saved}
    compared_optimizers = False
    for variable in variables:
        expected = variable.described()
        if _is_of_optimizer(variable) and not compared_optimizers:
            _refuse_extra((e for e in rest.values() if not _is_optimizer_key(e["key"])), where)
            _refuse_other_optimizer(optimizers, where)
            compared_optimizers = True
        found = rest.pop(variable.key, None)
        if found is None:
            raise _refusal(where, expected, "the checkpoint has no such variable")
        for field in ("shape", "dtype"):
            if found[field] != expected[field]:
                raise _refusal(
                    where,
                    expected,
                    f"the model has {field} {expected[field]}, the checkpoint {found[field]}",
                )
    _refuse_extra(rest.values(), where)


def _refuse_extra(extra: Iterable[Mapping[str, Any]], where: str) -> None:
    for entry in extra:
        raise _refusal(where, entry, "the model has no such variable")


def _refuse_other_optimizer(optimizers: tuple[str, str], where: str) -> None:
    saved, found = optimizers
    if saved != found:
        raise CheckpointError(
            f"Checkpoint {where} does not fit: it was written with optimizer {saved}, and the"
            f" model is compiled with {found}, whose slots mean something else. Nothing was"
            f" restored. Train with {saved}, or with another model_dir."
        )


def _refusal(where: str, entry: Mapping[str, Any], what: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint {where} does not fit the model. The first variable that differs is"
        f" {entry['name']} ({entry['key']}): {what}. Nothing was restored. Use the model, data"
        " and optimizer that wrote it, or another model_dir."
    )


def _is_of_optimizer(variable: LogicalVariable) -> bool:
    return _is_optimizer_key(variable.key)


def _is_optimizer_key(key: str) -> bool:
    return key.startswith("optimizer/") or "/.OPTIMIZER_SLOT/optimizer/" in key
