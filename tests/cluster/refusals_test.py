"""Steps whose updates would bypass the gradient buffer are refused, never trained by accident."""

import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.

keras = tf.keras


@pytest.fixture(scope="module")
def strategy(cluster):
    return cluster.strategy(1, 2, global_batch_size=2, local_batch_size=1)


class Training:
    """A variable, an optimizer, and a way to run a step on the worker."""

    def __init__(self, strategy):
        self._strategy = strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self.w = tf.Variable([1.0, 2.0], name="w")
            self.v = tf.Variable([3.0], name="v")
            self.optimizer = keras.optimizers.SGD(0.5)

    def gradient(self):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.w * self.w)
        return tape.gradient(loss, self.w)

    def apply(self, optimizer=None, **kwargs):
        (optimizer or self.optimizer).apply_gradients([(self.gradient(), self.w)], **kwargs)

    def run(self, step):
        self._coordinator.schedule(tf.function(lambda: self._strategy.run(step)))
        self._coordinator.join()


@pytest.fixture
def training(strategy):
    training = Training(strategy)
    before = strategy.stats()
    yield training
    # Whatever was refused has changed nothing.
    assert training.w.numpy().tolist() == [1.0, 2.0]
    assert training.v.numpy().tolist() == [3.0]
    assert strategy.stats() == before


def test_what_is_refused_here_is_otherwise_trained(strategy):
    training = Training(strategy)
    training.run(training.apply)
    assert strategy.stats().buffered == 1
    training.run(training.apply)
    # Both gradients are 2 w, on the same w.
    assert training.w.numpy().tolist() == [0.0, 0.0]
    assert strategy.stats().global_step == 1


def test_a_step_that_no_coordinator_schedules(training, strategy):
    with pytest.raises(RuntimeError, match=r"SGD.apply_gradients\(\) was called eagerly"):
        strategy.run(training.apply)


def test_a_model_that_runs_eagerly(training, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=[1])])
        model.compile("sgd", "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1]))).repeat()
    with pytest.raises(ValueError, match="eager"):
        model.fit(data, steps_per_epoch=2, verbose=0)


def test_an_optimizer_that_overrides_apply_gradients(training, strategy):
    class Doubling(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars], **kwargs)

    with strategy.scope():
        optimizer = Doubling(0.5)
    with pytest.raises(NotImplementedError, match=r"Doubling overrides apply_gradients\(\)"):
        training.run(lambda: training.apply(optimizer))


def test_an_optimizer_of_another_kind(training):
    class Own:
        def apply_gradients(self, gradient, variable):
            tf.distribute.get_replica_context().merge_call(self.merge, args=(variable, gradient))

        def merge(self, strategy, variable, gradient):
            strategy.extended.update(variable, lambda v, g: v.assign_sub(g), args=(gradient,))

    own = Own()
    with pytest.raises(NotImplementedError, match="Own updates variables on a path that GBA does"):
        training.run(lambda: own.apply_gradients(training.gradient(), training.w))


@pytest.mark.parametrize(
    "option", ["skip_gradients_aggregation", "experimental_aggregate_gradients"]
)
def test_gradients_that_are_not_to_be_aggregated(training, option):
    value = option == "skip_gradients_aggregation"
    with pytest.raises(NotImplementedError, match="was told to skip aggregation"):
        training.run(lambda: training.apply(**{option: value}))


def test_only_gradients_that_are_none(training):
    with pytest.raises(ValueError, match=r"expected at least one gradient, found None .*w:0"):
        training.run(lambda: training.optimizer.apply_gradients([(None, training.w)]))


def test_two_updates_by_one_optimizer_in_one_run(training):
    def step():
        training.apply()
        training.apply()

    with pytest.raises(RuntimeError, match=r"was called twice in one strategy.run\(\)"):
        training.run(step)


def test_two_optimizers_for_one_variable(training, strategy):
    with strategy.scope():
        other = keras.optimizers.Adam()

    def step():
        training.apply()
        training.apply(other)

    with pytest.raises(RuntimeError, match=r"Adam.*updates \['w:0'\], which another optimizer"):
        training.run(step)


@pytest.mark.parametrize("where", ["condition", "loop", "function"])
def test_apply_gradients_below_the_top_level(training, where):
    def apply():
        training.apply()
        return 0

    step = {
        "condition": lambda: tf.cond(tf.random.uniform([]) < 2.0, apply, lambda: 0),
        "loop": lambda: tf.while_loop(lambda i: i < 2, lambda i: [i + 1 + apply()], [0]),
        "function": lambda: tf.function(apply)(),
    }[where]
    with pytest.raises(RuntimeError, match="A token stands for exactly one gradient"):
        training.run(step)


