"""What flags do, in the script as it is started. What it writes is tested in kubernetes_test.py."""

import os
import pathlib
import subprocess
import sys

import pytest

from gba_tf import kubernetes

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "kubernetes_manifest.py"
COMMAND = ("python", "scripts/train.py", "--strategy=gba", "--model_dir=/training/run1")


def run_script(*arguments):
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("form", ["plain", "tfjob"])
def test_the_script_writes_the_manifest(form):
    flags = ["--name=ctr", "--image=registry/gba:1", "--storage_claim=shared", f"--form={form}"]
    flags += ["--namespace=ads", "--num_workers=3", "--num_ps=2", "--evaluator", "--port=3000"]
    flags += ["--ps_cpu=4", "--ps_memory=16Gi"]
    result = run_script(*flags, "--", *COMMAND)
    assert result.returncode == 0 and result.stderr == ""
    job = kubernetes.TrainingJob(
        name="ctr",
        image="registry/gba:1",
        command=COMMAND,
        storage_claim="shared",
        namespace="ads",
        num_workers=3,
        num_ps=2,
        evaluator=True,
        port=3000,
        resources={
            role: kubernetes.Resources("4", "16Gi") if role == "ps" else kubernetes.Resources()
            for role in kubernetes.ROLES
        },
    )
    assert result.stdout == kubernetes.to_yaml(getattr(job, form)())


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--", "python"], "--name must have a value"),
        (["--name=ctr", "--image=i", "--storage_claim=s"], "found none: add -- python"),
        (["--name=C", "--image=i", "--storage_claim=s", "--", "a"], "name: expected at most 42"),
    ],
)
def test_a_mistake_is_one_line_and_no_manifest(arguments, text):
    result = run_script(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert text in result.stderr
    assert result.stderr.startswith("kubernetes_manifest: ") and result.stderr.count("\n") == 1


def test_a_command_without_model_dir_is_pointed_out():
    flags = ["--name=ctr", "--image=i", "--storage_claim=s"]
    result = run_script(*flags, "--", "python", "mine.py")
    assert result.returncode == 0
    assert "note: the command has no --model_dir" in result.stderr
