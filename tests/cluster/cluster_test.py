"""TensorFlow's servers of a cluster end with the chief, however it ends, and say why."""

import pathlib
import socket
import sys
import time

import pytest

from gba_tf.local_cluster import LocalCluster

PRELUDE = """
import os, pathlib, sys, time
from gba_tf import cluster
folder = pathlib.Path(sys.argv[1])
config = cluster.ClusterConfig.from_env()
"""
# The chief runs one op on each task, then does as the test says.
TRAIN = (
    PRELUDE
    + """
cluster.serve_if_not_chief(config)
cluster.serve_if_not_chief(config)  # GBAStrategy calls it again.
import tensorflow as tf
tf.distribute.ParameterServerStrategy(cluster.cluster_resolver(config))
for job in ("ps", "worker"):
    for index in range(len(config.cluster[job])):
        with tf.device(f"/job:{job}/task:{index}"):
            total = tf.constant(2) + tf.constant(3)
        print(total.device.split("/")[1:4:2], int(total), flush=True)
(folder / "trained").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
"""
)


def command(folder, program):
    return [sys.executable, "-c", program, str(folder)]


def wait_for(path, cluster):
    while not path.exists():
        assert cluster.processes["chief"].poll() is None, cluster.log_path("chief").read_text()
        time.sleep(0.02)


def listening_addresses(process_id):
    """What the process listens on, from the kernel's tables: {(hexadecimal address, port)}."""
    inodes = set()
    for descriptor in pathlib.Path(f"/proc/{process_id}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # Closed meanwhile.
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_all_tasks_listen_on_loopback_only_and_end_with_0_after_the_chief(tmp_path, capfd):
    with LocalCluster(
        command(tmp_path, TRAIN), 2, 1, evaluator=True, log_dir=tmp_path / "logs"
    ) as cluster:
        wait_for(tmp_path / "trained", cluster)
        for task, process in cluster.processes.items():
            port = int(cluster.addresses[task].rpartition(":")[2])
            # 127.0.0.1 as the IPv6 socket of gRPC has it, ::ffff:127.0.0.1.
            assert listening_addresses(process.pid) == {("0000000000000000FFFF00000100007F", port)}
        (tmp_path / "go").touch()
        assert cluster.wait() == 0
        assert [process.returncode for process in cluster.processes.values()] == [0] * 5
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "['job:ps', 'task:0'] 5",
        "['job:worker', 'task:0'] 5",
        "['job:worker', 'task:1'] 5",
    ]
    assert [line for line in err.splitlines() if not line.startswith("gba_tf: local cluster")] == []


def test_a_failed_chief_ends_the_others_with_1_and_its_reason(tmp_path):
    program = TRAIN.replace("import tensorflow as tf", "raise ArithmeticError('no data')")
    # Without wait(), which would stop the others at once.
    with LocalCluster(
        command(tmp_path, program), 1, 1, evaluator=True, log_dir=tmp_path
    ) as cluster:
        for task in ("chief", "worker-0", "ps-0", "evaluator-0"):
            assert cluster.processes[task].wait(timeout=120) == 1
    assert "ArithmeticError: no data" in (tmp_path / "chief.log").read_text()
    for task in ("worker", "ps", "evaluator"):
        log = (tmp_path / f"{task}-0.log").read_text()
        assert f"{task} 0 ends because the chief failed: ArithmeticError: no data" in log


def test_dead_and_restarted_workers_do_not_keep_the_cluster_from_ending(tmp_path, capfd):
    with LocalCluster(
        command(tmp_path, TRAIN), 2, 1, log_dir=tmp_path / "logs", tolerate_worker_failures=True
    ) as cluster:
        wait_for(tmp_path / "trained", cluster)
        cluster.kill("worker-0")
        cluster.kill("worker-1")
        cluster.restart("worker-1")
        port = int(cluster.addresses["worker-1"].rpartition(":")[2])
        while not listening_addresses(cluster.processes["worker-1"].pid):
            assert cluster.processes["worker-1"].poll() is None
            time.sleep(0.02)
        assert {port} == {
            port for _, port in listening_addresses(cluster.processes["worker-1"].pid)
        }
        (tmp_path / "go").touch()
        assert cluster.wait() == 0
        assert cluster.processes["worker-1"].returncode == 0
    assert "worker 0 did not answer when training ended" in capfd.readouterr().err


