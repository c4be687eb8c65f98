from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from rankscope.preflight.checks import firewall
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.facts.rules import FilterRules, parse
from tests.capabilities import IN_USER_NAMESPACE

from .synthetic import Cluster, cluster

RANGE = "32768-60999"


def with_rules(some: Cluster, node: str, **flags: bool) -> None:
    """Let root have read the rules of a node."""
    facts = some.reports[node].facts.ports
    assert facts is not None
    some.facts(node, ports=msgspec.structs.replace(facts, rules=FilterRules(**flags)))


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (("ufw", "nft"), ("sudo ufw prepend allow from 10.77.0.0/16 to any port 29500 proto tcp",)),
        (
            ("firewalld", "nft"),
            ('--zone="$(sudo firewall-cmd --get-zone-of-interface=eth0 ', 'address="10.77.0.0/16"',
             "&& sudo firewall-cmd --reload"),
        ),
        (("nft", "iptables"), ("sudo nft list ruleset | awk", "ip saddr 10.77.0.0/16 tcp dport")),
        (("iptables",), ("raw:PREROUTING", "-I ${t#*:} -p tcp -s 10.77.0.0/16 --dport 29500 -j")),
        ((), ("# security group of node0: allow inbound tcp 29500 from 10.77.0.0/16",)),
    ],
)  # fmt: skip
def test_each_tool_in_its_own_words(tools: tuple[str, ...], words: tuple[str, ...]) -> None:
    run = cluster(3, tools=tools).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node1", "node2"), "29500")
    assert all(word in fix.command for word in words), fix.command
    assert fix.owner == ("admin" if tools else "provider")
    assert fix.node == "node0"
    assert "\n" not in fix.command


def test_rules_that_nft_does_not_see_are_opened_as_well() -> None:
    run = cluster(3, tools=("nft", "iptables", "iptables-legacy")).run()
    fixes = firewall.open_inbound(run, "node0", ("node1", "node2"), "29500")
    assert ["nft insert" in fix.command for fix in fixes] == [True, False]
    assert "iptables-legacy -t" in fixes[1].command


def test_a_range_is_written_as_the_tool_wants_it() -> None:
    says = {
        tool: firewall.open_outbound(cluster(2, tools=(tool,)).run(), "node0", ("node1",), RANGE)[0]
        for tool in ("ufw", "firewalld", "nft", "iptables")
    }
    assert "out to 10.77.0.0/16 port 32768:60999" in says["ufw"].command
    assert "-d 10.77.0.0/16 --dport 32768:60999" in says["iptables"].command
    assert "--dport 32768:60999" in says["firewalld"].command
    assert "ip daddr 10.77.0.0/16 tcp dport 32768-60999" in says["nft"].command
    assert "hook (output|postrouting|egress)" in says["nft"].command


def test_prohibited_is_how_firewalld_rejects() -> None:
    run = cluster(2, tools=("ufw", "firewalld")).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node1",), "29500", "prohibited")
    assert "firewall-cmd" in fix.command


def test_one_source_of_many_is_named_alone() -> None:
    run = cluster(4, tools=("iptables",)).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node3",), "29500")
    assert "-s 10.77.0.4 " in fix.command


def test_nothing_is_opened_to_the_world_where_networks_are_known() -> None:
    some = cluster(60, tools=("nft",))
    for number, name in enumerate(some.names):
        own = f"10.{number}.0.7"
        eth0 = Interface(name="eth0", addresses=(f"{own}/24",), is_up=True)
        facts = some.reports[name].facts.interfaces
        assert facts is not None
        gloo = (msgspec.structs.replace(facts.gloo[0], address=own),)
        some.facts(name, interfaces=msgspec.structs.replace(facts, interfaces=(eth0,), gloo=gloo))
        some.report(name, addresses=(own,))
    for start, end in list(some.edges):
        some.change(start, end, source_address="")
    (fix,) = firewall.open_inbound(some.run(), "node0", some.names[1:], RANGE)
    assert fix.command.count("nft insert") <= firewall.MAX_NETWORKS
    assert "ip saddr 10." in fix.command
    assert " 0.0.0.0/0" not in fix.command


def test_an_address_that_is_none_goes_into_no_command() -> None:
    some = cluster(3, tools=("nft",))
    facts = some.reports["node1"].facts.interfaces
    assert facts is not None
    evil = (msgspec.structs.replace(facts.gloo[0], address="1.2.3.4; reboot"),)
    some.facts("node1", interfaces=msgspec.structs.replace(facts, gloo=evil))
    some.report("node1", addresses=("$(reboot)",))
    fixes = firewall.open_inbound(some.run(), "node0", ("node1", "node2"), RANGE)
    assert not [fix for fix in fixes if "reboot" in fix.command]


def test_the_range_is_that_of_the_node() -> None:
    some = cluster(2)
    facts = some.reports["node1"].facts.ports
    assert facts is not None
    some.facts("node1", ports=type(facts)(range_low=50000, range_high=51000))
    assert firewall.ephemeral_range(some.run(), "node1") == "50000-51000"
    assert firewall.ephemeral_range(some.run(), "nobody") == "32768-60999"


