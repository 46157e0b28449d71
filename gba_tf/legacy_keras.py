"""Makes sure that tf.keras is Keras 2 (tf-keras), the Keras with parameter-server training."""

import os

SETTING = "TF_USE_LEGACY_KERAS"
_TRUE = ("1", "true", "True")


def require() -> None:
    """Checks that tf.keras is tf-keras, importing it if that is still open.

    Raises:
      ImportError: tf.keras is already Keras 3, or the environment asks for it, or tf-keras is not
        installed. The text says what to do.
    """
    import tensorflow as tf

    loaded = getattr(tf.keras, "_tfll_keras_version", None)
    if loaded is None and os.environ.get(SETTING) not in _TRUE:
        raise ImportError(
            f"gba_tf: expected {SETTING}=1 in the environment, found"
            f" {SETTING}={os.environ.get(SETTING)!r}: Keras 3 has no parameter-server training."
            f" Unset it or set {SETTING}=1."
        )
    if loaded in ("keras_3", "keras_2"):
        raise ImportError(
            f"gba_tf: expected tf.keras to be tf-keras (Keras 2), found {loaded.replace('_', ' ')}"
            " already loaded: it has no parameter-server training. Put `import gba_tf` before the"
            f" first use of tensorflow.keras, or set {SETTING}=1 in the environment."
        )
    try:
        import tf_keras  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "gba_tf: expected the package tf-keras, of the same version as TensorFlow"
            f" {tf.__version__}, found: {error}. Run pip install 'tf-keras~={tf.__version__}'."
        ) from error
    _ = tf.keras.Model  # Settles the choice for the rest of the process.
