"""The ops of token servers and gradient buffers, in one process."""

import pytest
import tensorflow as tf

from gba_tf.ops import library
from gba_tf.ops.gradient_buffer import GradientBuffer, GradientSpec, pack
from gba_tf.ops.token_server import worker_identity

CPU = "/device:CPU:0"
DENSE = GradientSpec("dense", tf.float32, tf.TensorShape([2, 2]))
SPARSE = GradientSpec("sparse", tf.float64, tf.TensorShape([5, 2]), tf.int64)


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


def test_the_second_of_two_commits_closes_the_step(make_server):
    server = make_server()
    first, second = server.take(worker(0)), server.take(worker(1))
    assert (int(first), int(second)) == (0, 1)
    # oldest live id, number of steps.
    assert server.commit([second]).numpy().tolist() == [0, 0]
    assert counts(server.stats()) == (2, 0, 0, 0, 1, 1, 0)
    # One step: 0, divisor 2, two ids 0 and 1, their weights.
    assert server.commit([first]).numpy().tolist() == [2, 1, 0, 2, 2, 0, 1, 1, 1]
    assert counts(server.stats()) == (2, 2, 0, 0, 0, 0, 1)
    assert server.stats().staleness == {0: 2}


def test_a_gradient_beyond_the_tolerance_is_decayed(make_server):
    server = make_server(m=1, tolerance=1)
    late = server.take(worker(0))
    for _ in range(2):
        server.mark_applied(server.commit([server.take(worker(1))]))
    # Its value is 0; it closes step 2.
    assert server.commit([late]).numpy().tolist() == [3, 1, 2, 1, 1, 0, 0]
    assert counts(server.stats()) == (3, 2, 1, 0, 0, 0, 3)
    # The others were issued while it was out, so they stand for one step later than they closed.
    assert server.stats().staleness == {-1: 2, 2: 1}


def test_flush_closes_a_partial_buffer_with_its_own_divisor(make_server):
    server = make_server(m=4)
    for task in range(3):
        server.commit([server.take(worker(task))])
    assert server.flush().numpy().tolist() == [3, 1, 0, 3, 3, 0, 1, 2, 1, 1, 1]
    assert counts(server.stats()) == (3, 3, 0, 0, 0, 0, 1)


def test_flush_can_keep_the_partial_buffer(make_server):
    server = make_server(m=2)
    for task in range(3):
        server.commit([server.take(worker(task))])
    # Step 0 with tokens 0 and 1 is closed and not applied; token 2 stays in the buffer.
    assert server.flush(close_partial=False).numpy().tolist() == [2, 1, 0, 2, 2, 0, 1, 1, 1]
    assert counts(server.stats()) == (3, 2, 0, 0, 0, 1, 1)


def test_the_token_of_a_dead_worker_is_lost_and_its_gradient_dropped(make_server, run_id):
    server = make_server()
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


def test_a_worker_that_takes_again_has_lost_its_token(make_server):
    server = make_server()
    server.take(worker(0))
    server.take(worker(0))
    assert counts(server.stats()) == (2, 0, 0, 1, 1, 0, 0)


def test_the_identity_of_a_process_does_not_change():
    assert worker_identity().shape == [2]
    assert worker_identity().numpy().tolist() == worker_identity().numpy().tolist()


def test_a_new_run_releases_what_the_one_before_it_held(make_server, run_id):
    server = make_server()
    server.take(worker(0))
    assert make_server().stats().issued == 1
    make_server(run_id=run_id + "-next")
    with pytest.raises(
        tf.errors.NotFoundError, match="parameter server was restarted.*a newer run"
    ):
        server.take(worker(0))
    assert make_server().stats().issued == 0


def test_one_name_stands_for_one_form(make_server, run_id):
    make_server(m=2)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="policy gba with M = 3.*found.*gba with M = 2"
    ):
        make_server(m=3).stats()
    GradientBuffer(CPU, run_id, "buffer", [DENSE])
    with pytest.raises(tf.errors.InvalidArgumentError, match="found one for other variables"):
        GradientBuffer(CPU, run_id, "buffer", [SPARSE]).stats()


def test_wrong_gradients_are_refused(make_server, run_id):
    buffer = GradientBuffer(CPU, run_id, "buffer", [DENSE])
    token = make_server().take(worker(0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="[Ee]xpected"):
        buffer.push(token, pack([SPARSE], [slices([1], [[1, 1]])]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row.*5"):
        pack([SPARSE], [slices([5], [[1, 1]])])
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many values as ids"):
        pack([SPARSE], [slices([1, 2], [[1, 1]])])
    assert buffer.stats()["num_gradients"] == 0


def test_shapes_are_known_in_a_graph(make_server, run_id):
    server, buffer = make_server(), GradientBuffer(CPU, run_id, "buffer", [DENSE])
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
            flushed=server.flush().shape,
            staleness=staleness.shape,
            buffer_stats=ops.gba_buffer_stats(buffer=buffer._handle).shape,
            state=server.serialize().shape,
            worker_seconds=[
                tensor.shape.as_list()
                for tensor in ops.gba_worker_seconds(token_server=server._handle)
            ],
            saved=[tensor.shape.as_list() for tensor in buffer.serialize()],
        )

    graph.get_concrete_function()
    saved, seconds = shapes.pop("saved"), shapes.pop("worker_seconds")
    assert {name: shape.as_list() for name, shape in shapes.items()} == {
        "identity": [2],
        "block": [None],
        "token": [],
        "pushed": [],
        "decision": [None],
        "flushed": [None],
        "lost": [None],
        "stats": [9],
        "staleness": [None, 2],
        "buffer_stats": [3],
        "state": [],
    }
    assert saved == [[None], [None], []]
    assert seconds == [[None], [None], [None]]


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
def test_a_wrong_rank_is_refused_when_a_graph_is_built(make_server, run_id, call):
    server, buffer = make_server(), GradientBuffer(CPU, run_id, "buffer", [DENSE])
    with pytest.raises(ValueError, match="Shape must be rank . but is rank ."):
        tf.function(lambda: call(server, buffer)).get_concrete_function()


def test_a_gradient_spec_refuses_what_a_buffer_cannot_hold():
    with pytest.raises(ValueError, match="v:0: expected a gradient of one of .* found complex64"):
        GradientSpec.of(tf.zeros([2], tf.complex64), tf.Variable(tf.zeros([2]), name="v"))
    unknown = tf.Variable(tf.zeros([2]), name="v", shape=[None])
    with pytest.raises(ValueError, match="expected a fully defined shape"):
        GradientSpec.of(tf.zeros([2]), unknown)
