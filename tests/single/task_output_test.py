"""TensorFlow's start-up lines are kept out; everything else comes through, at once and whole."""

import contextlib
import io
import os

import pytest

from gba_tf.task_output import (
    LEADER_MARKS_VARIABLE,
    LeaderMarks,
    NoiseFilter,
    OutputCopier,
    last_lines,
    mark_leader,
)

NOISE = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1796117102.373334    3594 port.cc:153] oneDNN custom operations are on.\n"
    b"I0000 00:00:1796117102.898060    3594 cpu_feature_guard.cc:227] This TensorFlow binary\n"
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow.\n"
    b"E0000 00:00:1796117105.418017    3594 cuda_platform.cc:52] failed call to cuInit: INTERNAL\n"
)
SIGNAL = (
    b"Epoch 1/3\n"
    b"I am a line of the user\n"
    b"W0000 00:00:1796117102.373334    3594 grpc.cc:1] a warning\n"
    b"E0000 00:00:1796117102.373334    3594 grpc.cc:1] an error\n"
    b"ValueError: To enable the following instructions\n"
)


@pytest.mark.parametrize("piece_size", [1, 7, 64, 4096])
def test_noise_is_dropped_however_the_output_is_cut(piece_size):
    data = NOISE + SIGNAL + NOISE
    output = NoiseFilter()
    pieces = [data[i : i + piece_size] for i in range(0, len(data), piece_size)]
    assert b"".join(output.feed(piece) for piece in pieces) + output.flush() == SIGNAL


def test_a_progress_bar_is_shown_before_its_line_ends():
    output = NoiseFilter()
    assert output.feed(b"10/100 [=>..]") == b"10/100 [=>..]"
    assert output.feed(b"\r20/100 [==>.]") == b"\r20/100 [==>.]"
    assert output.feed(b"\nI0000 00:00:17.3    35 port.cc:153] x\nend") == b"\nend"


def test_what_only_began_like_noise_is_shown_at_the_end():
    output = NoiseFilter()
    assert output.feed(b"WARNING: All log") == b""
    assert output.flush() == b"WARNING: All log"


def marked(monkeypatch, leads, environment="1"):
    """What mark_leader writes to both streams."""
    monkeypatch.setenv(LEADER_MARKS_VARIABLE, environment)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        mark_leader(leads)
    assert out.getvalue() == err.getvalue()
    return out.getvalue().encode()


@pytest.mark.parametrize("piece_size", [1, 7, 64, 4096])
def test_marks_of_a_leader_are_taken_out_however_the_output_is_cut(monkeypatch, piece_size):
    leads, follows = marked(monkeypatch, True), marked(monkeypatch, False)
    data = b"a\n" + leads + b"b\nc" + leads + b"d\n\x1e e" + follows + b"f\n" + leads + b"g\x1e"
    marks = LeaderMarks(leads=False)
    parts = [
        part
        for start in range(0, len(data), piece_size)
        for part in marks.split(data[start : start + piece_size])
    ]
    assert b"".join(part for part, shown in parts if shown) == b"b\ncd\n\x1e eg"
    assert b"".join(part for part, shown in parts if not shown) == b"a\nf\n"
    assert marks.flush() == b"\x1e"
    assert marks.leads


def test_only_tasks_whose_output_is_watched_write_marks(monkeypatch):
    assert marked(monkeypatch, True, environment="") == b""


def test_a_task_is_on_the_terminal_while_it_leads_and_in_its_log_always(tmp_path, monkeypatch):
    terminal, path = io.StringIO(), tmp_path / "worker-0.log"
    data = b"one\n" + marked(monkeypatch, True) + NOISE + b"two\n" + marked(monkeypatch, False)
    copy(data + b"three", terminal, path, hide_noise=True, leads=False)
    assert terminal.getvalue() == "two\n"
    assert path.read_bytes() == b"one\n" + NOISE + b"two\nthree"


def copy(data, terminal, path, hide_noise, **settings):
    reading, writing = os.pipe()
    with path.open("ab", buffering=0) as log:
        pipe = os.fdopen(reading, "rb", buffering=0)
        copier = OutputCopier(pipe, log, terminal, hide_noise, **settings)
        os.write(writing, data)
        os.close(writing)
        copier.join(timeout_seconds=30)


def test_the_log_is_complete_and_the_terminal_is_quiet(tmp_path):
    terminal = io.StringIO()
    copy(NOISE + "Grüße\n".encode(), terminal, tmp_path / "chief.log", hide_noise=True)
    assert terminal.getvalue() == "Grüße\n"
    assert (tmp_path / "chief.log").read_bytes() == NOISE + "Grüße\n".encode()


def test_two_streams_share_a_log_without_cutting_lines(tmp_path):
    pipes = [os.pipe(), os.pipe()]
    path = tmp_path / "chief.log"
    with path.open("ab", buffering=0) as log:
        copiers = [
            OutputCopier(os.fdopen(reading, "rb", buffering=0), log, io.StringIO(), False)
            for reading, _ in pipes
        ]
        for piece in range(300):
            for stream, (_, writing) in enumerate(pipes):
                os.write(writing, b"%d" % stream + (b"\n" if piece % 3 == 2 else b""))
        for _, writing in pipes:
            os.write(writing, b"end")
            os.close(writing)
        for copier in copiers:
            copier.join(timeout_seconds=30)
    assert sorted(path.read_text().replace("end", "").split()) == ["000"] * 100 + ["111"] * 100
    assert path.read_text().count("end") == 2


def test_a_terminal_that_is_gone_does_not_stop_the_copy(tmp_path):
    terminal = io.StringIO()
    terminal.close()
    copy(SIGNAL, terminal, tmp_path / "chief.log", hide_noise=False)
    assert (tmp_path / "chief.log").read_bytes() == SIGNAL


def test_the_last_lines_are_those_of_the_end(tmp_path):
    path = tmp_path / "worker-0.log"
    path.write_text("".join(f"line {i}\n" for i in range(50_000)))
    assert last_lines(path) == [f"line {i}" for i in range(49_980, 50_000)]
    path.write_bytes(b"one\n\xff\n")
    assert last_lines(path) == ["one", "\ufffd"]
