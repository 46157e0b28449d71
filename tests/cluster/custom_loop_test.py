"""Custom training loops with ClusterCoordinator.schedule, where workers are many or tasks empty."""

import numpy as np
import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.

keras = tf.keras


def schedule(strategy, step, count):
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for _ in range(count):
        coordinator.schedule(step)
    coordinator.join()


@pytest.mark.parametrize("returns", [True, False])
def test_no_token_is_lost_where_nobody_dies(cluster, returns):
    strategy = cluster.strategy(2, 1, global_batch_size=4, local_batch_size=1)
    with strategy.scope():
        w = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.5)

    def compute():
        # Nothing in the step comes from its worker: no batch, and no result unless it is asked for.
        optimizer.apply_gradients([(tf.ones([2]), w)])
        return tf.reduce_sum(w)

    @tf.function
    def step():
        result = strategy.run(compute)
        return result if returns else None

    schedule(strategy, step, 48)
    stats = strategy.stats()
    assert (stats.issued, stats.applied, stats.lost, stats.outstanding) == (48, 48, 0, 0)
    np.testing.assert_allclose(w.numpy(), [1.0 - 12 * 0.5, 2.0 - 12 * 0.5])


def test_the_end_of_the_data_costs_no_token(cluster):
    strategy = cluster.strategy(1, 1, global_batch_size=2, local_batch_size=1)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        w = tf.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
    data = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(3))

    @tf.function
    def step(iterator):
        batch = next(iterator)
        strategy.run(lambda x: optimizer.apply_gradients([(tf.cast(x, tf.float32), w)]), (batch,))

    iterator = iter(data)
    for _ in range(3):
        coordinator.schedule(step, (iterator,))
    coordinator.join()
    with pytest.raises(tf.errors.OutOfRangeError):
        coordinator.schedule(step, (iterator,))
        coordinator.join()
    stats = strategy.stats()
    assert (stats.issued, stats.applied, stats.buffered, stats.lost) == (3, 2, 1, 0)
    assert float(w) == -0.5


def test_a_loss_scale_moves_where_the_first_task_owns_no_variable(cluster):
    strategy = cluster.strategy(1, 2, global_batch_size=1, local_batch_size=1)
    with strategy.scope():
        filler = tf.Variable(tf.zeros([1000]), name="filler")  # Fills up task 0.
        w = tf.Variable([1.0])
        inner = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))
        optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0)
    assert "task:0" in filler.device and "task:1" in w.device

    def step(gradient):
        run = tf.function(lambda: strategy.run(lambda: optimizer.apply_gradients([(gradient, w)])))
        schedule(strategy, run, 1)

    step(tf.constant([np.inf]))
    assert (float(w[0]), float(optimizer.loss_scale), int(optimizer.iterations)) == (1.0, 4.0, 1)
    step(tf.constant([1.0]))
    # The second update has half of the learning rate.
    assert (float(w[0]), float(optimizer.loss_scale), int(optimizer.iterations)) == (0.5, 4.0, 2)
    assert int(optimizer.dynamic_counter) == 1


def test_the_loss_scale_of_a_step_is_read_once(cluster):
    strategy = cluster.strategy(1, 1, global_batch_size=1, local_batch_size=1)
    with strategy.scope():
        w = tf.Variable([1.0])
        optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    same = []

    def compute():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(w * w))
        same.append(optimizer.loss_scale is optimizer.loss_scale)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [w]))
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    schedule(strategy, tf.function(lambda: strategy.run(compute)), 1)
    assert set(same) == {True}
    assert float(w[0]) == 0.0


def test_an_optimizer_leaves_no_gradients_behind_when_it_goes_on_with_other_variables(cluster):
    strategy = cluster.strategy(1, 1, global_batch_size=2, local_batch_size=1)
    with strategy.scope():
        w, u = tf.Variable([1.0]), tf.Variable([1.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([w, u])

    def step(*variables):
        pairs = [(tf.ones([1]), variable) for variable in variables]
        return tf.function(lambda: strategy.run(lambda: optimizer.apply_gradients(pairs)))

    schedule(strategy, step(w, u), 3)
    with pytest.raises(RuntimeError, match="to train other variables than before, while 1 grad"):
        schedule(strategy, step(w), 1)
    strategy.flush()
    schedule(strategy, step(w), 2)
    assert (float(w[0]), float(u[0]), int(optimizer.iterations)) == (-2.0, -1.0, 3)
    assert strategy.stats(optimizer).global_step == 3
