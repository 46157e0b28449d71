"""Processes of a local cluster start, end and are stopped together, whatever happens to whom.

The programs here are plain Python: TensorFlow's servers are in cluster_test.py.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from gba_tf import local_cluster
from gba_tf.local_cluster import LocalCluster

LAUNCHER = pathlib.Path(__file__).parents[2] / "scripts" / "launch_local.py"
# `folder` is where the tasks of a test leave notes for it.
PRELUDE = """
import json, os, pathlib, signal, socket, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = task["type"] if task["type"] == "chief" else "%s-%d" % (task["type"], task["index"])
folder = pathlib.Path(sys.argv[1])
(folder / (name + ".tmp")).write_text(str(os.getpid()))
(folder / (name + ".tmp")).rename(folder / (name + ".pid"))
def wait_for(path):
    while not path.exists():
        time.sleep(0.02)
"""
SLEEP = "time.sleep(600)"


@pytest.fixture(autouse=True)
def logs_go_to_the_folder_of_the_test(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def command(folder, program):
    return [sys.executable, "-c", PRELUDE + program, str(folder)]


def wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not reached in 60 s: {what}"
        time.sleep(0.02)


def process_ids(folder, count):
    wait_until(lambda: len(list(folder.glob("*.pid"))) == count, f"{count} processes")
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def lives(process_id):
    try:
        state = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_all_end(ids):
    wait_until(lambda: not any(map(lives, ids)), f"the end of processes {ids}")


def launch(folder, program, *flags, **options):
    return subprocess.Popen(
        [sys.executable, LAUNCHER, *flags, "--", *command(folder, program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_every_task_gets_its_role_and_all_end_with_0(tmp_path):
    program = "(folder / (name + '.config')).write_text(os.environ['TF_CONFIG'])"
    log_dir = tmp_path / "new" / "logs"
    with LocalCluster(command(tmp_path, program), 2, 1, evaluator=True, log_dir=log_dir) as cluster:
        assert cluster.wait() == 0
        addresses = cluster.addresses
    names = {"chief", "worker-0", "worker-1", "ps-0", "evaluator-0"}
    assert set(addresses) == set(cluster.processes) == names
    assert all(process.returncode == 0 for process in cluster.processes.values())
    assert {path.stem for path in log_dir.iterdir()} == names
    assert len(set(addresses.values())) == 5
    assert json.loads((tmp_path / "worker-1.config").read_text()) == {
        "cluster": {
            "chief": [addresses["chief"]],
            "worker": [addresses["worker-0"], addresses["worker-1"]],
            "ps": [addresses["ps-0"]],
            "evaluator": [addresses["evaluator-0"]],
        },
        "task": {"type": "worker", "index": 1},
    }


def test_the_chief_speaks_on_the_terminal_and_all_speak_in_their_logs(tmp_path, capfd):
    program = "print('out of', name); print('err of', name, file=sys.stderr)"
    with LocalCluster(command(tmp_path, program), 1, 1, log_dir=tmp_path) as cluster:
        assert cluster.wait() == 0
    out, err = capfd.readouterr()
    assert out == "out of chief\n"
    assert "err of chief\n" in err
    assert f"logs in {tmp_path}" in err
    assert "worker-0\n" not in out + err
    for name in ("chief", "worker-0", "ps-0"):
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert sorted(lines) == [f"err of {name}", f"out of {name}"]


def test_worker_0_is_on_the_terminal_while_it_leads_then_the_chief_alone(tmp_path, capfd):
    program = r"""
from gba_tf import task_output
if name == "worker-0":
    print("worker-0 starts")
    task_output.mark_leader(True)
    sys.stdout.write("worker-0 leads\n")
    print("worker-0 warns", file=sys.stderr, flush=True)
    # As a task does whose program was restarted in another mode.
    task_output.mark_leader(False)
    print("worker-0 serves")
    (folder / "served").touch()
else:
    wait_for(folder / "served")
    task_output.mark_leader(True)
    # As a whole line, like that of worker-0, which may be shown at the same time.
    sys.stdout.write(f"{name} goes on\n")
"""
    with LocalCluster(command(tmp_path, program), 2, 0, log_dir=tmp_path) as cluster:
        assert cluster.wait() == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["chief goes on", "worker-0 leads"]
    assert [line for line in err.splitlines() if not line.startswith("gba_tf: local")] == [
        "worker-0 warns"
    ]
    assert sorted((tmp_path / "worker-0.log").read_text().splitlines()) == [
        "worker-0 leads",
        "worker-0 serves",
        "worker-0 starts",
        "worker-0 warns",
    ]
    assert "\x1e" not in (tmp_path / "worker-1.log").read_text()


def test_the_output_of_a_failed_leader_is_not_shown_twice(tmp_path, capfd):
    program = """
