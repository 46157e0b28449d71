"""Saved and restored token servers and gradient buffers."""

import threading

import pytest
import tensorflow as tf

from gba_tf.ops.gradient_buffer import GradientBuffer, GradientSpec, pack
from gba_tf.ops.token_server import TokenStats

CPU = "/device:CPU:0"
DENSE = GradientSpec("dense", tf.float32, tf.TensorShape([2, 2]))
SPARSE = GradientSpec("sparse", tf.float64, tf.TensorShape([5, 2]), tf.int64)


def worker(task):
    return tf.constant([task, 17], tf.int64)


def test_the_state_of_a_server_and_a_buffer_survives_in_a_checkpoint(make_applied):
    applied = make_applied([DENSE, SPARSE])
    rows = tf.constant([[2.0, 4.0]], tf.float64)
    gradients = [tf.ones([2, 2]), tf.IndexedSlices(rows, tf.constant([1], tf.int64), [5, 2])]
    applied.push_and_commit(0, gradients)
    applied.apply(applied.push_and_commit(1, gradients))
    applied.push_and_commit(0, gradients)
    applied.server.take(worker(1))
    state = applied.server.serialize()
    ids, blocks, applied_steps = applied.buffer.serialize()
    assert (ids.numpy().tolist(), int(applied_steps)) == ([2], 1)

    restored = make_applied([DENSE, SPARSE], name="restored")
    restored.server.restore(state)
    restored.buffer.restore(ids, blocks, applied_steps)
    # Who held the outstanding token is not there any more.
    assert restored.server.stats() == TokenStats(4, 2, 0, 1, 0, 1, 1, {0: 2})
    assert restored.buffer.stats() == applied.buffer.stats()
    restored.apply(restored.push_and_commit(5, gradients))
    assert restored.variables[0].numpy().tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert restored.variables[1].numpy()[1].tolist() == [-2.0, -4.0]
    assert restored.buffer.stats()["applied_steps"] == 2


def test_damaged_state_is_refused_and_changes_nothing(make_server, run_id):
    server, buffer = make_server(), GradientBuffer(CPU, run_id, "buffer", [DENSE])
    server.take(worker(0))
    state = server.serialize()
    for damaged, message in [
        (tf.strings.substr(state, 0, 30), "damaged or truncated"),
        (tf.constant("token"), "expected at least 24 bytes, found 5"),
        (make_server("of 3", m=3).serialize(), "with 2 gradients per update, found 3"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            server.restore(damaged)
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.restore(tf.constant([0], tf.int64), tf.constant(["?"]), tf.constant(3, tf.int64))
    assert server.stats() == TokenStats(1, 0, 0, 0, 1, 0, 0, {})
    assert buffer.stats()["applied_steps"] == 0


def no_gradients(applied_steps=0):
    return (
        tf.zeros([0], tf.int64),
        tf.zeros([0], tf.string),
        tf.constant(applied_steps, tf.int64),
    )


def decision_of(step):
    """A step that token number `step` alone closed: its value is the step, and so is its id."""
    return tf.constant([step, 1, step, 1, 1, step, 1], tf.int64)


def test_a_restored_buffer_has_forgotten_what_an_inspection_found(run_id):
    buffer = GradientBuffer(CPU, run_id, "buffer", [DENSE])

    @tf.function(input_signature=DENSE.argument_specs(), autograph=False)
    def inspection(gradient):
        return [tf.io.serialize_tensor(tf.reduce_sum(gradient))]

    inspection = inspection.get_concrete_function()

    @tf.function
    def found():
        return buffer.inspect(decision_of(0), inspection)

    def push_and_inspect(value):
        buffer.push(tf.constant(0, tf.int64), pack([DENSE], [tf.fill([2, 2], value)]))
        return float(tf.io.parse_tensor(found()[0, 0], tf.float32))

    assert push_and_inspect(1.0) == 4.0
    # It is looked at once per timeline.
    assert push_and_inspect(2.0) == 4.0
    buffer.restore(*no_gradients())
    assert push_and_inspect(3.0) == 12.0


def test_a_restored_buffer_goes_on_after_an_update_that_failed(make_applied):
    broken = tf.Variable(True)
    w = tf.Variable(tf.zeros([4]))

    def update(gradient):
        check = tf.debugging.assert_equal(broken.read_value(), False, "the update is broken")
        with tf.control_dependencies([check]):
            w.assign_sub(gradient)

    applied = make_applied([DENSE], m=1, update=update)
    state = applied.server.serialize()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the update is broken"):
        applied.apply(applied.push_and_commit(0, [tf.ones([2, 2])]))
    broken.assign(False)
    applied.server.restore(state)
    applied.buffer.restore(*no_gradients())
    applied.apply(applied.push_and_commit(0, [tf.fill([2, 2], 3.0)]))
    assert w.numpy().tolist() == [-3.0] * 4
    assert applied.buffer.stats() == {"num_gradients": 0, "num_bytes": 0, "applied_steps": 1}


def test_a_restore_waits_for_the_update_that_is_running(make_applied):
    w = tf.Variable(tf.zeros([4]))
    started, go_on = threading.Event(), threading.Event()

    def wait():
        started.set()
        assert go_on.wait(60)

    def update(gradient):
        with tf.control_dependencies([tf.py_function(wait, [], [])]):
            w.assign_sub(gradient)

    applied = make_applied([DENSE], m=1, update=update)
    decision = applied.push_and_commit(0, [tf.ones([2, 2])])
    updating = threading.Thread(target=applied.apply, args=(decision,))
    updating.start()
    assert started.wait(60)
    restoring = threading.Thread(target=applied.buffer.restore, args=no_gradients(7))
    restoring.start()
    restoring.join(0.2)  # Time to do wrong.
    try:
        assert applied.buffer.stats()["applied_steps"] == 0
    finally:
        go_on.set()
        updating.join()
        restoring.join()
    # Had it not waited, the end of the update would have set 1.
    assert applied.buffer.stats()["applied_steps"] == 7
    assert w.numpy().tolist() == [-1.0] * 4
