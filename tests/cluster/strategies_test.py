"""create_strategy: what each mode is made of, on a real cluster."""

import pytest
import tensorflow as tf

import gba_tf
from gba_tf import cluster as roles
from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import GBAConfig, Policy

keras = tf.keras


@pytest.fixture
def create(cluster, monkeypatch):
    """create_strategy in the chief of 3 workers and 2 parameter servers."""
    # The cluster is that of all tests, and does not end with one of them.
    monkeypatch.setattr(roles, "end_cluster_at_exit", lambda config: None)
    addresses = cluster.processes.addresses

    def run(name):
        config = ClusterConfig(
            {
                "chief": (cluster.new_chief_address(),),
                "worker": tuple(addresses[f"worker-{index}"] for index in range(3)),
                "ps": tuple(addresses[f"ps-{index}"] for index in range(2)),
            },
            "chief",
            0,
        )
        cluster.end_strategy()
        strategy = gba_tf.create_strategy(
            name,
            global_batch_size=24,
            local_batch_size=4,
            staleness_tolerance=7,
            staleness_bound=3,
            backup_workers=1,
            variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
            cluster_config=config,
        )
        return cluster.use(strategy)

    return run


@pytest.mark.parametrize(
    "name, policy, local_batch_size, steps_per_epoch, updates_per_step",
    [
        ("gba", Policy("gba", 6, 7, 3), 4, 12, 1 / 6),
        ("bsp", Policy("bsp", 6, 7, 3), 4, 12, 1 / 6),
        ("hop_bs", Policy("hop_bs", 1, 7, 3), 4, 12, 1),
        ("hop_bw", Policy("hop_bw", 2, 7, 3), 12, 4, None),
        ("parameter_server", None, 4, 12, 1),
    ],
)
def test_a_mode_is_made_of_its_settings_and_trains(
    create, name, policy, local_batch_size, steps_per_epoch, updates_per_step
):
    strategy = create(name)
    plan = gba_tf.plan_of(strategy)
    assert (plan.strategy, plan.num_workers) == (name, 3)
    assert plan.examples_per_step == plan.local_batch_size == local_batch_size
    assert plan.steps_per_epoch(48) == steps_per_epoch
    if policy is None:
        assert type(strategy) is tf.distribute.experimental.ParameterServerStrategy
    else:
        assert type(strategy) is gba_tf.GBAStrategy
        assert strategy.policy == policy
        assert strategy.config == GBAConfig(24, local_batch_size, 7)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=[8])])
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
    assert len(model.trainable_variables) == 2  # The shards of the only one.
    x = tf.ones([48, 8])
    data = tf.data.Dataset.from_tensor_slices((x, tf.ones([48, 1]))).batch(local_batch_size)
    model.fit(data, steps_per_epoch=steps_per_epoch, verbose=0)
    gba_tf.flush(strategy)
    if updates_per_step is not None:
        assert int(model.optimizer.iterations) == steps_per_epoch * updates_per_step
    else:  # A late gradient is none of the two of an update.
        stats = strategy.stats()
        assert int(model.optimizer.iterations) == -(-stats.applied // 2)


def test_a_strategy_of_somebody_else_has_no_plan():
    with pytest.raises(ValueError, match="plan_of: expected a strategy that gba_tf.create_strat"):
        gba_tf.plan_of(tf.distribute.OneDeviceStrategy("/cpu:0"))
