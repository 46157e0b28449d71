"""Tests of DeepFM: its formula by hand, learning, saving and loading."""

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.features import CategoricalFeature, MultiCategoricalFeature, NumericFeature
from gba_tf.models import DeepFM

FEATURES = (
    CategoricalFeature("user", 20),
    CategoricalFeature("item", 10),
    MultiCategoricalFeature("genres", 6, max_length=3),
    NumericFeature("price", missing_value=-1.0),
)


def make_columns(size=64, seed=0):
    random = np.random.RandomState(seed)
    return {
        "user": random.randint(0, 20, size).astype(np.int32),
        "item": random.randint(0, 10, size).astype(np.int32),
        "genres": random.randint(-1, 6, (size, 3)).astype(np.int32),
        "price": random.choice([-1.0, 0.0, 1.5], size).astype(np.float32),
    }


def make_data(size=64):
    columns = make_columns(size)
    labels = ((columns["user"] + columns["item"]) % 2).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((columns, labels)).batch(16)


def make_model(**settings):
    return DeepFM(FEATURES, **{"embedding_dim": 4, "hidden_units": (8, 4), "seed": 1, **settings})


def test_the_logit_is_first_order_plus_pairs_plus_deep_by_hand():
    model = DeepFM((CategoricalFeature("a", 2), CategoricalFeature("b", 2)), 2, hidden_units=(1,))
    model({"a": tf.constant([1]), "b": tf.constant([1])})
    model.field_embeddings.embeddings.assign([[9, 9], [1, 2], [9, 9], [3, 4]])
    model.field_embeddings.weights_table.assign([[9], [0.5], [9], [0.25]])
    hidden, output = model.deep.layers[1], model.output_layer
    hidden.set_weights([np.array([[1.0], [0.0], [0.0], [2.0]]), np.array([-1.0])])
    output.set_weights([np.array([[0.1]]), np.array([0.01])])
    logits = model({"a": tf.constant([1, 0]), "b": tf.constant([1, 1])})
    # First order 0.5 + 0.25; pair 1 * 3 + 2 * 4; deep 0.1 * relu(1 * 1 + 2 * 4 - 1) + 0.01.
    # With a = 0: 9 + 0.25; 9 * 3 + 9 * 4; 0.1 * relu(9 + 8 - 1) + 0.01.
    assert logits.numpy() == pytest.approx([0.75 + 11 + 0.8 + 0.01, 9.25 + 63 + 1.6 + 0.01])


def test_the_deep_part_shares_the_embeddings_of_the_factorization_machine():
    model = make_model()
    model(make_columns())
    names = [variable.name.split("/")[-1] for variable in model.trainable_variables]
    assert names == ["embeddings:0", "first_order:0", *["kernel:0", "bias:0"] * 3]
    assert tuple(model.trainable_variables[2].shape) == (4 * 4, 8)


def test_it_learns_an_interaction_of_two_fields():
    columns = {
        "a": np.repeat([0, 1], 64).astype(np.int32),
        "b": np.tile([0, 1], 64).astype(np.int32),
    }
    labels = (columns["a"] ^ columns["b"]).astype(np.float32)
    model = DeepFM(
        (CategoricalFeature("a", 2), CategoricalFeature("b", 2)), 4, hidden_units=(8,), seed=1
    )
    model.compile(optimizer=tf.keras.optimizers.Adam(0.05))
    data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(32)
    model.fit(data, epochs=60, verbose=0)
    assert model.evaluate(data, verbose=0) < 0.05


def test_one_seed_gives_one_start_and_another_seed_another():
    columns = make_columns()
    np.testing.assert_array_equal(make_model()(columns), make_model()(columns))
    assert (make_model()(columns).numpy() != make_model(seed=2)(columns).numpy()).any()


def test_dropout_acts_in_training_only():
    model, columns = make_model(dropout=0.5), make_columns()
    np.testing.assert_array_equal(model(columns, training=False), model(columns, training=False))
    assert (model(columns, training=True).numpy() != model(columns, training=False).numpy()).any()


def test_a_checkpoint_restores_weights_and_optimizer(tmp_path):
    model = make_model()
    model.compile(optimizer="adam")
    model.fit(make_data(), verbose=0)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    copy = make_model(seed=9)
    copy.compile(optimizer="adam")
    copy(make_columns())
    copy.optimizer.build(copy.trainable_variables)
    restored = tf.train.Checkpoint(model=copy, optimizer=copy.optimizer).restore(path)
    restored.assert_existing_objects_matched()
    np.testing.assert_array_equal(copy(make_columns()), model(make_columns()))
    model.fit(make_data(), verbose=0)
    copy.fit(make_data(), verbose=0)
    np.testing.assert_array_equal(copy(make_columns()), model(make_columns()))


def test_weights_survive_a_file(tmp_path):
    model = make_model()
    model(make_columns())
    model.save_weights(str(tmp_path / "weights"))
    copy = make_model(seed=9)
    copy.load_weights(str(tmp_path / "weights")).expect_partial()
    np.testing.assert_array_equal(copy(make_columns()), model(make_columns()))


@pytest.mark.parametrize("name, kind", [("model", "tf"), ("model.keras", "keras")])
def test_a_saved_model_loads_with_the_same_logits(tmp_path, name, kind):
    model = make_model(dropout=0.2, l2=0.01)
    model.compile(optimizer="adam")
    model.fit(make_data(), verbose=0)
    model.save(str(tmp_path / name), save_format=kind)
    copy = tf.keras.models.load_model(str(tmp_path / name), compile=False)
    assert isinstance(copy, DeepFM)
    assert copy.get_config() == model.get_config()
    np.testing.assert_array_equal(copy(make_columns()), model(make_columns()))


def test_an_export_serves_without_the_class(tmp_path):
    model = make_model()
    model.compile(optimizer="adam")
    model.fit(make_data(), verbose=0)
    model.save(str(tmp_path / "model"), save_format="tf")
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    columns = make_columns(5, seed=3)
    (logits,) = served(**{name: tf.constant(v) for name, v in columns.items()}).values()
    np.testing.assert_allclose(logits, model(columns), rtol=1e-6)


def test_predict_returns_the_logits():
    model, columns = make_model(), make_columns()
    np.testing.assert_allclose(model.predict(columns, verbose=0), model(columns), rtol=1e-5)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"embedding_dim": 0}, "expected embedding_dim to be at least 1, found 0"),
        ({"hidden_units": ()}, r"expected hidden_units to be positive integers, found \(\)"),
        (
            {"hidden_units": (8, 0)},
            r"expected hidden_units to be positive integers, found \(8, 0\)",
        ),
        ({"dropout": 1.0}, "expected dropout from 0 to below 1, found 1.0"),
        ({"l2": -0.1}, "expected l2 to be at least 0, found -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        make_model(**settings)
