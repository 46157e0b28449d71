"""[3] Loads the op library: the one place that knows where it is and what it was built against."""

import functools
import pathlib
from types import ModuleType

FOLDER = pathlib.Path(__file__).parent


def path() -> pathlib.Path:
    """Where the op library for the installed TensorFlow is, if it was built."""
    import tensorflow as tf

    major, minor = tf.__version__.split(".")[:2]
    return FOLDER / f"_gba_ops_tf{major}_{minor}.so"


@functools.cache
def load() -> ModuleType:
    """Loads the op library into this process; later calls return the same module.

    Every chief, worker and parameter server process has to call this before it serves.

    Returns:
      The module of generated op wrappers; gba_tf.ops.token_server and gradient_buffer use it.

    Raises:
      ImportError: The library is missing, or was built for another TensorFlow.
    """
    import tensorflow as tf

    library = path()
    if not library.exists():
        others = sorted(other.name for other in FOLDER.glob("_gba_ops_tf*.so"))
        raise ImportError(
            f"gba_tf: expected the op library for TensorFlow {tf.__version__}, {library}, found"
            f" {others or 'none'}. Build it against the TensorFlow you use: in the checkout,"
            " `pip install --no-build-isolation --force-reinstall --no-deps .`, or `make` to work"
            " on gba_tf itself."
        )
    try:
        return tf.load_op_library(str(library))
    except tf.errors.NotFoundError as error:
        raise ImportError(
            f"gba_tf: TensorFlow {tf.__version__} cannot load {library}: {error}. Reinstall gba_tf."
        ) from error
