"""G means the same in every mode; what does not fit is refused before anything starts."""

import pytest

from gba_tf.batch_plan import STRATEGIES, BatchPlan
from gba_tf.cluster_config import ClusterConfig
from gba_tf.config import Policy


@pytest.mark.parametrize(
    "strategy, local, gradients, per_step, steps",
    [
        # Of G = 24 and B = 4 on 3 workers, one of which is a backup; 50 examples in an epoch.
        ("multi_worker_mirrored", 8, 3, 24, 3),
        ("gba", 4, 6, 4, 13),
        ("bsp", 4, 6, 4, 13),
        ("parameter_server", 4, 1, 4, 13),
        ("hop_bs", 4, 1, 4, 13),
        ("hop_bw", 12, 2, 12, 5),
        ("one_device", 24, 1, 24, 3),
    ],
)
def test_the_sizes_of_each_mode(strategy, local, gradients, per_step, steps):
    plan = BatchPlan.create(strategy, 24, 4, num_workers=3, backup_workers=1)
    assert plan.local_batch_size == local
    assert plan.gradients_per_update == gradients
    assert plan.examples_per_step == per_step
    assert plan.steps_per_epoch(50) == steps
    is_asynchronous = strategy in ("parameter_server", "hop_bs")
    assert plan.examples_per_update == (4 if is_asynchronous else 24)


@pytest.mark.parametrize("global_batch_size, expected", [(512, 128), (6, 3), (7, 7), (1, 1)])
def test_the_local_batch_is_a_quarter_or_what_is_whole(global_batch_size, expected):
    assert BatchPlan.create("gba", global_batch_size).local_batch_size == expected


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("sync", 24), f"expected one of {', '.join(STRATEGIES)}; found 'sync'"),
        (("gba", 24, 5), "G=24 must be a whole multiple of local_batch_size B=5"),
        (("multi_worker_mirrored", 24, 4, 5), "G=24 to be a whole multiple of the 5 workers.*G=25"),
        (("hop_bw", 24, 4, 3, 3), "expected backup_workers from 0 to 2.*the 3 workers, found 3"),
        (("hop_bw", 24, 4, 3, -1), "expected backup_workers from 0 to 2.*found -1"),
        (("hop_bw", 25, 5, 3, 1), "the 2 gradients .workers - backup_workers = 3 - 1.*G=26"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        BatchPlan.create(*arguments)


def test_an_epoch_has_examples():
    with pytest.raises(ValueError, match="num_examples: expected at least 1, found 0"):
        BatchPlan.create("gba", 24).steps_per_epoch(0)


def test_a_bound_that_lets_nobody_start_is_refused():
    with pytest.raises(ValueError, match="staleness_bound: expected at least 1 gradients, found 0"):
        Policy("hop_bs", 1, staleness_bound=0)


CLUSTER = ClusterConfig(
    {"chief": ("a:1",), "worker": ("b:1", "c:1", "d:1"), "ps": ("e:1", "f:1")}, "worker", 1
)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "one_device"])
def test_the_workers_of_a_cluster_are_those_of_its_worker_job_in_every_mode(strategy):
    assert BatchPlan.for_cluster(strategy, CLUSTER, 24, 4).num_workers == 3


def test_a_chief_alone_is_the_only_worker_of_all_reduce():
    alone = ClusterConfig({"chief": ("a:1",)}, "chief", 0)
    assert BatchPlan.for_cluster("multi_worker_mirrored", alone, 24).num_workers == 1


def test_a_cluster_that_is_none_for_the_mode_is_refused():
    with pytest.raises(ValueError, match="one_device trains in one process.*with 3 workers and 2"):
        BatchPlan.for_cluster("one_device", CLUSTER, 24)
    with pytest.raises(ValueError, match="hop_bs: expected TF_CONFIG in the environment"):
        BatchPlan.for_cluster("hop_bs", None, 24)
    assert BatchPlan.for_cluster("one_device", None, 24).num_workers == 1
    assert BatchPlan.for_cluster("multi_worker_mirrored", None, 24).local_batch_size == 24
