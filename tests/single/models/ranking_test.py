"""Tests of the step that ranking models share, against plain Keras."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.features import CategoricalFeature, NumericFeature
from gba_tf.models import DeepFM

FEATURES = (CategoricalFeature("a", 5), NumericFeature("x"))


def make_data(size=24):
    random = np.random.RandomState(0)
    columns = {
        "a": random.randint(0, 5, size).astype(np.int32),
        "x": random.normal(size=size).astype(np.float32),
    }
    return columns, random.randint(0, 2, size).astype(np.float32)


def make_model(**settings):
    return DeepFM(FEATURES, embedding_dim=4, hidden_units=(8,), seed=1, **settings)


def test_the_loss_is_the_mean_cross_entropy():
    columns, labels = make_data()
    model = make_model()
    logits = model(columns).numpy().astype(np.float64)
    probability = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(probability) + (1 - labels) * np.log(1 - probability))
    assert float(model.compute_loss((columns, labels))) == pytest.approx(expected, rel=1e-5)
    wide = labels[:, np.newaxis]
    assert float(model.compute_loss((columns, wide))) == pytest.approx(expected, rel=1e-5)


def test_sample_weights_weigh_examples():
    columns, labels = make_data(4)
    model = make_model()
    alone = [
        float(
            model.compute_loss(({k: v[i : i + 1] for k, v in columns.items()}, labels[i : i + 1]))
        )
        for i in range(4)
    ]
    weights = np.array([0.0, 1.0, 2.0, 0.5], np.float32)
    expected = float(np.dot(weights, alone)) / 4
    assert float(model.compute_loss((columns, labels, weights))) == pytest.approx(
        expected, rel=1e-5
    )


def test_the_loss_and_gradients_of_an_empty_batch_are_0():
    columns, labels = make_data(4)
    none = ({name: values[:0] for name, values in columns.items()}, labels[:0])
    model = make_model(l2=0.1)
    with tf.GradientTape() as tape:
        loss = tf.add_n([model.compute_loss(none, training=True), *model.losses])
    assert float(loss) == 0
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert not np.any(tf.convert_to_tensor(gradient))


def test_uneven_parts_with_weights_average_to_the_global_batch():
    columns, labels = make_data(10)
    model = make_model()
    # 3 workers got 6, 4 and 0 examples of 10; the weight of an example is 3 n_i / 10.
    losses = []
    for start, end, weight in ((0, 6, 1.8), (6, 10, 1.2), (10, 10, 0.0)):
        part = {name: values[start:end] for name, values in columns.items()}
        weights = np.full(end - start, weight, np.float32)
        losses.append(model.compute_loss((part, labels[start:end], weights)))
    expected = float(model.compute_loss((columns, labels)))
    assert np.mean(losses) == pytest.approx(expected, rel=1e-5)


def test_examples_of_weight_0_do_not_count_in_the_mean_loss():
    columns, labels = make_data(12)
    model = make_model()
    model.compile()
    # 8 examples, then 4 of which one fills up; the others make up for it.
    weights = np.array([1.0] * 8 + [4 / 3] * 3 + [0.0], np.float32)
    data = tf.data.Dataset.from_tensor_slices((columns, labels, weights)).batch(8)
    eleven = ({name: values[:11] for name, values in columns.items()}, labels[:11])
    expected = float(model.compute_loss(eleven))
    assert model.evaluate(data, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_fit_equals_gradient_descent_by_hand():
    columns, labels = make_data()
    model, reference = make_model(l2=0.1), make_model(l2=0.1)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.5))
    model.fit(tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8), epochs=1, verbose=0)
    for start in (0, 8, 16):
        batch = {name: values[start : start + 8] for name, values in columns.items()}
        with tf.GradientTape() as tape:
            logits = reference(batch)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels[start : start + 8], logits)
            loss = tf.reduce_mean(losses) + reference.losses[0]
        variables = reference.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * tf.convert_to_tensor(gradient))
    for value, expected in zip(model.trainable_variables, variables, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


def test_fit_and_validation_show_the_mean_loss_over_examples():
    columns, labels = make_data(20)
    model = make_model(l2=0.1)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.0))  # The weights stay.
    data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)  # 8, 8 and 4.
    history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    expected = float(model.compute_loss((columns, labels)))
    assert history == {
        "loss": pytest.approx([expected] * 2, rel=1e-5),
        "val_loss": pytest.approx([expected] * 2, rel=1e-5),
    }


def test_gradients_of_local_batches_average_to_that_of_the_global_batch():
    columns, labels = make_data()
    model = make_model(l2=0.1)

    def gradients(start, end):
        with tf.GradientTape() as tape:
            part = {name: values[start:end] for name, values in columns.items()}
            loss = model.compute_loss((part, labels[start:end])) + model.losses[0]
        return [
            tf.convert_to_tensor(gradient).numpy()
            for gradient in tape.gradient(loss, model.trainable_variables)
        ]

    local = [gradients(start, start + 6) for start in range(0, 24, 6)]
    for parts, expected in zip(zip(*local, strict=True), gradients(0, 24), strict=False):
        np.testing.assert_allclose(np.mean(parts, axis=0), expected, rtol=1e-4, atol=1e-7)


def test_evaluate_returns_the_mean_over_examples():
    columns, labels = make_data(20)
    model = make_model()
    model.compile()
    data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)  # 8, 8 and 4.
    expected = float(model.compute_loss((columns, labels)))
    for _ in range(2):
        assert model.evaluate(data, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_metrics_given_to_compile_see_probabilities():
    columns, labels = make_data()
    model = make_model()
    model.compile(optimizer="sgd", metrics=[tf.keras.metrics.BinaryAccuracy(name="accuracy")])
    data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)
    model.fit(data, verbose=0)
    result = model.evaluate(data, verbose=0, return_dict=True)
    expected = np.mean((model(columns).numpy() > 0) == (labels > 0.5))
    assert result["accuracy"] == pytest.approx(expected)


def test_the_mean_loss_is_the_only_state_besides_the_weights():
    columns, labels = make_data()
    model = make_model()
    model.compile(optimizer="adam")
    model.fit(tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8), verbose=0)
    assert len(model.trainable_variables) == 6
    assert [v.name for v in model.non_trainable_variables] == ["total:0", "count:0"]


def test_training_is_the_same_each_time_for_one_seed():
    columns, labels = make_data()
    weights = []
    for _ in range(2):
        model = make_model()
        model.compile(optimizer="adam")
        data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)
        model.fit(data, epochs=3, verbose=0)
        weights.append(model.get_weights())
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_mixed_precision_trains_with_a_scaled_loss():
    columns, labels = make_data()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model()
        model.compile(optimizer="adam")
        data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)
        before = float(model.compute_loss((columns, labels)))
        model.fit(data, epochs=20, verbose=0)
        after = model.evaluate(data, verbose=0)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    assert model(columns).dtype == tf.float32
    assert after < before


def test_two_replicas_train_as_one_device_does(tmp_path):
    # In a process of its own, as TensorFlow fixes the number of logical devices at its first use.
    program = textwrap.dedent("""
        import numpy as np
        from gba_tf.models import DeepFM
        from gba_tf.features import CategoricalFeature, NumericFeature
        import tensorflow as tf
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        random = np.random.RandomState(0)
        columns = {"a": random.randint(0, 5, 32), "x": random.normal(size=32).astype("float32")}
        labels = random.randint(0, 2, 32).astype("float32")
        results = []
        for strategy in (
            tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.distribute.get_strategy()
        ):
            with strategy.scope():
                features = (CategoricalFeature("a", 5), NumericFeature("x"))
                model = DeepFM(features, 4, hidden_units=(8,), l2=0.1, seed=1)
                model.compile(optimizer=tf.keras.optimizers.SGD(0.5))
            data = tf.data.Dataset.from_tensor_slices((columns, labels)).batch(8)
            model.fit(data, epochs=2, verbose=0)
            results.append([*model.get_weights(), model.evaluate(data, verbose=0)])
        for one, other in zip(*results):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    """)
    # Elsewhere than in the checkout, whose gba_tf would hide the installed one.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
