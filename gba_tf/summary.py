"""What a run leaves behind: DIR/summary.json, and the same for the eye."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

FILE_NAME = "summary.json"
# Fixed: other tools read them. Keys may be added, never renamed or left out.
KEYS = (
    "strategy",
    "model",
    "dataset",
    "global_batch_size",
    "local_batch_size",
    "gradients_per_update",
    "num_workers",
    "num_ps",
    "global_step",
    "epochs",
    "examples",
    "train_seconds",
    "examples_per_second",
    "auc",
    "loss",
    "tokens",
    "staleness",
    "checkpoint",
    "switches",
    "versions",
)
# Of the staleness histogram, in the block for the eye.
_MAX_SHARES = 6


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    import tensorflow as tf
    import tf_keras

    import gba_tf

    return {
        "gba_tf": gba_tf.__version__,
        "tensorflow": tf.__version__,
        "tf_keras": tf_keras.__version__,
    }


def write(model_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> pathlib.Path:
    """Writes DIR/summary.json in one step: a reader sees the whole file or none.

    A number that is not finite becomes null, as JSON has none: the AUC where all held-out examples
    are of one class, the loss of a training that diverged.

    Args:
      model_dir: An existing folder.
      summary: Values of all KEYS.

    Returns:
      The path of the file.

    Raises:
      ValueError: A key of KEYS is missing.
    """
    missing = [key for key in KEYS if key not in summary]
    if missing:
        raise ValueError(f"summary: expected the keys {KEYS}, found none of {missing}.")
    finite = {key: None if _is_not_finite(value) else value for key, value in summary.items()}
    text = json.dumps(finite, indent=2, allow_nan=False) + "\n"
    path = pathlib.Path(model_dir) / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(summary: Mapping[str, Any], path: str | os.PathLike[str]) -> str:
    """A readable block of the summary that was written to `path`."""
    rows = [
        ("model", f"{summary['model']} on {summary['dataset']}"),
        ("strategy", _strategy(summary)),
        ("update", _update(summary)),
        (
            "trained",
            f"{count(summary['epochs'], 'epoch')}, {summary['examples']:,} examples,"
            f" {count(summary['global_step'], 'global step')}",
        ),
        (
            "speed",
            f"{summary['examples_per_second']:,.0f} examples/s"
            f" ({summary['train_seconds']:.1f} s of training)",
        ),
        ("held out", f"AUC {decimal(summary['auc'])}, loss {decimal(summary['loss'])}"),
    ]
    for number, switch in enumerate(summary["switches"]):
        rows.append(("" if number else "switches", _switch(switch)))
    tokens = dict(summary["tokens"])
    if tokens:
        issued = tokens.pop("issued")
        ended = " + ".join(
            f"{tokens.pop(fate):,} {fate}" for fate in ("applied", "decayed", "lost")
        )
        rows.append(("tokens", f"{issued:,} issued = {ended}"))
        rows.append(("", "".join(f" + {number:,} {fate}" for fate, number in tokens.items())[1:]))
    if summary["staleness"]:
        rows.append(("staleness", _staleness(summary["staleness"])))
        rows.append(("", "(global steps late: share of gradients)"))
    rows.append(("checkpoint", _short(summary["checkpoint"])))
    rows.append(("summary", _short(path)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def count(number: int, singular: str) -> str:
    """ "1 worker", "2,000 workers"."""
    return f"{number:,} {singular}{'' if number == 1 else 's'}"


def _strategy(summary: Mapping[str, Any]) -> str:
    if not summary["num_ps"]:
        return summary["strategy"]
    return (
        f"{summary['strategy']}, {count(summary['num_workers'], 'worker')},"
        f" {count(summary['num_ps'], 'parameter server')}"
    )


def _update(summary: Mapping[str, Any]) -> str:
    gradients, size = summary["gradients_per_update"], summary["local_batch_size"]
    if gradients == 1:
        return f"1 gradient of {size:,} examples"
    return (
        f"G = {summary['global_batch_size']:,} examples = {gradients:,} gradients of B = {size:,}"
    )


def _switch(switch: Mapping[str, Any]) -> str:
    seconds = sum(switch["seconds"].values())
    return f"to {switch['to']} at global step {switch['global_step']:,}, in {seconds:.1f} s"


def _short(path: str | os.PathLike[str]) -> str:
    """The path from the current folder, for what is in it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def _staleness(staleness: Mapping[str, int]) -> str:
    """Shares of the gradients by their delay in global steps."""
    ordered = sorted((int(steps), number) for steps, number in staleness.items())
    total = sum(number for _, number in ordered)
    shares = [f"{steps}: {100 * number / total:.1f} %" for steps, number in ordered]
    if len(ordered) > _MAX_SHARES:
        rest = sum(number for _, number in ordered[_MAX_SHARES - 1 :])
        first_of_rest = ordered[_MAX_SHARES - 1][0]
        shares[_MAX_SHARES - 1 :] = [f"{first_of_rest} or more: {100 * rest / total:.1f} %"]
    return ", ".join(shares)


def decimal(value: float | None) -> str:
    """Four decimals, or "undefined"."""
    return "undefined" if value is None or _is_not_finite(value) else f"{value:.4f}"


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
