"""Checks of local ports: each is provoked, and silent where nothing is wrong."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.master_port import PortMasterFree, PortMasterRange
from rankscope.preflight.checks.ports import PortConntrack, PortCount, ProcLeftover
from rankscope.preflight.facts.ports import PortOwner
from rankscope.preflight.facts.processes import Leftover
from rankscope.preflight.model import CheckFinding, Facts, Listening, NodeReport
from tests.preflight.healthy import both, having, judged, run

OWN: tuple[Check, ...] = (
    PortMasterFree(), PortMasterRange(), PortCount(), PortConntrack(), ProcLeftover(),
)  # fmt: skip


def commands(finding: CheckFinding) -> list[str]:
    return [fix.command for fix in finding.fix]


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
def test_a_healthy_run_yields_nothing(check: Check) -> None:
    assert judged(check, run()) == []


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
def test_facts_that_are_missing_are_not_a_pass(check: Check) -> None:
    def bare(report: NodeReport) -> NodeReport:
        return msgspec.structs.replace(report, facts=Facts(launch=report.facts.launch))

    assert [f.status for f in judged(check, run({"node0": bare}))] == ["unknown"]


def held(**fields: object):  # type: ignore[no-untyped-def]
    owner: dict[str, object] = {
        "port": 29500, "pid": 4711, "command": "python train.py", "user": "ann", "age_s": 3600.0,
    }  # fmt: skip
    return having("ports", master_busy=PortOwner(**(owner | fields)))  # type: ignore[arg-type]


def test_a_port_that_is_held_by_the_user() -> None:
    (finding,) = judged(PortMasterFree(), run({"node0": held()}))
    assert (finding.status, finding.nodes) == ("fail", ("node0",))
    assert finding.title == (
        "node0: port 29500 is held by pid 4711 python train.py (you, since 07:00 UTC)"
    )
    assert commands(finding) == ["torchrun --master-port 29501 ..."]  # it may be wanted


def test_a_port_that_an_earlier_job_left_is_freed() -> None:
    left = Leftover(pid=4711, command="python train.py", user="ann", age_s=3600.0, ports=(29500,))
    change = both(held(), having("ports", leftovers=(left,)))
    (finding,) = judged(PortMasterFree(), run({"node0": change}))
    assert commands(finding) == ["kill 4711", "torchrun --master-port 29501 ..."]


@pytest.mark.parametrize(
    ("fields", "words", "command"),
    [
        ({"user": "bob"}, "(bob, since", "torchrun --master-port 29501 ..."),
        ({"pid": 0, "command": "", "user": "bob", "age_s": 0.0}, "a process of bob, which cannot",
         "torchrun --master-port 29501 ..."),
        ({"age_s": 864000.0}, "since 2027-01-05 08:00 UTC",
         "torchrun --master-port 29501 ..."),
    ],
)  # fmt: skip
def test_who_holds_it(fields: dict[str, object], words: str, command: str) -> None:
    (finding,) = judged(PortMasterFree(), run({"node0": held(**fields)}))
    assert words in finding.title
    assert command == commands(finding)[0]


def test_the_fix_speaks_of_the_launch() -> None:
    change = {"*": having("launch", mode="c10d"), "node0": held()}
    (finding,) = judged(PortMasterFree(), run({**change, "node0": both(change["*"], held())}))
    assert "torchrun --rdzv-endpoint node0:29501 ..." in commands(finding)
    assert "nothing on any node" in finding.impact


def test_a_port_that_is_busy_elsewhere_is_no_matter() -> None:
    assert judged(PortMasterFree(), run({"node1": held()})) == []


def test_the_launcher_of_this_job_may_hold_it() -> None:
    found = judged(PortMasterFree(), run({"node0": held(is_launcher=True)}))
    assert [f.status for f in found] == ["skipped"]


def test_a_port_that_could_not_be_bound_for_another_reason() -> None:
    unbound = having("", listening=Listening(master=0, mesh=40000))
    found = judged(PortMasterFree(), run({"node0": unbound}))
    assert [f.status for f in found] == ["unknown"]
    low = both(unbound, having("launch", master_port=80))
    (finding,) = judged(PortMasterFree(), run({"node0": low}))
    assert finding.status == "fail"
    assert "ports below 1024, like 80, are for root alone" in finding.title


def test_a_master_that_is_not_there_is_unknown() -> None:
    whole = run()
    reports = {node: report for node, report in whole.reports.items() if node != "node0"}
    found = judged(PortMasterFree(), dataclasses.replace(whole, reports=reports))
    assert [f.status for f in found] == ["unknown"]


@pytest.mark.parametrize(("port", "warns"), [(29500, False), (32768, True), (40000, True)])
def test_a_port_that_the_kernel_hands_out(port: int, warns: bool) -> None:
    found = judged(PortMasterRange(), run({"*": having("launch", master_port=port)}))
    assert [(f.status, f.nodes) for f in found] == ([("warn", ("node0",))] if warns else [])
    if warns:
        assert commands(found[0]) == ["torchrun --master-port 29500 ..."]


def test_a_wide_range_leaves_a_port_below_it() -> None:
    change = {"*": having("ports", range_low=10000, range_high=65535)}
    (finding,) = judged(PortMasterRange(), run(change))
    assert commands(finding) == ["torchrun --master-port 9999 ..."]


def test_a_range_that_is_too_small() -> None:
    change = having("ports", range_low=40000, range_high=40007)
    (finding,) = judged(PortCount(), run({"node2": change}))
    assert (finding.status, finding.nodes) == ("warn", ("node2",))
    assert finding.evidence == {"num_needed": 11, "num_ports": 8, "num_time_wait": 3}


def test_a_full_table_of_connections() -> None:
    change = having("ports", conntrack_count=90, conntrack_max=100)
    (finding,) = judged(PortConntrack(), run({"node1": change}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))
    found = judged(PortConntrack(), run({"*": having("ports", conntrack_max=-1)}))
    assert [f.status for f in found] == ["skipped"]


def test_what_an_earlier_job_left() -> None:
    left = (
        Leftover(pid=7, command="python train.py", user="ann", age_s=7200.0, gpus=(0, 1)),
        Leftover(pid=8, command="torchrun train.py", user="ann", age_s=7200.0, ports=(29501,)),
    )
    (finding,) = judged(ProcLeftover(), run({"node2": having("ports", leftovers=left)}))
    assert (finding.status, finding.nodes) == ("warn", ("node2",))
    assert (
        "pid 7 python train.py and 1 more of an earlier job still holds GPU 0, 1" in finding.title
    )
    assert commands(finding) == ["kill 7 8"]


def test_who_holds_the_master_port_is_told_once() -> None:
    left = (
        Leftover(pid=4711, command="python train.py", user="ann", age_s=7200.0, ports=(29500,)),
    )
    owner = PortOwner(port=29500, pid=4711, command="python train.py", user="ann", age_s=7200.0)
    change = having("ports", leftovers=left, master_busy=owner)
    assert judged(ProcLeftover(), run({"node0": change})) == []
