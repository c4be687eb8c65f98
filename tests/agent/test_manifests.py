"""The manifests of docs/attach.md: taken by their schemas, and what their pods get names the run.

What a pod gets is derived from the manifest as the controller does it: labels, annotations, names.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rankscope.files import identity
from rankscope.node.launch import naming
from rankscope.process import environment, family
from tests.others import PYTHON
from tests.platforms import TRAINJOB

ROOT = Path(__file__).parents[2]
Manifest = dict[str, Any]
UID = "8d3f5a0e-52c5-4a9b-9f2f-2a6d2f7b6c11"
LABELS = {  # as pods have them; the last of Kueue (pkg/controller/constants), where it admits
    "jobset.sigs.k8s.io/jobset-name": "llama", "jobset.sigs.k8s.io/jobset-uid": UID,
    "batch.kubernetes.io/controller-uid": UID, "kueue.x-k8s.io/local-queue-name": "training",
}  # fmt: skip
ANNOTATIONS = {"jobset.sigs.k8s.io/restart-attempt": "1", "volcano.sh/job-retry-count": "1"}


def manifests() -> dict[str, Manifest]:
    """Return the manifests of the document by kind; a task of SkyPilot has none."""
    text = (ROOT / "docs" / "attach.md").read_text()
    found = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return {one.get("kind", "task"): one for one in found}


def container_of(manifest: Manifest) -> Manifest:
    """Return what is said of the container that trains."""
    spec: Manifest = manifest["spec"]
    if "trainer" in spec:
        trainer: Manifest = spec["trainer"]
        return trainer
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    return dict(container)


def pod(manifest: Manifest, node: int) -> dict[str, str]:
    """Return the environment of a pod of it."""
    name = manifest["metadata"]["name"]
    host = {"Job": f"{name}-{node}", "JobSet": f"{name}-workers-0-{node}"}.get(
        manifest["kind"], f"{name}-node-0-{node}"
    )
    fields = {
        "metadata.name": f"{host}-x7k2", "metadata.namespace": manifest["metadata"]["namespace"],
        "spec.nodeName": f"gpu-{node}",
        **{f"metadata.labels['{key}']": value for key, value in LABELS.items()},
        **{f"metadata.annotations['{key}']": value for key, value in ANNOTATIONS.items()},
    }  # fmt: skip
    own = {
        each["name"]: each["value"] if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container_of(manifest)["env"]
    }  # fmt: skip
    by_controller = TRAINJOB if manifest["kind"] == "TrainJob" else {"KUBERNETES_SERVICE_HOST": "x"}
    place = {"HOSTNAME": host, "JOB_COMPLETION_INDEX": str(node)}
    return by_controller | place | own


@pytest.mark.parametrize(("kind", "attempt"), [("TrainJob", 1), ("JobSet", 1), ("Job", 0)])
def test_what_pods_get_names_the_run_and_the_attempt(kind: str, attempt: int) -> None:
    manifest = manifests()[kind]
    for node in (0, 1):
        environ = pod(manifest, node) | {"POD_NAMESPACE": "team-a"}  # of the service account
        assert family.job_name(environ) == "kubernetes-team-a-llama-8d3f5a0e"
        assert identity.build(environ, node, 2).attempt == attempt
        facts = environment.snapshot(environ)
        assert facts["env.NODE_NAME"] == f"gpu-{node}"
        assert facts["env.POD_NAME"].startswith("llama-")
        unread = {each["name"] for each in container_of(manifest)["env"]} - {
            name.removeprefix("env.") for name in facts
        }
        assert unread <= {"RANKSCOPE_SERVER", "JOBSET_UID", "JOB_UID", "MASTER_ADDR"}


def test_each_variable_of_the_table_is_read_from_that_field() -> None:
    text = (ROOT / "docs" / "attach.md").read_text()
    (table,) = re.findall(r"\| variable \| from the field .*?\n\n", text, re.DOTALL)
    rows = dict(re.findall(r"^\| `(\w+)` \| `(metadata[^`]*)`", table, re.MULTILINE))
    keys = set(re.findall(r"\['(.*?)'\]", table))
    assert keys == LABELS.keys() | ANNOTATIONS.keys()
    for manifest in manifests().values():
        for each in container_of(manifest)["env"] if "kind" in manifest else []:
            if each["name"] in rows:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == rows[each["name"]]


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_job_and_those_of_the_jobset(version: str) -> None:
    jobset = manifests()["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    header = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "llama-workers-0"}}
    for job in (manifests()["Job"], header | jobset):
        kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueForm"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, version, strict=True)


_READ = """
import json, sys
from kubeflow_trainer_api import models
kind = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}
given = json.load(sys.stdin)
print(json.dumps(kind[given["kind"]].from_dict(given).to_dict()))
"""


@pytest.mark.needs("others")
@pytest.mark.parametrize("kind", ["TrainJob", "JobSet"])
def test_kubeflows_own_models_take_the_trainjob_and_the_jobset(kind: str) -> None:
    """They leave out a field that they do not know, so that all must come back."""
    manifest = manifests()[kind]
    done = subprocess.run(
        [PYTHON, "-c", _READ], input=json.dumps(manifest), capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == manifest


def test_the_task_of_skypilot_starts_torchrun_on_each_node() -> None:
    task = manifests()["task"]
    (line,) = re.sub(r"\\\n\s*", "", task["run"]).splitlines()
    said = subprocess.run(
        ["sh", "-c", f"rankscope() {{ printf '%s\\n' \"$@\"; }}; {line}"], text=True, check=True,
        capture_output=True,
        env={"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin",
             "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"},
    ).stdout.split()  # fmt: skip
    command = said[said.index("--") + 1 :]
    assert naming.launcher_kind(command) == "torchrun"
    options = ("--nnodes", "--node-rank", "--master-addr")
    assert [naming.option(command, name) for name in options] == ["2", "1", "10.0.0.4"]
