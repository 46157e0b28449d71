"""Makes tf-keras optimizers record their gradients while a GBA step is traced.

Synchronous training clips, decays and transforms the aggregated gradient, so the whole of
apply_gradients has to run after aggregation: a hook at merge_call, which optimizers reach after
clipping, would be too late. The hooks are installed once per process and do nothing outside a
worker's step of a GBAStrategy.
"""

import contextlib
import functools
import inspect

import tensorflow as tf

from gba_tf.step_record import OptimizerCall

_HOOKED = "_gba_tf_hooked"


@functools.cache
def install() -> None:
    """Hooks the classes of tf-keras that define apply_gradients."""
    from tf_keras.src.mixed_precision import loss_scale_optimizer
    from tf_keras.src.optimizers import optimizer
    from tf_keras.src.optimizers.legacy import optimizer_v2

    for optimizer_class in (
        optimizer.Optimizer,
        optimizer_v2.OptimizerV2,
        loss_scale_optimizer.LossScaleOptimizer,
        loss_scale_optimizer.LossScaleOptimizerV3,
    ):
        optimizer_class.apply_gradients = _recording(optimizer_class.apply_gradients)
    for scaling_class in (
        loss_scale_optimizer.LossScaleOptimizer,
        loss_scale_optimizer.LossScaleOptimizerV3,
    ):
        scaling_class.loss_scale = _read_once_per_step(scaling_class.loss_scale)
    loss_scale_optimizer.strategy_supports_loss_scaling = _supporting_gba(
        loss_scale_optimizer.strategy_supports_loss_scaling
    )


def _recording(apply_gradients):
    signature = inspect.signature(apply_gradients)

    @functools.wraps(apply_gradients)
    def record_or_apply(self, grads_and_vars, *args, **kwargs):
        context = gba_context()
        if context is None:
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        options = signature.bind(self, grads_and_vars, *args, **kwargs).arguments
        options.update(options.pop("kwargs", {}))
        del options["self"], options["grads_and_vars"]
        return _record(context, self, list(grads_and_vars), options)

    setattr(record_or_apply, _HOOKED, True)
    return record_or_apply


def _read_once_per_step(loss_scale: property) -> property:
    # The loss is multiplied and the gradient divided by it, and another worker's update may change
    # it in between.
    def read(self):
        context = gba_context()
        if context is None or context.record is None:
            return loss_scale.fget(self)
        return context.record.read_once(self, lambda: loss_scale.fget(self))

    return property(read, doc=loss_scale.__doc__)


def _supporting_gba(strategy_supports_loss_scaling):
    # tf-keras refuses parameter servers because their workers would unscale a gradient that another
    # worker scaled. Here every gradient is unscaled by the worker that scaled it, before the push.
    @functools.wraps(strategy_supports_loss_scaling)
    def supports():
        from gba_tf.strategy import GBAStrategy

        return isinstance(tf.distribute.get_strategy(), GBAStrategy) or (
            strategy_supports_loss_scaling()
        )

    return supports


def gba_context():
    from gba_tf.training import GBAReplicaContext

    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return None
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, GBAReplicaContext) else None


