"""The processes that scripts/benchmark.py measures, and how it talks to them.

Each process that trains listens at a Unix socket; it answers every message, and None ends it.
Imports no TensorFlow.
"""

import multiprocessing.connection
import os
import time
import types
from collections.abc import Sequence
from typing import Any

from gba_tf import benchmarking, local_cluster

_POLL_SECONDS = 0.2


class TaskFailed(Exception):
    """A process of the benchmark ended before its time; what it said has been shown."""

    def __init__(self, exit_code: int):
        super().__init__()
        self.exit_code = exit_code


class Contender:
    """The local cluster of one mode, and the connections to those of its processes that train.

    Args:
      command: Program and arguments of every process.
      addresses: The paths of the sockets at which processes listen, one each.
      num_workers: Workers besides the chief; 0 for a process alone, with num_ps=0.
      num_ps: Parameter servers.
      log_dir: For the logs of the processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        addresses: Sequence[str],
        num_workers: int,
        num_ps: int,
        log_dir: str | os.PathLike[str],
    ):
        self._cluster = local_cluster.LocalCluster(
            command,
            num_workers=num_workers,
            num_ps=num_ps,
            log_dir=log_dir,
            # At level 2 a chief that ends says of each function that it cannot remove it remotely.
            env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        self._addresses = list(addresses)
        self._connections: list[multiprocessing.connection.Connection] = []

    def __enter__(self) -> "Contender":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Waits until all that train are ready for messages."""
        for address in self._addresses:
            self._connections.append(self._connect(address))

    def request(self, message: Any) -> Any:
        """Sends a message to all that train; returns the first one's answer when all answered."""
        for connection in self._connections:
            connection.send(message)
        return [self._receive(connection) for connection in self._connections][0]

    def cpu_seconds(self) -> dict[str, float]:
        """Task ("chief", "worker-0", "ps-0") to the CPU seconds that it has used so far."""
        return {
            task: benchmarking.cpu_seconds(process.pid)
            for task, process in self._cluster.processes.items()
        }

    def end(self) -> None:
        """Ends the processes; raises TaskFailed if one did not end well."""
        for connection in self._connections:
            connection.send(None)
        if exit_code := self._cluster.wait():
            raise TaskFailed(exit_code)

    def close(self) -> None:
        """Stops what still runs."""
        self._cluster.close()  # First: a chief without its connection would complain.
        for connection in self._connections:
            connection.close()

    def _connect(self, address: str) -> multiprocessing.connection.Connection:
        while True:
            try:
                return multiprocessing.connection.Client(address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                self._check_processes()
                time.sleep(_POLL_SECONDS)

    def _receive(self, connection: multiprocessing.connection.Connection) -> Any:
        try:
            while not connection.poll(_POLL_SECONDS):
                self._check_processes()
            return connection.recv()
        except (EOFError, ConnectionResetError):
            raise TaskFailed(self._cluster.wait() or 1) from None

    def _check_processes(self) -> None:
        if any(process.poll() is not None for process in self._cluster.processes.values()):
            raise TaskFailed(self._cluster.wait() or 1)
