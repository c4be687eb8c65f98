"""Checks of interfaces and routes: each is provoked, and silent where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.interfaces import (
    NetDupIp,
    NetIfaceGloo,
    NetIfaceMissing,
    NetIfaceNccl,
    NetIfaceVirtual,
    NetNeigh,
    NetNic,
    NetRouteSym,
    NetRpFilter,
    NetSubnet,
)
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.facts.rdma import RdmaFacts, RdmaPort
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import CheckFinding, Facts, NodeReport
from rankscope.preflight.options import Options
from tests.preflight.healthy import NODES, address, both, having, judged, run

Change = Callable[[NodeReport], NodeReport]
NCCL = Options(backend="nccl")


def commands(finding: CheckFinding) -> list[str]:
    return [fix.command for fix in finding.fix]


def with_interface(name: str, text: str, kind: str = "", **fields: Any) -> Change:
    """Add an interface to a node; "{n}" in its address is the node's number."""

    def change(report: NodeReport) -> NodeReport:
        number = report.node.removeprefix("node")
        row = Interface(
            name=name, addresses=(text.format(n=number),), is_up=True, has_carrier=True,
            kind=kind, **fields,
        )  # fmt: skip
        old = report.facts.interfaces
        assert old is not None
        return having("interfaces", interfaces=(*old.interfaces, row))(report)

    return change


def changed_eth0(**fields: Any) -> Change:
    def change(report: NodeReport) -> NodeReport:
        old = report.facts.interfaces
        assert old is not None
        rows = tuple(
            msgspec.structs.replace(row, **fields) if row.name == "eth0" else row
            for row in old.interfaces
        )
        return having("interfaces", interfaces=rows)(report)

    return change


def fact(part: str, value: object) -> Change:
    def change(report: NodeReport) -> NodeReport:
        return msgspec.structs.replace(
            report, facts=msgspec.structs.replace(report.facts, **{part: value})
        )

    return change


def gloo_takes(
    interface: str, at: str, how: str = "GLOO_SOCKET_IFNAME=x", problem: str = ""
) -> Change:
    chosen = Choice(interface=interface, address=at, how=how, problem=problem)
    return having("interfaces", gloo=(chosen,))


@pytest.mark.parametrize("check", FAMILIES["interfaces"], ids=lambda check: check.id)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_healthy_run_yields_nothing(check: Check, backend: str) -> None:
    found = judged(check, run(options=Options(backend=backend)))
    assert [f for f in found if f.status != "skipped"] == []


def test_docker0_and_a_bmc_link_beside_eth0_are_no_fault() -> None:
    """What every machine has with the same address, and no library takes."""
    change = both(
        with_interface("docker0", "172.17.0.1/16", "docker"),
        with_interface("usb0", "169.254.3.1/24"),
        with_interface("eth1", "10.99.{n}.2/24"),
    )
    for check in FAMILIES["interfaces"]:
        found = judged(check, run({"*": change}))
        assert [f for f in found if f.status != "skipped"] == [], check.id


@pytest.mark.parametrize("check", FAMILIES["interfaces"], ids=lambda check: check.id)
def test_facts_that_are_missing_are_not_a_pass(check: Check) -> None:
    def bare(report: NodeReport) -> NodeReport:
        return msgspec.structs.replace(report, facts=Facts(launch=report.facts.launch))

    found = judged(check, run({"node1": bare}, options=NCCL))
    # these judge paths, of the others too
    if check.id not in ("net.route.sym", "net.rp_filter", "net.route", "net.nat"):
        assert [(f.status, f.nodes) for f in found] == [("unknown", ("node1",))]


def test_gloo_on_loopback_by_its_variable() -> None:
    (finding,) = judged(NetIfaceGloo(), run({"node1": gloo_takes("lo", "127.0.0.1")}))
    assert (finding.status, finding.nodes) == ("fail", ("node1",))
    assert "127.0.0.1" in finding.title
    assert commands(finding) == ["export GLOO_SOCKET_IFNAME=eth0"]


def test_the_host_name_trap_is_another_checks() -> None:
    change = gloo_takes("lo", "127.0.1.1", how="the host name node1 resolves to 127.0.1.1")
    assert judged(NetIfaceGloo(), run({"node1": change})) == []


def test_gloos_own_word_goes_before_the_emulation() -> None:
    asked = fact("smoke", SmokeFacts(backend="gloo", gloo=(Choice(address="127.0.0.1"),)))
    named = gloo_takes("eth0", "10.77.0.2", how="GLOO_SOCKET_IFNAME=eth0")
    (finding,) = judged(NetIfaceGloo(), run({"node1": both(named, asked)}))
    assert "gloo itself, asked" in finding.title
    assert finding.evidence["node1"] == {"emulated": ["10.77.0.2"], "asked": ["127.0.0.1"]}


