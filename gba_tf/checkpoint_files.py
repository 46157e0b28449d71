"""The folder of a run's checkpoints: each is there as a whole or not at all. No TensorFlow.

DIR/<step, 8 digits>/ holds one checkpoint. It is written to a folder beside it, whose name begins
with a dot, brought to the disk, and then renamed. A folder without a dot is therefore complete,
unless somebody has damaged it since: `training.json` in it has the size and CRC-32 of every file.

One process at a time writes there: it claims the folder before its first save, and removes what one
that was killed has left. Whoever only reads changes nothing.

A second checkpoint of the same step first becomes `<step>.new`, which counts from then on, and gets
the name `<step>` when the older one is removed: there is no moment without a complete one.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import shutil
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from absl import logging

from gba_tf import tf_state_file
from gba_tf.file_lock import FileLock, LockedError

METADATA = "training.json"
# Of the files with the variables.
PREFIX = "variables"
FORMAT_VERSION = 2

_COMPLETE = re.compile(r"(\d{8,})(\.new)?")
_NEW = ".new"
_UNFINISHED = re.compile(r"\.\d{8,}(\.new)?\.(writing|removed)")
_SCRATCH = re.compile(r"\.(.+)\.scratch")
_LOCK = ".lock"
_CHUNK_BYTES = 2**20
# A full disk, a quota, a limit of the process.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Lock file -> this process's claim, which all that save there share.
_claims: "weakref.WeakValueDictionary[pathlib.Path, FileLock]" = weakref.WeakValueDictionary()


class CheckpointError(ValueError):
    """A checkpoint that cannot be restored: damaged, or of another model. Nothing was changed."""


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint, with whose files nothing is wrong.

    Attributes:
      step: k, the global step.
      folder: Where its files are.
      metadata: What `CheckpointFiles.save` was given.
    """

    step: int
    folder: pathlib.Path
    metadata: dict[str, Any]