def change(variable):
    variable.assign_sub(tf.ones_like(variable))
    return 0


WAYS_TO_CHANGE = {
    "directly": change,
    "in a condition": lambda v: tf.cond(tf.random.uniform([]) < 2.0, lambda: change(v), lambda: 0),
    "in a loop": lambda v: tf.while_loop(lambda i: i < 2, lambda i: [i + 1 + change(v)], [0]),
    "in a function": lambda v: tf.function(change)(v),
    "in a function in a condition": lambda v: tf.cond(
        tf.random.uniform([]) < 2.0, lambda: tf.function(change)(v), lambda: 0
    ),
    "in a function in a function": lambda v: tf.function(lambda: tf.function(change)(v))(),
    "by scatter": lambda v: v.scatter_sub(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))),
    "by a raw op": lambda v: tf.raw_ops.ResourceApplyGradientDescent(
        var=v.handle, alpha=1.0, delta=tf.ones_like(v)
    ),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("way", list(WAYS_TO_CHANGE))
def test_a_variable_that_the_step_changes(training, way, trains):
    def step():
        WAYS_TO_CHANGE[way](training.v)
        if trains:
            training.apply()

    with pytest.raises(RuntimeError, match="Variable v:0 is changed by the op .* in the step"):
        training.run(step)


def test_state_of_the_forward_pass_without_aggregation(training, strategy):
    with strategy.scope():
        state = tf.Variable([0.0], trainable=False, name="state")

    def step():
        state.assign_add([1.0])
        training.apply()

    with pytest.raises(
        RuntimeError, match="Variable state:0 is changed .*VariableAggregation.MEAN"
    ):
        training.run(step)
    assert state.numpy().tolist() == [0.0]


def test_a_model_made_outside_of_the_scope(strategy):
    w = tf.Variable([1.0])
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    training = Training(strategy)
    with pytest.raises(ValueError, match="created in this tf.distribute.Strategy.scope"):
        training.run(lambda: optimizer.apply_gradients([(tf.ones([1]), w)]))


def test_an_update_outside_of_strategy_run(training, strategy):
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = tf.function(lambda: training.v.assign_sub([1.0]))
    with pytest.raises(RuntimeError, match="Variable v:0 is changed by the op .* in the step"):
        coordinator.schedule(step)
    coordinator.join()


def test_a_step_that_the_chief_runs_itself(strategy):
    training = Training(strategy)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="Expected a training step to run on a worker"
    ):
        tf.function(lambda: strategy.run(training.apply))()
    assert strategy.stats(training.optimizer).issued == 0
    assert training.w.numpy().tolist() == [1.0, 2.0]


def test_skipping_aggregation_by_a_positional_argument(training):
    gradients_and_variables = lambda: [(training.gradient(), training.w)]  # noqa: E731
    with pytest.raises(NotImplementedError, match="told to skip aggregation"):
        training.run(
            lambda: training.optimizer.apply_gradients(gradients_and_variables(), None, True)
        )


def test_nadam_which_counts_in_python(training, strategy):
    with strategy.scope():
        nadam = keras.optimizers.Nadam()
    with pytest.raises(NotImplementedError, match="Nadam counts its steps in Python"):
        training.run(lambda: training.apply(nadam))


def test_state_whose_changes_cannot_be_averaged(training, strategy):
    with strategy.scope():
        state = tf.Variable(
            [0.0],
            trainable=False,
            name="state",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def step():
        state.assign_add([1.0])
        training.apply()

    with pytest.raises(RuntimeError, match="Variable state:0 is changed"):
        training.run(step)


@pytest.fixture
def moving_state(strategy):
    with strategy.scope():
        # Without a dtype: only the variable itself knows that it is a float.
        state = tf.Variable(
            tf.zeros([1]), trainable=False, name="s", aggregation=tf.VariableAggregation.MEAN
        )
    yield state
    assert state.numpy().tolist() == [0.0]


def test_state_that_is_changed_twice_in_a_step(training, moving_state):
    def step():
        moving_state.assign([3.0])
        moving_state.assign([5.0])
        training.apply()

    with pytest.raises(RuntimeError, match="s:0 is changed twice in one strategy.run"):
        training.run(step)


def test_state_that_is_changed_without_training(training, moving_state):
    with pytest.raises(RuntimeError, match=r"\['s:0'\] are changed in a strategy.run\(\) that"):
        training.run(lambda: moving_state.assign([77.0]))
