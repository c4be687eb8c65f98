"""Rules of packet filters, ready to paste, in the words of the tool that is on the node.

A rule lets the nodes of this job through, from and to their networks alone, and is put in front of
whatever could drop. Where root could read a node's rules and none drops, it gets no command.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.pairs import interface_towards
from rankscope.preflight.facts.edges import DialClass
from rankscope.preflight.facts.rules import FilterRules
from rankscope.preflight.model import Fix

DEFAULT_RANGE = (32768, 60999)  # ip_local_port_range of Linux
MAX_SOURCES = 4  # single addresses; above, networks are shorter
MAX_NETWORKS = 16
Way = Literal["in", "out"]
Key = Literal["dport", "sport"]

# Tables and chains have other names on every host: a rule is put in front of every base chain of
# the hook in whose table something drops. (awk keeps to what mawk and busybox know.)
_NFT = (
    """sudo nft list ruleset | awk '/^table/{t=$2" "$3} $1=="chain"{c=$2} """
    """/type TYPE hook (HOOKS) /{b[++n]=t" "c; w[n]=t} /[^a-z_-](WORDS)/{d[t]=1} """
    """END{for(i=1;i<=n;i++) if(d[w[i]] && b[i]~/^(inet|VERSION|netdev|bridge) /) print b[i]}' | """
    """while read -r chain; do sudo nft insert rule $chain MATCH accept; done"""
)
_IPTABLES = (
    """sudo sh -c 'for t in TABLES; do if TOOL -t ${t%:*} -S 2>/dev/null | grep -qE "WORDS"; """
    """then TOOL -t ${t%:*} -I ${t#*:} MATCH -j ACCEPT; fi; done'"""
)


@dataclass(frozen=True)
class _Hooks:
    """Where packets of one way pass, in the words of nftables and of iptables."""

    type: str
    nft: str
    tables: str


_FILTERS: dict[Way, _Hooks] = {
    "in": _Hooks(
        "filter",
        "ingress|prerouting|input",
        "raw:PREROUTING mangle:PREROUTING mangle:INPUT filter:INPUT",
    ),
    "out": _Hooks(
        "filter",
        "output|postrouting|egress",
        "raw:OUTPUT mangle:OUTPUT filter:OUTPUT mangle:POSTROUTING",
    ),
}
_REDIRECTS: dict[Way, _Hooks] = {
    "in": _Hooks("[a-z]+", "prerouting|input", "nat:PREROUTING mangle:PREROUTING"),
    "out": _Hooks("[a-z]+", "output", "nat:OUTPUT"),
}
_DROP_WORDS = ("drop|reject|queue|synproxy", "DROP|REJECT|NFQUEUE|SYNPROXY")
_REDIRECT_WORDS = ("redirect|dnat|tproxy", "REDIRECT|DNAT|TPROXY")


@dataclass(frozen=True)
class _Rule:
    """What is to pass at one node: `ports` of the peers (out) or its own (in)."""

    network: str  # of the peers; "" any
    ports: str  # "29500", "32768-60999"
    way: Way
    key: Key = "dport"  # sport: the answers of connections that go the other way

    @property
    def version(self) -> str:
        """Return ip or ip6."""
        return "ip6" if ":" in self.network else "ip"

    @property
    def colons(self) -> str:
        """Return the ports as iptables and ufw write a range."""
        return self.ports.replace("-", ":")


def open_inbound(
    run: Run, node: str, sources: Collection[str], ports: str, outcome: DialClass = "drop"
) -> tuple[Fix, ...]:
    """Return what lets `sources` in at `ports` ("29500", "32768-60999") of `node`."""
    networks = _networks(run, node, sources)
    directions = _inbound_directions(_rules_of(run, node), outcome)
    if not directions:
        return (_between(node, "in", ports, networks),)
    return _fixes(run, node, networks, ports, directions, outcome)


def open_outbound(
    run: Run, node: str, targets: Collection[str], ports: str, outcome: DialClass = "drop"
) -> tuple[Fix, ...]:
    """Return what lets `node` out to `ports` of `targets`."""
    networks = _networks(run, node, targets)
    directions = _outbound_directions(_rules_of(run, node), outcome)
    if not directions:
        return (_between(node, "out", ports, networks),)
    return _fixes(run, node, networks, ports, directions, outcome)


