"""For each ordered pair of modes: what one saves, the other restores bit for bit."""

import importlib.util
import itertools
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

import gba_tf
from gba_tf.batch_plan import STRATEGIES
from gba_tf.checkpoint import TrainingCheckpoint
from gba_tf.config import Policy
from gba_tf.local_cluster import LocalCluster

TASK = pathlib.Path(__file__).with_name("mode_pairs_task.py")
_spec = importlib.util.spec_from_file_location("mode_pairs_task", TASK)
task = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(task)

POLICIES = {
    "gba": Policy("gba", 2),
    "bsp": Policy("bsp", 2),
    "hop_bs": Policy("hop_bs", 1, staleness_bound=2),
    "hop_bw": Policy("hop_bw", 2),
}
IN_THIS_PROCESS = [mode for mode in STRATEGIES if mode != task.ALL_REDUCE]
TWO_SHARDS = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)


def strategy_of(mode, cluster):
    if mode == "one_device":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    if mode == "parameter_server":
        return cluster.tensorflows_strategy(2, 2, TWO_SHARDS)
    return cluster.strategy(
        2,
        2,
        global_batch_size=2 * task.BATCH,
        local_batch_size=task.BATCH,
        policy=POLICIES[mode],
        variable_partitioner=TWO_SHARDS,
    )


@pytest.fixture(scope="module")
def modes(cluster, tmp_path_factory):
    """(source -> its state, (source, target) -> (progress, state that the target restored))."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "found").mkdir()
    saved, restored = {}, {}
    for number, mode in enumerate(IN_THIS_PROCESS):
        strategy = strategy_of(mode, cluster)
        with strategy.scope():
            model = task.make_model(seed=number)
        task.train(model, 6)
        if mode in POLICIES:  # No gradients are left that another mode would apply.
            strategy.flush()
        saved[mode] = task.save(folder / f"from-{mode}", model, number)

    environment = {"PYTHONPATH": str(pathlib.Path(gba_tf.__file__).parents[1])}
    with LocalCluster(
        [sys.executable, str(TASK), str(folder)], 2, 0, log_dir=folder / "logs", env=environment
    ) as workers:
        assert workers.wait() == 0, (folder / "logs" / "worker-0.log").read_text()[-3000:]
    saved[task.ALL_REDUCE] = dict(np.load(folder / f"{task.ALL_REDUCE}.npz"))
    for source in IN_THIS_PROCESS:
        state = dict(np.load(folder / "found" / f"{source}.npz"))
        restored[source, task.ALL_REDUCE] = tuple(state.pop("progress")), state

    for target in IN_THIS_PROCESS:
        strategy = strategy_of(target, cluster)
        for source in STRATEGIES:
            with strategy.scope():
                model = task.make_model(seed=99)
            progress = TrainingCheckpoint(folder / f"from-{source}", model).restore()
            assert progress.strategy == source
            numbers = progress.epoch, progress.examples
            restored[source, target] = numbers, task.state_of(model)
    return saved, restored


@pytest.mark.parametrize("source, target", list(itertools.permutations(STRATEGIES, 2)))
def test_what_one_mode_saves_the_other_restores_bit_for_bit(modes, source, target):
    saved, restored = modes
    (epoch, examples), found = restored[source, target]
    expected = saved[source]
    number = 7 if source == task.ALL_REDUCE else IN_THIS_PROCESS.index(source)
    assert (epoch, examples) == (number, number + 1)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert np.array_equal(found[key], value), key
    # It was trained: slots are not what they were made as.
    slots = [value for key, value in expected.items() if "optimizer" in key and value.ndim == 2]
    assert slots and all(np.count_nonzero(slot) for slot in slots)
