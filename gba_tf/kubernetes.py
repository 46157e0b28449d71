"""Kubernetes manifests of a training job: plain ones, and a TFJob of Kubeflow's Training Operator.

Both give every task a TF_CONFIG, a DNS name that outlives its pods, the volume that all tasks
share, and a NetworkPolicy that keeps everybody else away from TensorFlow's port. Imports no
TensorFlow.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

DEFAULT_PORT = 2222
ROLES = ("chief", "worker", "ps", "evaluator")
# A manifest, after a comment for its reader.
Document = tuple[str, dict[str, Any]]

# Of a label, of which host names are made (RFC 1123); a Service's starts with a letter (RFC 1035).
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_LABEL = 63
# A pod of a StatefulSet has a label of the set's name and 11 characters more.
_MAX_NAME = _MAX_LABEL - 11 - len("-evaluator")
_CPU = re.compile(r"[0-9]+m|[0-9]+(\.[0-9]{1,3})?")
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGT]i|[kMGT])?")

# What a pod of a StatefulSet runs, with the program and its arguments in "$@". Kubernetes replaces
# "$(NAME)" and "$$" in it, so it has neither. `run` passes SIGTERM on: a shell that is process 1 of
# a container does not die of it, and a program that is its child would never hear of it.
_TASK_SCRIPT = """\
set -u
stopped= child=
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child"' TERM
run() {
  "$@" &
  child=$!
  # A signal that came before there was a child.
  [ -z "$stopped" ] || kill -TERM "$child"
  wait "$child" && status=0 || status=$?
  if [ -n "$stopped" ]; then wait "$child"; exit; fi
}

