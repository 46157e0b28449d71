"""Settings are completed and checked before anything starts."""

import pytest
import tensorflow as tf

from gba_tf import run_settings
from gba_tf.cluster_config import ClusterConfig
from gba_tf.models.defaults import DEEPFM
from gba_tf.run_settings import RunSettings

MODES = (("gba", 128), ("multi_worker_mirrored", 256))


def create(**settings):
    defaults = {
        "strategy": "gba",
        "model": "deepfm",
        "dataset": "criteo",
        "data_dir": "data",
        "model_dir": "runs/a",
        "global_batch_size": None,
        "local_batch_size": None,
        "staleness_tolerance": 4,
        "epochs": None,
        "optimizer": None,
        "learning_rate": None,
        "seed": 1,
    }
    return RunSettings.create(**{**defaults, **settings})


@pytest.mark.parametrize("dataset", run_settings.DATASETS)
def test_what_is_not_given_is_that_of_the_data_set(dataset):
    defaults = DEEPFM[dataset]
    settings = create(dataset=dataset)
    assert settings.batch.global_batch_size == defaults.global_batch_size
    assert settings.epochs == defaults.epochs
    assert settings.learning_rate == defaults.learning_rate
    assert settings.optimizer == defaults.optimizer
    assert settings.optimizer in run_settings.OPTIMIZERS


def test_what_is_given_stays_and_the_folder_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = create(epochs=9, optimizer="sgd", learning_rate=0.5, global_batch_size=96)
    assert (settings.epochs, settings.optimizer, settings.learning_rate) == (9, "sgd", 0.5)
    assert settings.batch.global_batch_size == 96
    assert settings.model_dir == str(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    "global_batch_size, expected", [(512, 128), (6, 3), (7, 7), (1, 1), (2, 1), (4, 1)]
)
def test_the_local_batch_is_a_quarter_or_what_is_whole(global_batch_size, expected):
    settings = create(global_batch_size=global_batch_size)
    assert settings.batch.local_batch_size == expected


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"global_batch_size": 64, "local_batch_size": 24}, "G=64 must be a whole multiple.*B=24"),
        ({"global_batch_size": 64, "local_batch_size": 128}, "G / B is 0.5"),
        ({"learning_rate": 0.0}, "learning_rate: expected a positive number, found 0.0"),
        ({"learning_rate": -1.0}, "learning_rate: expected a positive number, found -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a positive number, found nan"),
        ({"learning_rate": float("inf")}, "learning_rate: expected a positive number, found inf"),
    ],
)
def test_a_value_out_of_range_is_named(settings, text):
    with pytest.raises(ValueError, match=text):
        create(**settings)


def test_an_unknown_mode_is_told_the_known_ones():
    with pytest.raises(ValueError, match="expected one of multi_worker_mirrored, gba, .*'sync'"):
        create(strategy="sync")


def test_a_bound_that_lets_nobody_start_is_refused():
    with pytest.raises(ValueError, match="staleness_bound: expected at least 1 gradients, found 0"):
        create(strategy="hop_bs", staleness_bound=0)


def test_what_does_not_fit_the_cluster_is_refused():
    config = ClusterConfig({"chief": ("a:1",), "worker": ("b:1", "c:1"), "ps": ("d:1",)}, "ps", 0)
    create(strategy="hop_bw", global_batch_size=64, backup_workers=1).check_cluster(config)
    with pytest.raises(ValueError, match="backup_workers from 0 to 1.*the 2 workers, found 2"):
        create(strategy="hop_bw", global_batch_size=64, backup_workers=2).check_cluster(config)
    with pytest.raises(ValueError, match="G=63 to be a whole multiple of the 2 workers"):
        create(strategy="multi_worker_mirrored", global_batch_size=63).check_workers(2)


def test_what_is_trained_does_not_depend_on_the_mode():
    one, other = (create(strategy=name, local_batch_size=size) for name, size in MODES)
    assert one.what_is_trained() == other.what_is_trained()


@pytest.mark.parametrize("name", run_settings.OPTIMIZERS)
def test_keras_knows_every_optimizer(name):
    optimizer = tf.keras.optimizers.get(name)
    optimizer.learning_rate = 0.25
    assert type(optimizer).__name__.lower() == name
    assert float(optimizer.learning_rate) == 0.25