def open_path(
    run: Run, starts: Collection[str], end: str, ports: str, outcome: DialClass = "drop"
) -> tuple[Fix, ...]:
    """Return what opens single paths: it is not known at which end the rule is, or where else."""
    fixes: list[Fix] = []
    directions = _inbound_directions(_rules_of(run, end), outcome)
    networks = _networks(run, end, starts)
    if directions:
        fixes += _fixes(run, end, networks, ports, directions, outcome)
    for start in starts:
        directions = _outbound_directions(_rules_of(run, start), outcome)
        if directions:
            fixes += _fixes(run, start, _networks(run, start, (end,)), ports, directions, outcome)
    return tuple(fixes) or (_between(end, "in", ports, networks),)


def exempt(run: Run, node: str, peers: Collection[str], ports: str, way: Way) -> tuple[Fix, ...]:
    """Return what keeps connections with `peers` out of a redirection at `node`."""
    networks = _networks(run, node, peers)
    fixes = [Fix(node=node, command=_annotation(networks, ports, way), owner="admin")]
    if "kubernetes" not in run.container(node) and "kubernetes" not in _orchestrator(run, node):
        fixes = []
    tools = [tool for tool in _tools(run, node) if tool in ("nft", "iptables", "iptables-legacy")]
    for tool in _without_twins(tools):
        commands = [
            _raw(tool, _Rule(network, ports, way), _REDIRECTS, _REDIRECT_WORDS)
            for network in networks
        ]
        fixes.append(Fix(node=node, command="; ".join(commands), owner="admin"))
    return tuple(fixes) or (
        Fix(node=node, command=_annotation(networks, ports, way), owner="admin"),
    )


def elsewhere(fixes: Collection[Fix]) -> tuple[Fix, ...]:
    """Return where to look if commands change nothing: rules on the way are not known."""
    places = sorted({fix.node for fix in fixes if fix.owner == "admin"})
    text = "# if that changes nothing, something between the nodes filters (switch, router, "
    text += "security group, host of the container): it has to let the same through"
    return tuple(Fix(node=node, command=text, owner="provider") for node in places[:1])


def ephemeral_range(run: Run, node: str) -> str:
    """Return the range of random ports of a node: "32768-60999"."""
    report = run.reports.get(node)
    ports = report.facts.ports if report is not None else None
    low, high = (ports.range_low, ports.range_high) if ports is not None else (0, 0)
    low, high = (low, high) if high else DEFAULT_RANGE
    return f"{low}-{high}"


def _inbound_directions(rules: FilterRules | None, outcome: DialClass) -> list[tuple[Way, Key]]:
    """Return which packets of calls that come in are to pass; none where no rule stops any."""
    if rules is None:
        return [("in", "dport"), ("out", "sport")] if outcome == "no-data" else [("in", "dport")]
    directions: list[tuple[Way, Key]] = [("in", "dport")] if rules.drops_in else []
    return [*directions, ("out", "sport")] if rules.drops_out else directions


def _outbound_directions(rules: FilterRules | None, outcome: DialClass) -> list[tuple[Way, Key]]:
    """Return the same for calls that go out."""
    if rules is None:
        return [("out", "dport"), ("in", "sport")] if outcome == "no-data" else [("out", "dport")]
    directions: list[tuple[Way, Key]] = [("out", "dport")] if rules.drops_out else []
    return [*directions, ("in", "sport")] if rules.drops_in else directions


def _rules_of(run: Run, node: str) -> FilterRules | None:
    report = run.reports.get(node)
    ports = report.facts.ports if report is not None else None
    return ports.rules if ports is not None else None


def _between(node: str, way: Way, ports: str, networks: Collection[str]) -> Fix:
    """Return what to ask for where no rule on the node drops anything."""
    where = ", ".join(network for network in networks if network) or "all nodes"
    text = "# no rule on this node drops it: whatever filters before it (switch, router, security "
    text += f"group, host of the container) has to allow {way}bound tcp {ports}"
    text += f" {'from' if way == 'in' else 'to'} {where}"
    return Fix(node=node, command=text, owner="provider")


