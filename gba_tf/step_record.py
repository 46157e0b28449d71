"""What one step hands to its optimizers: recorded while the step is traced."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf


@dataclasses.dataclass
class OptimizerCall:
    """One recorded optimizer.apply_gradients(zip(gradients, variables), **options)."""

    optimizer: object
    variables: list[tf.Variable]
    gradients: list[tf.Tensor | tf.IndexedSlices]
    options: dict


@dataclasses.dataclass
class StateDelta:
    """A change of non-trainable state by the forward pass, such as a moving average."""

    variable: tf.Variable
    delta: tf.Tensor


class StepRecord:
    """The gradients of one traced step, in the order in which they were handed over."""

    def __init__(self):
        self.graph: tf.Graph | None = None
        self.calls: list[OptimizerCall] = []
        self.state_deltas: list[StateDelta] = []
        self._read: dict[int, tf.Tensor] = {}

    @property
    def trains(self) -> bool:
        return bool(self.calls)

    def variables(self) -> list[tf.Variable]:
        """The variables that change, in the order of `gradients()`."""
        trained = [variable for call in self.calls for variable in call.variables]
        return trained + [state.variable for state in self.state_deltas]

    def gradients(self) -> list[tf.Tensor | tf.IndexedSlices]:
        gradients = [gradient for call in self.calls for gradient in call.gradients]
        return gradients + [state.delta for state in self.state_deltas]

    def read_once(self, owner: object, read: Callable[[], tf.Tensor]) -> tf.Tensor:
        """The value that `owner` had at its first read in this step."""
        if id(owner) not in self._read:
            with self.graph.as_default():
                self._read[id(owner)] = read()
        return self._read[id(owner)]

    def add_call(self, call: OptimizerCall) -> None:
        """Raises RuntimeError where one token cannot stand for this call."""
        name = type(call.optimizer).__name__
        self._require_top_level(f"{name}.apply_gradients()")
        if any(call.optimizer is other.optimizer for other in self.calls):
            raise RuntimeError(
                f"{name}.apply_gradients() was called twice in one strategy.run(): the second"
                " gradient would be computed on parameters that the first one has not changed yet."
                " Call strategy.run() once for each update."
            )
        earlier = {id(variable) for variable in self.variables()}
        shared = [variable.name for variable in call.variables if id(variable) in earlier]
        if shared:
            raise RuntimeError(
                f"{name}.apply_gradients() updates {shared}, which another optimizer updates in the"
                " same strategy.run(). Give each optimizer variables of its own."
            )
        self.calls.append(call)

    def add_state_delta(self, state: StateDelta) -> None:
        """Raises RuntimeError inside a condition or loop, and for a second change."""
        self._require_top_level(f"The assignment to {state.variable.name}")
        if any(state.variable is other.variable for other in self.state_deltas):
            raise RuntimeError(
                f"{state.variable.name} is changed twice in one strategy.run(), for example by a"
                " layer that is called twice: the second change would be computed from the value"
                " before the first. Use a layer of its own for each call, or a layer without"
                " moving statistics."
            )
        self.state_deltas.append(state)

    def _require_top_level(self, what: str) -> None:
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise RuntimeError(
                f"{what} was called inside a tf.cond, a tf.while_loop or a tf.function of its own"
                " within strategy.run(). A token stands for exactly one gradient: call it at the"
                " top level of the function given to strategy.run()."
            )