def test_an_explicit_status_reaches_all_tasks_and_is_sent_once(tmp_path):
    program = (
        PRELUDE
        + """
cluster.serve_if_not_chief(config)
print(cluster.shutdown_cluster(config, status=1, message="the disk is full", timeout_seconds=60))
print(cluster.shutdown_cluster(config, status=0))
"""
    )
    with LocalCluster(command(tmp_path, program), 1, 1, log_dir=tmp_path) as cluster:
        assert cluster.processes["chief"].wait(timeout=120) == 0
        for task in ("worker-0", "ps-0"):
            assert cluster.processes[task].wait(timeout=120) == 1
            reason = f"{task.replace('-', ' ')} ends because the chief failed: the disk is full"
            assert reason in cluster.log_path(task).read_text()
    assert (tmp_path / "chief.log").read_text().splitlines()[-2:] == ["()", "()"]


# A chief without TensorFlow: nobody at its address, then somebody, whom the worker alone looks for.
MISSING_THEN_KILLED = (
    PRELUDE
    + """
if config.is_chief:
    import socket
    while not (folder / "come").exists():
        time.sleep(0.02)
    server = socket.create_server(("127.0.0.1", int(config.address.rpartition(":")[2])))
    server.accept()
    (folder / "seen").touch()
    time.sleep(600)
if config.task_type == "worker":
    cluster.serve(config, chief_grace_seconds=1, chief_notice_seconds=0.2)
"""
)


def test_a_missing_chief_is_named_and_a_vanished_one_ends_the_task_with_1(tmp_path):
    with LocalCluster(
        command(tmp_path, MISSING_THEN_KILLED), 1, 1, log_dir=tmp_path / "logs"
    ) as cluster:
        chief, worker = cluster.addresses["chief"], cluster.addresses["worker-0"]
        log = cluster.log_path("worker-0")
        missing = (
            f"worker 0 at {worker} waits for the chief, which has not been seen at {chief} for"
        )
        while missing not in log.read_text():
            assert cluster.processes["worker-0"].poll() is None, log.read_text()
            time.sleep(0.02)
        (tmp_path / "come").touch()
        wait_for(tmp_path / "seen", cluster)
        cluster.kill("chief")
        assert cluster.processes["worker-0"].wait(timeout=60) == 1
    assert f"worker 0 ends: the chief at {chief} is gone for" in log.read_text()
    assert "did not say that training ended" in log.read_text()


def test_a_port_that_is_taken_is_named():
    from gba_tf import cluster

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = cluster.ClusterConfig(
            {"chief": ("127.0.0.1:1",), "worker": (address,), "ps": ("127.0.0.1:2",)}, "worker", 0
        )
        with pytest.raises(RuntimeError, match=f"worker 0 cannot listen at {address}: .*port"):
            cluster.serve(config)


def test_the_chief_does_not_serve_and_only_the_chief_ends_the_cluster():
    from gba_tf import cluster

    tasks = {"chief": ("127.0.0.1:1",), "worker": ("127.0.0.1:2",), "ps": ("127.0.0.1:3",)}
    with pytest.raises(ValueError, match="chief 0 is the chief"):
        cluster.serve(cluster.ClusterConfig(tasks, "chief", 0))
    with pytest.raises(ValueError, match="expected the chief to end the cluster, found ps 0"):
        cluster.end_cluster_at_exit(cluster.ClusterConfig(tasks, "ps", 0))


def test_without_a_cluster_and_for_an_evaluator_with_work_of_its_own_the_program_goes_on():
    from gba_tf import cluster

    cluster.serve_if_not_chief(None)
    tasks = {"chief": ("127.0.0.1:1",), "worker": ("127.0.0.1:2",), "ps": ("127.0.0.1:3",)}
    evaluator = cluster.ClusterConfig(tasks, "evaluator", 0, ("127.0.0.1:4",))
    cluster.serve_if_not_chief(evaluator, evaluator_returns=True)
