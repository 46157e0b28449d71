"""`--strategy=auto` in one task: what scripts/train.py does there instead of one TrainingRun."""

import dataclasses
import pathlib

import tensorflow as tf

from gba_tf import all_reduce, cluster, data, legacy_keras, models, switching
from gba_tf.all_reduce import WorkersNotReadyError
from gba_tf.checkpoint import CheckpointError
from gba_tf.checkpoint_files import CheckpointFiles
from gba_tf.cluster_config import ClusterConfig
from gba_tf.forked_process import ProcessFailure
from gba_tf.model_dir import CHECKPOINTS
from gba_tf.ops import library
from gba_tf.run_settings import RunSettings
from gba_tf.supervisor import Supervisor
from gba_tf.switch_files import Segment, SwitchFileError, SwitchFiles
from gba_tf.switch_monitor import SwitchMonitor
from gba_tf.training_run import TrainingRun


def supervise(settings: RunSettings, config: ClusterConfig, dataset: data.Dataset) -> int:
    """Takes this task through the run; every task of the cluster calls it.

    Args:
      settings: Of the run; its model_dir is shared by all tasks.
      config: From TF_CONFIG.
      dataset: What to train on.

    Returns:
      The exit code of the task, see Supervisor.run.

    Raises:
      ImportError: tf.keras is Keras 3, or gba_tf was not built for this TensorFlow.
    """
    # Now, and not in each process: none of it starts TensorFlow's runtime.
    legacy_keras.require()
    library.load()
    _ = models.DeepFM
    return Supervisor(
        config,
        settings.model_dir,
        lambda: _first_mode(settings),
        settings.resume,
        lambda segment: _train(settings, config, dataset, segment),
    ).run()


def _first_mode(settings: RunSettings) -> str:
    """That of the newest checkpoint, where there is one of such a mode."""
    saved = CheckpointFiles(pathlib.Path(settings.model_dir) / CHECKPOINTS).newest()
    mode = saved and saved.metadata["strategy"]
    return mode if mode in switching.MODES else switching.ALL_REDUCE


def _train(
    settings: RunSettings, config: ClusterConfig, dataset: data.Dataset, segment: Segment
) -> None:
    """Trains or serves for a segment, in a process that ends with it."""
    # The supervisors end every task; nobody has to be told.
    config = dataclasses.replace(config, evaluators=())
    if segment.mode == switching.ALL_REDUCE:
        config = dataclasses.replace(config.for_all_reduce(), bystanders={})
    elif not config.is_chief:
        cluster.serve(config)
    settings = dataclasses.replace(settings, strategy=segment.mode, resume=segment.resume)
    files = SwitchFiles(settings.model_dir)
    monitor = SwitchMonitor(segment, settings.switch_rule, files)
    try:
        TrainingRun(settings, config, dataset, monitor).execute()
    # A full disk is an OSError.
    except (CheckpointError, WorkersNotReadyError, SwitchFileError, OSError) as error:
        raise ProcessFailure(str(error), code=2) from None
    except tf.errors.OpError as error:
        lost = all_reduce.lost_worker_error(config, error) if config.all_reduce else None
        if lost is None:
            raise
        raise ProcessFailure(str(lost), code=1) from None
