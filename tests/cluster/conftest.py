"""Clusters of real processes; the pytest process is the chief that trains on them."""

import contextlib
import os
import pathlib
import socket
import sys
import threading
import time

import pytest

import gba_tf
from gba_tf import task_output
from gba_tf.local_cluster import LocalCluster

SERVE_TASK = pathlib.Path(__file__).with_name("serve_task.py")
START_SECONDS = 120


class TestCluster:
    """Worker and parameter server processes on loopback.

    Several strategies can be made on it, one after the other, each on its first workers and
    parameter servers. Making one ends the use of the one before.

    Attributes:
      processes: The LocalCluster.
      latest_strategy: The one that can be used, unless another cluster has been used since.
    """

    __test__ = False
    _coordinator = None  # Of the latest strategy of all clusters.

    def __init__(self, processes: LocalCluster, num_workers: int, num_ps: int):
        self.processes = processes
        self._num_workers = num_workers
        self._num_ps = num_ps
        self._chief_ports: list[socket.socket] = []
        self.latest_strategy = None

    def strategy(
        self,
        num_workers: int | None = None,
        num_ps: int | None = None,
        *,
        global_batch_size: int,
        local_batch_size: int,
        **kwargs,
    ):
        """A GBAStrategy on the first workers and parameter servers; all of them by default."""
        strategy = gba_tf.GBAStrategy(
            self._new_resolver(num_workers, num_ps),
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            **kwargs,
        )
        return self.use(strategy)

    def tensorflows_strategy(self, num_workers: int, num_ps: int, variable_partitioner=None):
        """TensorFlow's own ParameterServerStrategy on the first workers and parameter servers."""
        import tensorflow as tf

        resolver = self._new_resolver(num_workers, num_ps)
        return self.use(tf.distribute.ParameterServerStrategy(resolver, variable_partitioner))

    def _new_resolver(self, num_workers: int | None, num_ps: int | None):
        import tensorflow as tf

        addresses = self.processes.addresses
        num_workers, num_ps = num_workers or self._num_workers, num_ps or self._num_ps
        spec = {
            # TensorFlow opens a new server whenever the tasks change, and never closes the old one.
            "chief": [self.new_chief_address()],
            "worker": [addresses[f"worker-{index}"] for index in range(num_workers)],
            "ps": [addresses[f"ps-{index}"] for index in range(num_ps)],
        }
        self.end_strategy()
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )

    def use(self, strategy):
        """Makes a strategy the latest one; returns it."""
        import tensorflow as tf

        TestCluster._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.latest_strategy = strategy
        return strategy

    def wait_until_serving(self, task: str, times: int = 1) -> None:
        """Returns when the task has come up, for the given number of times in all."""
        deadline = time.monotonic() + START_SECONDS
        log = self.processes.log_path(task)
        while log.read_text(errors="replace").count("serving\n") < times:
            if self.processes.processes[task].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{task} does not serve:\n{log.read_text(errors='replace')}")
            time.sleep(0.05)

    def new_chief_address(self) -> str:
        """An address for the chief of one strategy."""
        # Kept bound, so that nobody else gets the port; gRPC may listen on it all the same.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        self._chief_ports.append(reserved)
        return f"127.0.0.1:{reserved.getsockname()[1]}"

    @staticmethod
    def end_strategy() -> None:
        """Ends the latest strategy's threads, which must not use what a new one reconnects.

        All workers have to live: the threads reconnect those that died before they end.
        """
        if TestCluster._coordinator is None:
            return
        coordination = TestCluster._coordinator._cluster
        TestCluster._coordinator = None
        deadline = time.monotonic() + START_SECONDS
        while any(worker._is_dead_with_error for worker in coordination.workers):
            assert time.monotonic() < deadline, "a dead worker was not restarted"
            time.sleep(0.05)
        coordination.stop()
        for thread in threading.enumerate():
            if thread.name.startswith(("WorkerClosureProcessingLoop", "WorkerPreemptionHandler")):
                thread.join(START_SECONDS)
                assert not thread.is_alive(), f"{thread.name} does not end"

    def close(self) -> None:
        self.end_strategy()
        self.processes.close()
        for reserved in self._chief_ports:
            reserved.close()


_LIVING: list[TestCluster] = []


@contextlib.contextmanager
def _running_cluster(log_dir, num_workers, num_ps, op_libraries=()):
    command = [sys.executable, str(SERVE_TASK), *map(str, op_libraries)]
    # The servers load the gba_tf that the chief has loaded, installed or not.
    python_path = [str(pathlib.Path(gba_tf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, python_path))}
    processes = LocalCluster(command, num_workers, num_ps, log_dir=log_dir, env=env)
    cluster = TestCluster(processes, num_workers, num_ps)
    _LIVING.append(cluster)
    try:
        for task in processes.addresses:
            if task != "chief":
                cluster.wait_until_serving(task)
        yield cluster
    finally:
        _LIVING.remove(cluster)
        cluster.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """3 workers and 3 parameter servers, started once."""
    with _running_cluster(tmp_path_factory.mktemp("cluster"), 3, 3) as running:
        yield running


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory):
    """Starts a cluster of the module's own: start_cluster(num_workers, num_ps, op_libraries)."""
    with contextlib.ExitStack() as stack:

        def start(num_workers, num_ps, op_libraries=()):
            log_dir = tmp_path_factory.mktemp("cluster")
            return stack.enter_context(_running_cluster(log_dir, num_workers, num_ps, op_libraries))

        yield start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for cluster in _LIVING:
            for task in cluster.processes.addresses:
                text = task_output.NoiseFilter().feed(
                    cluster.processes.log_path(task).read_bytes() + b"\n"
                )
                report.sections.append((f"last lines of {task}", text.decode()[-2000:]))
    return report
