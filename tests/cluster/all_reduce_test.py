"""All-reduce with real processes: uneven data end by themselves, and so do tasks without a part.

The tasks run all_reduce_task.py.
"""

import json
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from gba_tf import all_reduce, cluster, models
from gba_tf.cluster_config import ClusterConfig
from gba_tf.features import CategoricalFeature, NumericFeature
from gba_tf.local_cluster import LocalCluster

TASK = pathlib.Path(__file__).with_name("all_reduce_task.py")
LEARNING_RATE = 0.01
TIMEOUT_SECONDS = 120


def start(folder, what, num_workers, num_ps, **settings):
    command = [sys.executable, str(TASK), str(folder), what]
    return LocalCluster(command, num_workers, num_ps, log_dir=folder / "logs", **settings)


def train_one_weight(*steps):
    """Gradient descent for y = w x to 2 x; each step has the x of each of two workers.

    A worker's gradient is the mean over its part, and none is 0; the update is the workers' mean.
    """
    w = 0.0
    for parts in steps:
        gradients = [
            np.mean([2 * (w * x - 2 * x) * x for x in part]) if part else 0.0 for part in parts
        ]
        w -= LEARNING_RATE * np.mean(gradients)
    return w


HALVES = [([1, 2], [3, 4]), ([5, 6], [7])]
ALL_TO_WORKER_0 = [([1, 2], [8]), ([3, 4], []), ([5, 6], []), ([7], [])]
STEPS = {
    "partial last batch": HALVES * 2,
    "one example": [([3], [])],
    "a single file": HALVES,
    "a single listed file": HALVES,
    "a file for each": ALL_TO_WORKER_0 * 2,
    "an empty shard": [([1, 2], []), ([3, 4], [])],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder, terminal output and cluster of a run on uneven data, in every kind of task."""
    folder = tmp_path_factory.mktemp("all_reduce")
    (folder / "1-to-7.txt").write_text("".join(f"{x}\n" for x in range(1, 8)))
    (folder / "8.txt").write_text("8\n")
    random = np.random.default_rng(5)
    examples = {
        "a": random.integers(0, 5, 6).tolist(),
        "x": random.normal(size=6).tolist(),
        "labels": random.integers(0, 2, 6).astype(float).tolist(),
    }
    (folder / "ranking.json").write_text(json.dumps(examples))
    with start(folder, "train", 2, 1, evaluator=True) as processes:
        exit_code = processes.wait()
        logs = {task: processes.log_path(task).read_text() for task in processes.addresses}
        assert exit_code == 0, logs
        assert [process.returncode for process in processes.processes.values()] == [0] * 5
    found = [json.loads((folder / f"worker-{index}.json").read_text()) for index in range(2)]
    return examples, found, logs


@pytest.mark.parametrize("case", STEPS)
def test_uneven_data_train_and_evaluate(trained, case):
    _, found, _ = trained
    w = train_one_weight(*STEPS[case])
    for worker in found:
        # The mean of x^2 from 1 to 7 is 20.
        assert worker[case] == pytest.approx([w, (w - 2) ** 2 * 20], rel=1e-5)


def test_a_ranking_model_trains_on_uneven_parts_as_one_process_does(trained):
    examples, found, _ = trained
    features = (CategoricalFeature("a", 5), NumericFeature("x"))
    model = models.DeepFM(features, embedding_dim=4, hidden_units=(8,), seed=1)
    model.compile(tf.keras.optimizers.Adagrad(0.5))
    columns = {"a": np.array(examples["a"], np.int32), "x": np.array(examples["x"], np.float32)}
    data = tf.data.Dataset.from_tensor_slices((columns, np.array(examples["labels"], np.float32)))
    history = model.fit(data.batch(4), verbose=0).history  # 4 and 2.
    for worker in found:
        assert worker["ranking loss"] == pytest.approx(history["loss"], rel=1e-5)
        for weight, expected in zip(worker["ranking"], model.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)


def test_every_task_says_its_part(trained):
    _, _, logs = trained
    for index in range(2):
        assert f"gba_tf: worker {index}: 2 of 2 workers are connected" in logs[f"worker-{index}"]
    for task in ("chief", "ps", "evaluator"):
        log = logs["chief" if task == "chief" else f"{task}-0"]
        assert f"{task} 0 steps aside, as the workers train by all-reduce" in log


def test_the_terminal_shows_the_worker_that_leads_and_a_lost_worker_ends_all(tmp_path, capfd):
    # Without wait(), which would stop the others at once.
    with start(tmp_path, "kill worker 1", 2, 1) as processes:
        for task in ("worker-0", "chief", "ps-0"):
            assert processes.processes[task].wait(TIMEOUT_SECONDS) == 1
        lost = f"worker 0 lost worker 1 at {processes.addresses['worker-1']}, and all-reduce needs"
    log = (tmp_path / "logs" / "worker-0.log").read_text()
    assert f"\ngba_tf.all_reduce.WorkerLostError: {lost}" in log
    for task, name in (("chief", "chief 0"), ("ps-0", "ps 0")):
        log = (tmp_path / "logs" / f"{task}.log").read_text()
        assert f"{name} ends because worker 0 failed: WorkerLostError: {lost}" in log
    out, err = capfd.readouterr()
    assert "gba_tf: worker 0: 2 of 2 workers are connected" in err
    assert "worker 1: 2 of 2" not in err
    assert f"WorkerLostError: {lost}" in err
    assert "\x1e" not in out + err


def test_a_leader_that_hangs_is_lost_too_and_workers_alone_are_a_cluster(tmp_path):
    with start(tmp_path, "stop worker 0 of workers only", 2, 0) as processes:
        assert processes.processes["worker-1"].wait(TIMEOUT_SECONDS) == 1
        address = processes.addresses["worker-0"]
        log = processes.log_path("worker-1").read_text()
    assert f"WorkerLostError: worker 1 lost worker 0 at {address}, and all-reduce needs" in log


def test_what_came_before_the_strategy_is_to_be_moved(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    tf.constant(1) + tf.constant(1)
    config = ClusterConfig({"worker": ("127.0.0.1:1",)}, "worker", 0).for_all_reduce()
    with pytest.raises(RuntimeError, match="to be the first thing .* Move gba_tf.create_strategy"):
        all_reduce.create_strategy(config)


def test_only_workers_of_an_all_reduce_configuration_train():
    tasks = {"worker": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",)}
    config = ClusterConfig(tasks, "worker", 0)
    with pytest.raises(ValueError, match="Give it ClusterConfig.for_all_reduce"):
        cluster.serve_if_not_worker(config)
    with pytest.raises(ValueError, match="expected a worker .* found worker 0"):
        all_reduce.create_strategy(config)
    bystander = ClusterConfig(tasks, "ps", 0).for_all_reduce()
    with pytest.raises(ValueError, match="expected a worker .* found ps 0"):
        all_reduce.create_strategy(bystander)
    cluster.serve_if_not_worker(None)


def test_without_a_cluster_the_strategy_is_of_this_process_alone():
    strategy = all_reduce.create_strategy(None)
    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert strategy.num_replicas_in_sync == 1
