"""The ops of a training step in one process: token server, gradient buffer, updates."""

import threading
import uuid

import numpy as np
import pytest
import tensorflow as tf

from gba_tf.ops import library
from gba_tf.ops.gradient_buffer import GradientBuffer, GradientSpec, pack
from gba_tf.ops.token_server import TokenServer, worker_identity

CPU = "/device:CPU:0"
DENSE = GradientSpec("dense", tf.float32, tf.TensorShape([2, 2]))
SPARSE = GradientSpec("sparse", tf.float64, tf.TensorShape([5, 2]), tf.int64)


@pytest.fixture
def run_id():
    return uuid.uuid4().hex


def make_server(run_id, name="server", m=2, tolerance=1):
    return TokenServer(CPU, run_id, name, m, tolerance)


def worker(task):
    return tf.constant([task, 17], tf.int64)


def slices(ids, rows, num_rows=5):
    ids = tf.constant(ids, tf.int64)
    return tf.IndexedSlices(tf.constant(rows, tf.float64), ids, [num_rows, 2])


def counts(stats):
    return (
        stats.issued,
        stats.applied,
        stats.decayed,
        stats.lost,
        stats.outstanding,
        stats.buffered,
        stats.global_step,
    )


def test_the_second_of_two_commits_closes_the_step(run_id):
    server = make_server(run_id)
    first, second = server.take(worker(0)), server.take(worker(1))
    assert (int(first), int(second)) == (0, 1)
    # oldest live id, number of steps.
    assert server.commit([second]).numpy().tolist() == [0, 0]
    assert counts(server.stats()) == (2, 0, 0, 0, 1, 1, 0)
    # One step: 0, divisor 2, two ids 0 and 1, their weights.
    assert server.commit([first]).numpy().tolist() == [2, 1, 0, 2, 2, 0, 1, 1, 1]
    assert counts(server.stats()) == (2, 2, 0, 0, 0, 0, 1)
    assert server.stats().staleness == {0: 2}


def test_a_gradient_beyond_the_tolerance_is_decayed(run_id):
    server = make_server(run_id, m=1, tolerance=1)
    late = server.take(worker(0))
    for _ in range(2):
        server.mark_applied(server.commit([server.take(worker(1))]))
    # Its value is 0; it closes step 2.
    assert server.commit([late]).numpy().tolist() == [3, 1, 2, 1, 1, 0, 0]
    assert counts(server.stats()) == (3, 2, 1, 0, 0, 0, 3)
    # The others were issued while it was out, so they stand for one step later than they closed.
    assert server.stats().staleness == {-1: 2, 2: 1}


def test_flush_closes_a_partial_buffer_with_its_own_divisor(run_id):
    server = make_server(run_id, m=4)
    for task in range(3):
        server.commit([server.take(worker(task))])
    assert server.flush().numpy().tolist() == [3, 1, 0, 3, 3, 0, 1, 2, 1, 1, 1]
    assert counts(server.stats()) == (3, 3, 0, 0, 0, 0, 1)


def test_the_token_of_a_dead_worker_is_lost_and_its_gradient_dropped(run_id):
    server = make_server(run_id)
    buffer = GradientBuffer(CPU, run_id, "buffer", [DENSE])
    token = server.take(worker(3))
    buffer.push(token, pack([DENSE], [tf.ones([2, 2])]))
    # 64 bytes of header and 64 of values.
    assert buffer.stats() == {"num_gradients": 1, "num_bytes": 128, "applied_steps": 0}
    lost = server.give_up(3)
    assert lost.numpy().tolist() == [0]
    buffer.drop(lost)
    assert buffer.stats() == {"num_gradients": 0, "num_bytes": 0, "applied_steps": 0}
    assert server.give_up(3).numpy().tolist() == []
    # Should it be alive: its commit does not count.
    assert server.commit([token]).numpy().tolist() == [1, 0]
    assert counts(server.stats()) == (1, 0, 0, 1, 0, 0, 0)


def test_a_worker_that_takes_again_has_lost_its_token(run_id):
    server = make_server(run_id)
    server.take(worker(0))
    server.take(worker(0))
    assert counts(server.stats()) == (2, 0, 0, 1, 1, 0, 0)


