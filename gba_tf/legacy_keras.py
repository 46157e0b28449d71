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

    if not _is_loaded() and os.environ.get(SETTING) not in _TRUE:
        raise ImportError(
            f"gba_tf: expected {SETTING}=1 in the environment, found"
            f" {SETTING}={os.environ.get(SETTING)!r}: Keras 3 has no parameter-server training."
            f" Unset it or set {SETTING}=1."
        )
    try:
        import tf_keras  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "gba_tf: expected the package tf-keras, of the same version as TensorFlow"
            f" {tf.__version__}, found: {error}. Run pip install 'tf-keras~={tf.__version__}'."
        ) from error
    package = tf.keras.Model.__module__.split(".")[0]
    if package != "tf_keras":
        raise ImportError(
            f"gba_tf: expected tf.keras to be tf-keras (Keras 2), found that {package}"
            f" {getattr(tf.keras, '__version__', '?')} is already loaded, which has no"
            " parameter-server training. Put `import gba_tf` before the first use of"
            f" tensorflow.keras, or set {SETTING}=1 in the environment."
        )


def _is_loaded() -> bool:
    """Whether tf.keras was used before: it is a lazy loader until then."""
    import tensorflow as tf

    return type(tf.__dict__.get("keras")).__name__ != "KerasLazyLoader" or getattr(
        tf.keras, "_tfll_initialized", True
    )
