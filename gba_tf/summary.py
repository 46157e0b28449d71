"""What a run leaves behind: DIR/summary.json, and the same for the eye."""

import json
import os
import pathlib
import tempfile
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
    "versions",
)


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


def write(model_dir: str | os.PathLike[str], summary: dict[str, Any]) -> pathlib.Path:
    """Writes DIR/summary.json in one step: a reader sees the whole file or none.

    Raises:
      ValueError: A key of KEYS is missing.
    """
    missing = [key for key in KEYS if key not in summary]
    if missing:
        raise ValueError(f"summary: expected the keys {KEYS}, found none of {missing}.")
    path = pathlib.Path(model_dir) / FILE_NAME
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=FILE_NAME, delete=False
    ) as temporary:
        json.dump(summary, temporary, indent=2)
        temporary.write("\n")
    os.chmod(temporary.name, 0o644)
    os.replace(temporary.name, path)
    return path


def render(summary: dict[str, Any]) -> str:
    """A readable block of the summary."""
    tokens = summary["tokens"]
    rows = [
        ("model", f"{summary['model']} on {summary['dataset']}"),
        (
            "strategy",
            f"{summary['strategy']}, {summary['num_workers']} workers,"
            f" {summary['num_ps']} parameter servers",
        ),
        (
            "batch",
            f"G = {summary['global_batch_size']:,} = {summary['gradients_per_update']} x B ="
            f" {summary['local_batch_size']:,}",
        ),
        (
            "trained",
            f"{summary['epochs']} epochs, {summary['examples']:,} examples,"
            f" {summary['global_step']:,} global steps",
        ),
        (
            "speed",
            f"{summary['examples_per_second']:,.0f} examples/s"
            f" ({summary['train_seconds']:.1f} s of training)",
        ),
        ("held out", f"AUC {summary['auc']:.4f}, loss {summary['loss']:.4f}"),
    ]
    if tokens:
        counts = ", ".join(f"{count:,} {name}" for name, count in tokens.items())
        rows.append(("tokens", counts))
    if summary["staleness"]:
        total = sum(summary["staleness"].values())
        shares = (
            f"{value}: {100 * count / total:.1f} %"
            for value, count in sorted(summary["staleness"].items(), key=lambda item: int(item[0]))
        )
        rows.append(("staleness", ", ".join(shares) + "  (global steps: share of gradients)"))
    rows.append(("checkpoint", summary["checkpoint"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
