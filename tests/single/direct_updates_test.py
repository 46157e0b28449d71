"""Ops that change a guarded variable are found wherever in a step they hide; reads are not."""

import pytest
import tensorflow as tf

from gba_tf import direct_updates


@pytest.fixture
def variables():
    return [tf.Variable([1.0, 2.0], name="guarded"), tf.Variable([1.0, 2.0], name="free")]


def check(step, guarded):
    def run():
        step()

    graph = tf.function(run, autograph=False).get_concrete_function().graph
    direct_updates.refuse(graph, {id(guarded.handle): guarded})


def flip():
    return tf.random.uniform([]) < 0.5


def wrapped(write):
    """The write at the top level, in a branch, a loop's body and its condition, in functions."""
    return {
        "top": write,
        "true branch": lambda: tf.cond(flip(), lambda: write() + 0, lambda: 0),
        "false branch": lambda: tf.cond(flip(), lambda: 0, lambda: write() + 0),
        "case": lambda: tf.switch_case(tf.constant(1), [lambda: 0, lambda: 1, lambda: write() + 0]),
        "body": lambda: tf.while_loop(lambda i: i < 3, lambda i: [i + 1 + write()], [0]),
        "loop condition": lambda: tf.while_loop(lambda i: i + write() < 3, lambda i: [i + 1], [0]),
        "function": lambda: tf.function(write)(),
        "function in a branch in a function": lambda: tf.function(
            lambda: tf.cond(flip(), lambda: tf.function(write)() + 0, lambda: 0)
        )(),
        "mapped function": lambda: tf.map_fn(lambda i: i + write(), tf.range(3)),
    }


PLACES = list(wrapped(None))


@pytest.mark.parametrize("place", PLACES)
def test_a_write_is_found(variables, place):
    guarded, free = variables

    def write():
        free.read_value()
        guarded.assign_add(tf.ones([2]))
        return 0

    with pytest.raises(RuntimeError, match="Variable guarded:0 is changed .* bypass the gradient"):
        check(wrapped(write)[place], guarded)


@pytest.mark.parametrize("place", PLACES)
def test_reading_it_and_writing_another_is_allowed(variables, place):
    guarded, free = variables

    def write():
        free.assign_add(guarded.read_value() * tf.gather(guarded, [0, 1]))
        return tf.shape(guarded)[0] * 0

    check(wrapped(write)[place], guarded)


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.assign(tf.ones([2])),
        lambda v: v.assign_sub(tf.ones([2])),
        lambda v: v.scatter_add(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))),
        lambda v: v.scatter_max(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))),
        lambda v: v.scatter_nd_sub([[0]], [1.0]),
        lambda v: v[:1].assign([3.0]),
        lambda v: tf.raw_ops.ResourceApplyAdagradV2(
            var=v.handle, accum=v.handle, lr=1.0, epsilon=1.0, grad=tf.ones([2])
        ),
    ],
)
def test_every_kind_of_write_is_found(variables, write):
    with pytest.raises(RuntimeError, match="Variable guarded:0 is changed"):
        check(lambda: write(variables[0]), variables[0])


def test_a_slot_position_other_than_the_first_is_found(variables):
    guarded, free = variables
    with pytest.raises(RuntimeError, match="Variable guarded:0 is changed"):
        check(
            lambda: tf.raw_ops.ResourceApplyMomentum(
                var=free.handle, accum=guarded.handle, lr=1.0, grad=tf.ones([2]), momentum=0.9
            ),
            guarded,
        )
