"""Every mistake in TF_CONFIG has a message that names the key and the task, and says what to do."""

import json
import subprocess
import sys

import pytest

from gba_tf.cluster_config import ClusterConfig, ClusterConfigError, split_address

CLUSTER = {
    "chief": ["10.0.0.1:2222"],
    "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
    "ps": ["10.0.0.4:2222"],
}
WORKER_1 = {"type": "worker", "index": 1}


def read(cluster=CLUSTER, task=WORKER_1, **arguments):
    text = json.dumps({"cluster": cluster, "task": task})
    return ClusterConfig.from_env({"TF_CONFIG": text}, **arguments)


def message_of(cluster=CLUSTER, task=WORKER_1, **arguments):
    with pytest.raises(ClusterConfigError) as caught:
        read(cluster, task, **arguments)
    return str(caught.value)


def message_of_text(text):
    with pytest.raises(ClusterConfigError) as caught:
        ClusterConfig.from_env({"TF_CONFIG": text})
    return str(caught.value)


def test_a_worker_finds_its_place():
    config = read()
    assert (config.task_type, config.task_index, config.task_name) == ("worker", 1, "worker 1")
    assert config.address == "10.0.0.3:2222"
    assert config.chief_address == "10.0.0.1:2222"
    assert (config.num_workers, config.num_ps) == (2, 1)
    assert not config.is_chief
    assert read(task={"type": "chief", "index": 0}).is_chief


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}])
def test_without_tf_config_there_is_no_cluster(environ):
    assert ClusterConfig.from_env(environ) is None


def test_the_evaluator_is_taken_out_of_the_cluster_that_trains():
    config = read({**CLUSTER, "evaluator": ["10.0.0.5:2222"]})
    assert config.cluster == {
        "chief": ("10.0.0.1:2222",),
        "worker": ("10.0.0.2:2222", "10.0.0.3:2222"),
        "ps": ("10.0.0.4:2222",),
    }
    assert config.evaluators == ("10.0.0.5:2222",)
    evaluator = read({**CLUSTER, "evaluator": ["10.0.0.5:2222"]}, {"type": "evaluator", "index": 0})
    assert evaluator.address == "10.0.0.5:2222"
    assert not evaluator.is_chief


def test_all_reduce_needs_no_ps_and_its_first_worker_may_lead():
    config = read({"worker": CLUSTER["worker"]}, {"type": "worker", "index": 0}, require_ps=False)
    assert config.is_chief
    assert config.chief_address == "10.0.0.2:2222"
    assert not read({"worker": CLUSTER["worker"]}, WORKER_1, require_ps=False).is_chief


def test_malformed_json_is_shown_with_its_position():
    message = message_of_text('{"cluster": {chief: ["h:1"]}}')
    assert "TF_CONFIG is not JSON" in message
    assert "at line 1, column 14, " in message
    assert """near '{"cluster": {chief: ["h:1"]}}'""" in message


@pytest.mark.parametrize("text, found", [("[1, 2]", "[1, 2]"), ('"chief"', '"chief"')])
def test_tf_config_must_be_an_object(text, found):
    assert f"TF_CONFIG: expected a JSON object, found {found}" in message_of_text(text)


@pytest.mark.parametrize("text", ['{"task": {"type": "ps", "index": 0}}', '{"cluster": {}}'])
def test_a_missing_cluster_is_named(text):
    message = message_of_text(text)
    assert message.startswith(
        'TF_CONFIG["cluster"]: expected the addresses of chief, worker and ps'
    )
    assert "found none" in message


def test_the_cluster_must_be_an_object_of_lists():
    assert 'TF_CONFIG["cluster"]: expected an object' in message_of(["h:1"])
    message = message_of({**CLUSTER, "ps": "10.0.0.4:2222"})
    assert 'TF_CONFIG["cluster"]["ps"]: expected a list of addresses' in message
    assert 'found "10.0.0.4:2222"' in message
    assert 'Write ["host:port", ...]' in message


def test_an_empty_job_is_named():
    message = message_of({**CLUSTER, "ps": []})
    assert 'TF_CONFIG["cluster"]["ps"]: expected at least one address, found an empty' in message


def test_an_unknown_job_is_named():
    message = message_of({**CLUSTER, "workers": ["10.0.0.9:1"]})
    assert (
        'TF_CONFIG["cluster"]["workers"]: expected one of chief, worker, ps, evaluator' in message
    )


