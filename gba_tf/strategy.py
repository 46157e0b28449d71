"""[1] GBAStrategy: places variables, and creates the token server and the gradient buffers."""

import atexit
import itertools
import threading
import uuid
import weakref

import tensorflow as tf
from absl import logging
from tensorflow.python.distribute import (
    distribute_lib,
    input_util,
    parameter_server_strategy_v2,
)
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.framework import ops

from gba_tf import coordination, input_data, legacy_keras, optimizer_hooks, training
from gba_tf.apply import UpdateGroup
from gba_tf.config import DEFAULT_STALENESS_TOLERANCE, GBAConfig, Policy, SparseDivisor
from gba_tf.ops import library
from gba_tf.ops.token_server import TokenStats
from gba_tf.placement import BalancedPlacement, ps_device
from gba_tf.state_variable import StateVariable

# One process is one run: parameter servers release what they hold of earlier runs.
_RUN_ID = uuid.uuid4().hex
# Under these a worker may wait for another one, and must not wait for one that has no work.
_POLICIES_THAT_WAIT = ("hop_bs", "hop_bw")
_NO_TOKENS = TokenStats(0, 0, 0, 0, 0, 0, 0, {})


class GBAStrategy(parameter_server_strategy_v2.ParameterServerStrategyV2):
    """Trains over parameter servers with the updates of synchronous training.

    Workers never wait for each other. G / B gradients of B examples each, from whichever workers
    are fast, make up one update, `sum(w * g) / (G / B)`; a gradient that is later than the
    staleness tolerance has weight w = 0. With nobody late, parameters and optimizer slots equal
    those of training in one process with batches of G. Source: arXiv 2205.11048, section 4.

    Use it like tf.distribute.ParameterServerStrategy, on the chief, with Model.fit or
    tf.distribute.coordinator.ClusterCoordinator; nothing else changes:

        strategy = gba_tf.GBAStrategy(global_batch_size=2048, local_batch_size=512)
        with strategy.scope():
            model = ...
            model.compile(optimizer="adam", loss=...)
        model.fit(dataset_of_local_batches, steps_per_epoch=..., epochs=...)

    Args:
      cluster_resolver: Of the chief. None takes it from TF_CONFIG, and in the tasks that are not
        the chief, serves and does not return.
      global_batch_size: G, examples per update.
      local_batch_size: B, examples per gradient: the batch size of the dataset. A divisor of G.
      staleness_tolerance: iota, in global steps. Default 4.
      variable_partitioner: As in tf.distribute.ParameterServerStrategy; shards large tables.
      sparse_divisor: See GBAConfig.
      policy: Another rule for the token server than GBA's; `gba_tf.create_strategy` makes it for
        the other modes. Default: "gba" with M = G / B and the staleness tolerance.

    Raises:
      ValueError: Sizes that do not fit (GBAConfig), or a cluster without chief, worker or ps.
      NotImplementedError: A worker has more than one GPU.
      ImportError: The op library is missing, or tf.keras is Keras 3.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        global_batch_size: int,
        local_batch_size: int,
        staleness_tolerance: int = DEFAULT_STALENESS_TOLERANCE,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
        sparse_divisor: SparseDivisor = "gradients_per_update",
        policy: Policy | None = None,
    ):
        self.config = GBAConfig(
            global_batch_size, local_batch_size, staleness_tolerance, sparse_divisor
        )
        self.policy = policy or Policy("gba", self.config.gradients_per_update, staleness_tolerance)
        legacy_keras.require()
        library.load()
        optimizer_hooks.install()
        if cluster_resolver is None:
            from gba_tf import cluster

            cluster_config = cluster.ClusterConfig.from_env()
            if cluster_config is None:
                raise ValueError(
                    "GBAStrategy: expected a cluster_resolver, or TF_CONFIG in the environment;"
                    " found neither. Start the program with scripts/launch_local.py, or set"
                    " TF_CONFIG in every task of the cluster."
                )
            cluster.serve_if_not_chief(cluster_config)
            cluster_resolver = cluster.cluster_resolver(cluster_config)

        # What ParameterServerStrategyV2.__init__ does, with an extended of our own.
        self._cluster_resolver = cluster_resolver
        self._verify_args_and_config(cluster_resolver)
        self._cluster_coordinator = None
        self._connect_to_cluster(coordinator_name="chief")
        extended = GBAExtended(self, cluster_resolver, variable_partitioner)
        distribute_lib.Strategy.__init__(self, extended)
        self._should_use_with_coordinator = True
        self._canonicalize_devices = False
        self._is_parameter_server_strategy_v2 = True

        self._groups: dict[tuple, UpdateGroup] = {}
        # Not the number of groups: one that was refused may have left its name on the servers.
        self._group_numbers = itertools.count()
        self._groups_lock = threading.RLock()
        self._name = uuid.uuid4().hex
        coordinator = cluster_coordinator.ClusterCoordinator(self)
        input_data.share_datasets(coordinator, self.extended._num_workers)
        coordination.report_dead_workers(coordinator, self._give_up)
        coordination.check_steps(coordinator, self.extended.guarded_variables)
        if self.policy.name in _POLICIES_THAT_WAIT:
            coordination.report_idle_workers(coordinator, self._join, self._leave)
            coordination.refuse_mixed_steps(coordinator, self.policy.name, self._groups_of)
        atexit.register(_call_if_alive, weakref.WeakMethod(self._warn_of_leftovers))

    def update_group(self, record) -> UpdateGroup:
        """The group of a traced step, created at its first trace."""
        key = UpdateGroup.key(record)
        with self._groups_lock:
            if key not in self._groups:
                self._refuse_leftovers_of(record)
                name = f"{self._name}/{next(self._group_numbers)}"
                num_ps = self.extended._num_ps
                with tf.init_scope():
                    self._groups[key] = UpdateGroup(
                        self.policy, self.config.sparse_divisor, _RUN_ID, name, record, num_ps
                    )
            return self._groups[key]

    def trained_variables(self, record) -> dict[int, tf.Variable]:
        """id of the handle -> variable, for what only an update may change."""
        if not record.trains:
            return self.extended.guarded_variables
        return {**self.extended.guarded_variables, **self.extended.unaggregated_state}

    def stats(self, optimizer=None) -> TokenStats:
        """What became of the tokens, the staleness histogram, and the global step k.

        Args:
          optimizer: Whose updates; needed only where several models or optimizers are trained by
            steps of their own. Default: the one whose training started last.

        Returns:
          TokenStats. All zero before the first step.

        Raises:
          ValueError: No training step uses this optimizer.
        """
        groups = self.update_groups()
        if optimizer is not None:
            groups = [g for g in groups if any(o is optimizer for o in g.optimizers)]
            if not groups:
                raise ValueError(
                    f"stats: expected an optimizer that was trained under this strategy, found"
                    f" {optimizer!r}."
                )
        return groups[-1].stats() if groups else _NO_TOKENS

    def flush(self) -> None:
        """Ends training: applies what is left in the buffers, divided by its own number.

        Fewer than G / B gradients can be left when training ends. They are kept, and the next fit()
        goes on with them, until this is called; the update it makes counts as a global step. Waits
        for steps that are scheduled.
        """
        self.settle(close_partial=True)

    def settle(self, close_partial: bool) -> None:
        """Waits for scheduled steps, and applies every closed step that is not applied yet.

        Args:
          close_partial: Whether what is left in the buffers is closed and applied too, as by
            `flush`. If not, it is kept.
        """
        self._cluster_coordinator.join()
        for group in self.update_groups():
            # Nothing is scheduled: what is still out belongs to workers that died.
            for worker_task in range(self.extended._num_workers):
                group.give_up(worker_task)
            group.flush(close_partial)

    def variable_bytes_per_ps(self) -> tuple[int, ...]:
        """Bytes of model variables on each parameter server task."""
        return self.extended.placement.bytes_per_task

    def update_groups(self) -> list[UpdateGroup]:
        """Those of the steps that were traced so far."""
        with self._groups_lock:
            return list(self._groups.values())

    def _groups_of(self, function) -> tuple[UpdateGroup, ...]:
        """Those that a concrete function takes tokens of."""
        groups = self.update_groups()
        return tuple(group for group in groups if group.token_server.gives_tokens_to(function))

    def _refuse_leftovers_of(self, record) -> None:
        """An optimizer that goes on with other variables must not leave gradients behind."""
        optimizers = [call.optimizer for call in record.calls]
        for group in self._groups.values():
            if not any(mine is theirs for mine in optimizers for theirs in group.optimizers):
                continue
            with tf.init_scope():
                left = group.stats().buffered
            if left:
                raise RuntimeError(
                    f"{type(group.optimizers[0]).__name__} is to train other variables than before,"
                    f" while {left} gradients of the earlier ones wait for an update. Call"
                    " strategy.flush() first, or use an optimizer for each set of variables."
                )

    def _give_up(self, worker_task: int) -> None:
        for group in self.update_groups():
            group.give_up(worker_task)

    def _join(self, worker_task: int) -> None:
        for group in self.update_groups():
            group.token_server.join(worker_task)

    def _leave(self, worker_task: int) -> None:
        for group in self.update_groups():
            group.token_server.leave(worker_task)

    def _warn_of_leftovers(self) -> None:
        """At the end of the process: gradients are never forgotten silently."""
        try:
            left = sum(
                stats.buffered
                for group in self.update_groups()
                if (stats := group.stats()).issued != group.issued_when_saved
            )
        except tf.errors.OpError:
            return  # The parameter servers are gone, and somebody has said so.
        if left:
            logging.warning(
                "%d gradients are left in the buffers and are part of no update. Call"
                " strategy.flush() after the last fit() to apply them.",
                left,
            )


class GBAExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):
    """Where TensorFlow asks the strategy: how to create a variable, how to run a step."""

    def __init__(self, strategy: GBAStrategy, cluster_resolver, variable_partitioner):
        super().__init__(strategy, cluster_resolver, variable_partitioner)
        if self._num_gpus_per_worker > 1:
            raise NotImplementedError(
                f"GBAStrategy: expected at most one GPU per worker, found"
                f" {self._num_gpus_per_worker}. Start one worker per GPU, each with its own"
                " CUDA_VISIBLE_DEVICES."
            )
        self.placement = BalancedPlacement(self._num_ps)
        # Only an update may change these: trainable variables, and state moved by the forward pass.
        self.guarded_variables = weakref.WeakValueDictionary()
        # Nor may a training step change these: nobody said how the changes of M gradients combine.
        self.unaggregated_state = weakref.WeakValueDictionary()

    def _create_var_creator(self, next_creator, **kwargs):
        creator = super()._create_var_creator(next_creator, **kwargs)
        trainable = kwargs.get("trainable")
        trainable = True if trainable is None else trainable
        aggregation = kwargs.get("aggregation")

        def create(**kwargs):
            variable = creator(**kwargs)
            # Integers count things (Keras' train counter); they are not trained.
            if not variable.dtype.is_floating:
                return variable
            if trainable:
                self.guarded_variables[id(variable.handle)] = variable
            elif aggregation == tf.VariableAggregation.MEAN:
                variable = StateVariable(self._container_strategy(), variable, aggregation)
                self.guarded_variables[id(variable.handle)] = variable
            elif aggregation != tf.VariableAggregation.SUM:  # Metrics add up whenever they like.
                self.unaggregated_state[id(variable.handle)] = variable
            return variable

        return create

    def _create_variable_round_robin(self, next_creator, **kwargs):
        # Not round robin: balanced by bytes.
        shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
        initial_value = kwargs.get("initial_value")
        if shape is None and initial_value is not None and not callable(initial_value):
            initial_value = tf.convert_to_tensor(initial_value, dtype)
            shape, dtype = initial_value.shape, initial_value.dtype
        task = self.placement.place(shape, dtype)
        with ops.colocate_with(None, ignore_existing=True):
            with ops.device(ps_device(task)):
                return next_creator(**kwargs)

    def _experimental_distribute_dataset(self, dataset, options):
        if tf.executing_eagerly():
            input_data.refuse_python(input_data.graph_of(dataset))
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        if tf.executing_eagerly():  # Built later, by a coordinator, on each worker.
            return super()._distribute_datasets_from_function(dataset_fn, options)
        context = input_data.worker_context(self._num_workers)

        def create(input_context):
            with input_data.same_order_of_arrays(dataset_fn):
                dataset = dataset_fn(input_context)
            input_data.refuse_python(tf.compat.v1.get_default_graph().as_graph_def())
            if input_data.made_of_arrays(dataset_fn):
                dataset = input_data.share(dataset, input_context)
            return dataset

        return input_util.get_distributed_datasets_from_function(
            create,
            self._input_workers_with_options(options),
            [context],
            self._container_strategy(),
            options=options,
            build=True,
        )

    def _call_for_each_replica(self, fn, args, kwargs):
        self._assert_being_scheduled_by_cluster_coordinator()
        return training.run_step(self._container_strategy(), fn, args, kwargs)


def _call_if_alive(method: weakref.WeakMethod) -> None:
    bound = method()
    if bound is not None:
        bound()
