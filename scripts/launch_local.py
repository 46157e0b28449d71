"""Runs a program as a cluster of processes on this machine, one process for each task.

    python scripts/launch_local.py --num_workers=2 --num_ps=1 -- python train.py --epochs=3

Every task runs the command after `--`, with a TF_CONFIG that gives it its role. `python` there
means the interpreter that runs this script.
"""

import importlib.util
import os
import pathlib
import sys

from absl import app, flags

_ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
if importlib.util.find_spec("gba_tf") is None:
    # From a checkout that is not installed: for this process and for the tasks.
    sys.path.insert(0, _ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in (_ROOT, os.environ.get("PYTHONPATH")) if path
    )

from gba_tf import command_line  # noqa: E402
from gba_tf.local_cluster import LocalCluster  # noqa: E402

_NAME = "launch_local"

_NUM_WORKERS = flags.DEFINE_integer("num_workers", 2, "Worker tasks.", lower_bound=0)
_NUM_PS = flags.DEFINE_integer(
    "num_ps", 1, "Parameter server tasks; all-reduce training needs none.", lower_bound=0
)
_EVALUATOR = flags.DEFINE_bool("evaluator", False, "Whether to start an evaluator too.")
# absl has a flag of this name for its own log files, which this script does not write.
_LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "Folder for one log file per task. Default: a new temporary folder.",
    allow_override=True,
)


def main(command: list[str]) -> int:
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    try:
        cluster = LocalCluster(
            command, _NUM_WORKERS.value, _NUM_PS.value, _EVALUATOR.value, _LOG_DIR.value
        )
    except (ValueError, OSError) as error:
        command_line.fail(_NAME, str(error))
    with cluster:
        return cluster.wait()


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.command_parser(_NAME, "python anything.py"))
