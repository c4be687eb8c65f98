"""Checks of names and kept clocks: each is provoked, and silent where nothing is wrong."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.clock import ClockSync
from rankscope.preflight.checks.names import (
    DnsDigits,
    DnsMaster,
    DnsReverse,
    DnsSelfLoopback,
    HostDup,
    read_as_address,
)
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Clock
from rankscope.preflight.facts.names import HostsLine
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import CheckFinding, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.system import Resolved
from tests.preflight.healthy import both, having, healthy, judged, run

OWN: tuple[Check, ...] = (
    DnsMaster(), DnsDigits(), DnsSelfLoopback(), DnsReverse(), HostDup(), ClockSync(),
)  # fmt: skip


def commands(finding: CheckFinding) -> list[str]:
    return [fix.command for fix in finding.fix]


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_healthy_run_yields_nothing(check: Check, backend: str) -> None:
    assert judged(check, run(options=Options(backend=backend))) == []


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
def test_facts_that_are_missing_are_not_a_pass(check: Check) -> None:
    from rankscope.preflight.model import Facts

    def bare(report: NodeReport) -> NodeReport:
        return msgspec.structs.replace(report, facts=Facts(launch=report.facts.launch))

    found = judged(check, run({"node1": bare}))
    if check.id != "dns.digits":  # it reads names that are told, too
        assert [(f.status, f.nodes) for f in found] == [("unknown", ("node1",))]


def test_a_name_that_cannot_be_resolved() -> None:
    lost = having("names", master=Resolved(name="node0", error="EAI_NONAME: not known"))
    (finding,) = judged(DnsMaster(), run({"node1": lost, "node2": lost}))
    assert (finding.status, finding.nodes) == ("fail", ("node1", "node2"))
    assert finding.title == "node1, node2 cannot resolve node0: EAI_NONAME: not known"
    assert commands(finding)[0] == "echo '10.77.0.1 node0' | sudo tee -a /etc/hosts"
    assert finding.confidence == "proven"


def test_a_name_that_a_character_was_taken_from_gets_no_line_of_hosts() -> None:
    lost = having("names", master=Resolved(name="node0_", error="EAI_NONAME: not known"))
    (finding,) = judged(DnsMaster(), run({"node1": lost}))
    assert commands(finding) == []


def test_a_resolver_that_is_silent_is_no_proof() -> None:
    lost = having("names", master=Resolved(name="node0", error="no answer in 3 s"))
    (finding,) = judged(DnsMaster(), run({"node1": lost}))
    assert (finding.status, finding.confidence) == ("fail", "likely")


def test_a_slow_resolver_is_a_warning() -> None:
    answer = Resolved(name="node0", addresses=("10.77.0.1",), elapsed_ms=1800.0)
    (finding,) = judged(DnsMaster(), run({"node1": having("names", master=answer)}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))
    assert "1.8 s" in finding.title


def test_without_a_master_the_check_is_skipped() -> None:
    found = judged(DnsMaster(), run({"*": having("names", master=None)}))
    assert [f.status for f in found] == ["skipped"]


def trapped(line: str = "127.0.1.1 node1", address: str = "127.0.1.1"):  # type: ignore[no-untyped-def]
    choice = Choice(
        interface="lo", address=address, how=f"the host name node1 resolves to {address}"
    )
    return both(
        having("interfaces", gloo=(choice,)),
        having("names", own=Resolved(name="node1", addresses=(address,)),
               hosts_lines=(HostsLine(number=4, text=line),)),
    )  # fmt: skip


def test_the_own_name_is_loopback() -> None:
    (finding,) = judged(DnsSelfLoopback(), run({"node1": trapped()}))
    assert (finding.status, finding.nodes) == ("fail", ("node1",))
    assert "127.0.1.1" in finding.title
    assert "/etc/hosts line 4: 127.0.1.1 node1" in finding.lines[1]
    assert commands(finding) == [
        "export GLOO_SOCKET_IFNAME=eth0",
        "sudo cp /etc/hosts /etc/hosts.old && sed '4s/^/# /; $a10.77.0.2 node1' /etc/hosts.old"
        " | sudo tee /etc/hosts",
    ]
    assert finding.impact.startswith("works today with gloo, by luck")


def test_a_line_with_other_names_loses_only_this_one() -> None:
    (finding,) = judged(DnsSelfLoopback(), run({"node1": trapped("127.0.0.1 localhost node1")}))
    assert "sed '4s/[[:space:]]node1\\b//; $a10.77.0.2 node1'" in commands(finding)[1]


def test_two_of_them_or_high_addresses_pass_by_no_luck() -> None:
    (finding,) = judged(DnsSelfLoopback(), run({"node1": trapped(), "node2": trapped()}))
    assert finding.nodes == ("node1", "node2")
    assert "luck" not in finding.impact
    high = Choice(interface="eth0", address="192.168.1.1", how="the host name ...")
    change = {"*": having("interfaces", gloo=(high,)), "node1": trapped()}
    (finding,) = judged(DnsSelfLoopback(), run(change))
    assert "luck" not in finding.impact


def test_with_nccl_it_is_a_warning() -> None:
    (finding,) = judged(
        DnsSelfLoopback(), run({"node1": trapped()}, options=Options(backend="nccl"))
    )
    assert finding.status == "warn"


def test_the_variable_heals_it_and_so_does_gloos_own_word() -> None:
    named = Choice(interface="eth0", address="10.77.0.2", how="GLOO_SOCKET_IFNAME=eth0")
    assert judged(DnsSelfLoopback(), run({"node1": having("interfaces", gloo=(named,))})) == []

    def asked(report: NodeReport) -> NodeReport:
        smoke = SmokeFacts(backend="gloo", gloo=(Choice(address="10.77.0.2"),))
        return msgspec.structs.replace(
            report, facts=msgspec.structs.replace(report.facts, smoke=smoke)
        )

    assert judged(DnsSelfLoopback(), run({"node1": both(trapped(), asked)})) == []


def test_a_slow_reverse_name() -> None:
    change = having("names", reverse_ms=1200.0, reverse_of="10.77.0.3")
    (finding,) = judged(DnsReverse(), run({"node0": change}))
    assert (finding.status, finding.nodes) == ("warn", ("node0",))
    assert commands(finding) == ["echo '10.77.0.3 node2' | sudo tee -a /etc/hosts"]


def test_two_agents_in_one_place() -> None:
    (finding,) = judged(HostDup(), run({"node2": having("host", boot_id="b1", hostname="node1")}))
    assert (finding.status, finding.nodes) == ("fail", ("node1", "node2"))
    assert "two agents on one host" in finding.title


def test_one_kernel_with_several_networks_is_several_nodes() -> None:
    change = {
        f"node{i}": having("host", boot_id="same", network_namespace=100 + i) for i in range(3)
    }
    assert judged(HostDup(), run(change)) == []


@pytest.mark.parametrize(
    ("boot_id", "backend", "mode", "name", "status"),
    [
        ("b2", "gloo", "static", "node1", "warn"),
        ("b1", "nccl", "static", "node1", "fail"),  # NCCL tries shared memory
        ("b2", "nccl", "static", "node1", "warn"),
        ("b2", "gloo", "c10d", "node0", "fail"),  # two hosts of the store
    ],
)
def test_one_name_for_two_machines(
    boot_id: str, backend: str, mode: str, name: str, status: str
) -> None:
    change = {
        "*": having("launch", mode=mode),
        "node2": having("host", hostname=name, boot_id=boot_id, network_namespace=7),
    }
    (finding,) = judged(HostDup(), run(change, options=Options(backend=backend)))
    assert (finding.status, finding.nodes) == (status, (name, "node2"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("1234", "0.0.4.210"), ("10", "0.0.0.10"), ("10.1", "10.0.0.1"), ("0x10", "0.0.0.16"),
     ("010.0.0.1", "8.0.0.1"), ("10.0.0.1", ""), ("node1", ""), ("1node", ""), ("99999999999", ""),
     ("", ""), ("fd00::1", ""), ("1.2.3.4.5", ""), ("0x", "")],
)  # fmt: skip
def test_what_the_resolver_reads_as_an_address(name: str, expected: str) -> None:
    assert read_as_address(name) == expected
    if expected:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        assert {row[4][0] for row in rows} == {expected}


def test_a_host_that_is_called_by_a_number() -> None:
    change = {
        "*": having("launch", master_addr="1234"),
        "node0": both(having("launch", master_addr="1234"), having("names", hostname="1234")),
    }
    (finding,) = judged(DnsDigits(), run(change))
    assert (finding.status, finding.nodes) == ("fail", ("node0",))
    assert finding.title == "the host name 1234 is a number: the resolver reads it as 0.0.4.210"
    assert commands(finding) == [
        "torchrun --master-addr 10.77.0.1 ...", "sudo hostnamectl set-hostname node1234",
    ]  # fmt: skip


def apart(offset_ms: float) -> Callable[[NodeReport], NodeReport]:
    """Have a node see the clocks of all its peers so far from its own."""
    clock = Clock(offset_ms=offset_ms, uncertainty_ms=0.1)

    def change(report: NodeReport) -> NodeReport:
        edges = {
            peer: msgspec.structs.replace(edge, clock=clock) for peer, edge in report.edges.items()
        }
        return msgspec.structs.replace(report, edges=edges)

    return change


def test_a_clock_that_nobody_keeps_is_told_where_clocks_are_apart() -> None:
    loose = having("host", clock_is_synchronised=False)
    (finding,) = judged(ClockSync(), run({"node1": both(loose, apart(-300.0))}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))
    assert "300 ms apart from the others" in finding.title
    assert "chrony" in commands(finding)[0]
    assert judged(ClockSync(), run({"node1": both(loose, apart(20.0))})) == []
    assert judged(ClockSync(), run({"*": apart(-300.0)})) == []  # all are kept: not by this cause


def test_a_kernel_that_does_not_tell() -> None:
    found = judged(ClockSync(), run({"node1": having("host", clock_is_synchronised=None)}))
    assert [(f.status, f.nodes) for f in found] == [("unknown", ("node1",))]


def test_the_healthy_report_is_healthy() -> None:
    assert healthy("node0").facts.host is not None
