"""A worker that waits for others says for whom, though its own threads cannot run."""

import socket
import time

from gba_tf import missing_workers
from gba_tf.cluster_config import ClusterConfig


def wait_for(text, capfd):
    """Returns all that was written to standard error, when `text` is in it."""
    err = ""
    deadline = time.monotonic() + 60
    while text not in err:
        assert time.monotonic() < deadline, err
        time.sleep(0.02)
        err += capfd.readouterr().err
    return err


def address_of(server):
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_missing_workers_are_named_until_the_wait_is_over(capfd):
    # The second one is bound but does not listen: nobody answers there.
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as missing:
        missing.bind(("127.0.0.1", 0))
        workers = ("127.0.0.1:1", address_of(there), address_of(missing))
        config = ClusterConfig({"worker": workers}, "worker", 0).for_all_reduce()
        with missing_workers.named(config, notice_seconds=0.1):
            err = wait_for('"task": {"type": "worker", "index": 2}', capfd)
            assert (
                "gba_tf: worker 0 at 127.0.0.1:1 waits for worker 2, which has not been seen at"
                f" {workers[2]} for 0 s. Start the same program there with"
            ) in err
            assert "waits for worker 0" not in err and "waits for worker 1" not in err
            missing.listen()
            wait_for("something answers at all their addresses. Check that every task", capfd)
        assert "Traceback" not in capfd.readouterr().err


def test_nothing_is_said_of_a_wait_that_is_short(capfd):
    config = ClusterConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 0)
    with missing_workers.named(config.for_all_reduce()):
        pass
    assert capfd.readouterr().err == ""
