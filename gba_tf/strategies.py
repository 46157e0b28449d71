"""The modes behind one flag: `create_strategy(name)`."""

import weakref

import tensorflow as tf

from gba_tf import all_reduce, batch_plan, cluster, legacy_keras
from gba_tf.batch_plan import BatchPlan
from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import DEFAULT_STALENESS_BOUND, DEFAULT_STALENESS_TOLERANCE, Policy
from gba_tf.strategy import GBAStrategy

_plans: "weakref.WeakKeyDictionary[tf.distribute.Strategy, BatchPlan]" = weakref.WeakKeyDictionary()


def create_strategy(
    name: str,
    *,
    global_batch_size: int,
    local_batch_size: int | None = None,
    staleness_tolerance: int = DEFAULT_STALENESS_TOLERANCE,
    staleness_bound: int = DEFAULT_STALENESS_BOUND,
    backup_workers: int = batch_plan.DEFAULT_BACKUP_WORKERS,
    variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
    cluster_config: ClusterConfig | None = None,
) -> tf.distribute.Strategy:
    """The strategy of a mode; model, optimizer, learning rate, G and data stay as they are.

    Called once in every task of the cluster, before any other TensorFlow operation. It returns in
    the tasks that train: the chief with parameter servers, every worker under
    multi_worker_mirrored. The others serve until training ends, and their process ends here.

        strategy = gba_tf.create_strategy(mode, global_batch_size=2048, local_batch_size=512)
        plan = gba_tf.plan_of(strategy)
        dataset = dataset.batch(plan.examples_per_step)
        with strategy.scope():
            model = ...
        model.fit(dataset, steps_per_epoch=plan.steps_per_epoch(num_examples), epochs=...)
        gba_tf.flush(strategy)

    Args:
      name: The mode:
        "multi_worker_mirrored": synchronous all-reduce, tf.distribute.MultiWorkerMirroredStrategy.
        "gba": GBAStrategy.
        "parameter_server": TensorFlow's own asynchronous ParameterServerStrategy.
        "bsp": As gba, but no gradient is decayed, however late.
        "hop_bs": Bounded staleness: every gradient is an update; no worker has more than
          `staleness_bound` gradients more than the slowest one that lives.
        "hop_bw": Backup workers: the first (workers - backup_workers) gradients make up an update,
          and later ones of that step are dropped.
        "one_device": This process alone, the reference.
      global_batch_size: G, examples per update of synchronous training.
      local_batch_size: B, examples per gradient where the mode leaves a choice, see BatchPlan.
        Default: G / 4 if that is whole, else G / 2 or G.
      staleness_tolerance: iota of gba, in global steps. Default 4.
      staleness_bound: Of hop_bs, in gradients, 1 or more. Default 4.
      backup_workers: Of hop_bw, fewer than the workers. Default 1.
      variable_partitioner: Shards large tables over parameter servers; not used by the others.
      cluster_config: Default: that of TF_CONFIG.

    Returns:
      The strategy; `plan_of` knows its batch sizes.

    Raises:
      ValueError: The name is unknown, sizes do not fit, a setting would let everybody wait, or
        TF_CONFIG is not that of a cluster for the mode.
      ImportError: The op library is missing, or tf.keras is Keras 3.
    """
    batch_plan.check_strategy(name)
    if cluster_config is None:
        needs_ps = name in batch_plan.PS_STRATEGIES
        cluster_config = ClusterConfig.from_env(require_ps=needs_ps)
    plan = BatchPlan.for_cluster(
        name, cluster_config, global_batch_size, local_batch_size, backup_workers
    )
    policy = Policy(name, plan.gradients_per_update, staleness_tolerance, staleness_bound)
    legacy_keras.require()
    if name == "one_device":
        strategy = tf.distribute.OneDeviceStrategy(_device())
    elif name == "multi_worker_mirrored":
        if cluster_config is not None:
            cluster_config = cluster_config.for_all_reduce()
            cluster.serve_if_not_worker(cluster_config)
        strategy = all_reduce.create_strategy(cluster_config)
    else:
        cluster.serve_if_not_chief(cluster_config)
        resolver = cluster.cluster_resolver(cluster_config)
        if name == "parameter_server":
            strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner)
        else:
            strategy = GBAStrategy(
                resolver,
                global_batch_size=global_batch_size,
                local_batch_size=plan.local_batch_size,
                staleness_tolerance=staleness_tolerance,
                variable_partitioner=variable_partitioner,
                policy=policy,
            )
    _plans[strategy] = plan
    return strategy


def plan_of(strategy: tf.distribute.Strategy) -> BatchPlan:
    """The batch sizes of a strategy that `create_strategy` made.

    Raises:
      ValueError: It was made by something else.
    """
    if strategy not in _plans:
        raise ValueError(
            "plan_of: expected a strategy that gba_tf.create_strategy returned, found"
            f" {strategy!r}."
        )
    return _plans[strategy]


def flush(strategy: tf.distribute.Strategy) -> None:
    """Ends training: see GBAStrategy.flush. Does nothing in modes that leave no gradients."""
    if isinstance(strategy, GBAStrategy):
        strategy.flush()


def _device() -> str:
    return "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
