"""GBA (Global Batch gradients Aggregation, arXiv 2205.11048) for TensorFlow parameter servers."""

import importlib
import os

__version__ = "0.1.0"

# TensorFlow decides which Keras it is at the first use of tf.keras. Keras 3 has no parameter-server
# training, so this must be set before; gba_tf.legacy_keras says what to do where it is too late.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

_PUBLIC = {
    "BatchPlan": "batch_plan",
    "ClusterConfig": "cluster",
    "ClusterConfigError": "cluster",
    "GBAConfig": "config",
    "GBAStrategy": "strategy",
    "LocalCluster": "local_cluster",
    "Progress": "checkpoint",
    "TokenStats": "ops.token_server",
    "TrainingCheckpoint": "checkpoint",
    "create_strategy": "strategies",
    "flush": "strategies",
    "plan_of": "strategies",
    "serve_if_not_chief": "cluster",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str):
    # Loaded on first use: `import gba_tf` and the cluster launcher stay free of TensorFlow.
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'gba_tf' has no attribute '{name}'; it has {__all__}")


def __dir__():
    return sorted({*globals(), *__all__})