from gba_tf import task_output
if name == "worker-0":
    task_output.mark_leader(True)
    sys.exit("the reason")
time.sleep(600)
"""
    with LocalCluster(command(tmp_path, program), 1, 0, log_dir=tmp_path) as cluster:
        assert cluster.wait() == 1
    err = capfd.readouterr().err
    assert err.count("the reason") == 1
    assert "worker-0 ended with exit code 1; its output is above and in" in err


@pytest.mark.parametrize("install_dir", ["site-packages", "my code: 2"])
def test_a_task_listens_on_its_reserved_port_on_loopback_only(tmp_path, monkeypatch, install_dir):
    (tmp_path / install_dir).mkdir()
    library = shutil.copy(local_cluster._LOOPBACK_LIBRARY, tmp_path / install_dir)
    monkeypatch.setattr(local_cluster, "_LOOPBACK_LIBRARY", pathlib.Path(library))
    # As gRPC does: one socket for IPv4 and IPv6, on the wildcard address.
    program = """
port = int(os.environ["GBA_TF_LOOPBACK_PORT"])
server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
own = server.getsockname()[:2]
other = socket.create_server(("0.0.0.0", 0)).getsockname()[0]
with socket.create_connection(("127.0.0.1", port)):
    (folder / (name + ".listens")).write_text(json.dumps([*own, other]))
"""
    with LocalCluster(command(tmp_path, program), 1, 1) as cluster:
        assert cluster.wait() == 0
    for name, address in cluster.addresses.items():
        host, port, other = json.loads((tmp_path / f"{name}.listens").read_text())
        assert host == "::ffff:127.0.0.1"
        assert f"127.0.0.1:{port}" == address
        assert other == "0.0.0.0", "ports that are not the task's are left alone"


def test_without_the_loopback_library_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(local_cluster, "_LOOPBACK_LIBRARY", tmp_path / "missing.so")
    with pytest.raises(
        FileNotFoundError, match="missing.so, which keeps .* Build it: `pip install"
    ):
        LocalCluster(command(tmp_path, ""), 1, 1)


def test_the_ports_stay_reserved_while_the_cluster_lives(tmp_path):
    with LocalCluster(command(tmp_path, SLEEP), 1, 1) as cluster:
        port = int(cluster.addresses["ps-0"].rpartition(":")[2])
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))


def test_a_crashed_worker_shows_its_last_lines_and_ends_the_rest(tmp_path, capfd):
    program = """
if name == "worker-1":
    for i in range(30):
        print("line", i)
    sys.exit("the reason")
time.sleep(600)
"""
    with LocalCluster(command(tmp_path, program), 2, 1, log_dir=tmp_path) as cluster:
        ids = [process.pid for process in cluster.processes.values()]
        assert cluster.wait() == 1
        assert_all_end(ids)
    err = capfd.readouterr().err
    assert f"worker-1 ended with exit code 1; the last lines of {tmp_path / 'worker-1.log'}" in err
    assert "  line 29\n" in err and "  the reason\n" in err
    assert "  line 10\n" not in err, "20 lines: 11 to 29 and the reason"
    assert "  line 11\n" in err


@pytest.mark.parametrize(
    "end, expected", [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_the_exit_code_is_that_of_the_task_that_failed(tmp_path, end, expected):
    program = f"wait_for(folder / 'worker-0.pid')\nif name == 'ps-0': {end}\n{SLEEP}"
    with LocalCluster(command(tmp_path, program), 1, 1) as cluster:
        assert cluster.wait() == expected


def test_the_failure_of_the_chief_is_not_blamed_on_a_worker(tmp_path, capfd):
    with LocalCluster(
        command(tmp_path, "sys.exit(3 if name == 'chief' else 0)"), 2, 1, log_dir=tmp_path
    ) as cluster:
        assert cluster.wait() == 3
    assert "chief ended with exit code 3; its output is above" in capfd.readouterr().err


def test_a_task_that_does_not_end_is_named_and_the_result_is_1(tmp_path, capfd):
    with LocalCluster(command(tmp_path, "if name == 'worker-0': time.sleep(600)"), 2, 1) as cluster:
        stuck = cluster.processes["worker-0"].pid
        assert cluster.wait() == 1
        assert not lives(stuck)
    err = capfd.readouterr().err
    assert "the chief ended with exit code 0, but worker-0 still ran 10 s later" in err


def test_a_tolerated_worker_dies_in_one_line_and_can_be_restarted(tmp_path, capfd):
    program = """
if name == "chief":
    wait_for(folder / "go")
