"""Recommendation models on TensorFlow Recommenders; install as `gba_tf.models`."""

import importlib

_PUBLIC = {"DeepFM": "deepfm"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    # Loaded on first use: the settings in gba_tf.models.defaults are read without TensorFlow.
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'; it has {__all__}")
