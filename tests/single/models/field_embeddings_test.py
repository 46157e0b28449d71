"""Tests of the embeddings of fields, against rows looked up by hand."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

from gba_tf.features import CategoricalFeature, MultiCategoricalFeature, NumericFeature
from gba_tf.models.field_embeddings import FieldEmbeddings

# Rows of the tables: city 0-2, price 3 and 4 (missing), tags 5-8, age 9.
FEATURES = (
    CategoricalFeature("city", 3),
    NumericFeature("price", missing_value=-1.0),
    MultiCategoricalFeature("tags", 4, max_length=3),
    NumericFeature("age"),
)
TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)
WEIGHTS = np.arange(10, dtype=np.float32).reshape(10, 1) * 10
INPUTS = {
    "city": np.array([2, 0], np.int32),
    "price": np.array([0.5, -1.0], np.float32),
    "tags": np.array([[1, 3, -1], [-1, -1, -1]], np.int32),
    "age": np.array([2.0, 0.0], np.float32),
}


def make_layer(features=FEATURES, table=TABLE, weights=WEIGHTS, **settings):
    layer = FieldEmbeddings(features, table.shape[1], **settings)
    layer.build(None)
    layer.embeddings.assign(table)
    layer.weights_table.assign(weights)
    return layer


def test_each_kind_of_field_is_looked_up_in_its_rows():
    first_order, embeddings = make_layer()(INPUTS)
    expected = [
        # City 2: row 2. Price: 0.5 * row 3. Tags: mean of rows 6 and 8. Age: 2 * row 9.
        [[4, 5], [3, 3.5], [14, 15], [36, 38]],
        # City 0: row 0. Price missing: row 4. No tags: zero. Age: 0 * row 9.
        [[0, 1], [8, 9], [0, 0], [0, 0]],
    ]
    np.testing.assert_array_equal(embeddings, expected)
    np.testing.assert_array_equal(first_order, [[20, 15, 70, 180], [0, 40, 0, 0]])


def test_there_are_two_variables_however_many_fields():
    layer = make_layer()
    assert layer.num_rows == 10
    assert [layer.first_row(feature.name) for feature in FEATURES] == [0, 3, 5, 9]
    assert [tuple(v.shape) for v in layer.trainable_variables] == [(10, 2), (10, 1)]
    assert layer.non_trainable_variables == []


@pytest.mark.parametrize("bad", [3, -1, 2**32 + 2, -(2**40)])
def test_an_id_out_of_range_counts_as_id_0_of_its_own_field(bad):
    inputs = {
        **INPUTS,
        "city": np.array([bad, 1], np.int64),
        "tags": np.array([[1, 4, -1], [-2, -1, -1]], np.int64),
    }
    first_order, embeddings = make_layer()(inputs)
    np.testing.assert_array_equal(embeddings[:, 0], [[0, 1], [2, 3]])
    # Tags of the first example: mean of rows 6 and 5; of the second: row 5.
    np.testing.assert_array_equal(embeddings[:, 2], [[11, 12], [10, 11]])
    np.testing.assert_array_equal(first_order[:, 2], [55, 50])


def test_columns_of_shape_batch_by_1_are_taken_too():
    wide = {name: v if v.ndim == 2 else v[:, np.newaxis] for name, v in INPUTS.items()}
    for one, other in zip(make_layer()(wide), make_layer()(INPUTS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_over_distinct_rows():
    features = (CategoricalFeature("a", 4), CategoricalFeature("b", 4), NumericFeature("x"))
    layer = make_layer(features, np.ones((9, 2), np.float32), np.ones((9, 1), np.float32))
    inputs = {
        "a": tf.constant([3, 3, 1]),
        "b": tf.constant([3, 3, 3]),
        "x": tf.constant([1.0, 2.0, 4.0]),
    }
    with tf.GradientTape() as tape:
        first_order, embeddings = layer(inputs)
        total = tf.reduce_sum(first_order) + tf.reduce_sum(embeddings)
    for gradient in tape.gradient(total, layer.trainable_variables):
        assert isinstance(gradient, tf.IndexedSlices)
        counts = dict(
            zip(
                gradient.indices.numpy().tolist(),
                gradient.values[:, 0].numpy().tolist(),
                strict=True,
            )
        )
        # Row 3 is a = 3 twice, row 1 is a = 1, row 7 is b = 3 three times, row 8 is x: 1 + 2 + 4.
        assert counts == {3: 2.0, 1: 1.0, 7: 3.0, 8: 7.0}
        assert len(gradient.indices) == 4


def test_numeric_fields_alone_need_no_ids():
    layer = make_layer((NumericFeature("x"),), np.array([[2.0, 3.0]]), np.array([[5.0]]))
    first_order, embeddings = layer({"x": tf.constant([2.0])})
    assert first_order.numpy().tolist() == [[10.0]]
    assert embeddings.numpy().tolist() == [[[4.0, 6.0]]]


def test_l2_is_the_mean_over_examples_of_their_squares():
    features = (CategoricalFeature("a", 3),)
    table = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
    layer = make_layer(features, table, np.array([[0.0], [1.0], [2.0]]), l2=0.1)
    layer({"a": tf.constant([1, 2, 2, 2])})
    # 0.1 * ((1 + 4 + 1) + 3 * (9 + 16 + 4)) / 4.
    assert float(layer.losses[0]) == pytest.approx(0.1 * (6 + 3 * 29) / 4)


def test_a_partitioned_table_gives_the_same_rows():
    layer = make_layer()
    layer.embeddings = ShardedVariable([tf.Variable(TABLE[:5]), tf.Variable(TABLE[5:])])
    _, embeddings = layer(INPUTS)
    _, expected = make_layer()(INPUTS)
    np.testing.assert_array_equal(embeddings, expected)


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"expected the features \['age'\] in the inputs"):
        make_layer()({name: INPUTS[name] for name in ("city", "price", "tags")})


def test_a_width_that_contradicts_the_model_is_refused():
    with pytest.raises(
        ValueError, match="'a': expected embedding_dim 4 as in the model, .*found 8"
    ):
        FieldEmbeddings([CategoricalFeature("a", 3, embedding_dim=8)], 4)
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31 rows in all fields"):
        FieldEmbeddings([CategoricalFeature("a", 2**30), CategoricalFeature("b", 2**30)], 4)


def test_the_layer_survives_its_configuration():
    layer = FieldEmbeddings(FEATURES, 2, l2=0.5, seed=3)
    copy = tf.keras.layers.deserialize(tf.keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()
    copy.build(None)
    layer.build(None)
    np.testing.assert_array_equal(copy.embeddings, layer.embeddings)