if name.startswith("worker") and not (folder / (name + ".restarted")).exists():
    time.sleep(600)
"""
    with LocalCluster(
        command(tmp_path, program), 2, 1, log_dir=tmp_path, tolerate_worker_failures=True
    ) as cluster:
        process_ids(tmp_path, 4)
        with pytest.raises(RuntimeError, match="expected worker-0 to have ended"):
            cluster.restart("worker-0")
        cluster.kill("worker-0")
        cluster.kill("worker-1")
        (tmp_path / "worker-1.restarted").touch()
        cluster.restart("worker-1")
        (tmp_path / "go").touch()
        assert cluster.wait() == 0
    err = capfd.readouterr().err
    for worker in ("worker-0", "worker-1"):
        assert err.count(f"{worker} was killed by signal 9 (Killed); the others go on") == 1


def test_a_parameter_server_that_dies_is_not_tolerated(tmp_path):
    with LocalCluster(command(tmp_path, SLEEP), 1, 1, tolerate_worker_failures=True) as cluster:
        cluster.kill("ps-0")
        assert cluster.wait() == 137


# A child that ignores SIGTERM, in a session of its own: the hardest to find and to stop.
WITH_GRANDCHILD = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(folder / (name + "-child.tmp")).write_text(str(child.pid))
(folder / (name + "-child.tmp")).rename(folder / (name + "-child.pid"))
time.sleep(600)
"""


@pytest.mark.parametrize("signum, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_leaves_no_process(tmp_path, signum, expected):
    launcher = launch(tmp_path, WITH_GRANDCHILD, "--num_workers=1")
    ids = process_ids(tmp_path, 6)
    launcher.send_signal(signum)
    err = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == expected
    assert f"stopped by {signum.name}" in err
    assert_all_end(ids)


def test_ctrl_c_in_the_terminal_leaves_no_process(tmp_path):
    launcher = launch(tmp_path, SLEEP, "--num_workers=1", start_new_session=True)
    ids = process_ids(tmp_path, 3)
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert_all_end(ids)


def test_a_killed_launcher_leaves_no_process(tmp_path):
    launcher = launch(tmp_path, WITH_GRANDCHILD, "--num_workers=1")
    ids = process_ids(tmp_path, 6)
    launcher.kill()
    launcher.wait()
    assert_all_end(ids)
    launcher.communicate()


def test_an_exception_in_the_launching_program_leaves_no_process(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with LocalCluster(command(tmp_path, WITH_GRANDCHILD), 1, 1):
            ids = process_ids(tmp_path, 6)
            raise ZeroDivisionError
    assert not any(map(lives, ids))


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (([], 1, 1), ValueError, "command: expected a program"),
        ((["no-such-program"], 1, 1), FileNotFoundError, "none called 'no-such-program'"),
        ((["true"], -1, 1), ValueError, "found num_workers=-1"),
        ((["true"], 0, 1), ValueError, "num_workers: expected 1 or more with num_ps=1, found 0"),
    ],
)
def test_what_makes_no_cluster_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        LocalCluster(*arguments)


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--num_workers=x", "--", "true"], "flag --num_workers=x"),
        (["--num_ps=-1", "--", "true"], "flag --num_ps=-1"),
        (["--nope", "--", "true"], "Unknown command line flag 'nope'"),
        (["--num_workers=1"], "expected a program to run, found none"),
        (["--num_workers=0", "--", "true"], "num_workers: expected 1 or more"),
        (["--", "no-such-program"], "none called 'no-such-program'"),
    ],
)
def test_a_bad_flag_of_the_launcher_is_one_line_and_exit_code_2(flags, text):
    result = subprocess.run(
        [sys.executable, LAUNCHER, *flags], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert text in result.stderr
    assert result.stderr.startswith("launch_local: ") and result.stderr.count("\n") == 1


def test_the_launcher_passes_the_program_its_flags_and_returns_its_exit_code(tmp_path):
    program = "print(sys.argv[2:]) if name == 'chief' else None; sys.exit(int(name == 'chief') * 5)"
    result = subprocess.run(
        [sys.executable, LAUNCHER, "--num_workers=1", f"--log_dir={tmp_path}", "--"]
        + [*command(tmp_path, program), "--its", "--num_ps=9"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 5
    assert result.stdout == "['--its', '--num_ps=9']\n"
    assert (tmp_path / "ps-0.log").exists()


def test_the_launcher_runs_from_a_checkout_without_tensorflow_in_its_process(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = """
parent = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1])
assert "tensorflow" not in pathlib.Path(f"/proc/{parent}/maps").read_text()
import gba_tf.cluster
"""
    result = subprocess.run(
        [sys.executable, LAUNCHER, "--", *command(tmp_path, program)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
