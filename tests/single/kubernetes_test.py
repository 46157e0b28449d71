"""The manifests fit Kubernetes' schemas, and their pods' commands really run and do what they say.

What a pod would do is done here: variables are expanded as Kubernetes does, and /bin/sh runs the
command with the pod's environment and nothing else.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gba_tf import kubernetes
from gba_tf.cluster_config import ClusterConfig, ClusterConfigError

TRAIN = ("python", "scripts/train.py", "--strategy=gba", "--model_dir=/training/run1")
SHOW_TF_CONFIG = ("sh", "-c", 'echo "$TF_CONFIG"; exit 3')
KUBERNETES_VERSIONS = ("1.28", "1.35")
SHAPES = [{}, {"num_workers": 12, "num_ps": 3, "evaluator": True}, {"num_ps": 0}]
TFJOB_SCHEMA = yaml.safe_load(pathlib.Path(__file__).with_name("tfjob_schema.yaml").read_text())


def make_job(command=TRAIN, **options):
    options = {"name": "ctr", "image": "registry/gba:1", "storage_claim": "shared", **options}
    return kubernetes.TrainingJob(command=tuple(command), **options)


def manifests(documents):
    """What kubectl reads."""
    return list(yaml.safe_load_all(kubernetes.to_yaml(documents)))


def of_kind(kind, documents):
    return [document for document in manifests(documents) if document["kind"] == kind]


def validate(document, version):
    """Checks a manifest strictly; unknown keys are errors."""
    if document["kind"] != "TFJob":
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, TFJOB_SCHEMA)
    for replica in document["spec"]["tfReplicaSpecs"].values():
        pod_template = {"apiVersion": "v1", "kind": "PodTemplate", "template": replica["template"]}
        kubernetes_validate.validate(pod_template, version, strict=True)


def expand(text, variables):
    """Kubernetes' own expansion in command, args and env: $(NAME) if it is known, $$ to $."""

    def value(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def command_and_environment(pod_spec, pod_name, **extra):
    """How the container runtime starts the container of a pod."""
    (container,) = pod_spec["containers"]
    environment = {"PATH": os.environ["PATH"]}
    for entry in container["env"]:
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            environment[entry["name"]] = pod_name
        else:
            environment[entry["name"]] = expand(entry["value"], environment)
    environment.update(extra)
    command = [*container["command"], *container.get("args", [])]
    return [expand(argument, environment) for argument in command], environment


def pods(job):
    """Role, name and specification of each pod that the StatefulSets create."""
    for stateful_set in of_kind("StatefulSet", job.plain()):
        spec = stateful_set["spec"]
        role = spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for index in range(spec["replicas"]):
            yield role, f"{stateful_set['metadata']['name']}-{index}", spec["template"]["spec"]


class Pod:
    """A started pod of the plain form; its output is in `log`."""

    def __init__(self, job, name, log, **extra):
        (spec,) = [spec for _, pod_name, spec in pods(job) if pod_name == name]
        command, environment = command_and_environment(spec, name, **extra)
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def wait_for(self, text):
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)


@pytest.fixture
def run_pod(tmp_path):
    """run_pod(name, program, **environment) starts a pod of a job whose volume is tmp_path."""
    started = []

    def run(name, program, **extra):
        job = make_job(["sh", "-c", program], mount_path=str(tmp_path))
        pod = Pod(job, name, tmp_path / f"{len(started)}.log", **extra)
        started.append(pod)
        return pod.__enter__()

    yield run
    for pod in started:
        pod.__exit__()


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["plain", "tfjob"])
def test_manifests_fit_the_schemas(form, shape, version):
    for document in manifests(getattr(make_job(**shape), form)()):
        validate(document, version)


@pytest.mark.parametrize("form", ["plain", "tfjob"])
def test_the_schemas_find_a_misspelt_key(form):
    for document in manifests(getattr(make_job(), form)()):
        document["spec"]["replica"] = 1
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            validate(document, KUBERNETES_VERSIONS[0])


def test_every_pod_finds_its_task_and_the_same_cluster():
    job = make_job(
        SHOW_TF_CONFIG, num_workers=12, num_ps=1, evaluator=True, namespace="ads", port=3000
    )
    found = []
    for _, name, spec in pods(job):
        command, environment = command_and_environment(spec, name)
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 3, result.stderr
        config = ClusterConfig.from_env({"TF_CONFIG": result.stdout})
        found.append((name, config.task_type, config.task_index))
        # Its own address is the name that a StatefulSet's pod has in its headless Service.
        assert config.address == f"{name}.ctr.ads.svc:3000"
        assert config.cluster == {
            "chief": ("ctr-chief-0.ctr.ads.svc:3000",),
            "worker": tuple(f"ctr-worker-{index}.ctr.ads.svc:3000" for index in range(12)),
            "ps": ("ctr-ps-0.ctr.ads.svc:3000",),
        }
        assert config.evaluators == ("ctr-evaluator-0.ctr.ads.svc:3000",)
    assert found == [
        ("ctr-chief-0", "chief", 0),
        *((f"ctr-worker-{index}", "worker", index) for index in range(12)),
        ("ctr-ps-0", "ps", 0),
        ("ctr-evaluator-0", "evaluator", 0),
    ]