def test_gloo_on_an_interface_that_is_down_is_told_once() -> None:
    change = both(gloo_takes("eth0", "10.77.0.2"), changed_eth0(is_up=False))
    told = [f.id for c in FAMILIES["interfaces"] for f in judged(c, run({"node1": change}))]
    assert [id for id in told if id != "net.iface.nccl"] == ["net.down"]


def test_gloo_on_a_bare_interface() -> None:
    bare = gloo_takes("eth4", "", problem="eth4 has no address")
    (finding,) = judged(NetIfaceGloo(), run({"node1": bare}))
    assert "eth4 has no address" in finding.title


def nccl_takes(*names: str) -> Change:
    return having("interfaces", nccl=tuple(Choice(interface=n, address="1.2.3.4") for n in names))


@pytest.mark.parametrize(
    ("names", "status"),
    [(("br-12", "eth0"), "fail"), (("eth0", "br-12"), "warn"), (("lo",), "fail"),
     (("eth0", "tailscale0"), "warn"), (("eth0", "eth1"), None), (("br0",), None)],
)  # fmt: skip
def test_virtual_interfaces_of_nccl(names: tuple[str, ...], status: str | None) -> None:
    found = judged(NetIfaceNccl(), run({"node2": nccl_takes(*names)}, options=NCCL))
    assert [(f.status, f.nodes) for f in found] == ([(status, ("node2",))] if status else [])
    if found:
        assert commands(found[0]) == ["export NCCL_SOCKET_IFNAME==eth0"]


def test_nccl_is_not_judged_where_gloo_is_used() -> None:
    found = judged(NetIfaceNccl(), run({"*": nccl_takes("br-12")}))
    assert [f.status for f in found] == ["skipped"]


def test_an_interface_that_is_missing_on_one_node() -> None:
    def renamed(report: NodeReport) -> NodeReport:
        report = changed_eth0(name="ens5")(report)
        return gloo_takes("eth0", "", "GLOO_SOCKET_IFNAME=eth0", "no interface is named eth0")(
            report
        )

    (finding,) = judged(NetIfaceMissing(), run({"node2": renamed}))
    assert (finding.status, finding.nodes) == ("fail", ("node2",))
    assert finding.title == "node2: GLOO_SOCKET_IFNAME=eth0, but no interface is named eth0"
    assert [(fix.node, fix.command) for fix in finding.fix] == [
        ("node2", "export GLOO_SOCKET_IFNAME=ens5")
    ]
    assert judged(NetIfaceMissing(), run({"node2": renamed}, options=NCCL))[0].status == "warn"


def test_nccls_syntax_in_gloos_variable() -> None:
    problem = "no interface is named ^lo: ^ is NCCL's syntax, gloo takes exact names"
    change = gloo_takes("^lo", "", "GLOO_SOCKET_IFNAME=^lo", problem)
    (finding,) = judged(NetIfaceMissing(), run({"*": change}))
    assert finding.nodes == NODES
    assert commands(finding) == ["export GLOO_SOCKET_IFNAME=eth0"]


def test_a_name_that_nccl_does_not_find() -> None:
    chosen = Choice(how="NCCL_SOCKET_IFNAME==eth9", problem="no running interface matches =eth9")
    change = having("interfaces", nccl=(chosen,))
    (finding,) = judged(NetIfaceMissing(), run({"node1": change}, options=NCCL))
    assert (finding.status, finding.nodes) == ("fail", ("node1",))
    assert commands(finding) == ["export NCCL_SOCKET_IFNAME==eth0"]


@pytest.mark.parametrize(("hca", "is_missing"), [("=mlx5_9", True), ("mlx5", False), ("^x", False)])
def test_a_device_that_nccl_does_not_find(hca: str, is_missing: bool) -> None:
    change = both(
        fact(
            "rdma", RdmaFacts(ports=tuple(RdmaPort(device=f"mlx5_{i}", number=1) for i in (0, 1)))
        ),
        having("launch", environment={"NCCL_IB_HCA": hca}),
    )
    found = judged(NetIfaceMissing(), run({"node1": change}, options=NCCL))
    assert [f.nodes for f in found] == ([("node1",)] if is_missing else [])


DOCKER = both(
    with_interface("docker0", "172.17.0.1/16", "docker"),
    gloo_takes("docker0", "172.17.0.1", "GLOO_SOCKET_IFNAME=docker0"),
)