def test_where_no_rule_drops_the_node_gets_no_command() -> None:
    some = cluster(3, tools=("nft",))
    with_rules(some, "node1")
    (fix,) = firewall.open_inbound(some.run(), "node1", ("node0", "node2"), RANGE)
    assert (fix.owner, fix.command[:2]) == ("provider", "# ")
    with_rules(some, "node1", drops_out=True)  # what goes out may be the answers
    (fix,) = firewall.open_inbound(some.run(), "node1", ("node0", "node2"), RANGE)
    assert "tcp sport 32768-60999" in fix.command
    assert "hook (output" in fix.command


def test_a_path_is_opened_at_the_end_that_has_rules() -> None:
    some = cluster(3, tools=("nft",))
    assert [f.node for f in firewall.open_path(some.run(), ("node2",), "node1", RANGE)] == [
        "node1", "node2",
    ]  # fmt: skip
    with_rules(some, "node1")
    with_rules(some, "node2", drops_out=True)
    (fix,) = firewall.open_path(some.run(), ("node2",), "node1", RANGE)
    assert fix.node == "node2"
    with_rules(some, "node2")
    (fix,) = firewall.open_path(some.run(), ("node2",), "node1", RANGE)
    assert fix.owner == "provider"


def test_a_sidecar_is_told_by_annotation_in_kubernetes() -> None:
    some = cluster(3, tools=())
    some.facts("node2", host=HostFacts(hostname="node2", container="kubernetes"))
    (fix,) = firewall.exempt(some.run(), "node2", ("node0", "node1"), RANGE, "out")
    assert 'excludeOutboundIPRanges: "10.77.0.0/16"' in fix.command
    assert 'skip-outbound-ports: "32768-60999"' in fix.command
    (fix,) = firewall.exempt(some.run(), "node2", ("node0",), "29500", "out")
    assert 'excludeOutboundPorts: "29500"' in fix.command


_BASE = "type filter hook input priority filter; policy accept;"


@pytest.mark.parametrize(
    ("ruleset", "flags"),
    [
        ("", {}),
        (f"table inet t {{\n chain c {{\n {_BASE}\n tcp dport 22 accept\n }}\n}}", {}),
        (f"table inet t {{\n chain c {{\n {_BASE}\n tcp dport 99 drop\n }}\n}}",
         {"drops_in": True}),
        (f'table inet t {{\n chain c {{\n {_BASE}\n accept comment "no drop"\n }}\n}}', {}),
        (f"table inet t {{\n chain d {{\n drop\n }}\n chain c {{\n {_BASE}\n jump d\n }}\n}}",
         {"drops_in": True}),
        (f"table inet t {{\n chain d {{\n drop\n }}\n chain c {{\n {_BASE}\n }}\n}}", {}),
        ("table inet t {\n map m {\n elements = { 22 : accept, 80 : drop }\n }\n chain c {\n "
         f"{_BASE}\n tcp dport vmap @m\n }}\n}}", {"drops_in": True}),
        ("table ip t {\n chain o {\n type nat hook output priority -100; policy accept;\n"
         " tcp dport 1-9 redirect to :15001\n }\n}", {"redirects_out": True}),
        ("table ip t {\n chain o {\n type filter hook output priority 0; policy drop;\n }\n}",
         {"drops_out": True}),
    ],
)  # fmt: skip
def test_what_a_ruleset_could_do(ruleset: str, flags: dict[str, bool]) -> None:
    assert parse(ruleset) == FilterRules(**flags)


SHAPES = {
    "the last word": ("policy accept;\n tcp dport 22 accept\n drop", ""),
    "the policy": ("policy drop;\n tcp dport 22 accept", ""),
    "with a counter": ("policy accept;\n tcp dport 22 accept\n counter reject", ""),
    "in a chain of its own": ("policy accept;\n jump shut", "chain shut {\n drop\n}\n"),
    "by a map": ("policy accept;\n tcp dport vmap { 22 : accept, 1024-65535 : drop }", ""),
}


@pytest.mark.multiproc
@pytest.mark.laboratory
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_drops_gets_a_rule_in_front(shape: str) -> None:
    rules, more = SHAPES[shape]
    run = cluster(3, tools=("nft",)).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node1", "node2"), RANGE)
    base = f"chain first {{\n type filter hook input priority 0; {rules}\n}}\n"
    idle = "chain c {\n type filter hook input priority 1; policy accept;\n}\n"
    script = (
        f"nft -f - <<'end'\ntable inet fw {{\n{more}{base}}}\n"
        f"table inet idle {{\n{idle}}}\nend\n"
        f'sudo() {{ "$@"; }}; {fix.command}; nft list chain inet fw first; nft list table inet idle'
    )
    enter = ["unshare", "-n"] if os.geteuid() == 0 else IN_USER_NAMESPACE
    done = subprocess.run([*enter, "sh", "-ec", script], text=True, capture_output=True, check=True)
    chain, _, other = done.stdout.partition("table inet idle")
    first = next(line for line in chain.splitlines() if "policy" not in line and "{" not in line)
    assert first.split() == "ip saddr 10.77.0.0/16 tcp dport 32768-60999 accept".split()
    assert "accept" not in other.replace("policy accept", "")
