"""The smoke test alone on real hosts of namespaces: what it says where nothing held it back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.collective import CollGloo, difference
from rankscope.preflight.collective.schedule import members
from rankscope.preflight.facts.interfaces import InterfaceFacts
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import Facts, NodeReport
from rankscope.preflight.report.stored import Document
from tests import fork_server
from tests.preflight import injections as broken
from tests.preflight.nslab import Lab
from tests.preflight.scene import MASTER_PORT, Mode, Scene, base_environment

pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.timeout(400),
    pytest.mark.needs("namespaces"),
]  # fmt: skip
ROOT = Path(__file__).parents[3]
# One node: the first tells its port by a file; `alone` only asks gloo for its address.
AGENT = """
import asyncio, pathlib, sys, time
import msgspec
from rankscope.preflight.facts import interfaces
from rankscope.preflight.model import Options
from rankscope.preflight.collective import child as smoke
from rankscope.preflight.system import System
smoke.IMPORT_LIMIT_S, smoke.STORE_LIMIT_S = 150.0, 100.0
rank, place, address, *python = sys.argv[1:]
rank, place, smoke._COMMAND = int(rank), pathlib.Path(place), (*python, *smoke._COMMAND[1:])
async def main():
    child = smoke.SmokeChild(System(), Options(), limit_s=15.0, budget_s=1.0)
    child.start()
    await child.imported()
    if address == "alone":
        for _ in range(100):
            if child.facts().gloo or child.facts().error: break
            await asyncio.sleep(0.1)
        await child.stop()
        return child.facts()
    if rank == 0: place.with_suffix(".new").write_text(str(child.port)); place.with_suffix(".new").rename(place)
    while not place.exists(): await asyncio.sleep(0.05)
    return await child.run(rank=rank, nodes=["node0", "node1", "node2"], address=address,
                           port=int(place.read_text()), backend="gloo")
facts = asyncio.run(main())
sys.stdout.buffer.write(msgspec.json.encode([facts, interfaces.collect(System())]))
"""  # noqa: E501


def told(scene: Scene, address: str) -> Run:
    """Run one agent on each host, and merge what they say."""
    script = scene.shared / "agent.py"
    script.write_text(AGENT)
    children = []
    for number in scene.everywhere:
        environment = scene.lab.environment(number)
        environment["PYTHONPATH"] = str(ROOT / "agent")
        argv = [sys.executable, str(script), str(number), str(scene.shared / "port"), address]
        argv += fork_server.python()
        children.append(
            scene.start(number, argv, stdout=subprocess.PIPE, env=environment, cwd=os.sep)
        )
    reports = {}
    for number, child in enumerate(children):
        out, _ = child.communicate(timeout=300)
        smoke, interfaces = msgspec.json.decode(out, type=tuple[SmokeFacts, InterfaceFacts])
        name = scene.lab.names[number]
        reports[name] = NodeReport(
            node=name, node_rank=number, addresses=(scene.lab.ip(number),),
            facts=Facts(smoke=smoke, interfaces=interfaces),
        )  # fmt: skip
    return Run("7", tuple(reports), reports)


@pytest.fixture
def scene() -> Callable[[], Scene]:
    return lambda: Scene(Lab(3, base=base_environment()))


def smoke_of(run: Run, node: str) -> SmokeFacts:
    smoke = run.reports[node].facts.smoke
    assert smoke is not None
    return smoke


@pytest.mark.core
def test_three_healthy_hosts(scene: Callable[[], Scene]) -> None:
    here = scene()
    with here.lab:
        run = told(here, here.lab.ip(0))
    assert [
        f
        for check in FAMILIES["collective"]
        if "cpu-pace" not in check.needs  # this machine is busy, and no agent measured how much
        for f in check.evaluate(run)
        if f.status in ("fail", "warn")
    ] == []
    for number, node in enumerate(run.expected):
        smoke = smoke_of(run, node)
        assert (smoke.stage, smoke.error) == ("done", "")
        assert [(c.interface, c.address) for c in smoke.gloo] == [("eth0", here.lab.ip(number))]
        assert difference(run, node) == ""


@pytest.mark.parametrize("mode", ["static", "c10d", "env"])
def test_it_meets_at_the_endpoint_of_the_job(mode: Mode) -> None:
    """Rank 0 is node 1, and MASTER_ADDR a name of it: there the store is, at the job's port."""
    with Lab(3, base=base_environment()) as lab:
        here = Scene(lab, mode)
        for number in here.everywhere:
            lab.run(number, f"echo '{lab.ip(1)} head' >> /etc/hosts")
            here.say(
                number, master_addr="head", endpoint=f"head:{MASTER_PORT}",
                node_rank=(number - 1) % 3,
            )  # fmt: skip
        children = []
        for number in here.everywhere:
            environment = {**lab.environment(number), "PYTHONPATH": str(ROOT / "agent")}
            argv = [sys.executable, "-m", "rankscope", "preflight", "--nodes", ",".join(lab.names)]
            argv += ["--only", "collective,env.master.rank0", "--json"]
            children.append(
                here.run_preflight(number, argv, stdout=subprocess.PIPE, env=environment)
            )
        said = [child.communicate(timeout=200)[0] for child in children]
    document = msgspec.json.decode(said[2], type=Document)
    assert document.verdict.findings == ()
    smokes = {report.node: report.facts.smoke for report in document.reports}
    assert [(s.store, s.beside, s.stage) for s in smokes.values() if s is not None] == [
        (f"head:{MASTER_PORT}", "", "done")
    ] * 3
    run = Run("7", document.verdict.expected, {report.node: report for report in document.reports})
    rest = ("node0", "node2") if mode == "c10d" else ("node2", "node0")  # c10d numbers them itself
    assert members(run, "node0") == ("node1", *rest)


def test_a_path_that_loses_large_messages_shows_as_a_size(scene: Callable[[], Scene]) -> None:
    here = scene()
    with here.lab:
        broken.black_hole(1, 1400)(here)
        run = told(here, here.lab.ip(0))
    (found,) = CollGloo().evaluate(run)
    assert found.status == "fail"
    assert "64 kB did not end" in found.title
    assert "4 B passed" in found.title
    assert set(found.nodes) <= {"node1"}
    assert all("node1" in edge for edge in found.edges)


def test_gloo_s_own_word_where_it_takes_something_odd(scene: Callable[[], Scene]) -> None:
    here = scene()
    with here.lab:
        here.add_nic(0, "docker0", "172.17.0.1/16")
        here.lab.env[0]["GLOO_SOCKET_IFNAME"] = "docker0,eth0"
        broken.own_name(1, address="127.0.1.1")(here)
        here.lab.env[2]["GLOO_SOCKET_IFNAME"] = "eth9"
        run = told(here, "alone")
    asked = {node: smoke_of(run, node).gloo for node in run.expected}
    assert [(c.interface, c.address) for c in asked["node0"]] == [
        ("docker0", "172.17.0.1"), ("eth0", here.lab.ip(0))
    ]  # fmt: skip
    assert [(c.interface, c.address) for c in asked["node1"]] == [("lo", "127.0.1.1")]
    (missing,) = asked["node2"]
    assert (missing.address, missing.problem) == ("", "Unable to find address for: eth9")
    assert [difference(run, node) for node in run.expected] == ["", "", ""]  # as emulated
