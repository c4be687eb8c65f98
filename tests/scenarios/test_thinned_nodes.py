"""Two nodes above their budget: one server has all ranks thin from the same step on."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from rankscope.wire import schema, thinning
from tests import fork_server
from tests.agent import recorded
from tests.ports import free_port
from tests.scenarios.conftest import Watched
from tests.scenarios.launched import PYTHON, RUN, environment
from tests.server.conftest import ServerProcess

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("namespaces")]
NODES = ("node0", "node1")
AS_NODE = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
STEPS_AFTER = 40  # that are looked at
TRAINING = (
    "--strategy", "ddp", "--steps", "100000", "--layers", "2", "--layer-seconds", "0.016",
    "--width", "32", "--context", "32", "--data-bytes", "65536", "--log-every", "1000",
)  # fmt: skip
THINLY = {
    "RANKSCOPE_OVERHEAD_PERCENT": "0.000001", "RANKSCOPE_COLLECTIVES": "kernels",
    "GLOO_SOCKET_IFNAME": "lo",  # the name of a node has no address
}  # fmt: skip


def start(node: int, port: int, directory: Path, server: ServerProcess) -> subprocess.Popen[bytes]:
    """Start the launcher of a node with one rank; it has a host name and a directory of its own."""
    directory.mkdir()
    command = [
        *AS_NODE, NODES[node], *RUN, PYTHON, "-m", "torch.distributed.run", "--nnodes", "2",
        "--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-backend", "static",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "--local-addr", "127.0.0.1",
        "-m", "rankscope_trainer", *TRAINING,
    ]  # fmt: skip
    variables = environment(directory, server, **THINLY, **fork_server.under_torchrun())
    with (directory.parent / "test.log").open("ab") as log:
        return subprocess.Popen(
            command, env=variables, stdout=log, stderr=log, cwd=directory, start_new_session=True,
        )  # fmt: skip


def ranks(tmp_path: Path) -> list[recorded.Recorded]:
    """Return what the rank of each node recorded, as far as there is one."""
    return [rank for name in NODES for rank in recorded.read(tmp_path / name)]


def changes(rank: recorded.Recorded) -> list[schema.Event]:
    return [event for event in rank.of(schema.Event) if event.name == "thinning_changed"]


def test_they_record_the_same_steps_whole(tmp_path: Path, server: ServerProcess) -> None:
    run, port = Watched(server, tmp_path, "test"), free_port()
    launchers = [start(node, port, tmp_path / NODES[node], server) for node in range(len(NODES))]

    def has_thinned() -> bool:
        found = ranks(tmp_path)
        return len(found) == len(NODES) and all(
            changes(rank) and rank.steps["step"].max() > changes(rank)[0].step + STEPS_AFTER
            for rank in found
        )

    try:
        run.until(run.step, 150)  # both train: no ring is half made any more
        run.until(has_thinned, 150)
        assert [row["host"] for row in run.ranks()] == list(NODES)
    finally:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            launcher.wait(60)
    one, other = ranks(tmp_path)
    first = changes(one)[0]
    level, from_step = int(first.fields["level"]), int(first.fields["from_step"])
    assert level >= 2
    for rank in (one, other):
        change = changes(rank)[0]
        assert change.fields["why"] == "agreed for all ranks"
        assert (change.fields["level"], change.fields["from_step"]) == (str(level), str(from_step))
    thinned = [
        {int(row["step"]): bool(row["flags"] & schema.STEP_THINNED) for row in rank.steps}
        for rank in (one, other)
    ]
    common = sorted(thinned[0].keys() & thinned[1].keys())
    assert [thinned[0][step] for step in common] == [thinned[1][step] for step in common]
    after = [step for step in common if from_step < step <= from_step + STEPS_AFTER]
    assert len(after) == STEPS_AFTER
    assert all(thinned[0][step] == thinning.is_thinned(step, level) for step in after)
    assert not any(thinned[0][step] for step in common if step < from_step)