def test_the_identity_of_a_process_does_not_change():
    assert worker_identity().shape == [2]
    assert worker_identity().numpy().tolist() == worker_identity().numpy().tolist()


class Applied:
    """A server, a buffer and variables that an update function writes."""

    def __init__(self, run_id, specs, m=2, update=None, name="", **options):
        self.server = make_server(run_id, name, m)
        self.buffer = GradientBuffer(CPU, run_id, name, specs, **options)
        self.specs = specs
        self.variables = [tf.Variable(tf.zeros(spec.shape, spec.dtype)) for spec in specs]
        signature = [argument for spec in specs for argument in spec.argument_specs()]
        function = tf.function(update or self.subtract, input_signature=signature, autograph=False)
        self.update = function.get_concrete_function()
        # Traced once, for whatever thread calls it.
        vector = tf.TensorSpec([None], tf.int64)
        self._apply = tf.function(self._apply_in_graph).get_concrete_function(vector)

    def subtract(self, *arguments):
        remaining = iter(arguments)
        for spec, variable in zip(self.specs, self.variables, strict=True):
            gradient = spec.from_arguments([next(remaining) for _ in spec.argument_specs()])
            if spec.sparse:
                variable.scatter_sub(gradient)
            else:
                variable.assign_sub(gradient)

    def _apply_in_graph(self, decision):
        return self.buffer.apply(decision, self.update, self.update.captured_inputs)

    def push_and_commit(self, task, gradients):
        token = self.server.take(worker(task))
        pushed = self.buffer.push(token, pack(self.specs, gradients))
        return self.server.commit([pushed])

    def apply(self, decision):
        state = self._apply(decision)
        self.server.mark_applied(decision)
        return state


def test_an_update_gets_the_mean_dense_and_sparse(run_id):
    applied = Applied(run_id, [DENSE, SPARSE])
    applied.push_and_commit(
        0, [tf.constant([[1.0, 2.0], [3.0, 4.0]]), slices([4, 1, 4], [[1, 1], [2, 2], [10, 20]])]
    )
    decision = applied.push_and_commit(1, [tf.ones([2, 2]), slices([1, 0], [[4, 8], [6, 6]])])
    assert applied.apply(decision).shape == [1, 0]
    dense, sparse = (variable.numpy().tolist() for variable in applied.variables)
    assert dense == [[-1.0, -1.5], [-2.0, -2.5]]
    assert sparse == [[-3.0, -3.0], [-3.0, -5.0], [0.0, 0.0], [0.0, 0.0], [-5.5, -10.5]]
    assert applied.buffer.stats() == {"num_gradients": 0, "num_bytes": 0, "applied_steps": 1}


def test_a_row_can_be_divided_by_the_number_of_gradients_that_have_it(run_id):
    applied = Applied(run_id, [SPARSE], sparse_divisor="gradients_with_row")
    applied.push_and_commit(0, [slices([4, 1], [[2, 4], [2, 2]])])
    applied.apply(applied.push_and_commit(1, [slices([1], [[4, 8]])]))
    expected = [[0, 0], [-3, -5], [0, 0], [0, 0], [-2, -4]]
    assert applied.variables[0].numpy().tolist() == expected


def test_a_decision_applied_twice_changes_variables_once(run_id):
    applied = Applied(run_id, [DENSE], m=1)
    decision = applied.push_and_commit(0, [tf.ones([2, 2])])
    applied.apply(decision)
    applied.apply(decision)
    assert applied.variables[0].numpy().tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert applied.buffer.stats()["applied_steps"] == 1


def test_the_bits_of_a_sum_do_not_depend_on_the_order_of_the_pushes(run_id):
    rng = np.random.default_rng(0)
    gradients = (rng.normal(size=[6, 2, 2]) * 10.0 ** rng.integers(-6, 6, [6, 1, 1])).astype("f4")
    results = []
    for order in (range(6), reversed(range(6)), [3, 0, 5, 1, 4, 2]):
        applied = Applied(run_id, [DENSE], m=6, name=f"{len(results)}")
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


