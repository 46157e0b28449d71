"""Updates from token server and gradient buffer to variables, in one process."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.ops.gradient_buffer import GradientSpec, pack

DENSE = GradientSpec("dense", tf.float32, tf.TensorShape([2, 2]))
SPARSE = GradientSpec("sparse", tf.float64, tf.TensorShape([5, 2]), tf.int64)


def worker(task):
    return tf.constant([task, 17], tf.int64)


def slices(ids, rows, num_rows=5):
    ids = tf.constant(ids, tf.int64)
    return tf.IndexedSlices(tf.constant(rows, tf.float64), ids, [num_rows, 2])


def test_an_update_gets_the_mean_dense_and_sparse(make_applied):
    applied = make_applied([DENSE, SPARSE])
    applied.push_and_commit(
        0, [tf.constant([[1.0, 2.0], [3.0, 4.0]]), slices([4, 1, 4], [[1, 1], [2, 2], [10, 20]])]
    )
    decision = applied.push_and_commit(1, [tf.ones([2, 2]), slices([1, 0], [[4, 8], [6, 6]])])
    assert applied.apply(decision).shape == [1, 0]
    dense, sparse = (variable.numpy().tolist() for variable in applied.variables)
    assert dense == [[-1.0, -1.5], [-2.0, -2.5]]
    assert sparse == [[-3.0, -3.0], [-3.0, -5.0], [0.0, 0.0], [0.0, 0.0], [-5.5, -10.5]]
    assert applied.buffer.stats() == {"num_gradients": 0, "num_bytes": 0, "applied_steps": 1}


def test_a_row_can_be_divided_by_the_number_of_gradients_that_have_it(make_applied):
    applied = make_applied([SPARSE], sparse_divisor="gradients_with_row")
    applied.push_and_commit(0, [slices([4, 1], [[2, 4], [2, 2]])])
    applied.apply(applied.push_and_commit(1, [slices([1], [[4, 8]])]))
    expected = [[0, 0], [-3, -5], [0, 0], [0, 0], [-2, -4]]
    assert applied.variables[0].numpy().tolist() == expected


def test_a_decision_applied_twice_changes_variables_once(make_applied):
    applied = make_applied([DENSE], m=1)
    decision = applied.push_and_commit(0, [tf.ones([2, 2])])
    applied.apply(decision)
    applied.apply(decision)
    assert applied.variables[0].numpy().tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert applied.buffer.stats()["applied_steps"] == 1


def test_the_bits_of_a_sum_do_not_depend_on_the_order_of_the_pushes(make_applied):
    rng = np.random.default_rng(0)
    gradients = (rng.normal(size=[6, 2, 2]) * 10.0 ** rng.integers(-6, 6, [6, 1, 1])).astype("f4")
    results = []
    for order in (range(6), reversed(range(6)), [3, 0, 5, 1, 4, 2]):
        applied = make_applied([DENSE], m=6, name=f"{len(results)}")
        tokens = [applied.server.take(worker(task)) for task in range(6)]
        for index in order:
            applied.buffer.push(tokens[index], pack([DENSE], [tf.constant(gradients[index])]))
            decision = applied.server.commit([tokens[index]])
        applied.apply(decision)
        results.append(applied.variables[0].numpy())
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    assert np.any(total != np.flip(gradients, 0).sum(axis=0)), "the order matters here"
    for result in results:
        np.testing.assert_array_equal(result, -(total / np.float32(6)))


def test_updates_from_many_threads_are_applied_one_at_a_time_in_order(make_applied):
    # w <- 3 w + g modulo 1000003 depends on the order, and a mixed up read and write would show.
    spec = GradientSpec("w", tf.float64, tf.TensorShape([1]))
    w = tf.Variable([1.0], dtype=tf.float64)

    def update(gradient):
        value = 3.0 * w.read_value() + gradient
        # Long enough for the next update to be waiting.
        busy = tf.reduce_sum(tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64])))
        with tf.control_dependencies([busy]):
            w.assign(tf.math.floormod(value, 1000003.0))

    applied = make_applied([spec], m=1, update=update)
    num_threads, num_updates = 8, 25
    barrier = threading.Barrier(num_threads)
    errors = []

    def work(task):
        try:
            barrier.wait()
            for _ in range(num_updates):
                token = applied.server.take(worker(task))
                gradient = tf.cast(token[None] + 1, tf.float64)
                pushed = applied.buffer.push(token, pack([spec], [gradient]))
                # The order of the commits is not that of the tokens; the decision tells it.
                decision = applied.server.commit([pushed])
                closed.extend(closed_steps(decision.numpy()))
                applied.apply(decision)
        except Exception as error:
            errors.append(error)

    closed = []
    threads = [threading.Thread(target=work, args=(task,)) for task in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    total = num_threads * num_updates
    token_of_step = dict(closed)
    assert sorted(token_of_step) == list(range(total))
    expected = 1.0
    for step in range(total):
        # One in a stale step has weight 0, which leaves the gradient 0.
        token, weight = token_of_step[step]
        expected = (3.0 * expected + weight * (token + 1)) % 1000003
    assert w.numpy()[0] == expected
    stats = applied.server.stats()
    assert stats.applied + stats.decayed == stats.global_step == total
    assert applied.buffer.stats() == {
        "num_gradients": 0,
        "num_bytes": 0,
        "applied_steps": total,
    }


def closed_steps(decision):
    """(step, (id, weight)) for a decision of steps with one gradient each."""
    steps = decision[2:].reshape(-1, 5).tolist()
    return [(step, (token, weight)) for step, _, _, token, weight in steps]


def test_an_update_that_fails_says_so_and_is_not_run_again(make_applied):
    broken = tf.Variable(True)

    def update(gradient):
        check = tf.debugging.assert_equal(broken.read_value(), False, "the update is broken")
        with tf.control_dependencies([check]):
            w.assign_sub(gradient)

    w = tf.Variable(tf.zeros([4]))
    applied = make_applied([DENSE], m=1, update=update)
    decision = applied.push_and_commit(0, [tf.ones([2, 2])])
    with pytest.raises(tf.errors.InvalidArgumentError, match="the update is broken"):
        applied.apply(decision)
    assert applied.buffer.stats()["applied_steps"] == 0
    broken.assign(False)
    # It may have changed some variables already: running it again would do that twice.
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="update of global step 0 failed on .* restart training from a checkpoint.*is broken",
    ):
        applied.apply(decision)
    assert w.numpy().tolist() == [0.0] * 4


def test_what_was_never_taken_or_pushed_is_refused(make_applied):
    applied = make_applied([DENSE], m=1)
    with pytest.raises(tf.errors.NotFoundError, match="expected|Expected the id of a token"):
        applied.server.commit([tf.constant(7, tf.int64)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="found 0 and 1"):
        applied.server.commit([tf.constant(0, tf.int64), tf.constant(1, tf.int64)])
    decision = applied.server.commit([applied.server.take(worker(0))])
    with pytest.raises(tf.errors.NotFoundError, match="0"):
        applied.apply(decision)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected a decision"):
        applied.apply(tf.constant([1, 5, 0], tf.int64))
    with pytest.raises(tf.errors.FailedPreconditionError, match="Expected a closed global step"):
        applied.server.mark_applied(tf.constant([9, 1, 8, 1, 1, 8, 1], tf.int64))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("ids_dtype", [None, tf.int32, tf.int64])
def test_every_dtype_goes_through(make_applied, dtype, ids_dtype):
    spec = GradientSpec("v", dtype, tf.TensorShape([3, 2]), ids_dtype)
    applied = make_applied([spec])
    for task, values in enumerate(([[1, 2], [3, 4], [5, 6]], [[2, 2], [2, 2], [2, 2]])):
        gradient = tf.constant(values, dtype)
        if ids_dtype is not None:
            gradient = tf.IndexedSlices(gradient, tf.constant([0, 1, 2], ids_dtype), [3, 2])
        decision = applied.push_and_commit(task, [gradient])
    applied.apply(decision)
    found = tf.cast(applied.variables[0], tf.float64).numpy().tolist()
    assert found == [[-1.5, -2.0], [-2.5, -3.0], [-3.5, -4.0]]
