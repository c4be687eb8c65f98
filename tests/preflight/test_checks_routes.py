"""No way to a node that is up: the route, the link, the address it advertises, translation."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.interfaces import Interface, InterfaceFacts
from rankscope.preflight.facts.routes import Neighbour, Route
from rankscope.preflight.model import CheckFinding
from rankscope.preflight.system import Resolved
from rankscope.preflight.verdict.engine import evaluate

from .synthetic import PORT, RANDOM, Cluster, cluster, dial

CHECKS: dict[str, Check] = {check.id: check for check in FAMILIES["interfaces"]}
IDS = ("net.down", "net.loopback", "net.dup_mac", "net.nat", "net.route")


def found(id: str, run: Run) -> list[CheckFinding]:
    return [f for f in CHECKS[id].evaluate(run) if f.status in ("fail", "warn")]


def commands(finding: CheckFinding) -> list[str]:
    return [fix.command for fix in finding.fix]


def interface(given: Cluster, node: str, name: str = "eth0", **fields: Any) -> None:
    """Change, or add, an interface of a node."""
    old = given.reports[node].facts.interfaces
    assert old is not None
    rows = [r for r in old.interfaces if r.name != name]
    before = next((r for r in old.interfaces if r.name == name), Interface(name=name, is_up=True))
    rows.append(msgspec.structs.replace(before, **fields))
    given.facts(node, interfaces=msgspec.structs.replace(old, interfaces=tuple(rows)))


def lose(given: Cluster, start: str, end: str, *routes: Route, **fields: Any) -> None:
    """Close a path both ways; `start` knows these routes to `end`."""
    given.close(start, end)
    given.close(end, start)
    given.change(start, end, routes=routes, **fields)
    given.change(end, start, routes=(Route(
        address=given.address[start], prefix="10.77.0.0/16", interface="eth0"
    ),))  # fmt: skip


def advertise(given: Cluster, node: str, address: str, name: str = "eth1") -> None:
    """Let gloo on a node take another address, of a second interface there."""
    interface(given, node, name, addresses=(f"{address}/24",), is_up=True)
    facts = given.reports[node].facts.interfaces
    assert facts is not None
    chosen = Choice(interface=name, address=address, how=f"GLOO_SOCKET_IFNAME={name}")
    given.facts(node, interfaces=msgspec.structs.replace(facts, gloo=(chosen,)))
    given.report(node, addresses=(given.address[node], address))


def unreached(given: Cluster, start: str, end: str, address: str, detour: str = "") -> None:
    """Let no port of an advertised address answer; `detour`: one of another address does."""
    some = tuple(dial(end, address, port, "no-route") for port in RANDOM)
    around = dial(end, detour, RANDOM[0]) if detour else None
    none = Route(address=address, kind="none", error="ENETUNREACH")
    given.change(start, end, ephemeral=some, detour=around, routes=(none,))


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_healthy_run_yields_nothing(id: str, backend: str) -> None:
    assert found(id, cluster(4, backend=backend).run()) == []


@pytest.mark.parametrize("id", ["net.nat", "net.route"])
@pytest.mark.parametrize("which", ["all", "random", "master"])
def test_a_firewall_is_no_route(id: str, which: str) -> None:
    given = cluster(3)
    given.close_inbound("node1", which=which)
    for start in given.sources("node1"):
        near = Route(address=given.address["node1"], prefix="10.77.0.0/16", interface="eth0")
        hop = Neighbour(address=given.address["node1"], interface="eth0", mac="02:00:00:00:00:01")
        given.change(start, "node1", routes=(near,), neighbours=(hop,))
    assert found(id, given.run()) == []


@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit"])
def test_a_route_that_forbids_is_removed(kind: Any) -> None:
    given, peer = cluster(3), "10.77.0.3"
    lose(given, "node1", "node2", Route(address=peer, kind=kind, prefix=f"{peer}/32"))
    (one,) = found("net.route", given.run())
    assert (one.status, one.nodes, one.confidence) == ("fail", ("node1",), "proven")
    assert set(one.edges) == {("node1", "node2"), ("node2", "node1")}
    assert commands(one) == [f"sudo ip route del {kind} {peer}/32"]
    assert [(fix.node, fix.owner) for fix in one.fix] == [("node1", "admin")]
    (told,) = evaluate(given.run()).findings
    assert (told.id, len(told.explains)) == ("net.route", 1)  # of closed ports nobody speaks


def test_a_wide_route_is_not_removed_but_gone_around() -> None:
    given, peer = cluster(3), "10.77.0.3"
    lose(given, "node1", "node2", Route(
        address=peer, kind="blackhole", prefix="0.0.0.0/0", table=100, source="10.77.0.2"
    ))  # fmt: skip
    (one,) = found("net.route", given.run())
    assert commands(one) == ["sudo ip route replace 10.77.0.0/16 dev eth0 table 100"]


def test_a_wide_route_to_far_nodes_is_for_a_person() -> None:
    given, peer = cluster(3), "10.77.0.3"
    lose(given, "node1", "node2", Route(address=peer, kind="blackhole", prefix="10.0.0.0/8"))
    interface(given, "node1", addresses=("10.77.0.2/32",))
    (one,) = found("net.route", given.run())
    assert commands(one)[0].startswith("# remove the route blackhole 10.0.0.0/8, or add one")


@pytest.mark.parametrize(
    ("route", "command"),
    [
        ({"prefix": "10.77.0.3/32", "gateway": "10.77.0.99", "interface": "eth0"},
         "sudo ip route del 10.77.0.3/32 via 10.77.0.99 dev eth0"),
        ({"prefix": "10.77.0.3/32", "interface": "eth1"},
         "sudo ip route del 10.77.0.3/32 dev eth1"),
        ({"prefix": "0.0.0.0/0", "gateway": "10.77.0.99", "interface": "eth0", "table": 7},
         "sudo ip route replace 10.77.0.0/16 dev eth0 table 7"),
    ],
)  # fmt: skip
def test_a_route_away_from_the_own_network(route: dict[str, Any], command: str) -> None:
    given = cluster(3)
    lose(given, "node1", "node2", Route(address="10.77.0.3", **route))
    (one,) = found("net.route", given.run())
    assert (one.nodes, one.confidence) == (("node1",), "likely")
    assert "away from eth0" in one.title
    assert commands(one) == [command]


def test_a_detour_that_carries_the_control_port_is_innocent() -> None:
    given = cluster(3)
    given.close("node1", "node2", which="random")
    given.change("node1", "node2", routes=(Route(
        address="10.77.0.3", prefix="10.77.0.3/32", gateway="10.77.0.9", interface="eth0"
    ),))  # fmt: skip
    assert found("net.route", given.run()) == []


def test_a_network_that_lies_over_the_others() -> None:
    given = cluster(3)
    interface(given, "node1", "docker1", addresses=("10.77.0.9/24",), kind="docker")
    for peer in ("node0", "node2"):
        lose(given, "node1", peer, Route(
            address=given.address[peer], prefix="10.77.0.0/24", interface="docker1"
        ))  # fmt: skip
    (one,) = found("net.route", given.run())
    assert (one.nodes, len(one.edges)) == (("node1",), 4)
    assert commands(one) == [
        "sudo ip route replace 10.77.0.1/32 dev eth0 && sudo ip route replace 10.77.0.3/32 dev eth0"
    ]


def test_no_route_is_told_once_for_all_who_have_none() -> None:
    given = cluster(3)
    for start in ("node0", "node1"):
        lose(given, start, "node2", Route(address="10.77.0.3", kind="none", error="ENETUNREACH"))
    (one,) = found("net.route", given.run())
    assert (one.status, one.nodes) == ("fail", ("node0", "node1"))
    assert "no route to 10.77.0.3 (node2)" in one.title
    assert {command[:15] for command in commands(one)} == {"# add a route t"}


def test_a_router_that_does_not_answer() -> None:
    given = cluster(3)
    interface(given, "node2", addresses=("10.77.0.3/32",))
    for peer in ("node0", "node1"):
        given.close("node2", peer, "no-arp")
        given.close(peer, "node2")
        given.change("node2", peer, routes=(Route(
            address=given.address[peer], prefix="0.0.0.0/0", gateway="10.9.9.9", interface="eth0"
        ),))  # fmt: skip
    (one,) = found("net.route", given.run())
    assert one.nodes == ("node2",)
    assert "by a router that does not answer" in one.title
    assert "the router 10.9.9.9" in commands(one)[0]


@pytest.mark.parametrize(("mac", "is_wrong"), [("02:de:ad:00:00:01", True), ("02:00::03", False)])
def test_a_fixed_neighbour(mac: str, is_wrong: bool) -> None:
    given = cluster(3)
    interface(given, "node2", mac="02:00::03")
    near = Route(address="10.77.0.3", prefix="10.77.0.0/16", interface="eth0")
    entry = Neighbour(address="10.77.0.3", interface="eth0", mac=mac, state="permanent")
    lose(given, "node1", "node2", near, neighbours=(entry,))
    told = found("net.route", given.run())
    assert [one.nodes for one in told] == ([("node1",)] if is_wrong else [])
    if told:
        assert commands(told[0]) == ["sudo ip neigh del 10.77.0.3 dev eth0"]


@pytest.mark.parametrize(("limit", "is_wrong"), [(1, True), (64, False), (0, False)])
def test_packets_that_do_not_live_long(limit: int, is_wrong: bool) -> None:
    given = cluster(3)
    facts = given.reports["node2"].facts.interfaces
    assert facts is not None
    given.facts("node2", interfaces=msgspec.structs.replace(facts, hop_limit=limit))
    interface(given, "node2", addresses=("10.77.0.3/32",))
    for peer in ("node0", "node1"):
        lose(given, "node2", peer, Route(
            address=given.address[peer], prefix="0.0.0.0/0", gateway="10.77.0.9", interface="eth0"
        ))  # fmt: skip
    told = found("net.route", given.run())
    assert [one.nodes for one in told] == ([("node2",)] if is_wrong else [])
    if told:
        assert commands(told[0]) == ["sudo sysctl -w net.ipv4.ip_default_ttl=64"]


@pytest.mark.parametrize("is_asked", [True, False])
def test_links_that_do_not_meet_name_the_node(is_asked: bool) -> None:
    """A busy node had no time to ask for routes: what its kernel said of ARP is enough."""
    given = cluster(3)
    for peer in ("node0", "node1"):
        for start, end in (("node2", peer), (peer, "node2")):
            near = Route(address=given.address[end], prefix="10.77.0.0/16", interface="eth0")
            given.close(start, end, "no-arp")
            given.change(start, end, routes=(near,) if is_asked or start == "node1" else ())
    (one,) = found("net.route", given.run())
    assert (one.nodes, len(one.edges)) == (("node2",), 4)
    assert "no answer to ARP" in one.title
    assert [fix.node for fix in one.fix] == ["node2"]


def test_gloo_on_an_interface_that_others_do_not_reach() -> None:
    given = cluster(3)
    advertise(given, "node1", "10.2.7.9")
    for peer in ("node0", "node2"):
        unreached(given, peer, "node1", "10.2.7.9", detour="10.77.0.2")
    (one,) = found("net.route", given.run())
    assert (one.status, one.nodes) == ("fail", ("node1",))
    assert one.title == (
        "node1: others do not reach the address that gloo advertises (10.2.7.9 of eth1), "
        "and reach 10.77.0.2"
    )
    assert commands(one) == ["export GLOO_SOCKET_IFNAME=eth0"]


def test_with_nccl_its_interface_is_named_as_well() -> None:
    given = cluster(3, backend="nccl")
    advertise(given, "node1", "10.2.7.9")
    unreached(given, "node0", "node1", "10.2.7.9", detour="10.77.0.2")
    (one,) = found("net.route", given.run())
    assert commands(one)[1] == "export NCCL_SOCKET_IFNAME==eth0"


def test_an_address_that_nobody_dials_is_a_warning() -> None:
    """The node with the highest address dials all others itself."""
    given = cluster(3)
    advertise(given, "node1", "200.1.1.9")
    for peer in ("node0", "node2"):
        unreached(given, peer, "node1", "200.1.1.9", detour="10.77.0.2")
    (one,) = found("net.route", given.run())
    assert one.status == "warn"


def test_an_endpoint_that_others_do_not_reach() -> None:
    given = cluster(3)
    interface(given, "node0", "eth1", addresses=("10.99.3.1/24",))
    given.report("node0", addresses=("10.77.0.1", "10.99.3.1"))
    for start in ("node1", "node2"):
        given.change(start, "node0", master=dial("node0", "10.99.3.1", PORT, "no-route"))
    (one,) = found("net.route", given.run())
    assert one.nodes == ("node0",)
    assert "MASTER_ADDR 10.99.3.1 of eth1" in one.title
    assert re.search(r"10\.77\.0\.1", commands(one)[0])


def translated(given: Cluster, node: str, public: str, is_inbound: bool) -> None:
    """Put a node behind NAT: it has an address that no other node reaches."""
    own = "10.2.7.2"
    interface(given, node, addresses=(f"{own}/24",))
    facts = given.reports[node].facts.interfaces
    assert facts is not None
    chosen = (Choice(interface="eth0", address=own),)
    given.facts(node, interfaces=msgspec.structs.replace(facts, gloo=chosen))
    given.report(node, addresses=(own,))
    for peer in [name for name in given.names if name != node]:
        unreached(given, peer, node, own, detour=public if is_inbound else "")
        mesh = dial(node, public, PORT) if is_inbound else dial(node, own, PORT, "no-route")
        known_as = Resolved(name=node, addresses=(public if is_inbound else own,))
        given.change(peer, node, mesh=mesh, resolved=known_as)
        out = given.edges[node, peer].ephemeral[0]
        out = msgspec.structs.replace(out, local_address=own, seen_address=public)
        given.change(node, peer, ephemeral=(out,))


@pytest.mark.parametrize("is_inbound", [True, False])
def test_a_node_behind_nat(is_inbound: bool) -> None:
    given = cluster(3)
    translated(given, "node2", "10.77.0.3", is_inbound)
    (one,) = found("net.nat", given.run())
    assert (one.status, one.nodes) == ("fail", ("node2",))
    assert set(one.edges) == {("node0", "node2"), ("node1", "node2")}
    assert "10.77.0.3" in one.lines[0]
    assert all(command.startswith("# ") for command in commands(one))
    assert found("net.route", given.run()) == []
    assert [f.id for f in evaluate(given.run()).findings] == ["net.nat"]


def test_a_container_is_told_to_share_its_hosts_network() -> None:
    given = cluster(3)
    translated(given, "node2", "10.77.0.3", is_inbound=True)
    given.facts("node2", host=HostFacts(hostname="node2", container="docker"))
    (one,) = found("net.nat", given.run())
    assert "--network host" in commands(one)[0]


def test_nat_of_the_endpoint_alone_is_no_fault() -> None:
    """A floating address that leads to node 0: all advertise what the others reach."""
    given = cluster(3)
    for start in ("node1", "node2"):
        given.change(start, "node0", master=dial("node0", "203.0.113.7", PORT))
    assert found("net.nat", given.run()) == []


def test_a_second_address_of_ones_own_is_no_nat() -> None:
    given = cluster(3)
    given.report("node1", addresses=("10.77.0.2", "10.77.0.95"))
    some = tuple(
        msgspec.structs.replace(d, seen_address="10.77.0.95")
        for d in given.edges["node1", "node0"].ephemeral
    )
    given.change("node1", "node0", ephemeral=some)
    given.close("node0", "node1")
    assert found("net.nat", given.run()) == []


@pytest.mark.parametrize(
    ("fields", "words", "command"),
    [
        ({"is_up": False}, "is down", "sudo ip link set dev eth0 up"),
        ({"has_carrier": False}, "has no link", "# eth0 is switched on and has no link"),
    ],
)
def test_the_own_interface_is_down(fields: dict[str, Any], words: str, command: str) -> None:
    given = cluster(3)
    interface(given, "node1", **fields)
    for path in given.touching("node1"):
        given.close(*path, "no-arp")
    (one,) = found("net.down", given.run())
    assert (one.status, one.nodes) == ("fail", ("node1",))
    assert one.title == f"node1: eth0, which the job uses, {words}"
    assert commands(one)[0].startswith(command)
    assert [f.id for f in evaluate(given.run()).findings] == ["net.down"]


def test_an_idle_interface_may_be_down() -> None:
    given = cluster(3)
    interface(given, "node1", "eth1", addresses=("10.9.0.1/24",), is_up=False)
    assert found("net.down", given.run()) == []


def test_a_name_in_a_command_is_quoted() -> None:
    given = cluster(3)
    odd = "eth0;id"
    facts = given.reports["node1"].facts.interfaces
    assert isinstance(facts, InterfaceFacts)
    row = msgspec.structs.replace(facts.interfaces[0], name=odd, is_up=False)
    given.facts("node1", interfaces=msgspec.structs.replace(facts, interfaces=(row,)))
    (one,) = found("net.down", given.run())
    assert commands(one) == ["sudo ip link set dev 'eth0;id' up"]


@pytest.mark.parametrize(
    ("node", "backend", "status"),
    [("node0", "gloo", "fail"), ("node1", "gloo", "warn"), ("node1", "nccl", "fail")],
)
def test_loopback_is_down(node: str, backend: str, status: str) -> None:
    given = cluster(3, backend=backend)
    interface(given, node, "lo", addresses=("127.0.0.1/8",), is_up=False, is_loopback=True)
    (one,) = found("net.loopback", given.run())
    assert (one.status, one.nodes) == (status, (node,))
    assert commands(one) == ["sudo ip link set dev lo up"]


def test_loopback_is_needed_by_several_ranks_of_one_node() -> None:
    given = cluster(3)
    interface(given, "node2", "lo", is_up=False, is_loopback=True)
    launch = given.reports["node2"].facts.launch
    assert launch is not None
    given.facts("node2", launch=msgspec.structs.replace(launch, nproc_per_node=2))
    (one,) = found("net.loopback", given.run())
    assert one.status == "fail"


@pytest.mark.parametrize("is_lost", [True, False])
def test_one_mac_address_on_two_nodes(is_lost: bool) -> None:
    """Bridges of different machines have equal ones by chance: only where a path is closed."""
    given = cluster(3)
    for node in ("node0", "node2"):
        interface(given, node, mac="02:00:00:00:00:07")
    if is_lost:
        given.close("node0", "node2")
        given.close("node2", "node0")
    told = found("net.dup_mac", given.run())
    assert [one.nodes for one in told] == ([("node0", "node2")] if is_lost else [])


def test_what_was_seen_of_others_cannot_break_a_check() -> None:
    given = cluster(3)
    bad = Dial(outcome="drop", address="no address", port=1)
    given.change("node0", "node1", ephemeral=(bad,), routes=(Route(address="no address"),))
    for id in IDS:
        assert isinstance(found(id, given.run()), list)
