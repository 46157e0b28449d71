"""Settings that TensorFlow reads when it is loaded, so before any test module; and a hard end."""

import os

import pytest

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Many small processes share the machine.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "4")

_EXIT_STATUS = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    # Not through the interpreter's end: there TensorFlow releases what dozens of strategies had on
    # workers and parameter servers that are gone by now, and sometimes crashes over it.
    status = config.stash.get(_EXIT_STATUS, None)
    if status is not None:
        config.get_terminal_writer().flush()
        os._exit(status)
