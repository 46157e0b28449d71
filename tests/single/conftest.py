"""Token servers, gradient buffers and variables in this process."""

import functools
import uuid

import pytest
import tensorflow as tf

from gba_tf.config import Policy
from gba_tf.ops.gradient_buffer import GradientBuffer, pack
from gba_tf.ops.token_server import TokenServer

CPU = "/device:CPU:0"


class Applied:
    """A server, a buffer and variables that an update function writes."""

    def __init__(self, run_id, specs, m=2, update=None, name="", policy=None, **options):
        self.server = TokenServer(CPU, run_id, name, policy or Policy("gba", m, 1))
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

    def pack(self, gradients):
        return pack(self.specs, gradients)

    def push_and_commit(self, task, gradients):
        token = self.server.take(tf.constant([task, 17], tf.int64))
        pushed = self.buffer.push(token, self.pack(gradients))
        return self.server.commit([pushed])

    def apply(self, decision):
        state = self._apply(decision)
        self.server.mark_applied(decision)
        return state


@pytest.fixture
def run_id():
    return uuid.uuid4().hex


@pytest.fixture
def make_server(run_id):
    """make_server(name, m, tolerance, run_id) -> TokenServer of this test's run."""

    def make(name="server", m=2, tolerance=1, run_id=run_id):
        return TokenServer(CPU, run_id, name, Policy("gba", m, tolerance))

    return make


@pytest.fixture
def make_applied(run_id):
    """make_applied(specs, m, update, name, policy, sparse_divisor) -> Applied of this run."""
    return functools.partial(Applied, run_id)