def _record(context, optimizer, grads_and_vars, options: dict):
    name = type(optimizer).__name__
    if not getattr(type(optimizer).apply_gradients, _HOOKED, False):
        raise NotImplementedError(
            f"{name} overrides apply_gradients(): GBA cannot tell what it does to a gradient before"
            " and what after aggregation. Expected an optimizer of tf.keras.optimizers or"
            " tf.keras.optimizers.legacy, or a subclass that overrides update_step() only."
        )
    inner = unwrapped(optimizer)
    if type(inner).__name__ == "Nadam" and not hasattr(inner, "_create_all_weights"):
        raise NotImplementedError(
            "tf.keras.optimizers.Nadam counts its steps in Python while it is traced, so its"
            " momentum schedule would stand still. Use tf.keras.optimizers.legacy.Nadam, Adam or"
            " AdamW."
        )
    if context.record is None:
        raise RuntimeError(
            f"{name}.apply_gradients() was called eagerly under GBAStrategy: expected it inside a"
            " tf.function that ClusterCoordinator.schedule() sends to a worker."
        )
    if options.get("skip_gradients_aggregation") or not options.get(
        "experimental_aggregate_gradients", True
    ):
        raise NotImplementedError(
            f"{name}.apply_gradients() was told to skip aggregation: under GBA every gradient is"
            " aggregated on the parameter servers. Leave the argument out."
        )
    gradients = [(g, v) for g, v in grads_and_vars if g is not None]
    if not gradients:
        raise ValueError(
            f"{name}.apply_gradients(): expected at least one gradient, found None for all of"
            f" {[variable.name for _, variable in grads_and_vars]}. Is the loss computed from these"
            " variables, inside the tape?"
        )
    # As apply_gradients does: only the legacy optimizers create no slots without a gradient.
    build(optimizer, [v for g, v in grads_and_vars if g is not None or hasattr(optimizer, "build")])
    context.record.add_call(
        OptimizerCall(
            optimizer=optimizer,
            variables=[variable for _, variable in gradients],
            gradients=[gradient for gradient, _ in gradients],
            options=options,
        )
    )
    return optimizer.iterations


def build(optimizer, variables) -> None:
    """Creates the slot variables on the parameter servers of their variables."""
    with tf.init_scope():
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
        else:
            _refuse_slots_of_whole_variables(unwrapped(optimizer), variables)
            _ = optimizer.iterations
            optimizer._create_all_weights(variables)


def _refuse_slots_of_whole_variables(optimizer, variables) -> None:
    """Refuses to train with fresh slots where Keras has restored some that it will not use.

    If the slots of shards do not exist yet when a checkpoint is restored, a legacy optimizer makes
    slots for the whole variables, and forgets them when those of the shards are made.
    """
    for variable in variables:
        if not hasattr(variable, "_sharded_container"):
            continue
        whole = variable._sharded_container()
        # What is there later is the whole variable itself, as a sign.
        if any(slot is not whole for slot in optimizer._slots.get(whole._unique_id, {}).values()):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"tf.keras.optimizers.legacy.{name}: a checkpoint was restored before the slots of"
                f" {variable.name} and other shards existed, so that they would start anew. Restore"
                " with gba_tf.TrainingCheckpoint, whose callback saves every epoch; or use"
                f" tf.keras.optimizers.{name}, or no variable_partitioner."
            )


def unwrapped(optimizer):
    """The optimizer that updates variables: what a loss-scale optimizer wraps, else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def merges_rows_first(optimizer) -> bool:
    """Whether an optimizer merges the repeated rows of a sparse gradient before all else.

    One that clips or transforms gradients does so first, and its norms see every occurrence.
    """
    inner = unwrapped(optimizer)
    names = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers")
    return not any(getattr(inner, name, None) for name in names)


@contextlib.contextmanager
def rows_merged(optimizer):
    """Spares the optimizer the merging of repeated rows, which the gradient buffer has merged."""
    inner = unwrapped(optimizer)
    if not merges_rows_first(optimizer) or not hasattr(inner, "_deduplicate_sparse_grad"):
        yield
        return
    inner._deduplicate_sparse_grad = lambda gradients: gradients
    try:
        yield
    finally:
        del inner._deduplicate_sparse_grad


def all_variables(optimizer) -> list[tf.Variable]:
    """Every variable of an optimizer, also the wrapper's own, such as a loss scale."""
    inner = unwrapped(optimizer)
    variables = optimizer.variables
    variables = list(variables() if callable(variables) else variables)
    for name in ("_iterations", "_learning_rate", "_current_learning_rate"):
        value = getattr(inner, name, None)
        if isinstance(value, tf.Variable):
            variables.append(value)
    if getattr(optimizer, "dynamic", False):
        # A dynamic loss scale keeps its own state out of the list of variables.
        variables += optimizer._loss_scale._weights.values()
    hyper = getattr(inner, "_hyper", None) or {}
    variables += [value for value in hyper.values() if isinstance(value, tf.Variable)]
    return variables