def _fixes(
    run: Run, node: str, networks: Collection[str], ports: str,
    directions: Collection[tuple[Way, Key]], outcome: DialClass,
) -> tuple[Fix, ...]:  # fmt: skip
    tools = _tools(run, node)
    if not tools:
        where = ", ".join(network for network in networks if network) or "all nodes"
        way = next(iter(directions))[0]
        text = f"# security group of {node}: allow {way}bound tcp {ports}"
        text += f" {'from' if way == 'in' else 'to'} {where}"
        return (Fix(node=node, command=text, owner="provider"),)
    manager = _manager(tools, outcome)
    fixes = []
    for tool in (manager,) if manager else _without_twins(tools):
        commands = [
            command
            for way, key in directions
            for network in networks
            if (command := _command(run, node, tool, _Rule(network, ports, way, key)))
        ]
        if tool == "firewalld":
            commands.append("sudo firewall-cmd --reload")
        joint = "; " if tool in ("nft", "iptables", "iptables-legacy") else " && "
        fixes.append(Fix(node=node, command=joint.join(commands), owner="admin"))
    return tuple(fixes)


def _tools(run: Run, node: str) -> tuple[str, ...]:
    report = run.reports.get(node)
    host = report.facts.host if report is not None else None
    return host.firewall_tools if host is not None else ()


def _manager(tools: Collection[str], outcome: DialClass) -> str:
    """Return the service that makes the rules of a node: the first that is there."""
    if outcome == "prohibited" and "firewalld" in tools:
        return "firewalld"  # its reject is admin-prohibited
    return next((tool for tool in tools if tool in ("ufw", "firewalld")), "")


def _without_twins(tools: Collection[str]) -> list[str]:
    """Return the tools that see rules of their own: nft sees those that iptables makes, too."""
    kept = [tool for tool in tools if tool in ("nft", "iptables", "iptables-legacy")]
    return [tool for tool in kept if tool != "iptables" or "nft" not in kept]


def _command(run: Run, node: str, tool: str, rule: _Rule) -> str:
    """Return one command; "" where the tool lets such packets pass by itself."""
    if tool in ("ufw", "firewalld"):
        if rule.key == "sport":
            return ""  # both follow connections
        return _ufw(rule) if tool == "ufw" else _firewalld(run, node, rule)
    return _raw(tool, rule, _FILTERS, _DROP_WORDS)


def _ufw(rule: _Rule) -> str:
    if rule.way == "out":
        return f"sudo ufw prepend allow out to {rule.network or 'any'} port {rule.colons} proto tcp"
    return (
        f"sudo ufw prepend allow from {rule.network or 'any'} to any port {rule.colons} proto tcp"
    )


def _firewalld(run: Run, node: str, rule: _Rule) -> str:
    family = "ipv6" if rule.version == "ip6" else "ipv4"
    if rule.way == "out":
        where = f"-d {rule.network} " if rule.network else ""
        words = f"OUTPUT 0 -p tcp {where}--dport {rule.colons} -j ACCEPT"
        return f"sudo firewall-cmd --permanent --direct --add-rule {family} filter {words}"
    interface = interface_towards(run, node)
    zone = ""
    if interface is not None and interface.name.replace("-", "").replace(".", "").isalnum():
        zone = f'--zone="$(sudo firewall-cmd --get-zone-of-interface={interface.name} || '
        zone += 'sudo firewall-cmd --get-default-zone)" '
    if not rule.network:
        return f"sudo firewall-cmd --permanent {zone}--add-port={rule.ports}/tcp"
    text = f'rule family="{family}" source address="{rule.network}" '
    text += f'port port="{rule.ports}" protocol="tcp"'
    return f"sudo firewall-cmd --permanent {zone}--add-rich-rule='{text} accept'"


