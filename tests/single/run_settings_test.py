"""Settings are completed and checked before anything starts; a folder is for one run."""

import pytest
import tensorflow as tf

from gba_tf import run_settings
from gba_tf.models.defaults import DEEPFM
from gba_tf.run_settings import RunSettings


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
    "strategy, examples_per_gradient, gradients_per_update",
    [("gba", 16, 4), ("parameter_server", 16, 1), ("one_device", 64, 1)],
)
def test_what_makes_an_update_depends_on_the_mode(
    strategy, examples_per_gradient, gradients_per_update
):
    settings = create(strategy=strategy, global_batch_size=64, local_batch_size=16)
    assert settings.examples_per_gradient == examples_per_gradient
    assert settings.gradients_per_update == gradients_per_update


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


def test_a_mode_that_is_not_there_yet_says_so():
    with pytest.raises(NotImplementedError, match="found multi_worker_mirrored, which comes in a"):
        create(strategy="multi_worker_mirrored")


@pytest.mark.parametrize("name", run_settings.OPTIMIZERS)
def test_keras_knows_every_optimizer(name):
    optimizer = tf.keras.optimizers.get(name)
    optimizer.learning_rate = 0.25
    assert type(optimizer).__name__.lower() == name
    assert float(optimizer.learning_rate) == 0.25


def test_a_folder_is_claimed_by_one_run_only(tmp_path):
    model_dir = tmp_path / "new" / "run"
    run_settings.claim_model_dir(str(model_dir))
    assert (model_dir / "logs").is_dir()
    with pytest.raises(ValueError, match="expected a new or an empty folder, found .* in use"):
        run_settings.claim_model_dir(str(model_dir))


def test_an_empty_folder_can_be_claimed_and_a_file_cannot(tmp_path):
    (tmp_path / "empty").mkdir()
    run_settings.claim_model_dir(str(tmp_path / "empty"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file in use"):
        run_settings.claim_model_dir(str(tmp_path / "file"))


def test_only_a_folder_without_files_is_released(tmp_path):
    for name in ("used", "unused"):
        run_settings.claim_model_dir(str(tmp_path / name))
    (tmp_path / "used" / "logs" / "chief.log").touch()
    for name in ("used", "unused"):
        run_settings.release_model_dir(str(tmp_path / name))
    assert not (tmp_path / "unused").exists()
    assert (tmp_path / "used" / "logs" / "chief.log").exists()
