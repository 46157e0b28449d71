"""An epoch shows how far it is: in place on a terminal, line by line elsewhere."""

import io
import os
import pty
import re
import threading

import pytest

from gba_tf.progress import COLUMNS_VARIABLE, EpochProgress, terminal_columns


@pytest.fixture(autouse=True)
def no_terminal_is_announced(monkeypatch):
    monkeypatch.delenv(COLUMNS_VARIABLE, raising=False)


def progress(stream, **settings):
    return EpochProgress(
        "epoch 2/5",
        **{"done": lambda: 0, "total": 2000, "examples": 60_000, "stream": stream, **settings},
    )


def test_the_line_has_the_share_the_rate_and_the_detail():
    shown = progress(io.StringIO(), detail=lambda: "loss 0.5")
    # 500 of 2,000 batches are 15,000 of 60,000 examples, in 3 seconds.
    assert shown.line(500, 3.0) == (
        "epoch 2/5 [###.........] 500/2,000 batches, 5,000 examples/s, loss 0.5"
    )


def test_before_the_first_batch_there_is_no_rate_and_no_detail():
    shown = progress(io.StringIO(), detail=lambda: "loss of the last epoch")
    assert shown.line(0, 0.0) == "epoch 2/5 [............] 0/2,000 batches"


def test_more_than_all_is_shown_as_all():
    # Steps that were repeated for a dead worker are counted twice.
    shown = progress(io.StringIO())
    assert (
        shown.line(2001, 6.0) == "epoch 2/5 [############] 2,000/2,000 batches, 10,000 examples/s"
    )


class Screen(io.StringIO):
    """Tells when something was written."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text):
        count = super().write(text)
        self.written.set()
        return count


def test_in_a_log_there_are_whole_lines_while_the_epoch_runs():
    log = Screen()
    with progress(log, done=lambda: 1000):
        assert log.written.wait(60)
    assert re.fullmatch(
        r"(epoch 2/5 \[######\.{6}\] 1,000/2,000 batches, [\d,]+ examples/s\n)+", log.getvalue()
    )


def test_a_counter_that_fails_costs_one_line_only():
    log = Screen()
    answers = iter([ConnectionError("the parameter server is busy")])

    def done():
        for error in answers:
            raise error
        return 1000

    with progress(log, done=done):
        assert log.written.wait(60)
    assert "1,000/2,000 batches" in log.getvalue()


def test_on_a_terminal_one_line_is_rewritten_and_gone_in_the_end(monkeypatch):
    main_end, terminal_end = pty.openpty()
    reached = threading.Event()
    monkeypatch.setenv(COLUMNS_VARIABLE, "40")

    def done():
        reached.set()
        return 1000

    with os.fdopen(terminal_end, "w") as terminal:
        with progress(terminal, done=done):
            assert reached.wait(60)
        shown = ""
        # One read need not give all that was written.
        while not shown.endswith("\r\x1b[K"):
            shown += os.read(main_end, 1 << 16).decode()
    os.close(main_end)
    # 39 columns: a line that wraps could not be rewritten.
    assert re.fullmatch(r"(\repoch 2/5 \[######\.{6}\] 1,000/2,000 ba\x1b\[K)+\r\x1b\[K", shown), (
        repr(shown)
    )


def test_what_shows_the_output_is_found_out():
    assert terminal_columns(io.StringIO(), {}) is None
    assert terminal_columns(io.StringIO(), {COLUMNS_VARIABLE: "132"}) == 132
    assert terminal_columns(io.StringIO(), {COLUMNS_VARIABLE: "wide"}) is None
    main_end, terminal_end = pty.openpty()
    with os.fdopen(terminal_end, "w") as terminal:
        assert terminal_columns(terminal, {}) == 80, "a terminal that does not know its size"
    os.close(main_end)