def test_docker0_is_the_same_everywhere() -> None:
    (finding,) = judged(NetIfaceVirtual(), run({"*": DOCKER}))
    assert (finding.status, finding.nodes, finding.confidence) == ("fail", NODES, "proven")
    assert "docker0 (docker), which is 172.17.0.1 on all of them" in finding.title
    assert set(commands(finding)) == {"export GLOO_SOCKET_IFNAME=eth0"}


def test_docker0_on_one_node() -> None:
    (finding,) = judged(NetIfaceVirtual(), run({"node1": DOCKER}))
    assert (finding.nodes, finding.confidence) == (("node1",), "likely")


def test_a_tunnel_that_carries_is_no_fault() -> None:
    """Nodes that meet over wireguard, and whose random ports answer there."""

    def over_wg(report: NodeReport) -> NodeReport:
        number = int(report.node[-1])
        report = with_interface("wg0", "10.8.0.{n}/24", "vpn")(report)
        report = gloo_takes("wg0", f"10.8.0.{number}", "GLOO_SOCKET_IFNAME=wg0")(report)
        edges = {
            peer: msgspec.structs.replace(
                edge, ephemeral=(Dial(outcome="ok", address=f"10.8.0.{peer[-1]}", port=4000),)
            )
            for peer, edge in report.edges.items()
        }
        return msgspec.structs.replace(report, edges=edges)

    assert judged(NetIfaceVirtual(), run({"*": over_wg})) == []


@pytest.mark.parametrize(
    ("text", "overlaps"),
    [("10.77.0.9{n}/24", True), ("10.77.0.9{n}/16", True), ("10.78.0.9{n}/24", False),
     ("10.77.0.9{n}/32", False), ("169.254.0.{n}/16", False)],
)  # fmt: skip
def test_two_interfaces_in_one_subnet(text: str, overlaps: bool) -> None:
    found = judged(NetSubnet(), run({"node1": with_interface("eth1", text)}))
    assert [(f.status, f.nodes) for f in found] == ([("warn", ("node1",))] if overlaps else [])


def test_one_address_on_two_nodes() -> None:
    twin = both(
        changed_eth0(addresses=("10.77.0.2/24",)), gloo_takes("eth0", "10.77.0.2", "the host name")
    )
    (finding,) = judged(NetDupIp(), run({"node2": twin}))
    assert (finding.status, finding.nodes) == ("fail", ("node1", "node2"))
    assert finding.title == "node1, node2 have the same address 10.77.0.2"
    assert [fix.node for fix in finding.fix] == ["node2"]  # where the name of node1 leads
    assert commands(finding) == [
        "sudo sysctl -w net.ipv4.conf.eth0.promote_secondaries=1 && "
        "sudo ip addr add 10.77.0.3/24 dev eth0 && "
        "sudo ip addr del 10.77.0.2/24 dev eth0  # and in its network configuration",
    ]


def test_the_rightful_one_keeps_the_address_whatever_the_order() -> None:
    twin = changed_eth0(addresses=("10.77.0.3/24",))
    (finding,) = judged(NetDupIp(), run({"node1": twin}))
    assert [fix.node for fix in finding.fix] == ["node1"]
    assert "addr add 10.77.0.2/24" in commands(finding)[0]


def test_an_idle_twin_is_a_warning_and_people_say_whose_it_is() -> None:
    (finding,) = judged(NetDupIp(), run({"*": with_interface("eth1", "192.168.9.9/24")}))
    assert (finding.status, finding.nodes) == ("warn", NODES)
    assert [fix.node for fix in finding.fix] == list(NODES)
    assert all(command.startswith("# give ") for command in commands(finding))


def test_two_agents_on_one_host_have_no_twin_address() -> None:
    twin = both(
        changed_eth0(addresses=("10.77.0.2/24",)), having("host", boot_id="b1", machine_id="m1")
    )
    assert judged(NetDupIp(), run({"node2": twin})) == []


def crooked(peer: str, broken: bool) -> Change:
    """Send to `peer` from eth1's address; `broken`: nothing comes back."""

    def change(report: NodeReport) -> NodeReport:
        report = with_interface("eth1", "10.88.0.{n}/24")(report)
        edge = report.edges[peer]
        outcome = "drop" if broken else "ok"
        edge = msgspec.structs.replace(
            edge, source_address=f"10.88.0.{report.node[-1]}",
            ephemeral=(Dial(outcome=outcome, address=address(peer), port=4000),),
        )  # fmt: skip
        return msgspec.structs.replace(report, edges={**report.edges, peer: edge})

    return change


