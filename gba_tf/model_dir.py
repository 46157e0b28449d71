"""The folder that a run writes to: one run at a time, and nothing of anybody else's in it."""

import os
import pathlib
import sys

from gba_tf.file_lock import FileLock, LockedError

LOGS = "logs"
CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
# What tells the folder of an earlier run from somebody else's.
_OF_A_RUN = (LOGS, CHECKPOINTS, _LOCK)


class ModelDir:
    """A run's claim on its folder, until `release` or the end of this process, however it ends.

    Args:
      path: Created if it is not there.
      resume: Whether to go on with the run that the folder holds, if it holds one.

    Raises:
      ValueError: Another run is writing to it; or it holds something: a run, without `resume`, or
        files that are not a run's.
      OSError: It cannot be created or written to.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool):
        self.path = pathlib.Path(path)
        self._lock: FileLock | None = None
        found = _names_in(self.path)
        self._created = not self.path.exists()
        if found and not any(name in found for name in _OF_A_RUN):
            raise ValueError(
                f"model_dir: expected a new or an empty folder, or that of an earlier run, found"
                f" {path} with {sorted(found)[0]!r} in it. Choose another one."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path / _LOCK)
        if found and not resume:
            # A run that left nothing but its lock did not begin.
            if _names_in(self.path) - {_LOCK}:
                self.release()
                raise ValueError(
                    f"model_dir: expected a new or an empty folder, found a run in {path}."
                    " --resume goes on with it; or choose another folder, or move what is in it"
                    " away."
                )
        (self.path / LOGS).mkdir(exist_ok=True)

    def release(self) -> None:
        """Lets others have the folder; removes it if it is new and nothing was written to it."""
        if self._lock is None:
            return
        for folder in (self.path / LOGS, self.path / CHECKPOINTS):
            _remove_if_empty(folder)
        if self._created and _names_in(self.path) == {_LOCK}:
            (self.path / _LOCK).unlink()
            _remove_if_empty(self.path)
        self._lock.close()
        self._lock = None


def _names_in(path: pathlib.Path) -> set[str]:
    if path.exists() and not path.is_dir():
        raise ValueError(f"model_dir: expected a folder, found the file {path}. Choose another.")
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


def _remove_if_empty(folder: pathlib.Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # Something is in it, or it is not there.
        return


def _lock(path: pathlib.Path) -> FileLock:
    try:
        lock = FileLock(path)
    except LockedError as error:
        raise ValueError(
            f"model_dir: expected one that nobody writes to, found {path.parent} in use by another"
            f" run ({error.owner}). Wait for its end, or choose another folder."
        ) from None
    if not lock.keeps_others_out:
        print(
            f"gba_tf: {path.parent} is on a file system without locks: nothing keeps a second"
            " run from writing there too",
            file=sys.stderr,
            flush=True,
        )
    return lock
