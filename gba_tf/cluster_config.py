"""TF_CONFIG, read and checked in one place.

TF_CONFIG is TensorFlow's own way to tell a process its place in a cluster, for example

    {"cluster": {"chief": ["10.0.0.1:2222"],
                 "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
                 "ps": ["10.0.0.4:2222"]},
     "task": {"type": "worker", "index": 0}}

TensorFlow itself finds most mistakes late or never: a cluster without a chief waits in silence. All
mistakes are found here, before anything is started. Imports no TensorFlow.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
# A name, an IPv4 address or an IPv6 address in brackets, then a port.
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]+)")


class ClusterConfigError(ValueError):
    """A mistake in TF_CONFIG: which key and task, what was expected and found, what to do."""


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The cluster that trains, and the place of this process in it.

    Attributes:
      cluster: Addresses ("host:port") of each job, in order of task index. The evaluator is not in
        it: servers that expect it would wait for it (tensorflow#46169).
      task_type: "chief", "worker", "ps" or "evaluator".
      task_index: Index of this task within its job.
      evaluators: Addresses of the evaluator job, usually none or one.
      all_reduce: Whether the workers train by all-reduce, see `for_all_reduce`.
      bystanders: Under all-reduce, the addresses of each job that has no part in the training.
    """

    cluster: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int
    evaluators: tuple[str, ...] = ()
    all_reduce: bool = False
    bystanders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """Tasks of the worker job; the chief is not counted."""
        return len(self.cluster.get("worker", ()))

    @property
    def num_ps(self) -> int:
        """Parameter server tasks."""
        return len(self.cluster.get("ps", ()))

    @property
    def is_chief(self) -> bool:
        """Whether this task leads; without a chief job that is worker 0, as in TensorFlow."""
        if "chief" in self.cluster:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.task_index == 0

    @property
    def address(self) -> str:
        """Address ("host:port") of this task."""
        jobs = {**self.cluster, **self.bystanders, "evaluator": self.evaluators}
        return jobs[self.task_type][self.task_index]

    @property
    def chief_address(self) -> str:
        """Address ("host:port") of the task for which `is_chief` is true."""
        return self.cluster["chief" if "chief" in self.cluster else "worker"][0]

    @property
    def chief_name(self) -> str:
        """The task for which `is_chief` is true, in messages."""
        return "the chief" if "chief" in self.cluster else "worker 0"

    @property
    def followers(self) -> Mapping[str, str]:
        """Name ("ps 0") to address of the tasks that end when the one that leads tells them to."""
        jobs = {
            **(self.bystanders if self.all_reduce else self.cluster),
            "evaluator": self.evaluators,
        }
        return {
            f"{job} {index}": address
            for job, addresses in jobs.items()
            for index, address in enumerate(addresses)
            if address != self.chief_address
        }

    @property
    def task_name(self) -> str:
        """This task in messages, for example "worker 0"."""
        return f"{self.task_type} {self.task_index}"

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] = os.environ, require_ps: bool = True
    ) -> "ClusterConfig | None":
        """Reads TF_CONFIG.

        Args:
          environ: The environment. Default: that of this process.
          require_ps: Whether training needs parameter servers, and with them a chief and workers.
            False for all-reduce, whose cluster may consist of workers alone. Default: True.

        Returns:
          The checked configuration; None if TF_CONFIG is not set or empty.

        Raises:
          ClusterConfigError: For any mistake in TF_CONFIG.
        """
        text = environ.get("TF_CONFIG", "")
        if not text.strip():
            return None
        config = _parse_object(text)
        cluster = _read_cluster(config)
        _check_addresses(cluster)
        _check_roles(cluster, require_ps)
        task_type, task_index = _read_task(config, cluster)
        evaluators = cluster.pop("evaluator", ())
        return cls(cluster, task_type, task_index, evaluators)

    def for_all_reduce(self) -> "ClusterConfig":
        """The same tasks for all-reduce: the workers train, worker 0 leads, the others step aside.

        Without a worker, as in a local cluster of one process, the chief becomes worker 0.

        Returns:
          A configuration whose `cluster` has the workers only, and chief and ps among the
          `bystanders`. Of one that is for all-reduce already, the same.
        """
        if self.all_reduce:
            return self
        if "worker" in self.cluster:
            training, task_type = "worker", self.task_type
        else:
            training = "chief"
            task_type = "worker" if self.task_type == "chief" else self.task_type
        return dataclasses.replace(
            self,
            cluster={"worker": self.cluster[training]},
            task_type=task_type,
            all_reduce=True,
            bystanders={job: tasks for job, tasks in self.cluster.items() if job != training},
        )


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" (or "[ipv6]:port") into what `socket.create_connection` takes."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _key(*names: str | int) -> str:
    return "TF_CONFIG" + "".join(f"[{json.dumps(name)}]" for name in names)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        raise ClusterConfigError(
            f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno}, "
            f"near {near!r}. Expected for example {_EXAMPLE}"
        ) from None
    if not isinstance(config, dict):
        raise ClusterConfigError(
            f"TF_CONFIG: expected a JSON object, found {_describe(config)}. For example {_EXAMPLE}"
        )
    return config


