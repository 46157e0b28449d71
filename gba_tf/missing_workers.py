"""Says which workers an all-reduce worker waits for, while TensorFlow waits for them in silence.

A process of its own does that (`python -m gba_tf.missing_workers`), because TensorFlow lets no
other Python thread run in the meantime. Imports no TensorFlow.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from gba_tf import cluster
from gba_tf.cluster_config import ClusterConfig

_NOTICE_SECONDS = 30.0


@contextlib.contextmanager
def named(config: ClusterConfig, notice_seconds: float = _NOTICE_SECONDS) -> Iterator[None]:
    """Says on standard error who is missing, again and again while the context lasts.

    Args:
      config: From `ClusterConfig.for_all_reduce()`, of a worker.
      notice_seconds: How often. Default: 30.
    """
    root = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "gba_tf.missing_workers", str(notice_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        with contextlib.suppress(BrokenPipeError):  # It is only there to help.
            process.stdin.write(json.dumps(dataclasses.asdict(config)).encode() + b"\n")
            process.stdin.flush()
        yield
    finally:
        # It ends when its standard input does, and so also when this process is killed.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def _say_who_is_missing(config: ClusterConfig, seconds: float) -> None:
    missing = {
        f"worker {index}": address
        for index, address in enumerate(config.cluster["worker"])
        if index != config.task_index and not cluster.answers(address)
    }
    for task, address in missing.items():
        cluster.say_missing(config, task, task, address, seconds)
    if not missing:
        cluster.say(
            f"{config.task_name} waits for the other workers for {seconds:.0f} s, though something "
            "answers at all their addresses. Check that every task has the same cluster in "
            "TF_CONFIG and trains by all-reduce"
        )


def _main(notice_seconds: float) -> None:
    # Ctrl-C is for the process that waits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = time.monotonic()
    config = ClusterConfig(**json.loads(sys.stdin.buffer.readline()))
    while not select.select([sys.stdin], [], [], notice_seconds)[0]:
        _say_who_is_missing(config, time.monotonic() - start)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
