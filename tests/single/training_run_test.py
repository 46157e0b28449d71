"""A run in one process equals a plain Keras loop over the same batches, and reports it truly."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

import gba_tf
from gba_tf import models
from gba_tf.cluster_config import ClusterConfig
from gba_tf.data.blocks import Blocks
from gba_tf.data.dataset import Dataset, Examples
from gba_tf.features import CategoricalFeature, NumericFeature
from gba_tf.models.defaults import DEEPFM
from gba_tf.run_settings import RunSettings
from gba_tf.training_run import TrainingRun

NUM_TRAIN, NUM_TEST, BATCH, EPOCHS, SEED = 50, 20, 16, 2, 7
FEATURES = (CategoricalFeature("city", 9), NumericFeature("price"))
ALONE = ClusterConfig({"chief": ("127.0.0.1:1",)}, "chief", 0)


def make_examples(count, generator):
    city = generator.integers(9, size=count).astype(np.int32)
    price = generator.normal(size=count).astype(np.float32)
    return Examples({"city": city, "price": price}, (city % 2).astype(np.float32))


def make_dataset():
    generator = np.random.default_rng(1)
    return Dataset(
        "criteo", make_examples(NUM_TRAIN, generator), make_examples(NUM_TEST, generator), FEATURES
    )


def settings(model_dir, **others):
    return RunSettings.create(
        **{
            "strategy": "one_device",
            "model": "deepfm",
            "dataset": "criteo",
            "data_dir": None,
            "model_dir": str(model_dir),
            "global_batch_size": BATCH,
            "local_batch_size": None,
            "staleness_tolerance": 4,
            "epochs": EPOCHS,
            "optimizer": "adam",
            "learning_rate": 0.01,
            "seed": SEED,
            **others,
        }
    )


def new_model():
    model = models.DeepFM(FEATURES, seed=SEED, **DEEPFM["criteo"].model)
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01))
    return model


def test_it_trains_on_the_batches_of_each_epoch_and_leaves_checkpoint_and_summary(tmp_path, capsys):
    dataset = make_dataset()
    result = TrainingRun(settings(tmp_path), ALONE, dataset).execute()

    expected = new_model()
    blocks = Blocks(NUM_TRAIN, BATCH, SEED)
    losses = []
    for position in range(EPOCHS * 4):  # 50 / 16, rounded up.
        batch = dataset.train.take(blocks.indices_at(position).numpy())
        loss = expected.evaluate(dict(batch.columns), batch.labels, 64, 0, return_dict=True)["loss"]
        losses.append((len(batch), loss))
        expected.train_on_batch(dict(batch.columns), batch.labels)

    restored = new_model()
    restored(dict(dataset.train.columns))
    restored.optimizer.build(restored.trainable_variables)
    status = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(
        result["checkpoint"]
    )
    status.assert_existing_objects_matched()
    assert int(restored.optimizer.iterations) == result["global_step"] == 8
    pairs = [
        *zip(restored.variables, expected.variables, strict=True),
        *zip(restored.optimizer.variables, expected.optimizer.variables, strict=True),
    ]
    trained = [(a, b) for a, b in pairs if "total" not in a.name and "count" not in a.name]
    for found, wanted in trained:
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)

    logits = expected(dict(dataset.test.columns)).numpy()
    labels = dataset.test.labels
    higher = logits[labels == 1][:, None] > logits[labels == 0][None, :]
    assert result["auc"] == pytest.approx(higher.mean(), abs=1e-6)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    log_loss = -np.mean(np.log(np.where(labels == 1, probabilities, 1 - probabilities)))
    assert result["loss"] == pytest.approx(log_loss, abs=1e-5)
    assert result["examples"] == EPOCHS * NUM_TRAIN
    assert result["examples_per_second"] == result["examples"] / result["train_seconds"]
    assert result["versions"]["gba_tf"] == gba_tf.__version__
    assert json.loads((tmp_path / "summary.json").read_text()) == result

    output = capsys.readouterr().out
    for epoch in range(EPOCHS):
        sizes, values = zip(*losses[4 * epoch : 4 * epoch + 4], strict=True)
        loss = np.average(values, weights=sizes)
        assert f"epoch {epoch + 1}/2: loss {loss:.4f}, held-out loss" in output
    assert f"held-out loss {result['loss']:.4f}, AUC {result['auc']:.4f}" in output
    assert "50 examples to train on, 20 held out\nadam, learning rate 0.01" in output


def test_held_out_examples_of_one_class_have_no_auc(tmp_path, capsys):
    dataset = make_dataset()
    of_one_class = Examples(dataset.test.columns, np.zeros(NUM_TEST, np.float32))
    one_class = Dataset("criteo", dataset.train, of_one_class, FEATURES)
    result = TrainingRun(settings(tmp_path, epochs=1), ALONE, one_class).execute()
    assert math.isnan(result["auc"])
    assert json.loads((tmp_path / "summary.json").read_text())["auc"] is None
    assert capsys.readouterr().out.count("AUC undefined") == 2


def test_a_batch_larger_than_the_data_is_the_data(tmp_path):
    result = TrainingRun(settings(tmp_path, global_batch_size=2**31 - 1), ALONE, make_dataset())
    assert result.execute()["global_step"] == EPOCHS