# The number at the end of a pod's name is the index of its task.
export TF_CONFIG="{\\"cluster\\": $CLUSTER, \\
\\"task\\": {\\"type\\": \\"$TASK_TYPE\\", \\"index\\": ${POD_NAME##*-}}}"

# A StatefulSet restarts whatever ends. Training has ended when the leading task says so in a file
# of the shared volume; until then, a leader that was restarted may need a task that ended well.
while [ ! -e "$FINISHED" ]; do
  run "$@"
  [ "$status" = 0 ] || exit "$status"
  if [ "$POD_NAME" = "$LEADER" ]; then : > "$FINISHED" || exit 1; fi
  # Two minutes, because NFS may show a new file to others a minute late.
  for try in 1 2 3 4 5 6 7 8 9 10 11 12; do
    [ ! -e "$FINISHED" ] || break
    run sleep 10
  done
done
echo "Training has finished, says $FINISHED. Delete the job to free its resources."
while :; do run sleep 3600; done
"""

# The operator starts an evaluator, but leaves it out of "cluster". All tasks have to know it: the
# evaluator its own address, the chief whom to tell that training ended.
_ADD_EVALUATOR_SCRIPT = """\
start='{"cluster":{'
export TF_CONFIG="$start\\"evaluator\\":[\\"$EVALUATOR\\"],${TF_CONFIG#"$start"}"
exec "$@"
"""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a pod requests.

    Attributes:
      cpu: Cores, for example "2", "0.5" or "500m".
      memory: Bytes, for example "4Gi".
    """

    cpu: str = "1"
    memory: str = "2Gi"


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A training job on Kubernetes, checked.

    Attributes:
      name: Of the job; every name in the cluster begins with it.
      image: Container image with the program, gba_tf and a POSIX shell.
      command: The program and its arguments, the same in every task.
      storage_claim: An existing PersistentVolumeClaim that all pods can write (ReadWriteMany).
      mount_path: Where the pods have it. Default: "/training".
      namespace: Default: "default".
      num_workers: Worker tasks. Default: 2.
      num_ps: Parameter server tasks; with 0, the job is workers without a chief, for all-reduce.
        Default: 1.
      evaluator: Whether there is an evaluator task. Default: False.
      port: Of every task's TensorFlow server. Default: 2222.
      resources: Requests of a pod of each role in ROLES; those left out have the defaults of
        Resources.

    Raises:
      ValueError: A value that Kubernetes would refuse, or with which training would not work. The
        text names it.
    """

    name: str
    image: str
    command: tuple[str, ...]
    storage_claim: str
    mount_path: str = "/training"
    namespace: str = "default"
    num_workers: int = 2
    num_ps: int = 1
    evaluator: bool = False
    port: int = DEFAULT_PORT
    resources: Mapping[str, Resources] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_label("name", self.name, _MAX_NAME)
        if not self.name[0].isalpha():
            raise ValueError(f"name: expected a letter at its start, found {self.name!r}.")
        _check_label("namespace", self.namespace, _MAX_LABEL)
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(
                "image: expected a container image such as registry/training:1, found"
                f" {self.image!r}."
            )
        if not self.command:
            raise ValueError("command: expected the program to run in every task, found none.")
        for part in self.storage_claim.split("."):
            _check_label("storage_claim", part, _MAX_LABEL)
        self._check_paths()
        if self.num_workers < 1 or self.num_ps < 0:
            raise ValueError(
                "num_workers, num_ps: expected at least 1 worker and 0 parameter servers, found"
                f" {self.num_workers} and {self.num_ps}."
            )
        if self.num_workers + self.num_ps < 2:
            raise ValueError(
                "num_workers: expected at least 2 where num_ps is 0, found 1: one process needs no"
                " cluster. Raise num_workers, or num_ps to train over parameter servers."
            )
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port: expected 1 to 65535, found {self.port}.")
        for role, resources in self.resources.items():
            if role not in ROLES:
                raise ValueError(f"resources: expected one of {', '.join(ROLES)}, found {role}.")
            _check_quantity(f"{role}_cpu", resources.cpu, _CPU, "cores such as 2, 0.5 or 500m")
            _check_quantity(f"{role}_memory", resources.memory, _MEMORY, "bytes such as 4Gi")

    def _check_paths(self) -> None:
        path = pathlib.PurePosixPath(self.mount_path)
        if not re.fullmatch(r"(/[\w.-]+)+/?", self.mount_path):
            raise ValueError(
                "mount_path: expected an absolute path below /, of letters, digits and _.-, found"
                f" {self.mount_path!r}."
            )
        if self.model_dir is not None:
            model_dir = pathlib.PurePosixPath(self.model_dir)
            if path not in model_dir.parents or ".." in model_dir.parts:
                raise ValueError(
                    f"command: expected a --model_dir below {path}, where all tasks have the volume"
                    f" that they share, found {self.model_dir!r}. Write for example"
                    f" --model_dir={path / 'run1'}, or change mount_path."
                )

    @property
    def model_dir(self) -> str | None:
        """The value of --model_dir in the command, None if it has none."""
        found = None
        for argument, following in zip(self.command, (*self.command[1:], ""), strict=True):
            flag, equals, value = argument.partition("=")
            if flag in ("--model_dir", "-model_dir"):
                found = value if equals else following
        return found

    @property
    def tasks(self) -> dict[str, int]:
        """Number of tasks of each role that the job has."""
        counts = {
            "chief": int(self.num_ps > 0),
            "worker": self.num_workers,
            "ps": self.num_ps,
            "evaluator": int(self.evaluator),
        }
        return {role: count for role, count in counts.items() if count}

    @property
    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "gba-tf", "app.kubernetes.io/instance": self.name}

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": self.namespace, "labels": self._labels}

    def plain(self) -> list[Document]:
        """A NetworkPolicy, a headless Service, and a StatefulSet for each role."""
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(self.name),
            "spec": {
                "clusterIP": "None",
                "selector": self._labels,
                "publishNotReadyAddresses": True,
                "ports": [{"name": "tensorflow", "port": self.port}],
            },
        }
        comment = "Gives each pod a DNS name of its own, which it keeps wherever it is restarted."
        return [
            self._network_policy(),
            (comment, service),
            *(self._stateful_set(role, count) for role, count in self.tasks.items()),
        ]

    def tfjob(self) -> list[Document]:
        """A NetworkPolicy and a TFJob, for clusters with Kubeflow's Training Operator (v1)."""
        names = {"chief": "Chief", "worker": "Worker", "ps": "PS", "evaluator": "Evaluator"}
        replicas = {
            names[role]: {
                "replicas": count,
                # A task that failed, or that was evicted, comes back and joins again.
                "restartPolicy": "OnFailure",
                "template": self._template(role, self._tfjob_container(), "tfjob-port"),
            }
            for role, count in self.tasks.items()
        }
        job = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": self._metadata(self.name),
            "spec": {"runPolicy": {"cleanPodPolicy": "Running"}, "tfReplicaSpecs": replicas},
        }
        return [self._network_policy(), ("The operator sets TF_CONFIG in every pod.", job)]

    def _network_policy(self) -> Document:
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._metadata(self.name),
            "spec": {
                "podSelector": {"matchLabels": self._labels},
                "policyTypes": ["Ingress"],
                "ingress": [
                    {
                        "from": [{"podSelector": {"matchLabels": self._labels}}],
                        "ports": [{"protocol": "TCP", "port": self.port}],
                    }
                ],
            },
        }
        return (
            "TensorFlow's port has no authentication: only the pods of this job may reach it.\n"
            "Needs a network plugin that enforces policies.",
            policy,
        )

    def _stateful_set(self, role: str, count: int) -> Document:
        labels = {**self._labels, "app.kubernetes.io/component": role}
        leader = f"{self.name}-{'chief' if self.num_ps else 'worker'}-0"
        # Another program or setting is another run, which the end of this one does not concern.
        run = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        finished = pathlib.PurePosixPath(self.mount_path) / f".{self.name}-{run}.finished"
        container = {
            "command": ["/bin/sh", "-c", _TASK_SCRIPT, "sh"],
            "args": [_literal(argument) for argument in self.command],
            "env": [
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "TASK_TYPE", "value": role},
                {"name": "CLUSTER", "value": json.dumps(self._cluster())},
                {"name": "LEADER", "value": leader},
                {"name": "FINISHED", "value": str(finished)},
            ],
        }
        stateful_set = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {**self._metadata(f"{self.name}-{role}"), "labels": labels},
            "spec": {
                "serviceName": self.name,
                "replicas": count,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": self._template(role, container),
            },
        }
        return f"The {role} task{'s' if count > 1 else ''}.", stateful_set

    def _cluster(self) -> dict[str, list[str]]:
        """Addresses of each job, as in TF_CONFIG."""
        domain = f"{self.name}.{self.namespace}.svc:{self.port}"
        return {
            role: [f"{self.name}-{role}-{index}.{domain}" for index in range(count)]
            for role, count in self.tasks.items()
        }

    def _tfjob_container(self) -> dict[str, Any]:
        command = [_literal(argument) for argument in self.command]
        if not self.evaluator:
            return {"command": command, "env": []}
        # The operator gives each task a Service of this name.
        address = f"{self.name}-evaluator-0.{self.namespace}.svc:{self.port}"
        return {
            "command": ["/bin/sh", "-c", _ADD_EVALUATOR_SCRIPT, "sh"],
            "args": command,
            "env": [{"name": "EVALUATOR", "value": address}],
        }

    def _template(
        self, role: str, container: dict[str, Any], port_name: str = "tensorflow"
    ) -> dict[str, Any]:
        """The pod of a role, running `container`."""
        resources = self.resources.get(role, Resources())
        return {
            "metadata": {"labels": {**self._labels, "app.kubernetes.io/component": role}},
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        # The operator looks for a container of this name.
                        "name": "tensorflow",
                        "image": self.image,
                        **container,
                        "env": [*container["env"], {"name": "PYTHONUNBUFFERED", "value": "1"}],
                        "ports": [{"name": port_name, "containerPort": self.port}],
                        "resources": {"requests": dataclasses.asdict(resources)},
                        "volumeMounts": [{"name": "training", "mountPath": self.mount_path}],
                    }
                ],
                "volumes": [
                    {
                        "name": "training",
                        "persistentVolumeClaim": {"claimName": self.storage_claim},
                    }
                ],
            },
        }


def to_yaml(documents: list[Document]) -> str:
    """The documents in one file for kubectl, each after its comment."""
    parts = []
    for comment, document in documents:
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)
        parts.append(f"---\n{lines}{text}")
    return "".join(parts)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as they are, and what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _literal(argument: str) -> str:
    """The argument such that Kubernetes does not look for variables in it."""
    return argument.replace("$", "$$")


def _check_label(flag: str, value: str, max_length: int) -> None:
    if not _LABEL.fullmatch(value) or len(value) > max_length:
        raise ValueError(
            f"{flag}: expected at most {max_length} lower-case letters, digits and '-', with no '-'"
            f" at either end, found {value!r}."
        )


def _check_quantity(flag: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    # Some digit that is not 0 is before the unit.
    if not pattern.fullmatch(value) or not re.match(r"[0.]*[1-9]", value):
        raise ValueError(f"{flag}: expected {expected}, found {value!r}.")
