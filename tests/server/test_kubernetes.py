"""The manifests of `deploy/kubernetes`: rendered by kubectl, and checked against its schemas."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rankscope_server.settings import SETTINGS, parse
from tests.server.balancers import DEPLOY
from tests.server.conftest import TestClient

MANIFESTS = DEPLOY / "kubernetes"
WAYS = ("single", "shared", "example")
VERSIONS = ("1.30", kubernetes_validate.latest_version())
KUBECTL = Path(sys.executable).with_name("kubectl")
Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(not KUBECTL.exists(), reason="there is no kubectl for this system")


def kubectl(*words: str, cwd: Path = MANIFESTS) -> str:
    """Run kubectl without a cluster; return what it prints."""
    done = subprocess.run(
        [KUBECTL, *words], capture_output=True, text=True, timeout=60, check=False, cwd=cwd,
        env=os.environ | {"KUBECONFIG": os.devnull},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@cache
def _rendered(way: str) -> str:
    return kubectl("kustomize", way)


def rendered(way: str) -> dict[str, Manifest]:
    """Return the manifests of one way by their kind; each kind is there once."""
    found = [one for one in yaml.safe_load_all(_rendered(way)) if one]
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    return by_kind


def pod(way: str) -> Manifest:
    """Return what is said of the server's pods."""
    found: Manifest = rendered(way)["Deployment"]["spec"]["template"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("way", WAYS)
def test_kubernetes_takes_them(way: str, version: str) -> None:
    for manifest in rendered(way).values():
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = copy.deepcopy(rendered(way)["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("way", WAYS)
def test_everything_is_about_the_same_pods(way: str) -> None:
    manifests, labels = rendered(way), pod(way)["metadata"]["labels"]
    selectors = [
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    if "PodDisruptionBudget" in manifests:
        selectors.append(manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    assert selectors == [labels] * len(selectors)
    assert ("PodDisruptionBudget" in manifests) == (manifests["Deployment"]["spec"]["replicas"] > 1)
    (port,) = (one["name"] for one in pod(way)["spec"]["containers"][0]["ports"])
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == port
    assert manifests["NetworkPolicy"]["spec"]["ingress"] == [{"ports": [{"port": port}]}]


@pytest.mark.parametrize("way", WAYS)
def test_pods_are_restricted(way: str) -> None:
    """As the Pod Security Standard "restricted" wants, and read-only beyond it."""
    spec = pod(way)["spec"]
    (server,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert not spec["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}
    user = re.search(r"(?m)^USER (\d+):(\d+)$", (DEPLOY / "container" / "Dockerfile").read_text())
    assert user is not None
    own = spec["securityContext"]
    assert [own["runAsUser"], own["runAsGroup"]] == [int(number) for number in user.groups()]


@pytest.mark.parametrize("way", WAYS)
def test_the_server_starts_with_what_they_say(way: str) -> None:
    manifests = rendered(way)
    (server,) = pod(way)["spec"]["containers"]
    assert server["envFrom"] == [
        {"configMapRef": {"name": manifests["ConfigMap"]["metadata"]["name"]}}
    ]
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"]["key"] for one in server["env"]}
    environ = manifests["ConfigMap"]["data"] | dict.fromkeys(secrets, "sqlite:////data/x.db")
    assert environ.keys() <= {setting.variable for setting in SETTINGS}
    settings = parse([], environ | {"RANKSCOPE_SERVER_HOST": "0.0.0.0"})
    assert settings.shutdown_seconds < pod(way)["spec"]["terminationGracePeriodSeconds"]
    assert settings.public_url == f"https://{settings.host_names()[0]}"
    assert ("RANKSCOPE_SERVER_DATABASE_URL" in secrets) == (way != "single")
    assert "Secret" not in manifests
    if "Ingress" in manifests:
        (rule,) = manifests["Ingress"]["spec"]["rules"]
        assert [rule["host"]] == list(settings.host_names())
        assert settings.proxies()


@pytest.mark.parametrize("way", WAYS)
def test_probes_are_answered(way: str, client: TestClient) -> None:
    """By a server that answers to one name alone, though a pod is asked by its address."""
    (server,) = pod(way)["spec"]["containers"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = server[kind]["httpGet"]
        headers = {one["name"]: one["value"] for one in asked["httpHeaders"]}
        assert client.get(asked["path"], headers=headers).status_code == 200
    by_address = client.get("/api/v1/health", headers={"Host": "10.2.3.4:8787"})
    assert by_address.status_code == 421


def test_the_commands_of_the_documents_are_right(tmp_path: Path) -> None:
    """What asks a cluster only builds what it would send; what is applied is what was rendered."""
    (tmp_path / "secrets.env").write_text(
        "token=t\ndatabase-url=postgresql://rankscope@db/rankscope\n"
    )
    (tmp_path / "deploy").symlink_to(DEPLOY)
    lines = re.findall(r"(?m)^kubectl (.+)$", (DEPLOY.parent / "docs" / "deploy.md").read_text())
    words = [shlex.split(line, comments=True) for line in lines]
    made, shown = [], []
    for one in words:
        if one[0] == "create":
            done = kubectl(*one, "--dry-run=client", "--output=yaml", cwd=tmp_path)
            made.append(yaml.safe_load(done))
        elif one[0] == "kustomize":
            shown.append(one[1])
            assert kubectl(*one, cwd=tmp_path) == _rendered("example")
    assert ["apply", "--kustomize", *shown] in words
    assert [one["kind"] for one in made] == ["Namespace", "Secret"]
    named = rendered("example")["Deployment"]["metadata"]["namespace"]
    assert made[0]["metadata"]["name"] == made[1]["metadata"]["namespace"] == named
    (server,) = pod("example")["spec"]["containers"]
    wanted = {one["valueFrom"]["secretKeyRef"]["key"] for one in server["env"]}
    assert made[1]["data"].keys() == wanted