def test_the_old_name_master_is_to_be_renamed():
    message = message_of({"master": ["10.0.0.1:2222"], **CLUSTER})
    assert 'TF_CONFIG["cluster"]["master"]' in message
    assert "Rename it to chief" in message
    message = message_of(task={"type": "master", "index": 0})
    assert 'TF_CONFIG["task"]["type"]' in message
    assert "Rename it to chief" in message


@pytest.mark.parametrize(
    "address, expected",
    [
        (2222, 'expected the address of worker 1 as a string "host:port", found 2222'),
        (None, 'as a string "host:port", found null'),
        ("10.0.0.3", 'found "10.0.0.3". Add the port, for example "10.0.0.3:2222"'),
        ("", 'found "". Add the port'),
        ("grpc://10.0.0.3:2222", "Remove the scheme"),
        (":2222", 'expected the address of worker 1 as "host:port", found ":2222"'),
        ("10.0.0.3:port", "a colon, and a port number"),
        ("10.0.0.3:-1", "a colon, and a port number"),
        (" 10.0.0.3:1", "a colon, and a port number"),
        ("fe80::1:2222", '"[IPv6 address]"'),
        ("10.0.0.3:0", "expected a port from 1 to 65535 for worker 1, found 0"),
        ("10.0.0.3:65536", "expected a port from 1 to 65535 for worker 1, found 65536"),
    ],
)
def test_a_malformed_address_is_named_with_its_task(address, expected):
    message = message_of({**CLUSTER, "worker": ["10.0.0.2:2222", address]})
    assert message.startswith('TF_CONFIG["cluster"]["worker"][1]: ')
    assert expected in message


def test_ipv6_addresses_and_the_last_port_are_accepted():
    config = read({**CLUSTER, "worker": ["host-2.example:65535", "[fe80::1]:2222"]})
    assert split_address(config.cluster["worker"][0]) == ("host-2.example", 65535)
    assert split_address(config.address) == ("fe80::1", 2222)


@pytest.mark.parametrize("job, index", [("ps", 0), ("evaluator", 0)])
def test_both_tasks_of_a_duplicate_address_are_named(job, index):
    message = message_of({**CLUSTER, job: ["10.0.0.3:2222"]})
    assert f'TF_CONFIG["cluster"]["{job}"][{index}]' in message
    assert f"found 10.0.0.3:2222 for both worker 1 and {job} {index}" in message
    assert "Give one of them another port" in message


def test_two_chiefs_are_refused():
    message = message_of({**CLUSTER, "chief": ["10.0.0.1:2222", "10.0.0.1:2223"]})
    assert 'TF_CONFIG["cluster"]["chief"]: expected one chief, found 2' in message


@pytest.mark.parametrize(
    "job, found, consequence",
    [
        ("chief", "found only 2 worker, 1 ps", "nobody would start the training"),
        ("worker", "found only 1 chief, 1 ps", "nobody would compute gradients"),
        ("ps", "found only 1 chief, 2 worker", "nobody would hold the parameters"),
    ],
)
def test_a_missing_job_is_named(job, found, consequence):
    cluster = {name: tasks for name, tasks in CLUSTER.items() if name != job}
    task = {"type": next(iter(cluster)), "index": 0}
    message = message_of(cluster, task)
    assert f'TF_CONFIG["cluster"]["{job}"]: expected at least one {job}' in message
    assert found in message
    assert consequence in message
    assert f'Add "{job}": ["host:port"]' in message


def test_all_reduce_needs_somebody_who_trains():
    message = message_of(
        {"evaluator": ["h:1"]}, {"type": "evaluator", "index": 0}, require_ps=False
    )
    assert "expected a chief or a worker, found only 1 evaluator" in message


def test_a_missing_task_is_named():
    message = message_of_text(json.dumps({"cluster": CLUSTER}))
    assert 'TF_CONFIG["task"]: expected the role of this process, found none' in message
    assert 'TF_CONFIG["task"]: expected an object' in message_of(task="worker")


@pytest.mark.parametrize(
    "task, found",
    [
        ({"type": "gpu", "index": 0}, 'found "gpu"'),
        ({"type": 3, "index": 0}, "found 3"),
        ({"index": 0}, "found none"),
    ],
)
def test_an_unknown_task_type_is_shown(task, found):
    message = message_of(task=task)
    assert f'TF_CONFIG["task"]["type"]: expected one of chief, worker, ps, {found}' in message


