"""Tests of the factorization machine's second-order term."""

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.models.interaction import FactorizationMachine


def test_two_fields_give_their_inner_product():
    # <(1, 2), (3, 4)> = 11 and <(0.5, -1), (2, 3)> = -2.
    embeddings = tf.constant([[[1.0, 2.0], [3.0, 4.0]], [[0.5, -1.0], [2.0, 3.0]]])
    assert FactorizationMachine()(embeddings).numpy().tolist() == [11.0, -2.0]


def test_three_fields_give_the_sum_over_their_pairs():
    # <a, b> + <a, c> + <b, c> = 11 + (-1) + (-1) for a = (1, 2), b = (3, 4), c = (1, -1).
    embeddings = tf.constant([[[1.0, 2.0], [3.0, 4.0], [1.0, -1.0]]])
    assert FactorizationMachine()(embeddings).numpy().tolist() == [9.0]


def test_many_fields_give_the_double_sum_of_equation_2():
    values = np.random.RandomState(0).normal(size=(4, 7, 5))
    expected = np.zeros(4)
    for i in range(7):
        for j in range(i + 1, 7):
            expected += (values[:, i] * values[:, j]).sum(axis=1)
    result = FactorizationMachine(dtype="float64")(tf.constant(values))
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_one_field_has_no_pairs():
    assert FactorizationMachine()(tf.constant([[[3.0, 4.0]]])).numpy() == pytest.approx([0.0])


def test_the_layer_survives_its_configuration():
    layer = FactorizationMachine(name="fm")
    copy = tf.keras.layers.deserialize(tf.keras.layers.serialize(layer))
    assert type(copy) is FactorizationMachine
    assert copy.name == "fm"
