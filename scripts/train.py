"""Trains a recommender in one of the modes of gba_tf; the mode is one flag.

    python scripts/train.py                                  # a local cluster, MovieLens-100K
    python scripts/train.py --dataset=criteo --data_dir=...  # a data set of one's own

Without TF_CONFIG it starts a local cluster and trains on it; with TF_CONFIG it is that task.
"""

import importlib.util
import os
import pathlib
import sys
import time

from absl import app, flags

_ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
if importlib.util.find_spec("gba_tf") is None:
    raise SystemExit(
        "train: expected gba_tf to be installed, found it nowhere: run `make`, or `pip install .`"
    )

from gba_tf import cluster, training_run  # noqa: E402
from gba_tf.cluster_config import ClusterConfig  # noqa: E402
from gba_tf.config import DEFAULT_STALENESS_TOLERANCE  # noqa: E402
from gba_tf.local_cluster import LocalCluster  # noqa: E402

_STRATEGY = flags.DEFINE_enum("strategy", "gba", training_run.STRATEGIES, "How to train.")
_MODEL = flags.DEFINE_enum("model", "deepfm", training_run.MODELS, "What to train.")
_DATASET = flags.DEFINE_enum(
    "dataset", "movielens_100k", training_run.DATASETS, "What to train on."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder or file of the data set; movielens_100k is fetched if it is missing."
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder for the checkpoint and summary.json; must be new or empty."
    " Default: runs/<strategy>-<model>-<dataset>-<time>.",
)
_GLOBAL_BATCH_SIZE = flags.DEFINE_integer(
    "global_batch_size", None, "G, examples per update, in every mode. Default: of the data set."
)
_LOCAL_BATCH_SIZE = flags.DEFINE_integer(
    "local_batch_size", None, "B, examples per gradient; a divisor of G. Default: G / 4."
)
_STALENESS_TOLERANCE = flags.DEFINE_integer(
    "staleness_tolerance",
    DEFAULT_STALENESS_TOLERANCE,
    "Global steps by which a gradient may be late before its weight is 0.",
)
_EPOCHS = flags.DEFINE_integer("epochs", None, "Passes over the data. Default: of the data set.")
_OPTIMIZER = flags.DEFINE_string("optimizer", None, "tf.keras optimizer. Default: of the data set.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Default: of the data set.")
_SEED = flags.DEFINE_integer("seed", 1, "Of initial values and of the order of the examples.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 2, "Of the local cluster.")
_NUM_PS = flags.DEFINE_integer("num_ps", 1, "Parameter servers of the local cluster.")


def _fail(text: str) -> None:
    print(f"train: {' '.join(text.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; a mistake is one line and exit code 2."""
    try:
        unknown = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        _fail(f"{error} (--help lists the flags)")
    if unknown:
        _fail(f"expected flags only, found {' '.join(unknown)}")
    return argv


def _settings() -> training_run.Settings:
    model_dir = _MODEL_DIR.value or os.path.join(
        "runs",
        f"{_STRATEGY.value}-{_MODEL.value}-{_DATASET.value}-{time.strftime('%Y%m%d-%H%M%S')}",
    )
    return training_run.Settings.create(
        strategy=_STRATEGY.value,
        model=_MODEL.value,
        dataset=_DATASET.value,
        data_dir=_DATA_DIR.value,
        model_dir=os.path.abspath(model_dir),
        global_batch_size=_GLOBAL_BATCH_SIZE.value,
        local_batch_size=_LOCAL_BATCH_SIZE.value,
        staleness_tolerance=_STALENESS_TOLERANCE.value,
        epochs=_EPOCHS.value,
        optimizer=_OPTIMIZER.value,
        learning_rate=_LEARNING_RATE.value,
        seed=_SEED.value,
    )


def _train_on_local_cluster(settings: training_run.Settings) -> int:
    # Read here first: what is wrong with the data is said once, before anything is started.
    training_run.load_dataset(settings)
    training_run.claim_model_dir(settings.model_dir)
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    command.append(f"--model_dir={settings.model_dir}")
    log_dir = os.path.join(settings.model_dir, "logs")
    with LocalCluster(command, _NUM_WORKERS.value, _NUM_PS.value, log_dir=log_dir) as tasks:
        return tasks.wait()


def main(argv: list[str]) -> int:
    del argv
    cluster_config = None
    try:
        settings = _settings()
        cluster_config = ClusterConfig.from_env()
        if cluster_config is None and settings.needs_cluster:
            return _train_on_local_cluster(settings)
        training_run.train(settings, cluster_config)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        if cluster_config is not None and cluster_config.is_chief:
            cluster.shutdown_cluster(cluster_config, status=1, message=str(error))
        _fail(str(error))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
