"""The file by which tf.train.latest_checkpoint finds a checkpoint. gba_tf does not read it."""

import contextlib
import os
import pathlib

NAME = "checkpoint"


def write(folder: pathlib.Path, prefix: str) -> None:
    """Makes tf.train.latest_checkpoint(folder) return folder/prefix: now, or not at all.

    Raises:
      OSError: It cannot be written. The file is as it was.
    """
    temporary = folder / f".{NAME}.writing"
    try:
        with open(temporary, "w") as file:
            for field in ("model_checkpoint_path", "all_model_checkpoint_paths"):
                file.write(f'{field}: "{prefix}"\n')
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
