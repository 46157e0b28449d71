"""Token counts over a whole training, of which this process may have done only the last part."""

import collections
import dataclasses
import uuid
import weakref
from typing import Any

import tensorflow as tf

from gba_tf.apply import UpdateGroup
from gba_tf.ops.token_server import TokenStats
from gba_tf.strategy import GBAStrategy

NO_TOKENS = TokenStats(0, 0, 0, 0, 0, 0, 0, {})
# What became of the tokens of runs before this one.
_earlier: "weakref.WeakKeyDictionary[tf.distribute.Strategy, TokenStats]" = (
    weakref.WeakKeyDictionary()
)
# By which a checkpoint says whose tokens it has counted.
_group_names: "weakref.WeakKeyDictionary[UpdateGroup, str]" = weakref.WeakKeyDictionary()


def total_stats(strategy: tf.distribute.Strategy) -> TokenStats:
    """What became of all tokens since training began, whatever the modes it ran in.

    Args:
      strategy: Of this run; earlier runs are known if a TrainingCheckpoint restored them.

    Returns:
      TokenStats; `global_step` is that of the last run which took tokens. All zero if none did.
    """
    running = []
    if isinstance(strategy, GBAStrategy):
        running = [group.stats() for group in strategy.update_groups()]
    return total([earlier_stats(strategy), *running])


def earlier_stats(strategy: tf.distribute.Strategy) -> TokenStats:
    """The part of earlier runs, as far as no token server of this run counts it."""
    return _earlier.get(strategy, NO_TOKENS)


def set_earlier_stats(strategy: tf.distribute.Strategy, stats: TokenStats) -> None:
    _earlier[strategy] = stats


def group_name(group: UpdateGroup) -> str:
    """The same for as long as the group lives, and no other group's, in no process."""
    return _group_names.setdefault(group, uuid.uuid4().hex)


def total(parts: list[TokenStats]) -> TokenStats:
    """The sum; the global step is the highest one."""
    counts = ("issued", "applied", "decayed", "lost", "outstanding", "buffered")
    staleness = collections.Counter()
    for part in parts:
        staleness.update(part.staleness)
    return TokenStats(
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
        global_step=max(part.global_step for part in parts),
        staleness=dict(sorted(staleness.items())),
    )


def to_json(stats: TokenStats) -> dict[str, Any]:
    """JSON's keys are strings."""
    fields = dataclasses.asdict(stats)
    fields["staleness"] = {str(steps): number for steps, number in stats.staleness.items()}
    return fields


def from_json(fields: dict[str, Any]) -> TokenStats:
    staleness = {int(steps): number for steps, number in fields["staleness"].items()}
    return TokenStats(**{**fields, "staleness": staleness})