def test_another_source_address_is_a_warning_while_it_works() -> None:
    (finding,) = judged(NetRouteSym(), run({"node0": crooked("node1", broken=False)}))
    assert (finding.status, finding.nodes) == ("warn", ("node0",))
    assert finding.edges == (("node0", "node1"),)
    assert "from 10.88.0.0 (eth1), but advertises 10.77.0.1 (eth0)" in finding.title


@pytest.mark.parametrize("is_open", [True, False])
def test_names_may_lead_over_another_network_than_gloo_takes(is_open: bool) -> None:
    """GLOO_SOCKET_IFNAME=eth1 on all, a network that they share; their names mean eth0."""

    def over_eth1(report: NodeReport) -> NodeReport:
        own = f"10.88.0.{report.node[-1]}"
        report = both(with_interface("eth1", "10.88.0.{n}/24"), gloo_takes("eth1", own))(report)
        edges = {}
        for peer, edge in report.edges.items():
            made = Dial(
                outcome="ok" if is_open else "drop", address=f"10.88.0.{peer[-1]}", port=4000,
                local_address=own if is_open else "",
            )  # fmt: skip
            edges[peer] = msgspec.structs.replace(edge, ephemeral=(made,))
        return msgspec.structs.replace(report, edges=edges)

    assert judged(NetRouteSym(), run({"*": over_eth1})) == []


def test_a_strict_filter_at_the_peer_drops_it() -> None:
    change = {
        "node0": crooked("node1", broken=True),
        "node1": both(with_interface("eth1", "10.88.0.{n}/24"), changed_eth0(rp_filter=1)),
    }
    (finding,) = judged(NetRpFilter(), run(change))
    assert (finding.status, finding.nodes) == ("fail", ("node1",))
    assert finding.edges == (("node0", "node1"),)
    assert [(fix.node, fix.command) for fix in finding.fix] == [
        ("node0", "sudo ip route replace 10.77.0.2 dev eth0 src 10.77.0.1"),
        ("node1", "sudo sysctl -w net.ipv4.conf.eth0.rp_filter=2"),
    ]
    assert judged(NetRouteSym(), run(change)) == []  # one cause, one finding


@pytest.mark.parametrize("rp_filter", [-1, 0, 2])
def test_without_a_strict_filter_the_route_is_the_cause(rp_filter: int) -> None:
    change = {
        "node0": crooked("node1", broken=True),
        "node1": both(with_interface("eth1", "10.88.0.{n}/24"), changed_eth0(rp_filter=rp_filter)),
    }
    assert judged(NetRpFilter(), run(change)) == []
    (finding,) = judged(NetRouteSym(), run(change))
    assert (finding.status, finding.nodes) == ("fail", ("node0",))


def test_a_strict_filter_alone_is_no_fault() -> None:
    change = both(changed_eth0(rp_filter=1), with_interface("eth1", "10.88.0.{n}/24"))
    assert judged(NetRpFilter(), run({"*": change})) == []


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"duplex": "half"}, "warn", "half duplex"),
        ({"speed_mbit": 1000}, "warn", "runs at 1000 Mbit/s, most others at 10000 Mbit/s"),
        ({"num_errors": 5000}, "warn", "5000 errors in 10000000 packets"),
        ({"carrier_changes": 500}, "warn", "500 times"),
        ({"num_errors": 900}, None, ""),
        ({"num_errors": 5000, "num_packets": 10**9}, None, ""),
        ({"speed_mbit": 0}, None, ""),
        ({"speed_mbit": 25000}, None, ""),  # faster than the others
    ],
)
def test_the_interface_itself(fields: dict[str, Any], status: str | None, words: str) -> None:
    found = judged(NetNic(), run({"node1": changed_eth0(**fields)}))
    assert [(f.status, f.nodes) for f in found] == ([(status, ("node1",))] if status else [])
    if found:
        assert words in found[0].title


def test_two_speeds_without_a_majority() -> None:
    change = {"node1": changed_eth0(speed_mbit=1000)}
    assert judged(NetNic(), run(change, ("node0", "node1"))) == []


def test_a_full_neighbour_table() -> None:
    (finding,) = judged(NetNeigh(), run({"node1": having("interfaces", gc_thresh3=2)}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))
    assert "gc_thresh3=8 " in commands(finding)[0]


def test_a_table_that_cannot_be_read_is_skipped() -> None:
    found = judged(NetNeigh(), run({"node1": having("interfaces", gc_thresh3=0)}))
    assert [(f.status, f.nodes) for f in found] == [("skipped", ("node1",))]