def _describe(value: Any) -> str:
    """The value as it stands in TF_CONFIG, cut to a readable length."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_cluster(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    jobs = config.get("cluster")
    if "cluster" not in config or jobs == {}:
        raise ClusterConfigError(
            f"{_key('cluster')}: expected the addresses of chief, worker and ps, found none. "
            f"Add them, for example {_EXAMPLE}"
        )
    if not isinstance(jobs, dict):
        raise ClusterConfigError(
            f"{_key('cluster')}: expected an object from job name to a list of addresses, found "
            f"{_describe(jobs)}. For example {_EXAMPLE}"
        )
    cluster = {}
    for job, addresses in jobs.items():
        if job == "master":
            raise ClusterConfigError(
                f'{_key("cluster", job)}: the job "master" of TensorFlow 1 is called "chief" now. '
                "Rename it to chief, here and in " + _key("task", "type")
            )
        if job not in _JOBS:
            raise ClusterConfigError(
                f"{_key('cluster', job)}: expected one of {', '.join(_JOBS)}, found the job "
                f"{_describe(job)}. Rename or remove it"
            )
        if not isinstance(addresses, list):
            raise ClusterConfigError(
                f"{_key('cluster', job)}: expected a list of addresses, found "
                f'{_describe(addresses)}. Write ["host:port", ...], in order of task index'
            )
        if not addresses:
            raise ClusterConfigError(
                f"{_key('cluster', job)}: expected at least one address, found an empty list. "
                "Add the addresses of its tasks, or remove the job"
            )
        cluster[job] = tuple(addresses)
    return cluster


def _check_addresses(cluster: dict[str, tuple[str, ...]]) -> None:
    owners: dict[str, str] = {}
    for job, addresses in cluster.items():
        for index, address in enumerate(addresses):
            key, task = _key("cluster", job, index), f"{job} {index}"
            if not isinstance(address, str):
                raise ClusterConfigError(
                    f'{key}: expected the address of {task} as a string "host:port", found '
                    f"{_describe(address)}"
                )
            match = _ADDRESS.fullmatch(address)
            if not match:
                raise ClusterConfigError(
                    f'{key}: expected the address of {task} as "host:port", found '
                    f"{_describe(address)}. {_address_advice(address)}"
                )
            if not 1 <= int(match["port"]) <= 65535:
                raise ClusterConfigError(
                    f"{key}: expected a port from 1 to 65535 for {task}, found {match['port']} in "
                    f"{_describe(address)}. Choose a free port of that host"
                )
            if address in owners:
                raise ClusterConfigError(
                    f"{key}: expected an address of its own for every task, found {address} for "
                    f"both {owners[address]} and {task}. Give one of them another port"
                )
            owners[address] = task


def _address_advice(address: str) -> str:
    if "://" in address:
        return "Remove the scheme (grpc:// and the like)"
    if ":" not in address:
        return f'Add the port, for example "{address.strip() or "host"}:2222"'
    return 'Write a host name, an IPv4 address or "[IPv6 address]", a colon, and a port number'


def _check_roles(cluster: dict[str, tuple[str, ...]], require_ps: bool) -> None:
    chiefs = cluster.get("chief", ())
    if len(chiefs) > 1:
        raise ClusterConfigError(
            f"{_key('cluster', 'chief')}: expected one chief, found {len(chiefs)}: "
            f"{', '.join(chiefs)}. Keep one; the others may become workers"
        )
    if not require_ps:
        if not chiefs and "worker" not in cluster:
            raise ClusterConfigError(
                f"{_key('cluster')}: expected a chief or a worker, found {_found_jobs(cluster)}. "
                'Add "worker": ["host:port", ...]'
            )
        return
    needed = {
        "chief": "nobody would start the training, and all others would wait for ever",
        "worker": "nobody would compute gradients",
        "ps": "nobody would hold the parameters",
    }
    for job, consequence in needed.items():
        if job not in cluster:
            raise ClusterConfigError(
                f"{_key('cluster', job)}: expected at least one {job} for training with parameter "
                f"servers, found {_found_jobs(cluster)}: {consequence}. "
                f'Add "{job}": ["host:port"] to the cluster of every task'
            )


def _found_jobs(cluster: dict[str, tuple[str, ...]]) -> str:
    return "only " + ", ".join(f"{len(tasks)} {job}" for job, tasks in cluster.items())


def _read_task(config: dict[str, Any], cluster: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    if "task" not in config:
        raise ClusterConfigError(
            f"{_key('task')}: expected the role of this process, found none. "
            'Add for example "task": {"type": "worker", "index": 0}'
        )
    task = config["task"]
    if not isinstance(task, dict):
        raise ClusterConfigError(
            f'{_key("task")}: expected an object with "type" and "index", found {_describe(task)}'
        )
    task_type = task.get("type")
    if task_type == "master":
        raise ClusterConfigError(
            f'{_key("task", "type")}: the task "master" of TensorFlow 1 is called "chief" now. '
            "Rename it to chief"
        )
    if not isinstance(task_type, str) or task_type not in _JOBS:
        found = _describe(task_type) if "type" in task else "none"
        raise ClusterConfigError(
            f"{_key('task', 'type')}: expected one of {', '.join(cluster)}, found {found}"
        )
    if task_type not in cluster:
        raise ClusterConfigError(
            f"{_key('task', 'type')}: this task is {task_type}, but {_key('cluster')} has "
            f'{_found_jobs(cluster)}. Add "{task_type}": ["host:port"] to the cluster'
        )
    if "index" not in task:
        raise ClusterConfigError(
            f"{_key('task', 'index')}: expected the index of this {task_type}, found none. "
            'Add for example "index": 0'
        )
    index = task["index"]
    # bool is an int in Python, but `true` in TF_CONFIG is a mistake.
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterConfigError(
            f"{_key('task', 'index')}: expected a whole number for this {task_type}, found "
            f"{_describe(index)}. Write it without quotes or decimal point"
        )
    count = len(cluster[task_type])
    if not 0 <= index < count:
        allowed = "0" if count == 1 else f"0 to {count - 1}"
        raise ClusterConfigError(
            f"{_key('task', 'index')}: expected {allowed} for this {task_type}, found {index}: "
            f"{_key('cluster', task_type)} has {count} address{'es' if count > 1 else ''}. "
            "Correct the index, or add the missing address to the cluster of every task"
        )
    return task_type, index
