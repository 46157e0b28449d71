"""A file that one process at a time may claim."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import weakref

# Some shared file systems have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_MAX_OWNER_BYTES = 1000


class LockedError(RuntimeError):
    """Somebody else has the lock.

    Attributes:
      owner: Host and process id, in JSON; "unknown" if it did not say.
    """

    def __init__(self, path: pathlib.Path, owner: str):
        super().__init__(f"{path}: expected no other claim on it, found that of {owner}.")
        self.owner = owner


class FileLock:
    """A claim on a file, until `close`, the last reference to it, or the end of this process.

    A lock of the system's, not the existence of the file: it ends with a process that is killed.

    Args:
      path: Created if it is not there; nobody removes it.

    Attributes:
      keeps_others_out: False where the file system has no locks: everybody gets the claim.

    Raises:
      LockedError: Another FileLock has it, of this process or another one.
      OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.keeps_others_out = True
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace")
            self.close()
            raise LockedError(path, owner or "unknown") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.close()
                raise
            self.keeps_others_out = False
        # For the message to others: of no use on a full disk, and nothing to fail for.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
            os.pwrite(self._descriptor, owner.encode(), 0)

    def is_in_place(self) -> bool:
        """Whether its path is still this file, which others see as locked."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
