"""Ends every process of a local cluster: the one way in which they are stopped.

Run as a program of its own (`python orphan_guard.py CLUSTER_ID`) that waits for the end of its
standard input. The launcher holds the other end: it closes it to stop the cluster, and the kernel
closes it when the launcher dies, even by SIGKILL. Processes are recognised by the cluster's id in
their environment, which children of children inherit too, whatever session they moved to.
"""

import os
import pathlib
import signal
import sys
import time

ENVIRONMENT_KEY = "GBA_TF_LOCAL_CLUSTER"
_TERMINATE_SECONDS = 3.0
# After SIGKILL only a process that hangs in the kernel is left, and waiting does not help.
_GIVE_UP_SECONDS = 10.0
_POLL_SECONDS = 0.05
# A process that was just forked has its parent's environment until it executes its program.
_SETTLE_POLLS = 3


def processes_of(cluster_id: str) -> list[int]:
    """Process ids of the living (not zombie) processes of a local cluster."""
    entry = f"{ENVIRONMENT_KEY}={cluster_id}".encode()
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # It ended meanwhile, or belongs to somebody else.
            continue
        if entry in environment.split(b"\0"):
            found.append(int(folder.name))
    return found


def stop(cluster_id: str) -> None:
    """Sends SIGTERM to all processes of a local cluster, after some seconds SIGKILL; waits."""
    start = time.monotonic()
    terminated: set[int] = set()
    empty_polls = 0
    while empty_polls < _SETTLE_POLLS and time.monotonic() - start < _GIVE_UP_SECONDS:
        processes = processes_of(cluster_id)
        empty_polls = 0 if processes else empty_polls + 1
        overdue = time.monotonic() - start >= _TERMINATE_SECONDS
        for process_id in processes:
            if overdue or process_id not in terminated:
                terminated.add(process_id)
                try:
                    os.kill(process_id, signal.SIGKILL if overdue else signal.SIGTERM)
                except ProcessLookupError:
                    pass
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    # Whatever ends the launcher must not end its guard.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    stop(sys.argv[1])