class CheckpointFiles:
    """The checkpoints of one run.

    Args:
      directory: Created by the first save. From then on no other process may save there, while this
        object lives.
      max_to_keep: After a save, older checkpoints beyond this number are removed. None keeps all.
      helpers: The owners of scratch folders that may be in use: other processes of the same run.

    Raises:
      ValueError: max_to_keep is less than 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = None,
        helpers: Collection[str] = (),
    ):
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep: expected at least 1 or None, found {max_to_keep}.")
        # Parameter servers write there too, and may have another working directory.
        self.directory = pathlib.Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._helpers = frozenset(helpers)
        self._claim: FileLock | None = None

    def steps(self) -> list[int]:
        """The global steps of all checkpoints, ascending."""
        names = (_COMPLETE.fullmatch(path.name) for path in self._entries())
        return sorted({int(name[1]) for name in names if name})

    def newest(self) -> SavedCheckpoint | None:
        """The checkpoint of the highest step, None if there is none.

        Raises:
          CheckpointError: It is damaged. The text names the file, and an earlier one that is not.
        """
        steps = self.steps()
        return self.read(steps[-1]) if steps else None

    def read(self, step: int) -> SavedCheckpoint:
        """The checkpoint of one step.

        Raises:
          CheckpointError: As for `newest`.
        """
        folder = self.folder(step)
        damage = _damage(folder)
        if damage is None:
            metadata = json.loads((folder / METADATA).read_text())
            return SavedCheckpoint(step, folder, metadata)
        raise CheckpointError(f"Checkpoint {folder} is damaged: {damage}. {self._way_out(step)}")

    def save(
        self,
        step: int,
        write: Callable[[pathlib.Path], Mapping[str, Any]],
        num_bytes: int,
    ) -> pathlib.Path:
        """Saves a checkpoint; what was there before is untouched until it is complete.

        Args:
          step: The global step.
          write: Writes the files into the folder it is given, and returns the metadata, for JSON.
          num_bytes: About how much it writes, to be told where the disk is too small.

        Returns:
          The folder.

        Raises:
          OSError: The disk is full, or cannot be written to. The earlier checkpoints are there.
          RuntimeError: Another process saves there.
        """
        unfinished = self.directory / f".{step:08d}.writing"
        with self._explained_if_full(step, num_bytes):
            self._claim_directory()
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                unfinished.mkdir()
                metadata = dict(write(unfinished))
                _seal(unfinished, step, metadata)
                return self._publish(unfinished, step)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise

    @contextlib.contextmanager
    def scratch(self, owner: str) -> Iterator[pathlib.Path]:
        """A folder for what a task has to write and nobody needs; gone afterwards.

        Args:
          owner: Names the task: several do so at the same time.
        """
        folder = self.directory / f".{owner}.scratch"
        shutil.rmtree(folder, ignore_errors=True)  # Of one that was killed.
        try:
            folder.mkdir(parents=True)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _claim_directory(self) -> None:
        """Makes this process the one that saves there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory.resolve() / _LOCK
        claim = _claims.get(path)
        if claim is None or not claim.is_in_place():
            try:
                claim = FileLock(path)
            except LockedError as error:
                raise RuntimeError(
                    f"Expected no other process that saves in {self.directory}, found one:"
                    f" {error.owner}. Nothing was saved. Wait for its end, or choose another"
                    " model_dir."
                ) from None
            if not claim.keeps_others_out:
                logging.warning(
                    "%s is on a file system without locks: nothing keeps a second process from"
                    " saving there too.",
                    self.directory,
                )
            _claims[path] = claim
            self._clean()
        self._claim = claim

    def _clean(self) -> None:
        """Finishes or removes what a process left that was killed while it saved."""
        for path in list(self._entries()):
            scratch = _SCRATCH.fullmatch(path.name)
            if scratch and scratch[1] in self._helpers:
                continue  # It removes what it left itself.
            if scratch or _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(_NEW) and _COMPLETE.fullmatch(path.name):
                self._replace(path)

    def _entries(self) -> Iterator[pathlib.Path]:
        return self.directory.iterdir() if self.directory.is_dir() else iter(())

    def folder(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step is, or will be."""
        folder = self.directory / f"{step:08d}"
        replacement = folder.with_name(folder.name + _NEW)
        return replacement if replacement.exists() else folder

    def _publish(self, complete: pathlib.Path, step: int) -> pathlib.Path:
        folder = self.directory / f"{step:08d}"
        if folder.exists():
            replacement = folder.with_name(folder.name + _NEW)
            os.rename(complete, replacement)
            self._replace(replacement)
        else:
            os.rename(complete, folder)
        _sync_folder(self.directory)
        self._point_to(folder)
        if self._max_to_keep is not None:
            for old in self.steps()[: -self._max_to_keep]:
                self._remove(self.folder(old))
        return folder

    def _point_to(self, folder: pathlib.Path) -> None:
        try:
            tf_state_file.write(self.directory, f"{folder.name}/{PREFIX}")
        except OSError as error:
            logging.warning(
                "The checkpoint %s is complete, but tf.train.latest_checkpoint(%s) does not know of"
                " it: %s. gba_tf finds it all the same.",
                folder,
                self.directory,
                error,
            )

    def _replace(self, replacement: pathlib.Path) -> None:
        folder = replacement.with_name(replacement.name.removesuffix(_NEW))
        _sync_folder(self.directory)
        if folder.exists():
            self._remove(folder)
        os.rename(replacement, folder)

    def _remove(self, folder: pathlib.Path) -> None:
        # Out of sight first: a folder that is half removed looks damaged.
        removed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(folder, removed)
        shutil.rmtree(removed)

    def _intact(self, steps: list[int]) -> int | None:
        return next((s for s in reversed(steps) if _damage(self.folder(s)) is None), None)

    def _way_out(self, damaged_step: int) -> str:
        earlier = self._intact([step for step in self.steps() if step < damaged_step])
        if earlier is None:
            return "There is no earlier complete one: start anew with another model_dir."
        return (
            f"The newest complete one before it is {self.folder(earlier)}, of global step"
            f" {earlier}. To go on from there, move {self.folder(damaged_step)} away."
        )

    @contextlib.contextmanager
    def _explained_if_full(self, step: int, num_bytes: int) -> Iterator[None]:
        """Says how much room is needed where there is none."""
        try:
            yield
        except Exception as error:
            reason = _reason_if_full(error)
            if reason is None:
                raise
            raise self._full(step, num_bytes, reason) from error

    def _full(self, step: int, num_bytes: int, reason: str) -> OSError:
        existing = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        newest = self._intact(self.steps())
        kept = "There is no earlier one."
        if newest is not None:
            kept = f"The earlier one of global step {newest} is complete: {self.folder(newest)}."
        return OSError(
            errno.ENOSPC,
            f"The checkpoint of global step {step} could not be saved: expected about"
            f" {num_bytes:,} bytes of space in {self.directory}, found {free:,} bytes free"
            f" ({reason}). Make room, or choose another model_dir. {kept}",
        )


def _seal(folder: pathlib.Path, step: int, metadata: dict[str, Any]) -> None:
    """Writes the metadata, and brings every file to the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        _sync(path)
    content = {"format_version": FORMAT_VERSION, "step": step, **metadata, "files": files}
    content["crc32"] = zlib.crc32(_canonical(content))
    path = folder / METADATA
    path.write_text(json.dumps(content, indent=1) + "\n")
    _sync(path)
    _sync_folder(folder)


def _damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint; None if nothing is."""
    path = folder / METADATA
    try:
        content = json.loads(path.read_text())
        checksum = content.pop("crc32")
        if content["format_version"] != FORMAT_VERSION:
            return (
                f"expected format version {FORMAT_VERSION} in {path}, found"
                f" {content['format_version']}: it was written by another version of gba_tf"
            )
        if zlib.crc32(_canonical(content)) != checksum:
            return f"the checksum of {path} does not match its text"
        files = content["files"].items()
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is not what gba_tf wrote ({type(error).__name__}: {error})"
    for name, expected in files:
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"expected {expected['bytes']:,} bytes in {path}, found {size:,}"
        if _crc32(path) != expected["crc32"]:
            return f"the checksum of {path} does not match its {size:,} bytes"
    return None


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _crc32(path: pathlib.Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync(path: pathlib.Path) -> None:
    # Whoever wrote it has closed it; any descriptor brings the whole file to the disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync


def _reason_if_full(error: BaseException) -> str | None:
    """The system's text, if an error says that there is no room."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in _FULL else None
    # TensorFlow's errors carry it.
    return next((t for t in map(os.strerror, _FULL) if t in str(error)), None)
