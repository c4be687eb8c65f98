"""Every port is closed but that of a server: by outbound HTTP the nodes still say the same."""

from __future__ import annotations

import sys
import time

import pytest

from tests.preflight.faults import Fault
from tests.preflight.scene import Scene, base_environment
from tests.preflight.trial import ROOT, Way, attempt, misses

PORT = 8787
START_LIMIT_S = 120.0  # of a server on a machine that is busy with other tests
pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip


def with_a_server(scene: Scene) -> None:
    """Start a server on node 0."""
    ready = scene.lab.folder / "ready.json"
    argv = [
        sys.executable, "-m", "rankscope_server.cli", "--host", "0.0.0.0", "--port", str(PORT),
        "--data-dir", str(scene.lab.folder / "data"), "--ready-file", str(ready),
    ]  # fmt: skip
    paths = ":".join(str(ROOT / part) for part in ("agent", "server"))
    environment = {**base_environment(), "PYTHONPATH": paths, "RANKSCOPE_TOKEN": "secret"}
    scene.lab.fork(0, argv, env=environment)
    deadline = time.monotonic() + START_LIMIT_S
    while not ready.exists():
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)


def closed_but_for_http(scene: Scene) -> None:
    """Let nothing in anywhere but answers, and what the server is asked."""
    with_a_server(scene)
    for number in scene.everywhere:
        own = [f"tcp dport {PORT} accept"] if number == 0 else []
        scene.firewall(number, "ct state established,related accept", *own, policy="drop")


WAY = Way(
    options=f"--server http://node0:{PORT} --run closed", environment={"RANKSCOPE_TOKEN": "secret"},
    has_torch=False,
)  # fmt: skip


def test_a_server_beside_a_healthy_mesh_changes_nothing() -> None:
    trial = attempt(Fault("healthy", "nothing", with_a_server, ()), WAY)
    assert not misses(trial), [answer.screen for answer in trial.answers]


def test_all_nodes_agree_over_http_alone() -> None:
    trial = attempt(Fault("closed", "all but HTTP is closed", closed_but_for_http, ()), WAY)
    said = []
    for answer in trial.answers:
        assert answer.verdict is not None, answer.screen
        assert answer.exit_code == 2, answer.screen
        assert answer.verdict.reported == ("node0", "node1", "node2"), answer.screen
        assert not any(one.id == "node.absent" for one in answer.loud), answer.screen
        assert any(one.id.startswith("port.") for one in answer.loud), answer.screen
        said.append([(one.id, one.title, one.nodes, one.edges) for one in answer.loud])
    assert said[0] == said[1] == said[2]