def _raw(tool: str, rule: _Rule, hooks: dict[Way, _Hooks], words: tuple[str, str]) -> str:
    if tool == "nft":
        side = "saddr" if rule.way == "in" else "daddr"
        match = f"{rule.version} {side} {rule.network} " if rule.network else ""
        return (
            _NFT.replace("TYPE", hooks[rule.way].type)
            .replace("HOOKS", hooks[rule.way].nft)
            .replace("WORDS", words[0])
            .replace("VERSION", rule.version)
            .replace("MATCH", f"{match}tcp {rule.key} {rule.ports}")
        )
    tool = tool.replace("iptables", "ip6tables" if rule.version == "ip6" else "iptables")
    side = "-s" if rule.way == "in" else "-d"
    match = f"-p tcp {side} {rule.network} " if rule.network else "-p tcp "
    return (
        _IPTABLES.replace("TABLES", hooks[rule.way].tables)
        .replace("TOOL", tool)
        .replace("WORDS", words[1])
        .replace("MATCH", f"{match}--{rule.key} {rule.colons}")
    )


def _orchestrator(run: Run, node: str) -> str:
    launch = run.launches.get(node)
    return launch.launcher if launch is not None else ""


def _annotation(networks: Collection[str], ports: str, way: Way) -> str:
    """Return what a service mesh is given, in the template of the pod."""
    where = ",".join(network for network in networks if network)
    if way == "in":
        istio = 'traffic.sidecar.istio.io/includeInboundPorts: ""'
        return f"# pod template, annotations: {istio}, or for linkerd " + (
            f'config.linkerd.io/skip-inbound-ports: "{ports}"'
        )
    istio = f'traffic.sidecar.istio.io/excludeOutboundIPRanges: "{where}"'
    if "-" not in ports or not where:
        istio = f'traffic.sidecar.istio.io/excludeOutboundPorts: "{ports}"'
    return f"# pod template, annotations: {istio}, or for linkerd " + (
        f'config.linkerd.io/skip-outbound-ports: "{ports}"'
    )


def _networks(run: Run, node: str, peers: Collection[str]) -> list[str]:
    """Return the networks of peers: the node's own subnet if it holds them all, else theirs."""
    addresses = sorted({one for name in peers if (one := _address(run, name))})
    if not addresses:
        return [""]
    for network in _subnets(run, node):
        if all(ipaddress.ip_address(one) in network for one in addresses):
            few = len(addresses) == 1 and len(run.expected) > 2
            return addresses if few else [str(network)]
    if len(addresses) <= MAX_SOURCES:
        return addresses
    return _gathered(run, peers, addresses) or [""]


def _gathered(run: Run, peers: Collection[str], addresses: Collection[str]) -> list[str]:
    """Return the subnets of peers, as they say; one that holds all of them where they are many."""
    theirs = {network for name in peers for network in _subnets(run, name)}
    found: list[str] = []
    for version in (4, 6):
        own = [ipaddress.ip_address(one) for one in addresses]
        some = [
            next((n for n in theirs if one in n), ipaddress.ip_network(str(one)))
            for one in own
            if one.version == version
        ]
        found += [str(network) for network in _merged(some)]
    return found


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _merged(networks: Collection[Network]) -> Iterator[Network]:
    left = sorted(set(networks), key=str)
    while len(left) > MAX_NETWORKS:  # one bit wider each, as long as that stays in private space
        wider = sorted({network.supernet() for network in left if network.prefixlen}, key=str)
        if not wider or not all(network.is_private for network in wider):
            return
        left = wider
    yield from left


def _subnets(run: Run, name: str) -> Iterator[Network]:
    """Yield the networks of the interface that a node uses."""
    interface = interface_towards(run, name)
    for own in interface.addresses if interface is not None else ():
        try:
            yield ipaddress.ip_interface(own).network
        except ValueError:
            continue


def _address(run: Run, name: str) -> str:
    """Return the address of a node, if it is one; "" if none is known."""
    report = run.reports.get(name)
    first = next(iter(report.addresses), "") if report is not None else ""
    for one in (run.gloo_address(name), first):
        try:
            return str(ipaddress.ip_address(one))
        except ValueError:
            continue
    return ""