def test_a_task_outside_the_cluster_is_refused():
    message = message_of(task={"type": "evaluator", "index": 0})
    assert (
        'TF_CONFIG["task"]["type"]: this task is evaluator, but TF_CONFIG["cluster"] has' in message
    )
    assert 'Add "evaluator": ["host:port"] to the cluster' in message


@pytest.mark.parametrize(
    "task, expected",
    [
        ({"type": "worker"}, "expected the index of this worker, found none"),
        ({"type": "worker", "index": "1"}, 'expected a whole number for this worker, found "1"'),
        ({"type": "worker", "index": 1.0}, "expected a whole number for this worker, found 1.0"),
        ({"type": "worker", "index": True}, "expected a whole number for this worker, found true"),
        ({"type": "worker", "index": None}, "expected a whole number for this worker, found null"),
        ({"type": "worker", "index": -1}, "expected 0 to 1 for this worker, found -1"),
        ({"type": "worker", "index": 2}, "expected 0 to 1 for this worker, found 2"),
        ({"type": "ps", "index": 1}, "expected 0 for this ps, found 1"),
    ],
)
def test_a_wrong_index_is_shown_with_what_is_allowed(task, expected):
    message = message_of(task=task)
    assert message.startswith('TF_CONFIG["task"]["index"]: ')
    assert expected in message


def test_an_index_out_of_range_says_how_many_addresses_there_are():
    message = message_of(task={"type": "worker", "index": 2})
    assert 'TF_CONFIG["cluster"]["worker"] has 2 addresses' in message


def test_reading_tf_config_does_not_import_tensorflow():
    program = "import sys, gba_tf.cluster; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_resolver_leaves_out_the_evaluator():
    from gba_tf import cluster

    resolver = cluster.cluster_resolver(read({**CLUSTER, "evaluator": ["10.0.0.5:2222"]}))
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")


ALL = {**CLUSTER, "evaluator": ["10.0.0.5:2222"]}


def test_for_all_reduce_the_workers_train_and_the_others_step_aside():
    config = read(ALL).for_all_reduce()
    assert config.cluster == {"worker": ("10.0.0.2:2222", "10.0.0.3:2222")}
    assert config.bystanders == {"chief": ("10.0.0.1:2222",), "ps": ("10.0.0.4:2222",)}
    assert (config.address, config.chief_address) == ("10.0.0.3:2222", "10.0.0.2:2222")
    assert (config.num_workers, config.num_ps, config.chief_name) == (2, 0, "worker 0")
    assert config.for_all_reduce() == config
    first = read(ALL, {"type": "worker", "index": 0}).for_all_reduce()
    assert first.is_chief and not config.is_chief
    for job, address in (("chief", "10.0.0.1:2222"), ("ps", "10.0.0.4:2222")):
        bystander = read(ALL, {"type": job, "index": 0}).for_all_reduce()
        assert (bystander.task_name, bystander.address) == (f"{job} 0", address)
        assert not bystander.is_chief


def test_without_workers_the_chief_is_the_only_worker():
    cluster = {"chief": ["10.0.0.1:2222"], "ps": ["10.0.0.4:2222"]}
    chief = read(cluster, {"type": "chief", "index": 0}, require_ps=False).for_all_reduce()
    assert chief.cluster == {"worker": ("10.0.0.1:2222",)}
    assert chief.bystanders == {"ps": ("10.0.0.4:2222",)}
    assert (chief.task_name, chief.is_chief) == ("worker 0", True)
    ps = read(cluster, {"type": "ps", "index": 0}, require_ps=False).for_all_reduce()
    assert (ps.task_name, ps.address, ps.is_chief) == ("ps 0", "10.0.0.4:2222", False)


def test_workers_alone_are_an_all_reduce_cluster_without_bystanders():
    config = read({"worker": CLUSTER["worker"]}, WORKER_1, require_ps=False).for_all_reduce()
    assert config.all_reduce
    assert config.bystanders == {} and config.followers == {}


def test_those_who_follow_are_told_to_end_by_the_one_that_leads():
    chief = read(ALL, {"type": "chief", "index": 0})
    assert chief.chief_name == "the chief"
    assert chief.followers == {
        "worker 0": "10.0.0.2:2222",
        "worker 1": "10.0.0.3:2222",
        "ps 0": "10.0.0.4:2222",
        "evaluator 0": "10.0.0.5:2222",
    }
    # Workers end by themselves.
    assert read(ALL).for_all_reduce().followers == {
        "chief 0": "10.0.0.1:2222",
        "ps 0": "10.0.0.4:2222",
        "evaluator 0": "10.0.0.5:2222",
    }
