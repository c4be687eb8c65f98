"""Every fault between nodes, as facts: one finding, the right node or pair, the right repair."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import (
    Bandwidth,
    Clock,
    Datagrams,
    EdgeFacts,
    Idle,
    PathMtu,
    Rtt,
)
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts
from rankscope.preflight.facts.rules import FilterRules
from rankscope.preflight.model import CheckFinding, Listening
from rankscope.preflight.options import Options
from rankscope.preflight.probe import schedule
from rankscope.preflight.report import grid
from rankscope.preflight.report.matrix import build
from rankscope.preflight.system import Resolved
from rankscope.preflight.verdict.engine import evaluate, exit_code

from .synthetic import PORT, Cluster, cluster, dial

OURS = (
    "node.absent", "dns.loopback", "dns.wrong", "dns.family", "port.master.reach",
    "port.master.identity", "port.intercepted", "port.ephemeral", "port.oneway", "port.local",
    "net.mtu.path",
    "net.mtu.differs", "net.latency", "net.jitter", "net.loss", "net.bandwidth", "net.idle",
    "clock.offset",
)  # fmt: skip


def found(run: Run) -> list[CheckFinding]:
    options = msgspec.structs.replace(run.options, only=OURS)
    whole = Run(run.run_id, run.expected, run.reports, options)
    return list(evaluate(whole, limit_s=120.0).findings)  # of a machine that may be busy


def only(run: Run) -> CheckFinding:
    findings = found(run)
    assert len(findings) == 1, [f"{f.id} {f.title}" for f in findings]
    return findings[0]


def commands(finding: CheckFinding) -> str:
    return "\n".join(f"{fix.node}: {fix.command}" for fix in finding.fix)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8, 16, 64])
@pytest.mark.parametrize("tier", ["quick", "default", "deep"])
def test_healthy_nodes_yield_nothing(num: int, tier: str) -> None:
    run = cluster(num, options=Options(tier=tier)).run()
    assert found(run) == []
    asides = evaluate(Run("x", run.expected, run.reports, run.options)).notes
    assert not [f for f in asides if f.id in OURS and f.status == "unknown"]


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("drop", "drops"), ("refused", "refuses"), ("prohibited", "prohibits")],
)
@pytest.mark.parametrize("mode", ["static", "c10d", "env"])
def test_master_port_closed_at_the_master(outcome: str, word: str, mode: str) -> None:
    some = cluster(3, mode=mode)
    some.close_inbound("node0", outcome, "master")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.reach", ("node0",))
    assert finding.title == f"node0 {word} tcp port 29500 from every node"
    assert set(finding.edges) == {("node1", "node0"), ("node2", "node0")}
    assert (
        "node0: sudo ufw prepend allow from 10.77.0.0/16 to any port 29500 proto tcp"
        in commands(finding)
    )
    assert "min" in finding.impact
    assert finding.confidence == "proven"


def test_master_port_closed_for_some_sources() -> None:
    some = cluster(5, tools=("firewalld",))
    for start in ("node2", "node3"):
        some.close(start, "node0", "prohibited", "master")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.reach", ("node0",))
    assert finding.title == "node0 prohibits tcp port 29500 from node2, node3"
    assert "--add-rich-rule='rule family=" in commands(finding)
    assert "sudo firewall-cmd --reload" in commands(finding)


def test_master_port_closed_for_one_source_is_a_pair() -> None:
    some = cluster(3)
    some.close("node2", "node0", "drop", "master")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.reach", ())
    assert finding.edges == (("node2", "node0"),)
    assert "10.77.0.3" in commands(finding)


def test_two_nodes_cannot_tell_whose_firewall_it_is() -> None:
    some = cluster(2)
    some.close("node1", "node0", "drop", "master")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.reach", ())


@pytest.mark.parametrize("outcome", ["drop", "refused", "prohibited"])
@pytest.mark.parametrize("num", [3, 4, 9])
def test_only_the_master_port_is_open_at_one_node(outcome: str, num: int) -> None:
    some = cluster(num)
    some.close_inbound("node1", outcome, "random")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node1",))
    assert finding.title.endswith("random ports; only 29500 is open")
    assert "to any port 32768:60999 proto tcp" in commands(finding)
    assert "29500" not in commands(finding)
    assert re.search(r"gloo init: .* (9\.5 min|12 s)", finding.impact)


def test_only_the_master_port_is_open_everywhere() -> None:
    some = cluster(3)
    for name in some.names:
        some.close_inbound(name, "drop", "random")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", some.names)
    assert [fix.node for fix in finding.fix] == list(some.names)


@pytest.mark.parametrize(("closed", "open_"), [(("node1", "node2"), 3), (("node0", "node4"), 7)])
def test_two_firewalls_of_one_kind_share_a_finding(closed: tuple[str, ...], open_: int) -> None:
    some = cluster(open_)
    for name in closed:
        some.close_inbound(name, "drop", "random")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", closed)


def test_two_firewalls_of_different_kinds_are_two_findings() -> None:
    some = cluster(5)
    some.close_inbound("node1", "drop", "random")
    some.close_inbound("node3", "refused", "random")
    some.close("node1", "node3", "refused", "random")
    findings = found(some.run())
    assert [(f.id, f.nodes) for f in findings] == [
        ("port.ephemeral", ("node1",)),
        ("port.ephemeral", ("node3",)),
    ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_way_that_gloo_dials(backend: str) -> None:
    some = cluster(3, backend=backend)
    some.close("node2", "node1")
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.edges) == (
        "port.oneway", (), (("node2", "node1"),),
    )  # fmt: skip
    assert "node1: sudo ufw prepend allow from 10.77.0.3 to any port 32768:60999" in commands(
        finding
    )
    assert ("NCCL init" if backend == "nccl" else "9.5 min") in finding.impact


def test_one_way_that_works_by_luck() -> None:
    some = cluster(3)
    some.close("node1", "node2")
    finding = only(some.run())
    assert (finding.id, finding.edges) == ("port.oneway", (("node1", "node2"),))
    assert finding.impact.startswith("works today with gloo")
    assert "gloo dials node2->node1: the higher address dials the lower one" in finding.lines


def test_gloo_compares_bytes_not_numbers() -> None:
    some = cluster(2)
    for name, own in (("node0", "9.1.1.1"), ("node1", "10.0.0.1")):
        facts = some.reports[name].facts.interfaces
        assert facts is not None
        choice = msgspec.structs.replace(facts.gloo[0], address=own)
        some.facts(name, interfaces=msgspec.structs.replace(facts, gloo=(choice,)))
    some.close("node0", "node1", which="random")
    assert only(some.run()).impact.startswith("works today")


def test_a_hole_in_the_range_is_told_with_its_ports() -> None:
    some = cluster(3)
    for start in ("node0", "node2"):
        some.hole(start, "node1")
    some.change("node0", "node1", ephemeral_shut=(40010, 44900))
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("port.ephemeral", "fail", ("node1",))
    assert finding.title == "node1 drops random ports 40,010 to 44,900; others are open"
    assert "32768:60999" in commands(finding)
    assert finding.impact.startswith("whenever a rank gets one of these ports")
    assert len(finding.evidence["ports_failed"]) == 6
    assert finding.evidence["ports_closed"] == "40010-44900"
    assert 33300 in finding.evidence["ports_ok"]


def test_closed_ports_among_open_ones_are_counted() -> None:
    some = cluster(3)
    for start in ("node0", "node2"):
        some.hole(start, "node1")
        edge = some.edges[start, "node1"]
        some.change(start, "node1", ephemeral=edge.ephemeral[::2])
        dials = tuple(msgspec.structs.replace(d, outcome="ok") for d in edge.ephemeral[1:4:2])
        some.change(start, "node1", ephemeral=(*edge.ephemeral[0:4:2], *dials))
    assert "of 21 random ports tried" in only(some.run()).title


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_hole_where_gloo_does_not_listen_warns(backend: str) -> None:
    some = cluster(3, backend=backend)
    for start in ("node0", "node2"):
        some.hole(start, "node1", first=50000, last=60999)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node1",))
    assert finding.status == ("warn" if backend == "gloo" else "fail")
    assert ("lower half" in finding.impact) == (backend == "gloo")


def test_what_nobody_dials_is_a_warning() -> None:
    some = cluster(3)
    some.close_inbound("node2", "drop", "random")  # gloo dials from the higher address
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("port.ephemeral", "warn", ("node2",))
    assert finding.impact.startswith("works today with gloo")


@pytest.mark.parametrize(("start", "end"), [("node2", "node1"), ("node1", "node2")])
def test_a_hole_one_way(start: str, end: str) -> None:
    some = cluster(3)
    some.hole(start, end)
    finding = only(some.run())
    assert (finding.id, finding.edges) == ("port.oneway", ((start, end),))
    assert finding.status == ("fail" if start == "node2" else "warn")
    assert "random ports 40,356 to 43,884" in finding.title


def test_who_missed_the_hole_is_no_witness() -> None:
    some = cluster(8)
    for start in some.sources("node1"):
        if start in ("node0", "node3", "node5"):
            some.hole(start, "node1")
        else:
            few = tuple(dial("node1", some.address["node1"], port) for port in (33300, 52116))
            some.change(start, "node1", ephemeral=few)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.confidence) == (
        "port.ephemeral", ("node1",), "proven",
    )  # fmt: skip


def test_connections_that_vanish_by_their_hash() -> None:
    some = cluster(3)
    for start in ("node0", "node2"):
        good = some.edges[start, "node1"].ephemeral
        dead = msgspec.structs.replace(good[0], outcome="drop", errno="ETIMEDOUT", is_flow=True)
        some.change(start, "node1", ephemeral=(dead, dead, dead, *good))
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("port.ephemeral", "fail", ("node1",))
    assert finding.title == "some connections to node1 vanish, others to the same ports pass"
    assert "node0->node1  3 of 16 connections got no answer to three SYNs" in finding.lines
    (fix,) = finding.fix
    assert fix.command.startswith("# ")  # no rule of a firewall does this


def test_handshakes_without_data_are_closed_ports() -> None:
    some = cluster(3)
    some.close_inbound("node1", "no-data", "random")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node1",))
    assert finding.title == "node1 passes no data on random ports; only 29500 is open"
    assert finding.evidence["class"] == "no-data"


def test_handshakes_without_data_on_the_master_port() -> None:
    some = cluster(3, tools=("nft",))
    some.close_inbound("node0", "no-data", "master")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.reach", ("node0",))
    assert "tcp dport 29500" in commands(finding)
    assert "tcp sport 29500" in commands(finding)  # its answers may be what is dropped


@pytest.mark.parametrize(
    "change", [{"stage": "listening"}, {"delay_p90_ms": 3000.0}], ids=["stopped", "no-core"]
)
def test_silence_of_a_node_that_hardly_ran_proves_nothing(change: dict[str, object]) -> None:
    some = cluster(3)
    some.close_inbound("node1", "no-data", "random")
    some.report("node1", **change)
    run = some.run()
    assert found(run) == []
    options = msgspec.structs.replace(run.options, only=("port.ephemeral",))
    (note,) = evaluate(Run("x", run.expected, run.reports, options)).notes
    assert (note.id, note.status) == ("port.ephemeral", "unknown")


def taken(some: Cluster, paths: list[tuple[str, str]], outcome: str, **fields: object) -> None:
    """Let another program take the random ports of paths."""
    for start, end in paths:
        own = some.address[end]
        dials = tuple(
            dial(end, own, port, outcome, **fields)
            for port in some.reports[end].listening.ephemeral
        )
        some.change(start, end, ephemeral=dials, decoy="ok")


@pytest.mark.parametrize(
    ("outcome", "fields", "says"),
    [
        ("not-us", {"banner": "HTTP/1.1 400"}, "another program answers ('HTTP/1.1 400')"),
        ("no-data", {}, "something accepts every connection and passes no data on"),
    ],
)
def test_a_sidecar_that_takes_what_a_node_dials(
    outcome: str, fields: dict[str, object], says: str
) -> None:
    some = cluster(3, tools=("nft",))
    taken(some, [("node2", "node0"), ("node2", "node1")], outcome, **fields)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.intercepted", ("node2",))
    assert finding.title == f"node2 dials other nodes on random ports: {says}"
    assert "hook (output)" in commands(finding)
    assert "ip daddr 10.77.0.0/16 tcp dport 32768-60999 accept" in commands(finding)
    assert "wait for each other" in finding.impact


def test_a_sidecar_that_takes_what_comes_in() -> None:
    some = cluster(3)
    taken(some, [("node0", "node1"), ("node2", "node1")], "not-us")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.intercepted", ("node1",))
    assert "hook (prerouting|input)" in commands(finding)


def test_what_accepts_all_and_is_silent_at_one_node_is_its_firewall() -> None:
    some = cluster(3)
    taken(some, [("node0", "node1"), ("node2", "node1")], "no-data")  # a SYN proxy
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node1",))
    assert "ufw prepend" in commands(finding)
    assert "redirect|dnat" in commands(finding)  # or a proxy that is silent
    facts = some.reports["node1"].facts.ports
    assert facts is not None
    for is_proxy in (True, False):
        rules = FilterRules(redirects_in=is_proxy, drops_in=not is_proxy)
        some.facts("node1", ports=msgspec.structs.replace(facts, rules=rules))
        finding = only(some.run())
        assert finding.id == ("port.intercepted" if is_proxy else "port.ephemeral")
        assert ("redirect|dnat" in commands(finding)) == is_proxy


def test_a_sidecar_that_takes_all_ports_is_told_of_the_master_port_too() -> None:
    some = cluster(3, tools=("nft",))
    taken(some, [("node2", "node0"), ("node2", "node1")], "not-us")
    for end in ("node0", "node1"):
        other = dial(end, some.address[end], PORT, "not-us", banner="HTTP/1.0 400")
        some.change("node2", end, mesh=other, master=other if end == "node0" else None)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.intercepted", ("node2",))
    assert "tcp dport 32768-60999 accept" in commands(finding)
    assert "tcp dport 29500 accept" in commands(finding)


def test_sidecars_everywhere() -> None:
    some = cluster(3)
    taken(some, list(some.edges), "not-us")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.intercepted", some.names)


def test_one_pair_of_two_nodes_names_nobody_without_their_rules() -> None:
    some = cluster(2)
    taken(some, [("node1", "node0")], "not-us")
    assert only(some.run()).nodes == ()
    facts = some.reports["node1"].facts.ports
    assert facts is not None
    rules = FilterRules(redirects_out=True)
    some.facts("node1", ports=msgspec.structs.replace(facts, rules=rules))
    assert only(some.run()).nodes == ("node1",)


def test_a_proxy_for_the_master_port_beside_one_node() -> None:
    some = cluster(3, tools=("nft",))
    other = dial("node0", some.address["node0"], PORT, "not-us", banner="HTTP/1.0 400")
    some.change("node2", "node0", master=other)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.identity", ("node2",))
    assert "tcp dport 29500 accept" in commands(finding)


def test_a_proxy_in_front_of_the_master() -> None:
    some = cluster(3)
    other = dial("node0", some.address["node0"], PORT, "not-us", banner="HTTP/1.0 400")
    for start in ("node1", "node2"):
        some.change(start, "node0", master=other)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.identity", ("node0",))
    assert "hook (prerouting|input)" in commands(finding)


def test_all_inbound_closed_at_the_master_is_one_finding() -> None:
    some = cluster(4)
    some.close_inbound("node0")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node0",))
    assert finding.title == "node0 drops all tcp ports, 29500 included"
    assert len(finding.explains) == 1
    assert "29500" in commands(finding)


def test_a_node_that_cannot_dial_out() -> None:
    some = cluster(4)
    some.close_outbound("node2")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ("node2",))
    assert "cannot dial" in finding.title
    assert "node2: sudo ufw prepend allow out" in commands(finding)


@pytest.mark.parametrize("node", ["node0", "node1"])
@pytest.mark.parametrize("num", [3, 6])
def test_one_isolated_node(node: str, num: int) -> None:
    some = cluster(num)
    some.close_inbound(node)
    some.close_outbound(node)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", (node,))
    assert finding.title.startswith(f"{node} is cut off")


@pytest.mark.parametrize("num", [2, 3, 5])
def test_all_isolated_names_nobody(num: int) -> None:
    some = cluster(num)
    for name in some.names:
        some.close_inbound(name)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", ())
    assert finding.confidence == "likely"
    assert len(finding.edges) == num * (num - 1)
    if num > 2:
        assert any("it is not known which" in line for line in finding.lines)


def test_a_refusal_proves_nothing_while_the_listener_is_down() -> None:
    some = cluster(3)
    some.report("node1", listening=Listening())
    some.close_inbound("node1", "refused", "random")
    assert found(some.run()) == []


def test_another_program_on_the_master_port() -> None:
    some = cluster(3)
    some.report("node0", listening=Listening(mesh=40001, ephemeral=(33000, 47000, 60000)))
    for start in ("node1", "node2"):
        other = dial("node0", some.address["node0"], PORT, "not-us", banner="HTTP/1.0 400")
        some.change(start, "node0", master=other)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.master.identity", ("node0",))
    assert "HTTP/1.0 400" in finding.title
    assert "ss -ltnp 'sport = :29500'" in commands(finding)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ("drop", "host down, or a firewall drops"),
        ("refused", "not started there"),
        ("no-arp", "no host on the link has the address"),
        ("prohibited", "a firewall rejects"),
        ("unresolved", "does not resolve"),
    ],
)
def test_an_absent_node(outcome: str, says: str) -> None:
    some = cluster(3)
    some.absent("node2", outcome)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.confidence) == ("node.absent", ("node2",), "likely")
    assert len([line for line in finding.lines if says in line]) == 2
    assert "node2: rankscope preflight --nodes node0,node1,node2" in commands(finding)


def test_where_a_port_answers_and_no_report_comes_large_packets_may_vanish() -> None:
    for outcome, look in (("ok", "rankscope preflight --nodes"), ("no-data", "ps -o pid")):
        some = cluster(3)
        some.absent("node2", outcome)
        finding = only(some.run())
        assert (finding.id, finding.nodes) == ("node.absent", ("node2",))
        assert look in commands(finding)
        assert "large packets may vanish" in commands(finding)


def test_a_path_that_carries_nothing_gets_no_smaller_mtu() -> None:
    some = cluster(3)
    _black_hole(some, [("node0", "node1"), ("node1", "node0")], 0)
    finding = only(some.run())
    assert "carry no large packet" in finding.title
    assert [fix.command[:2] for fix in finding.fix] == ["# "]


@pytest.mark.parametrize("late", ["node0", "node2"])
def test_a_node_that_came_late_was_not_tried_and_is_not_accused(late: str) -> None:
    some = cluster(3)
    for start in some.sources(late):
        failed = dial(late, some.address[late], PORT, "refused")
        some.edges[start, late] = EdgeFacts(mesh=failed)
    verdict = evaluate(some.run())
    assert found(some.run()) == []
    paths = tuple((start, late) for start in some.sources(late))
    assert paths in [f.edges for f in verdict.notes if f.id == "port.ephemeral"]
    assert exit_code(verdict) == 3
    matrix = build(verdict, some.run())
    assert matrix is not None
    assert matrix.letters == (".", "-")


@pytest.mark.parametrize(
    ("num", "mode", "joined"), [(2, "static", "1/2"), (3, "static", "2/3"), (4, "env", "3/4")]
)
def test_how_many_clients_would_join(num: int, mode: str, joined: str) -> None:
    some = cluster(num, mode=mode)
    some.absent(some.names[-1], "drop")
    assert only(some.run()).impact.endswith(f"then end: {joined} clients joined")


def test_nobody_came() -> None:
    some = cluster(3)
    some.absent("node1", "drop")
    some.absent("node2", "drop")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("node.absent", ("node1", "node2"))
    assert any("node0 hears no other node" in line for line in finding.lines)
    assert "--share" in commands(finding)


def test_the_master_is_absent() -> None:
    some = cluster(3)
    some.absent("node0", "drop")
    assert (only(some.run()).id, only(some.run()).nodes) == ("node.absent", ("node0",))


def test_a_wrong_hosts_entry_names_the_node_that_has_it() -> None:
    some = cluster(3)
    some.hosts_entry("node2", "node0", "10.77.0.99")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("dns.wrong", ("node2",))
    assert finding.edges == (("node2", "node0"),)
    assert "sed '3s/.*/10.77.0.1 node0/'" in commands(finding)
    assert "No route to host" in finding.impact


def test_a_wrong_hosts_entry_at_a_silent_address_is_no_firewall() -> None:
    some = cluster(4)
    some.hosts_entry("node2", "node0", "10.77.0.99", "drop")
    some.close("node1", "node0", "drop", "master")
    assert [(f.id, f.edges) for f in found(some.run())] == [
        ("dns.wrong", (("node2", "node0"),)),
        ("port.master.reach", (("node1", "node0"),)),
    ]


def test_a_name_that_leads_to_another_node() -> None:
    some = cluster(3)
    some.hosts_entry("node2", "node1", "10.77.0.1", "wrong-host")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("dns.wrong", ("node2",))
    assert "10.77.0.1, which node0 has" in finding.title
    assert finding.impact.startswith("works while")


def test_a_name_server_that_is_wrong_for_all_blames_no_node() -> None:
    some = cluster(3)
    for holder in ("node0", "node2"):
        edge = some.edges[holder, "node1"]
        failed = dial("node1", "10.77.9.9", PORT, "drop")
        resolved = Resolved(name="node1", addresses=("10.77.9.9",))
        some.change(holder, "node1", resolved=resolved, mesh=failed, ephemeral=edge.ephemeral)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("dns.wrong", ())
    assert "for every node" in finding.title


def test_an_address_that_is_translated_on_the_way_is_right() -> None:
    some = cluster(3)
    for holder in ("node0", "node2"):
        resolved = Resolved(name="node1", addresses=("203.0.113.7",))
        reached = dial("node1", "203.0.113.7", PORT)
        some.change(holder, "node1", resolved=resolved, mesh=reached)
    assert found(some.run()) == []


def test_a_peer_that_is_loopback() -> None:
    some = cluster(3)
    some.hosts_entry("node2", "node0", "127.0.1.1", "refused")
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("dns.loopback", ("node2",))
    assert "line 3 of /etc/hosts" in finding.lines[0]
    assert "10.77.0.1 node0" in commands(finding)


def test_a_dead_ipv6_address_first() -> None:
    some = cluster(3)
    for start in ("node1", "node2"):
        resolved = Resolved(name="node0", addresses=("fd00::dead", "10.77.0.1"))
        dead = dial("node0", "fd00::dead", PORT, "no-route")
        later = (dial("node0", "10.77.0.1", PORT),)
        some.change(start, "node0", resolved=resolved, mesh=dead, others=later)
    finding = only(some.run())
    assert (finding.id, finding.status) == ("dns.family", "warn")
    assert finding.nodes == ("node1", "node2")
    assert "by luck" in finding.impact


def test_a_dead_ipv4_address_first() -> None:
    some = cluster(3)
    resolved = Resolved(name="node0", addresses=("10.77.0.99", "10.77.0.1"))
    dead = dial("node0", "10.77.0.99", PORT, "no-arp")
    some.change("node2", "node0", resolved=resolved, mesh=dead,
                others=(dial("node0", "10.77.0.1", PORT),))  # fmt: skip
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("dns.wrong", "warn", ("node2",))


def test_nodes_without_a_common_family() -> None:
    some = cluster(3)
    some.report("node2", addresses=("fd00::3", "fe80::1"))
    for start, end in some.touching("node2"):
        some.edges.pop((start, end))
    findings = found(some.run())
    assert [(f.id, f.status, f.nodes) for f in findings] == [("dns.family", "fail", ("node2",))]


def take(given: Cluster, node: str, address: str, *, is_first: bool = False) -> None:
    """Let gloo on a node take an address of its eth0 that the host name leads to."""
    facts = given.reports[node].facts.interfaces
    assert facts is not None
    (eth0,) = facts.interfaces
    both = (f"{address}/64", *eth0.addresses) if is_first else (*eth0.addresses, f"{address}/64")
    eth0 = msgspec.structs.replace(eth0, addresses=both)
    gloo = (Choice(interface="eth0", address=address, how="the host name resolves to it"),)
    given.facts(node, interfaces=InterfaceFacts(interfaces=(eth0,), gloo=gloo))
    given.report(node, addresses=(given.address[node], address))


@pytest.mark.parametrize(("backend", "status"), [("gloo", "fail"), ("nccl", "warn")])
@pytest.mark.parametrize("odd", [("node2",), ("node1", "node2")])
def test_gloo_takes_ipv6_on_some_nodes(odd: tuple[str, ...], backend: str, status: str) -> None:
    given = cluster(4, backend=backend)
    for node in odd:
        take(given, node, f"fd77::{node[-1]}")
    one = only(given.run())
    assert (one.status, one.nodes) == (status, odd)
    assert "gloo takes an IPv6 address, and an IPv4 address on node0" in one.title
    assert [(fix.node, fix.command) for fix in one.fix] == [
        (node, "export GLOO_SOCKET_IFNAME=eth0") for node in odd
    ]


def test_where_the_interface_has_ipv6_first_a_person_mends_the_name() -> None:
    given = cluster(3)
    take(given, "node1", "fd77::1", is_first=True)
    one = only(given.run())
    assert one.fix[0].command.startswith("# let 'node1' lead to an IPv4 address")


def test_names_lead_to_ipv6_which_one_node_lacks() -> None:
    given = cluster(3)
    for node in ("node0", "node2"):
        take(given, node, f"fd77::{node[-1]}")
        addresses = ("fd77::1", given.address["node1"])
        given.change(
            node, "node1", resolved=Resolved(name="node1", addresses=addresses),
            mesh=dial("node1", "fd77::1", PORT, "no-route"),
            others=(dial("node1", given.address["node1"], PORT),),
        )  # fmt: skip
    one = only(given.run())
    assert (one.status, one.nodes) == ("fail", ("node1",))
    assert [fix.node for fix in one.fix] == ["node0", "node2"]
    assert all("/etc/gai.conf" in fix.command for fix in one.fix)


def test_a_name_that_one_node_cannot_resolve_accuses_no_port() -> None:
    some = cluster(3)
    failed = dial("node0", "node0", PORT, "unresolved")
    nothing = Resolved(name="node0", error="EAI_NONAME: Name or service not known")
    some.change("node2", "node0", resolved=nothing, mesh=failed, master=failed)
    assert found(some.run()) == []  # dns.master says it
    verdict = evaluate(some.run())
    assert ("port.master.reach", ("node2",)) in [(f.id, f.nodes) for f in verdict.notes]


def test_an_address_that_two_nodes_have_accuses_no_port() -> None:
    some = cluster(3)
    some.report("node2", addresses=(some.address["node1"],))
    for start in ("node0", "node2"):
        failed = dial("node1", some.address["node1"], PORT, "refused")
        some.change(start, "node1", mesh=failed, ephemeral=(failed,))
    for start in ("node0", "node1"):
        some.edges.pop((start, "node2"))
    assert [f for f in found(some.run()) if f.id.startswith("port.")] == []


def _black_hole(some: Cluster, paths: list[tuple[str, str]], carried: int = 1500) -> None:
    for path in paths:
        hole = PathMtu(carried_bytes=carried, interface_bytes=9000, large_ok=False)
        some.change(*path, mtu=hole)


@pytest.mark.parametrize("num", [2, 3, 6])
def test_a_node_without_local_ports_accuses_no_node_that_it_would_have_called(num: int) -> None:
    some = cluster(num)
    some.close_outbound("node1", "no-local-port")
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("port.local", "fail", ("node1",))
    assert "32768-60999" in finding.title
    assert "ip_local_port_range" in commands(finding)


def test_some_calls_without_a_local_port_are_a_warning() -> None:
    some = cluster(3)
    one, *others = some.edges["node1", "node0"].ephemeral
    failed = dial("node0", one.address, one.port, "no-local-port")
    some.change("node1", "node0", ephemeral=(failed, *others))
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("port.local", "warn", ("node1",))


@pytest.mark.parametrize("num", [3, 4, 8])
def test_a_black_hole_at_one_node(num: int) -> None:
    some = cluster(num)
    _black_hole(some, some.touching("node1"))
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.mtu.path", ("node1",))
    assert finding.title == (
        "paths of node1 carry 1500 bytes, interfaces say 9000: large messages vanish"
    )
    assert commands(finding) == "node1: sudo ip link set eth0 mtu 1500"
    assert "1800000ms" in finding.impact


@pytest.mark.parametrize("num", [2, 3, 6])
def test_a_black_hole_of_a_pair(num: int) -> None:
    some = cluster(num)
    _black_hole(some, [("node0", "node1"), ("node1", "node0")])
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.mtu.path", ())
    assert [fix.node for fix in finding.fix] == ["node0", "node1"]


def test_a_stall_on_a_path_of_full_size_is_no_black_hole() -> None:
    some = cluster(3)
    for path in (("node0", "node1"), ("node1", "node0")):
        some.change(*path, mtu=PathMtu(carried_bytes=1500, interface_bytes=1500, large_ok=False))
    assert found(some.run()) == []
    asides = [f for f in evaluate(some.run()).notes if f.id == "net.mtu.path"]
    assert [f.status for f in asides] == ["unknown"]


def test_a_path_on_which_no_large_message_was_tried_is_unknown() -> None:
    some = cluster(3)
    some.change("node0", "node1", mtu=None)
    some.change("node2", "node1", mtu=PathMtu(carried_bytes=-1, large_ok=False))
    verdict = evaluate(some.run())
    assert found(some.run()) == []
    asides = {f.edges: f.status for f in verdict.notes if f.id == "net.mtu.path"}
    stalled = (("node1", "node2"), ("node2", "node1"))
    assert asides == {(("node0", "node1"),): "unknown", stalled: "unknown"}
    assert exit_code(verdict) == 3


def test_a_black_hole_in_one_direction_stalls_both() -> None:
    some = cluster(3)
    _black_hole(some, [("node0", "node1")], 1400)
    some.change(
        "node1", "node0",
        mtu=PathMtu(carried_bytes=9000, interface_bytes=9000, large_ok=False),
    )  # fmt: skip
    assert set(only(some.run()).edges) == {("node0", "node1"), ("node1", "node0")}
    assert "carry 1400 bytes" in only(some.run()).title


def test_an_mtu_that_differs() -> None:
    some = cluster(4)
    jumbo = Interface(name="ens5", addresses=("10.77.0.3/16",), mtu_bytes=9000)
    facts = some.reports["node2"].facts.interfaces
    assert facts is not None
    some.facts("node2", interfaces=InterfaceFacts(interfaces=(jumbo,), gloo=facts.gloo))
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("net.mtu.differs", "warn", ("node2",))
    assert commands(finding) == "node2: sudo ip link set ens5 mtu 1500"


def test_without_a_majority_the_smallest_mtu_fits_all() -> None:
    some = cluster(2)
    jumbo = Interface(name="ens5", addresses=("10.77.0.1/16",), mtu_bytes=9000)
    facts = some.reports["node0"].facts.interfaces
    assert facts is not None
    some.facts("node0", interfaces=InterfaceFacts(interfaces=(jumbo,), gloo=facts.gloo))
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.mtu.differs", ())
    assert commands(finding) == "node0: sudo ip link set ens5 mtu 1500"


def _rtt(some: Cluster, paths: list[tuple[str, str]], low: float, middle: float) -> None:
    for path in paths:
        rtt = Rtt(num=12, min_ms=low, median_ms=middle, p95_ms=2 * middle, max_ms=3 * middle)
        some.change(*path, rtt=rtt)


@pytest.mark.parametrize("num", [3, 4, 16])
def test_a_distant_pair(num: int) -> None:
    some = cluster(num)
    pair = [("node0", "node2"), ("node2", "node0")]
    _rtt(some, pair, 100.0, 100.1)
    some.slow(pair, 40.0, 41.0)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.status) == ("net.latency", (), "warn")
    assert finding.title.startswith("node0-node2: round trip of 100 ms")
    assert len(finding.explains) == 1


@pytest.mark.parametrize("num", [4, 5, 16])
def test_a_distant_node(num: int) -> None:
    some = cluster(num)
    _rtt(some, some.touching("node1"), 20.0, 20.1)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.latency", ("node1",))


def test_a_single_good_pair_is_a_weak_measure_of_latency() -> None:
    some = cluster(3)
    _rtt(some, list(some.edges), 1.0, 1.1)
    _rtt(some, some.touching("node1"), 8.0, 8.1)
    assert found(some.run()) == []
    _rtt(some, some.touching("node1"), 20.0, 20.1)
    assert only(some.run()).nodes == ("node1",)


def test_a_distant_pair_that_one_end_saw_alone_is_a_stray() -> None:
    some = cluster(4)
    _rtt(some, [("node0", "node2")], 20.0, 20.1)
    assert found(some.run()) == []


def test_a_busy_machine_is_judged_beyond_its_own_delay_only() -> None:
    some = cluster(4)
    some.report("node3", delay_p90_ms=40.0)
    _rtt(some, [("node0", "node3"), ("node3", "node0")], 20.0, 40.0)
    some.slow(some.touching("node3"), 40.0, 41.0)
    verdict = evaluate(some.run())
    assert [f for f in verdict.findings if f.id in OURS] == []
    statuses = {r.id: r.status for r in verdict.results}
    assert statuses["net.latency"] == statuses["net.bandwidth"] == statuses["net.loss"] == "unknown"
    _rtt(some, [("node0", "node3"), ("node3", "node0")], 100.0, 140.0)
    assert only(some.run()).id == "net.latency"


def test_jitter_of_a_pair() -> None:
    some = cluster(3)
    _rtt(some, [("node0", "node2"), ("node2", "node0")], 0.2, 9.0)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.edges[0]) == ("net.jitter", (), ("node0", "node2"))


def test_jitter_is_why_the_round_trip_is_long_unless_distance_is() -> None:
    some = cluster(3)
    pair = [("node0", "node2"), ("node2", "node0")]
    _rtt(some, pair, 16.0, 40.0)
    some.slow(pair, 40.0, 41.0)
    assert (only(some.run()).id, len(only(some.run()).explains)) == ("net.jitter", 2)
    _rtt(some, pair, 100.0, 110.0)
    assert only(some.run()).id == "net.latency"


def test_one_late_answer_is_no_jitter() -> None:
    some = cluster(3)
    late = Rtt(num=12, min_ms=0.1, median_ms=0.2, p95_ms=190.0, max_ms=201.0)
    some.change("node0", "node2", rtt=late)
    assert found(some.run()) == []


def _lossy(
    some: Cluster, paths: list[tuple[str, str]], lost: int, again: int, mbit: float = 300.0
) -> None:
    for path in paths:
        sent = Bandwidth(
            mbit_per_s=mbit, rounds=(mbit,), num_segments=10_000, num_retransmits=again,
            again_mbit_per_s=mbit,
        )  # fmt: skip
        told = Datagrams(num_sent=400, num_answered=400 - lost)
        some.change(*path, bandwidth=sent, datagrams=told)


PAIR = [("node0", "node1"), ("node1", "node0")]


@pytest.mark.parametrize("mbit", [300.0, 9000.0])
def test_loss_is_the_cause_of_slowness(mbit: float) -> None:
    some = cluster(4)
    _lossy(some, PAIR, 16, 200, mbit)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.status) == ("net.loss", (), "warn")
    assert "node0-node1: 4.0 % of packets are lost" in finding.title
    assert "node0: ip -s link show eth0" in commands(finding)


def test_loss_says_which_way() -> None:
    some = cluster(3)
    _lossy(some, PAIR, 16, 200)
    there, back = PAIR[0], PAIR[0][::-1]
    for path, arrived in ((there, 384), (back, 400)):  # what is lost, is lost on the way there
        counted = Datagrams(num_sent=400, num_answered=384, num_arrived=arrived)
        some.change(*path, datagrams=counted)
    finding = only(some.run())
    assert (finding.id, finding.edges) == ("net.loss", (there,))
    assert finding.evidence["lost_ratios"] == {"->".join(there): 0.04}
    matrix = build(evaluate(some.run()), some.run())
    assert matrix is not None
    row, column = (matrix.names.index(name) for name in there)
    assert matrix.cells[row][column] + matrix.value(row, column) == "L4%"
    assert matrix.cells[column][row] + matrix.value(column, row) == "."
    assert any("L4%" in line.plain for line in grid.lines(matrix, 80))


def test_loss_at_one_node() -> None:
    some = cluster(3)
    _lossy(some, some.touching("node1"), 14, 300)
    assert (only(some.run()).id, only(some.run()).nodes) == ("net.loss", ("node1",))


@pytest.mark.parametrize(
    ("paths", "lost", "again"),
    [
        (PAIR, 0, 70),  # a bridge that overflows under load
        (PAIR, 3, 200),  # too few to tell
        (PAIR[:1], 40, 200),  # one end missed answers: it was late
        (PAIR, 40, 2),  # both ends were late, and TCP lost nothing
    ],
)
def test_what_is_no_loss(paths: list[tuple[str, str]], lost: int, again: int) -> None:
    some = cluster(3)
    _lossy(some, paths, lost, again, 9000.0)
    assert found(some.run()) == []


def test_loss_where_udp_is_closed() -> None:
    some = cluster(3)
    _lossy(some, PAIR, 400, 500)
    assert only(some.run()).id == "net.loss"
    _lossy(some, PAIR, 400, 100, 9000.0)
    assert found(some.run()) == []


def test_far_nodes_are_not_compared_by_how_far_tcp_had_sped_up() -> None:
    some = cluster(3)
    for start, end in some.edges:
        far = Rtt(num=12, min_ms=40.1, median_ms=40.2, p95_ms=40.4, max_ms=41.0)
        some.change(start, end, rtt=far)
    some.slow([path for path in some.edges if path != ("node0", "node1")], 16.0, 16.0)
    assert found(some.run()) == []
    options = msgspec.structs.replace(some.options, expect_gbps=1.0)
    asked = Run("x", some.names, some.run().reports, options)
    assert [f.id for f in found(asked)] == ["net.bandwidth"]


def test_a_limited_rate_is_not_called_loss() -> None:
    some = cluster(3)
    _lossy(some, [("node1", "node0"), ("node1", "node2")], 0, 900, 9.7)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.bandwidth", ("node1",))
    assert finding.title == "paths from node1: 9.7 Mbit/s; usual is 9000"
    _lossy(some, [("node1", "node0"), ("node1", "node2")], 400, 900, 9.7)  # UDP is closed
    assert only(some.run()).id == "net.bandwidth"


def test_a_late_end_makes_no_jitter() -> None:
    some = cluster(3)
    pair = [("node0", "node2"), ("node2", "node0")]
    _rtt(some, pair, 0.2, 9.0)
    some.report("node2", delay_p90_ms=6.0)
    assert found(some.run()) == []


@pytest.mark.parametrize("num", [3, 4, 5, 16])
def test_a_slow_node(num: int) -> None:
    some = cluster(num)
    some.slow(some.touching("node1"), 10.0, 10.0)
    finding = only(some.run())
    assert (finding.id, finding.nodes, finding.status) == ("net.bandwidth", ("node1",), "warn")
    assert "4,568 ms" in finding.impact


@pytest.mark.parametrize("num", [3, 4, 16])
def test_a_slow_pair(num: int) -> None:
    some = cluster(num)
    some.slow([("node0", "node1"), ("node1", "node0")], 100.0, 110.0)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.bandwidth", ())
    assert finding.title == "node0-node1: 110 Mbit/s; usual is 9000"


def test_slowness_that_a_second_look_does_not_confirm_is_a_stray() -> None:
    some = cluster(4)
    some.slow([("node0", "node1")], 100.0, 8900.0)
    some.slow([("node2", "node3")], 100.0, None)
    assert found(some.run()) == []


def test_a_pair_that_jitters_is_no_second_slow_partner() -> None:
    some = cluster(4)
    jittery = [("node0", "node1"), ("node1", "node0")]
    _rtt(some, jittery, 1.0, 20.0)
    some.slow([*jittery, ("node1", "node2"), ("node2", "node1")], 50.0, 50.0)
    found_ = {finding.id: finding for finding in found(some.run())}
    assert set(found_) == {"net.jitter", "net.bandwidth"}
    assert found_["net.bandwidth"].nodes == ()
    assert set(found_["net.bandwidth"].edges) == {("node1", "node2"), ("node2", "node1")}


@pytest.mark.parametrize("num", [2, 4])
def test_slower_than_asked_for(num: int) -> None:
    some = cluster(num, options=Options(expect_gbps=25.0))
    some.slow(list(some.edges), 9000.0, 9100.0)
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("net.bandwidth", "fail", ())
    assert "25000 Mbit/s asked for" in finding.title


def test_two_nodes_without_a_figure_are_no_comparison() -> None:
    some = cluster(2)
    some.slow([("node0", "node1")], 10.0, 10.0)
    verdict = evaluate(some.run())
    assert verdict.findings == ()
    assert {r.id: r.status for r in verdict.results}["net.bandwidth"] == "skipped"


@pytest.mark.parametrize(
    ("offset_s", "status", "says"),
    [(-20.0, "fail", "20.0 s behind"), (90.0, "fail", "90.0 s ahead"), (3.0, "warn", "3.0 s")],
)
@pytest.mark.parametrize("mode", ["static", "c10d"])
@pytest.mark.parametrize("node", ["node0", "node1", "node2"])
def test_a_clock_that_is_off(offset_s: float, status: str, says: str, mode: str, node: str) -> None:
    some = cluster(3, mode=mode)
    some.shift_clock(node, offset_s * 1e3)
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("clock.offset", status, (node,))
    assert says in finding.title
    assert f"{node}: sudo chronyc makestep" in commands(finding)
    if offset_s < -15 and mode == "c10d":
        assert "WORLD_SIZE=2 and exit code 0" in finding.impact


def test_two_clocks_cannot_tell_which_is_wrong() -> None:
    some = cluster(2)
    some.shift_clock("node1", -20_000.0)
    finding = only(some.run())
    assert (finding.id, finding.status, finding.nodes) == ("clock.offset", "fail", ())
    assert "20.0 s apart" in finding.title


def test_an_unsure_clock_accuses_nobody() -> None:
    some = cluster(3)
    for path in some.touching("node2"):
        some.change(*path, clock=Clock(offset_ms=1500.0, uncertainty_ms=2000.0))
    assert found(some.run()) == []


def test_an_idle_connection_that_is_forgotten() -> None:
    some = cluster(3, options=Options(tier="deep"))
    for path in some.edges:
        some.change(*path, idle=Idle(silent_s=60.0))
    assert found(some.run()) == []
    for path in (("node0", "node1"), ("node1", "node0")):
        some.change(*path, idle=Idle(silent_s=60.0, error="no answer in 3 s"))
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("net.idle", ())
    assert "keepalive" in commands(finding)


def test_a_thousand_nodes_of_which_a_third_is_cut_off() -> None:
    names = tuple(f"node{number}" for number in range(1000))
    peers = {name: schedule.pairs_of(name, names, "7f3a") for name in names}
    some = Cluster(names, peers=peers)
    for name in names[::3]:
        some.close_inbound(name)
        some.close_outbound(name)
    finding = only(some.run())
    assert (finding.id, finding.nodes) == ("port.ephemeral", names[::3])
    assert len(finding.fix) < 40
    assert len(finding.lines) < 10
    assert "and 330 more" in finding.title


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "master": lambda some: some.close_inbound(some.names[0], "drop", "master"),
    "random": lambda some: some.close_inbound(some.names[3], "refused", "random"),
    "oneway": lambda some: some.close(some.names[4], some.names[2]),
    "isolated": lambda some: (
        some.close_inbound(some.names[1]), some.close_outbound(some.names[1])
    )[0],
    "wrong": lambda some: some.hosts_entry(some.names[4], some.names[0], "10.77.0.99"),
    "mtu": lambda some: _black_hole(some, some.touching(some.names[2])),
    "latency": lambda some: _rtt(
        some, [(some.names[1], some.names[2]), (some.names[2], some.names[1])], 100.0, 101.0
    ),
    "slow": lambda some: some.slow(some.touching(some.names[3]), 10.0, 10.0),
    "clock": lambda some: some.shift_clock(some.names[4], -20_000.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_order_and_names_change_nothing_but_names(name: str) -> None:
    plain = cluster(6)
    FAULTS[name](plain)
    new = dict(zip(plain.names, ("zeta", "alpha", "m7", "node0", "b", "q-1"), strict=True))
    renamed = Cluster(tuple(new.values()))
    FAULTS[name](renamed)
    first, second = only(plain.run()), only(renamed.run(tuple(reversed(renamed.names))))
    assert (first.id, first.status, first.confidence) == (
        second.id, second.status, second.confidence,
    )  # fmt: skip
    assert {new[node] for node in first.nodes} == set(second.nodes)
    assert {(new[a], new[b]) for a, b in first.edges} == set(second.edges)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("lost", range(6))
def test_a_missing_report_makes_nobody_else_guilty(name: str, lost: int) -> None:
    whole = cluster(6)
    FAULTS[name](whole)
    guilty = set(only(whole.run()).nodes)
    some = cluster(6)
    FAULTS[name](some)
    gone = some.names[lost]
    some.absent(gone, "drop")
    for finding in found(some.run()):
        assert finding.id == "node.absent" or set(finding.nodes) <= guilty, finding


@pytest.mark.parametrize(
    ("first", "second"),
    [(a, b) for a in FAULTS for b in ("mtu", "clock", "slow", "master") if a != b],
)
def test_two_faults_are_two_findings(first: str, second: str) -> None:
    some = cluster(7)
    FAULTS[second](some)
    FAULTS[first](some)
    ids = [finding.id for finding in found(some.run())]
    alone = []
    for name in (first, second):
        one = cluster(7)
        FAULTS[name](one)
        alone.append(only(one.run()).id)
    assert sorted(ids) == sorted(alone)