def test_without_parameter_servers_the_workers_are_alone():
    configs = []
    for _, name, spec in pods(make_job(SHOW_TF_CONFIG, num_ps=0)):
        command, environment = command_and_environment(spec, name)
        output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
        configs.append(ClusterConfig.from_env({"TF_CONFIG": output}, require_ps=False))
    addresses = ("ctr-worker-0.ctr.default.svc:2222", "ctr-worker-1.ctr.default.svc:2222")
    assert [config.cluster for config in configs] == [{"worker": addresses}] * 2
    assert [config.is_chief for config in configs] == [True, False]


@pytest.mark.parametrize("evaluator", [False, True])
def test_a_task_of_a_tfjob_finds_the_evaluator_that_the_operator_leaves_out(evaluator):
    job = make_job(SHOW_TF_CONFIG, evaluator=evaluator, namespace="ads")
    (tfjob,) = of_kind("TFJob", job.tfjob())
    replicas = {role.lower(): spec for role, spec in tfjob["spec"]["tfReplicaSpecs"].items()}
    # As genTFConfigJSONStr of the operator writes it.
    cluster = {
        role: [f"ctr-{role}-{index}.ads.svc:2222" for index in range(replicas[role]["replicas"])]
        for role in sorted(replicas)
        if role != "evaluator"
    }
    for role, spec in replicas.items():
        for index in range(spec["replicas"]):
            config = {"cluster": cluster, "task": {"type": role, "index": index}}
            config["environment"] = "cloud"
            command, environment = command_and_environment(
                spec["template"]["spec"],
                f"ctr-{role}-{index}",
                TF_CONFIG=json.dumps(config, separators=(",", ":")),
            )
            output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
            read = ClusterConfig.from_env({"TF_CONFIG": output})
            assert (read.task_type, read.task_index) == (role, index)
            assert read.address == f"ctr-{role}-{index}.ads.svc:2222"
            assert read.cluster == {role: tuple(tasks) for role, tasks in cluster.items()}
            assert read.evaluators == (("ctr-evaluator-0.ads.svc:2222",) if evaluator else ())


def test_a_tf_config_that_the_operator_wrote_differently_is_refused_and_not_half_changed():
    (tfjob,) = of_kind("TFJob", make_job(SHOW_TF_CONFIG, evaluator=True).tfjob())
    spec = tfjob["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    command, environment = command_and_environment(spec, "ctr-worker-0", TF_CONFIG='{"task":{}}')
    output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    with pytest.raises(ClusterConfigError, match="TF_CONFIG is not JSON"):
        ClusterConfig.from_env({"TF_CONFIG": output})


@pytest.mark.parametrize("form", ["plain", "tfjob"])
def test_only_pods_of_the_job_reach_the_port(form):
    documents = getattr(make_job(port=3000, evaluator=True), form)()
    (policy,) = of_kind("NetworkPolicy", documents)
    labels = {"app.kubernetes.io/name": "gba-tf", "app.kubernetes.io/instance": "ctr"}
    assert policy["spec"] == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": labels}}],
                "ports": [{"protocol": "TCP", "port": 3000}],
            }
        ],
    }
    if form == "plain":
        templates = [item["spec"]["template"] for item in of_kind("StatefulSet", documents)]
    else:
        (tfjob,) = of_kind("TFJob", documents)
        templates = [item["template"] for item in tfjob["spec"]["tfReplicaSpecs"].values()]
    assert len(templates) == 4
    for template in templates:
        assert labels.items() <= template["metadata"]["labels"].items()
        assert template["spec"]["containers"][0]["ports"][0]["containerPort"] == 3000
        assert template["spec"]["automountServiceAccountToken"] is False


def test_the_service_is_headless_and_selects_what_the_stateful_sets_create():
    documents = make_job(evaluator=True).plain()
    (service,) = of_kind("Service", documents)
    stateful_sets = of_kind("StatefulSet", documents)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    selectors = [item["spec"]["selector"]["matchLabels"] for item in stateful_sets]
    assert len({tuple(selector.items()) for selector in selectors}) == 4
    for stateful_set, selector in zip(stateful_sets, selectors, strict=True):
        spec = stateful_set["spec"]
        assert spec["serviceName"] == service["metadata"]["name"]
        assert spec["podManagementPolicy"] == "Parallel"
        labels = spec["template"]["metadata"]["labels"]
        assert selector == labels
        assert service["spec"]["selector"].items() <= labels.items()


def test_each_role_has_its_requests_and_all_share_the_volume():
    resources = {"ps": kubernetes.Resources("4", "16Gi"), "worker": kubernetes.Resources("500m")}
    job = make_job(resources=resources, mount_path="/models", command=["true"])
    requests = {}
    for role, _, spec in pods(job):
        (container,) = spec["containers"]
        requests[role] = container["resources"]["requests"]
        (mount,) = container["volumeMounts"]
        (volume,) = spec["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/models"}
        assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    assert requests == {
        "chief": {"cpu": "1", "memory": "2Gi"},
        "worker": {"cpu": "500m", "memory": "2Gi"},
        "ps": {"cpu": "4", "memory": "16Gi"},
    }