def test_updates_from_many_threads_are_applied_one_at_a_time_in_order(run_id):
    # w <- 3 w + g modulo 1000003 depends on the order, and a mixed up read and write would show.
    spec = GradientSpec("w", tf.float64, tf.TensorShape([1]))
    w = tf.Variable([1.0], dtype=tf.float64)

    def update(gradient):
        value = 3.0 * w.read_value() + gradient
        # Long enough for the next update to be waiting.
        busy = tf.reduce_sum(tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64])))
        with tf.control_dependencies([busy]):
            w.assign(tf.math.floormod(value, 1000003.0))

    applied = Applied(run_id, [spec], m=1, update=update)
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


def test_an_update_that_fails_says_so_and_is_not_run_again(run_id):
    broken = tf.Variable(True)

    def update(gradient):
        check = tf.debugging.assert_equal(broken.read_value(), False, "the update is broken")
        with tf.control_dependencies([check]):
            w.assign_sub(gradient)

    w = tf.Variable(tf.zeros([4]))
    applied = Applied(run_id, [DENSE], m=1, update=update)
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


def test_the_state_of_a_server_and_a_buffer_survives_in_a_checkpoint(run_id):
    applied = Applied(run_id, [DENSE, SPARSE])
    gradients = [tf.ones([2, 2]), slices([1], [[2, 4]])]
    applied.push_and_commit(0, gradients)
    applied.apply(applied.push_and_commit(1, gradients))
    applied.push_and_commit(0, gradients)
    applied.server.take(worker(1))
    state = applied.server.serialize()
    ids, blocks, applied_steps = applied.buffer.serialize()
    assert (ids.numpy().tolist(), int(applied_steps)) == ([2], 1)

    restored = Applied(run_id, [DENSE, SPARSE], name="restored")
    restored.server.restore(state)
    restored.buffer.restore(ids, blocks, applied_steps)
    # Who held the outstanding token is not there any more.
    assert counts(restored.server.stats()) == (4, 2, 0, 1, 0, 1, 1)
    assert restored.buffer.stats() == applied.buffer.stats()
    restored.apply(restored.push_and_commit(5, gradients))
    assert restored.variables[0].numpy().tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert restored.variables[1].numpy()[1].tolist() == [-2.0, -4.0]
    assert restored.buffer.stats()["applied_steps"] == 2


