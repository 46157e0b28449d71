"""Trains a recommender in one of the modes of gba_tf; the mode is one flag.

    python scripts/train.py                                  # MovieLens-100K on a local cluster
    python scripts/train.py --dataset=criteo --data_dir=...  # a data set of one's own

Without TF_CONFIG it starts a cluster on this machine and trains on it, and a worker that dies there
does not end the run; with TF_CONFIG it is that task. --strategy=auto moves between all-reduce and
gba while it trains, by how long the workers take. What a run leaves behind, a checkpoint,
summary.json and maybe logs, is in --model_dir.
"""

import contextlib
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

from gba_tf import (  # noqa: E402
    batch_plan,
    cluster,
    data,
    injected_delay,
    progress,
    run_settings,
    signs_of_life,
)
from gba_tf.cluster_config import ClusterConfig  # noqa: E402
from gba_tf.config import DEFAULT_STALENESS_BOUND, DEFAULT_STALENESS_TOLERANCE  # noqa: E402
from gba_tf.injected_delay import InjectedDelay  # noqa: E402
from gba_tf.local_cluster import LocalCluster  # noqa: E402
from gba_tf.model_dir import LOGS, ModelDir  # noqa: E402
from gba_tf.run_settings import MAX_SIZE, RunSettings  # noqa: E402
from gba_tf.switching import SwitchRule  # noqa: E402

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
    "Folder for the checkpoints and summary.json: new, empty, or an earlier run's to go on with."
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
_STALENESS_BOUND = flags.DEFINE_integer(
    "staleness_bound",
    DEFAULT_STALENESS_BOUND,
    "Of hop_bs: gradients by which a worker may be ahead of the slowest one.",
    lower_bound=1,
    upper_bound=MAX_SIZE,
)
_BACKUP_WORKERS = flags.DEFINE_integer(
    "backup_workers",
    batch_plan.DEFAULT_BACKUP_WORKERS,
    "Of hop_bw: workers whose gradient an update does not wait for.",
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
_RESUME = flags.DEFINE_bool(
    "resume", True, "Whether to go on from the newest checkpoint in model_dir, of whatever mode."
)
_SAVE_EVERY_STEPS = flags.DEFINE_integer(
    "save_every_steps",
    None,
    "Batches between checkpoints within an epoch. Default: one after each epoch only.",
    lower_bound=1,
)
_MAX_CHECKPOINTS = flags.DEFINE_integer(
    "max_checkpoints", None, "The newest checkpoints to keep. Default: all.", lower_bound=1
)
_SWITCH_THRESHOLD = flags.DEFINE_float(
    "switch_threshold",
    SwitchRule.threshold,
    "Of auto: to gba where it is expected to be so many times as fast as all-reduce.",
)
_SWITCH_WINDOWS = flags.DEFINE_integer(
    "switch_windows", SwitchRule.windows, "Of auto: measurements in a row that have to agree."
)
_SWITCH_HYSTERESIS = flags.DEFINE_float(
    "switch_hysteresis",
    SwitchRule.hysteresis,
    "Of auto: back to all-reduce at the threshold less this part of it.",
)
_SWITCH_MINIMUM_STAY = flags.DEFINE_float(
    "switch_minimum_stay",
    SwitchRule.minimum_stay_seconds,
    "Of auto: seconds to train in a mode before it may be left.",
)
_INJECT_DELAY = flags.DEFINE_string(
    "inject_delay",
    None,
    f"{injected_delay.FORM}: lets the gradients of a worker take FACTOR times as long in these"
    " global steps, for tests and demonstrations.",
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
        staleness_bound=_STALENESS_BOUND.value,
        backup_workers=_BACKUP_WORKERS.value,
        resume=_RESUME.value,
        save_every_steps=_SAVE_EVERY_STEPS.value,
        max_checkpoints=_MAX_CHECKPOINTS.value,
        switch_rule=SwitchRule(
            threshold=_SWITCH_THRESHOLD.value,
            windows=_SWITCH_WINDOWS.value,
            hysteresis=_SWITCH_HYSTERESIS.value,
            minimum_stay_seconds=_SWITCH_MINIMUM_STAY.value,
        ),
        inject_delay=InjectedDelay.parse(_INJECT_DELAY.value) if _INJECT_DELAY.value else None,
    )


def _train_on_local_cluster(settings: RunSettings) -> int:
    """Starts the tasks, which run this script too, and waits for them. Imports no TensorFlow."""
    num_workers = _NUM_WORKERS.value if settings.strategy != "one_device" else 0
    num_ps = _NUM_PS.value if settings.needs_parameter_servers else 0
    # Checked and read here first: what is wrong is said once, before anything is started.
    settings.check_workers(num_workers)
    data.load(settings.dataset, settings.data_dir)
    model_dir = ModelDir(settings.model_dir, settings.resume)
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
    try:
        with LocalCluster(
            command,
            num_workers,
            num_ps,
            log_dir=os.path.join(settings.model_dir, LOGS),
            env=environment,
            # Under all-reduce all of them have to live, under auto all supervisors.
            tolerate_worker_failures=(
                settings.needs_parameter_servers and settings.strategy != run_settings.AUTO
            ),
        ) as tasks:
            print("TensorFlow starts in each of them; that takes some seconds ...", flush=True)
            return tasks.wait()
    finally:
        model_dir.release()


def _take_role(settings: RunSettings, config: ClusterConfig) -> ClusterConfig:
    """Returns in the tasks that train, under auto in all; the others serve until training ends."""
    settings.check_cluster(config)
    if settings.strategy == run_settings.AUTO:
        return config
    if settings.strategy == "multi_worker_mirrored":
        config = config.for_all_reduce()
        cluster.serve_if_not_worker(config)
    else:
        cluster.serve_if_not_chief(config)
    return config


def _require_model_dir(strategy: str) -> None:
    if not _MODEL_DIR.value:
        raise ValueError(
            f"{strategy}: expected --model_dir, a folder that all tasks of the cluster share, found"
            " none; its default is another one in each task."
        )


def _first_line_only(record: std_logging.LogRecord) -> bool:
    record.msg, record.args = record.getMessage().partition("\n")[0], None
    return True


def main(argv: list[str]) -> int:
    del argv
    # TensorFlow describes its cluster, and what gRPC thinks of a dead worker, at length.
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().addFilter(_first_line_only)
    config = model_dir = None
    has_role = False
    try:
        settings = _settings()
        config = ClusterConfig.from_env(require_ps=settings.needs_parameter_servers)
        if config is None:
            return _train_on_local_cluster(settings)
        if settings.strategy in (run_settings.AUTO, "multi_worker_mirrored"):
            _require_model_dir(settings.strategy)
        config = _take_role(settings, config)
        has_role = True
        dataset = data.load(settings.dataset, settings.data_dir)
        # Held until this process ends.
        if config.is_chief and os.environ.get(_CLAIMED_VARIABLE) != settings.model_dir:
            model_dir = ModelDir(settings.model_dir, settings.resume)
        if settings.strategy == run_settings.AUTO:
            from gba_tf import auto_run

            return auto_run.supervise(settings, config, dataset)
    except KeyboardInterrupt:
        _say("stopped by SIGINT")
        return 130
    except (ValueError, NotImplementedError, ImportError, OSError, RuntimeError) as error:
        _say(str(error))
        if config is not None and settings.strategy != run_settings.AUTO:
            _end_others(config, str(error))
        elif has_role:
            _tell_supervisors(settings, config, str(error), model_dir)
        return 2

    from gba_tf.all_reduce import WorkersNotReadyError
    from gba_tf.checkpoint import CheckpointError
    from gba_tf.training_run import TrainingRun

    try:
        TrainingRun(settings, config, dataset).execute()
    except (CheckpointError, WorkersNotReadyError, OSError) as error:  # A full disk.
        _say(str(error))
        if config.is_chief:
            cluster.shutdown_cluster(config, status=1, message=str(error))
        return 2
    del model_dir
    return 0


def _end_others(config: ClusterConfig, reason: str) -> None:
    """Of a task that cannot begin: nobody waits for it."""
    if config.all_reduce and config.task_type == "worker":
        from gba_tf import all_reduce

        with contextlib.suppress(RuntimeError, ImportError):
            all_reduce.create_strategy(config, ready=False)
    if config.is_chief:
        cluster.shutdown_cluster(config, status=1, message=reason)


def _tell_supervisors(
    settings: RunSettings, config: ClusterConfig, reason: str, model_dir: ModelDir | None
) -> None:
    """Of a task of auto that cannot begin: the others end with the reason."""
    is_claimed = model_dir is not None or os.environ.get(_CLAIMED_VARIABLE) == settings.model_dir
    # Ctrl-C: nobody else is to be told. Refused again: it is another run's folder.
    with contextlib.suppress(KeyboardInterrupt, ValueError, OSError):
        if config.is_chief and not is_claimed:
            model_dir = ModelDir(settings.model_dir, resume=True)
        signs_of_life.report_failure(config, settings.model_dir, reason)
    del model_dir


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
