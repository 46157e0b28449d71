"""A chief that dies and another one on the same living workers and parameter servers."""

import json
import subprocess
import sys

CHIEF = """
import json, os, signal, sys
import gba_tf
import tensorflow as tf

spec, steps, dies = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "dies"
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
)
strategy = gba_tf.GBAStrategy(resolver, global_batch_size=4, local_batch_size=1)
with strategy.scope():
    w = tf.Variable([0.0])
    optimizer = tf.keras.optimizers.SGD(1.0)
step = tf.function(
    lambda: strategy.run(lambda: optimizer.apply_gradients([(tf.ones([1]), w)]))
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
for _ in range(steps):
    coordinator.schedule(step)
coordinator.join()
stats = strategy.stats()
counts = [stats.issued, stats.applied, stats.buffered, stats.lost]
print(json.dumps([*counts, float(w[0])]), flush=True)
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_chief(cluster, steps, ending):
    addresses = cluster.processes.addresses
    spec = {
        "chief": [cluster.new_chief_address()],
        "worker": [addresses["worker-0"], addresses["worker-1"]],
        "ps": [addresses["ps-0"], addresses["ps-1"]],
    }
    done = subprocess.run(
        [sys.executable, "-c", CHIEF, json.dumps(spec), str(steps), ending],
        capture_output=True,
        text=True,
        timeout=120,
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert printed, done.stderr
    return json.loads(printed[0]), done.returncode


def test_a_new_chief_finds_nothing_of_the_one_that_died(cluster):
    cluster.end_strategy()
    # One update of the mean gradient 1, and two gradients that wait.
    assert run_chief(cluster, 6, "dies") == ([6, 4, 2, 0, -1.0], -9)
    assert run_chief(cluster, 5, "ends") == ([5, 4, 1, 0, -1.0], 0)