def test_damaged_state_is_refused_and_changes_nothing(run_id):
    server, buffer = make_server(run_id), GradientBuffer(CPU, run_id, "buffer", [DENSE])
    server.take(worker(0))
    state = server.serialize()
    for damaged, message in [
        (tf.strings.substr(state, 0, 30), "damaged or truncated"),
        (tf.constant("token"), "expected at least 24 bytes, found 5"),
        (make_server(run_id, "of 3", m=3).serialize(), "with 2 gradients per update, found 3"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            server.restore(damaged)
    with pytest.raises(tf.errors.InvalidArgumentError):
        buffer.restore(tf.constant([0], tf.int64), tf.constant(["?"]), tf.constant(3, tf.int64))
    assert counts(server.stats()) == (1, 0, 0, 0, 1, 0, 0)
    assert buffer.stats()["applied_steps"] == 0


def test_a_new_run_releases_what_the_one_before_it_held(run_id):
    server = make_server(run_id)
    server.take(worker(0))
    assert make_server(run_id).stats().issued == 1
    make_server(run_id + "-next")
    with pytest.raises(tf.errors.NotFoundError, match="The parameter server was restarted"):
        server.take(worker(0))
    assert make_server(run_id).stats().issued == 0


def test_one_name_stands_for_one_form(run_id):
    make_server(run_id, m=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="with M = 3.*found.*M = 2"):
        make_server(run_id, m=3).stats()
    GradientBuffer(CPU, run_id, "buffer", [DENSE])
    with pytest.raises(tf.errors.InvalidArgumentError, match="found one for other variables"):
        GradientBuffer(CPU, run_id, "buffer", [SPARSE]).stats()


def test_wrong_gradients_are_refused(run_id):
    buffer = GradientBuffer(CPU, run_id, "buffer", [DENSE])
    token = make_server(run_id).take(worker(0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="[Ee]xpected"):
        buffer.push(token, pack([SPARSE], [slices([1], [[1, 1]])]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row.*5"):
        pack([SPARSE], [slices([5], [[1, 1]])])
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many values as ids"):
        pack([SPARSE], [slices([1, 2], [[1, 1]])])
    assert buffer.stats()["num_gradients"] == 0


def test_what_was_never_taken_or_pushed_is_refused(run_id):
    applied = Applied(run_id, [DENSE], m=1)
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


def test_shapes_are_known_in_a_graph(run_id):
    server, buffer = make_server(run_id), GradientBuffer(CPU, run_id, "buffer", [DENSE])
    shapes = {}

    @tf.function
    def graph():
        identity = worker_identity()
        token = server.take(identity)
        block = pack([DENSE], [tf.zeros([2, 2])])
        pushed = buffer.push(token, block)
        decision = server.commit([pushed])
        ops = library.load()
        stats, staleness = ops.gba_token_stats(token_server=server._handle)
        shapes.update(
            identity=identity.shape,
            block=block.shape,
            token=token.shape,
            pushed=pushed.shape,
            decision=decision.shape,
            lost=server.give_up(0).shape,
            stats=stats.shape,
            staleness=staleness.shape,
            buffer_stats=ops.gba_buffer_stats(buffer=buffer._handle).shape,
            state=server.serialize().shape,
            saved=[tensor.shape.as_list() for tensor in buffer.serialize()],
        )

    graph.get_concrete_function()
    saved = shapes.pop("saved")
    assert {name: shape.as_list() for name, shape in shapes.items()} == {
        "identity": [2],
        "block": [None],
        "token": [],
        "pushed": [],
        "decision": [None],
        "lost": [None],
        "stats": [8],
        "staleness": [None, 2],
        "buffer_stats": [3],
        "state": [],
    }
    assert saved == [[None], [None], []]


@pytest.mark.parametrize(
    "call",
    [
        lambda server, buffer: server.take(tf.constant(0, tf.int64)),
        lambda server, buffer: server.commit([tf.constant([0], tf.int64)]),
        lambda server, buffer: server.mark_applied(tf.constant(0, tf.int64)),
        lambda server, buffer: buffer.push(tf.constant([0], tf.int64), tf.zeros([64], tf.uint8)),
        lambda server, buffer: buffer.push(tf.constant(0, tf.int64), tf.zeros([], tf.uint8)),
        lambda server, buffer: buffer.drop(tf.constant(0, tf.int64)),
        lambda server, buffer: server.restore(tf.constant(["a"])),
    ],
)
def test_a_wrong_rank_is_refused_when_a_graph_is_built(run_id, call):
    server, buffer = make_server(run_id), GradientBuffer(CPU, run_id, "buffer", [DENSE])
    with pytest.raises(ValueError, match="Shape must be rank . but is rank ."):
        tf.function(lambda: call(server, buffer)).get_concrete_function()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("ids_dtype", [None, tf.int32, tf.int64])
def test_every_dtype_goes_through(run_id, dtype, ids_dtype):
    spec = GradientSpec("v", dtype, tf.TensorShape([3, 2]), ids_dtype)
    applied = Applied(run_id, [spec])
    for task, values in enumerate(([[1, 2], [3, 4], [5, 6]], [[2, 2], [2, 2], [2, 2]])):
        gradient = tf.constant(values, dtype)
        if ids_dtype is not None:
            gradient = tf.IndexedSlices(gradient, tf.constant([0, 1, 2], ids_dtype), [3, 2])
        decision = applied.push_and_commit(task, [gradient])
    applied.apply(decision)
    found = tf.cast(applied.variables[0], tf.float64).numpy().tolist()
    assert found == [[-1.5, -2.0], [-2.5, -3.0], [-3.5, -4.0]]


def test_a_gradient_spec_refuses_what_a_buffer_cannot_hold():
    with pytest.raises(ValueError, match="v:0: expected a gradient of one of .* found complex64"):
        GradientSpec.of(tf.zeros([2], tf.complex64), tf.Variable(tf.zeros([2]), name="v"))
    unknown = tf.Variable(tf.zeros([2]), name="v", shape=[None])
    with pytest.raises(ValueError, match="expected a fully defined shape"):
        GradientSpec.of(tf.zeros([2]), unknown)
