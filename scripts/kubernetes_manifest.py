"""Writes Kubernetes manifests that run a program as a cluster of pods, one for each task.

    python scripts/kubernetes_manifest.py --name=ctr --image=registry/gba_tf:1 \\
        --storage_claim=training --num_workers=4 --num_ps=2 \\
        -- python scripts/train.py --model_dir=/training/run1 > ctr.yaml
    kubectl apply -f ctr.yaml

Every task runs the command after `--`, with a TF_CONFIG that gives it its role.
"""

import importlib.util
import pathlib
import sys

from absl import app, flags

if importlib.util.find_spec("gba_tf") is None:
    # From a checkout that is not installed.
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from gba_tf import command_line, kubernetes

_SCRIPT = "kubernetes_manifest"

_FORM = flags.DEFINE_enum(
    "form",
    "plain",
    ["plain", "tfjob"],
    "plain: a Service and StatefulSets. tfjob: a TFJob of Kubeflow's Training Operator.",
)
_NAME = flags.DEFINE_string("name", None, "Of the job.", required=True)
_NAMESPACE = flags.DEFINE_string("namespace", "default", "Of everything in the manifest.")
_IMAGE = flags.DEFINE_string(
    "image", None, "Container image with the program, gba_tf and a shell.", required=True
)
_STORAGE_CLAIM = flags.DEFINE_string(
    "storage_claim",
    None,
    "PersistentVolumeClaim that all pods can write (ReadWriteMany), for the model_dir.",
    required=True,
)
_MOUNT_PATH = flags.DEFINE_string("mount_path", "/training", "Where the pods have that volume.")
_NUM_WORKERS = flags.DEFINE_integer("num_workers", 2, "Worker tasks.")
_NUM_PS = flags.DEFINE_integer(
    "num_ps", 1, "Parameter server tasks; 0 for workers alone, which can only train by all-reduce."
)
_EVALUATOR = flags.DEFINE_bool("evaluator", False, "Whether to start an evaluator too.")
_PORT = flags.DEFINE_integer(
    "port", kubernetes.DEFAULT_PORT, "Of the TensorFlow server in each pod."
)
_CPU, _MEMORY = (
    {
        role: flags.DEFINE_string(
            f"{role}_{kind}", default, f"{what} that each {role} pod requests."
        )
        for role in kubernetes.ROLES
    }
    for kind, default, what in (
        ("cpu", kubernetes.Resources.cpu, "Cores"),
        ("memory", kubernetes.Resources.memory, "Memory"),
    )
)


def main(command: list[str]) -> None:
    try:
        job = kubernetes.TrainingJob(
            name=_NAME.value,
            image=_IMAGE.value,
            command=tuple(command),
            storage_claim=_STORAGE_CLAIM.value,
            mount_path=_MOUNT_PATH.value,
            namespace=_NAMESPACE.value,
            num_workers=_NUM_WORKERS.value,
            num_ps=_NUM_PS.value,
            evaluator=_EVALUATOR.value,
            port=_PORT.value,
            resources={
                role: kubernetes.Resources(_CPU[role].value, _MEMORY[role].value)
                for role in kubernetes.ROLES
            },
        )
    except ValueError as error:
        command_line.fail(_SCRIPT, str(error))
    if job.model_dir is None:
        command_line.say(
            _SCRIPT,
            f"note: the command has no --model_dir. What it writes outside {job.mount_path} is lost"
            " with its pod, and checkpoints need a folder that all tasks share.",
        )
    documents = job.tfjob() if _FORM.value == "tfjob" else job.plain()
    print(kubernetes.to_yaml(documents), end="")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.command_parser(_SCRIPT, "python scripts/train.py"))