def test_arguments_arrive_as_they_were_written():
    arguments = ["", "a b", "'", '"', "$HOME", "$(POD_NAME)", "$$", "\\", "two\nlines", "{}", "yes"]
    show = "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(3)"
    job = make_job([sys.executable, "-c", show, *arguments])
    (tfjob,) = of_kind("TFJob", job.tfjob())
    specs = [next(spec for _, _, spec in pods(job))]
    specs.append(tfjob["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"])
    for spec in specs:
        command, environment = command_and_environment(spec, "ctr-chief-0")
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert json.loads(result.stdout) == arguments


def test_after_success_no_pod_trains_again_even_if_it_is_restarted(run_pod, tmp_path):
    chief = run_pod("ctr-chief-0", "echo trained")
    chief.wait_for("Training has finished")
    restarted = run_pod("ctr-chief-0", "echo trained")
    restarted.wait_for("Training has finished")
    assert "trained" in chief.log.read_text()
    assert "trained" not in restarted.log.read_text()
    for pod in (chief, restarted):
        pod.process.terminate()
        assert pod.process.wait(timeout=60) == 128 + signal.SIGTERM
    # Another command on the same volume is another run.
    run_pod("ctr-chief-0", "echo trained in another mode").wait_for("another mode\nTraining has")
    assert len(list(tmp_path.glob(".ctr-*.finished"))) == 2


def test_a_failure_is_left_to_kubernetes_to_restart(run_pod, tmp_path):
    assert run_pod("ctr-chief-0", "exit 41").process.wait(timeout=60) == 41
    assert not list(tmp_path.glob(".ctr-*.finished"))


def test_a_worker_serves_again_if_the_chief_did_not_say_that_training_ended(run_pod, tmp_path):
    (tmp_path / "bin").mkdir()
    sleep = tmp_path / "bin" / "sleep"
    sleep.write_text("#!/bin/sh\n")
    sleep.chmod(0o755)
    program = f"echo serves >> {tmp_path}/count; [ $(wc -l < {tmp_path}/count) -lt 3 ] || exit 42"
    worker = run_pod("ctr-worker-1", program, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert worker.process.wait(timeout=60) == 42
    assert not list(tmp_path.glob(".ctr-*.finished"))


def test_the_program_hears_that_its_pod_is_stopped(run_pod):
    program = "trap 'echo saving; exit 43' TERM; echo ready; while :; do sleep 0.1; done"
    worker = run_pod("ctr-worker-0", program)
    worker.wait_for("ready")
    worker.process.terminate()
    assert worker.process.wait(timeout=60) == 43
    assert worker.log.read_text() == "ready\nsaving\n"


@pytest.mark.parametrize(
    "options, text",
    [
        ({"name": "CTR"}, r"name: expected at most 42 lower-case letters.*found 'CTR'"),
        ({"name": "c" * 43}, "name: expected at most 42"),
        ({"name": "1st"}, "name: expected a letter at its start, found '1st'"),
        ({"namespace": "a.b"}, "namespace: expected at most 63"),
        ({"image": "two words"}, "image: expected a container image"),
        ({"command": ()}, "command: expected the program"),
        ({"storage_claim": "a_b"}, "storage_claim: expected"),
        ({"mount_path": "training"}, "mount_path: expected an absolute path below /"),
        ({"mount_path": "/"}, "mount_path: expected an absolute path below /"),
        ({"mount_path": "/models"}, "expected a --model_dir below /models.*=/models/run1"),
        ({"command": ("a", "--model_dir", "/training")}, "found '/training'"),
        ({"command": ("a", "--model_dir=/training/../run")}, "found '/training/../run'"),
        ({"command": ("a", "--model_dir=runs/1")}, "found 'runs/1'"),
        ({"num_workers": 0}, "num_workers, num_ps: expected at least 1 worker"),
        ({"num_ps": -1}, "found 2 and -1"),
        ({"num_workers": 1, "num_ps": 0}, "expected at least 2 where num_ps is 0, found 1"),
        ({"port": 0}, "port: expected 1 to 65535, found 0"),
        ({"port": 65536}, "port: expected 1 to 65535, found 65536"),
        ({"resources": {"gpu": kubernetes.Resources()}}, "expected one of chief, worker, ps"),
        ({"resources": {"ps": kubernetes.Resources(cpu="0")}}, "ps_cpu: expected cores.*'0'"),
        ({"resources": {"ps": kubernetes.Resources(cpu="1G")}}, "ps_cpu: expected cores.*'1G'"),
        ({"resources": {"ps": kubernetes.Resources(memory="4GB")}}, "ps_memory: .*found '4GB'"),
        ({"resources": {"ps": kubernetes.Resources(memory="4m")}}, "ps_memory: .*found '4m'"),
    ],
)
def test_what_would_not_work_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        make_job(**options)
