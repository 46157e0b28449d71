"""Trains a recommender in one of the modes of gba_tf; the mode is one flag.

    python scripts/train.py                                  # MovieLens-100K on a local cluster
    python scripts/train.py --dataset=criteo --data_dir=...  # a data set of one's own

Without TF_CONFIG it starts a cluster on this machine and trains on it, and a worker that dies there
does not end the run; with TF_CONFIG it is that task. What a run leaves behind, a checkpoint,
summary.json and maybe logs, is in --model_dir.
"""

import importlib.util
import logging as std_logging
import os
import sys
import time
from typing import NoReturn

from absl import app, flags, logging


def _say(text: str) -> None:
    print(f"train: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _fail(text: str) -> NoReturn:
    _say(text)
    sys.exit(2)


if importlib.util.find_spec("gba_tf") is None:
    _fail("expected gba_tf to be installed, found it nowhere: run `make`, or `pip install .`")

from gba_tf import cluster, data, progress, run_settings  # noqa: E402
from gba_tf.cluster_config import ClusterConfig  # noqa: E402
from gba_tf.config import DEFAULT_STALENESS_TOLERANCE  # noqa: E402
from gba_tf.local_cluster import LocalCluster  # noqa: E402
from gba_tf.run_settings import MAX_SIZE, RunSettings  # noqa: E402

# The chief of a local cluster finds here that its model_dir was claimed for it.
_CLAIMED_VARIABLE = "GBA_TF_CLAIMED_MODEL_DIR"

_STRATEGY = flags.DEFINE_enum("strategy", "gba", run_settings.STRATEGIES, "How to train.")
_MODEL = flags.DEFINE_enum("model", "deepfm", run_settings.MODELS, "What to train.")
_DATASET = flags.DEFINE_enum(
    "dataset", "movielens_100k", run_settings.DATASETS, "What to train on."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder or file of the data set; movielens_100k is fetched if it is not given.",
)
_MODEL_DIR = flags.DEFINE_string(
    "model_dir",
    None,
    "Folder for the checkpoint and summary.json; must be new or empty."
    " Default: runs/<strategy>-<model>-<dataset>-<time>.",
)
_GLOBAL_BATCH_SIZE = flags.DEFINE_integer(
    "global_batch_size",
    None,
    "G, examples per update, in every mode. Default: of the data set.",
    lower_bound=1,
    upper_bound=MAX_SIZE,
)
_LOCAL_BATCH_SIZE = flags.DEFINE_integer(
    "local_batch_size",
    None,
    "B, examples per gradient; a divisor of G. Default: G / 4, else G / 2 or G, what is whole.",
    lower_bound=1,
    upper_bound=MAX_SIZE,
)
_STALENESS_TOLERANCE = flags.DEFINE_integer(
    "staleness_tolerance",
    DEFAULT_STALENESS_TOLERANCE,
    "Global steps by which a gradient may be late before its weight is 0.",
    lower_bound=0,
    upper_bound=MAX_SIZE,
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "Passes over the data. Default: of the data set.", lower_bound=1
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer",
    None,
    run_settings.OPTIMIZERS,
    "Of tf.keras.optimizers. Default: of the data set.",
    case_sensitive=False,
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Default: of the data set.")
_SEED = flags.DEFINE_integer(
    "seed",
    1,
    "Of initial values and of the order of the examples.",
    lower_bound=0,
    upper_bound=MAX_SIZE,
)
_NUM_WORKERS = flags.DEFINE_integer(
    "num_workers", 2, "Workers of the local cluster.", lower_bound=1
)
_NUM_PS = flags.DEFINE_integer(
    "num_ps", 1, "Parameter servers of the local cluster.", lower_bound=1
)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; a mistake is one line and exit code 2."""
    try:
        unknown = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        _fail(f"{error} (--help lists the flags)")
    if unknown:
        _fail(f"expected flags only, found {' '.join(unknown)} (--help lists the flags)")
    return argv


def _settings() -> RunSettings:
    model_dir = _MODEL_DIR.value or os.path.join(
        "runs",
        f"{_STRATEGY.value}-{_MODEL.value}-{_DATASET.value}-{time.strftime('%Y%m%d-%H%M%S')}",
    )
    return RunSettings.create(
        strategy=_STRATEGY.value,
        model=_MODEL.value,
        dataset=_DATASET.value,
        data_dir=_DATA_DIR.value,
        model_dir=model_dir,
        global_batch_size=_GLOBAL_BATCH_SIZE.value,
        local_batch_size=_LOCAL_BATCH_SIZE.value,
        staleness_tolerance=_STALENESS_TOLERANCE.value,
        epochs=_EPOCHS.value,
        optimizer=_OPTIMIZER.value,
        learning_rate=_LEARNING_RATE.value,
        seed=_SEED.value,
    )


def _train_on_local_cluster(settings: RunSettings) -> int:
    """Starts the tasks, which run this script too, and waits for them. Imports no TensorFlow."""
    # Read here first: what is wrong with the data is said once, before anything is started.
    data.load(settings.dataset, settings.data_dir)
    run_settings.claim_model_dir(settings.model_dir)
    # Whatever the flags say: the default has the time in it.
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    command.append(f"--model_dir={settings.model_dir}")
    environment = {
        _CLAIMED_VARIABLE: settings.model_dir,
        # Else TensorFlow's C++ adds a page to the one line that says that a worker died.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    }
    columns = progress.terminal_columns(sys.stdout)
    if columns is not None:
        environment[progress.COLUMNS_VARIABLE] = str(columns)
    num_workers, num_ps = _NUM_WORKERS.value, _NUM_PS.value
    if not settings.needs_parameter_servers:
        num_workers = num_ps = 0
    try:
        tasks = LocalCluster(
            command,
            num_workers,
            num_ps,
            log_dir=os.path.join(settings.model_dir, run_settings.LOGS),
            env=environment,
            tolerate_worker_failures=True,
        )
    except BaseException:
        run_settings.release_model_dir(settings.model_dir)
        raise
    with tasks:
        print("TensorFlow starts in each of them; that takes some seconds ...", flush=True)
        return tasks.wait()


def _prepare(settings: RunSettings, config: ClusterConfig) -> data.Dataset:
    """Returns in the chief, with the data; the other tasks serve it until it ends."""
    if not settings.needs_parameter_servers and (config.num_workers or config.num_ps):
        raise ValueError(
            f"strategy {settings.strategy} trains in one process; expected no TF_CONFIG, found one"
            f" with {config.num_workers} workers and {config.num_ps} parameter servers. Unset it,"
            " or choose another strategy."
        )
    cluster.serve_if_not_chief(config)
    dataset = data.load(settings.dataset, settings.data_dir)
    if os.environ.get(_CLAIMED_VARIABLE) != settings.model_dir:
        run_settings.claim_model_dir(settings.model_dir)
    return dataset


def _first_line_only(record: std_logging.LogRecord) -> bool:
    record.msg, record.args = record.getMessage().partition("\n")[0], None
    return True


def main(argv: list[str]) -> int:
    del argv
    # TensorFlow describes its cluster, and what gRPC thinks of a dead worker, at length.
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().addFilter(_first_line_only)
    config = None
    try:
        settings = _settings()
        config = ClusterConfig.from_env(require_ps=settings.needs_parameter_servers)
        if config is None:
            return _train_on_local_cluster(settings)
        dataset = _prepare(settings, config)
    except KeyboardInterrupt:
        _say("stopped by SIGINT")
        return 130
    except (ValueError, NotImplementedError, ImportError, OSError, RuntimeError) as error:
        _say(str(error))
        if config is not None and config.is_chief:
            cluster.shutdown_cluster(config, status=1, message=str(error))
        return 2

    from gba_tf.training_run import TrainingRun

    TrainingRun(settings, config, dataset).execute()
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
