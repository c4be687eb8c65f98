"""Firewall rules, ready to paste, in the words of the tool that is on the node."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.pairs import interface_towards
from rankscope.preflight.facts.edges import DialClass
from rankscope.preflight.model import Fix

DEFAULT_RANGE = (32768, 60999)  # ip_local_port_range of Linux
MAX_SOURCES = 4  # rules of single addresses; above, one rule without a source is shorter

# `nft list chains` gives names of tables and chains, which differ from host to host; a rule is
# put in front of every chain that filters this direction.
_NFT = (
    'sudo nft list chains | awk \'/^table/{{t=$2" "$3}} /chain/{{c=$2}} '
    "/hook {way}put/&&t~/^(inet|{version}) /{{print t,c}}' | while read chain; do "
    "sudo nft insert rule $chain {match} tcp dport {ports} accept; done"
)


def open_inbound(
    run: Run, node: str, sources: Collection[str], ports: str, outcome: DialClass = "drop"
) -> tuple[Fix, ...]:
    """Return what lets `sources` in at `ports` ("29500", "32768-60999") of `node`."""
    addresses = [run.gloo_address(name) or _first_address(run, name) for name in sources]
    networks = _networks(run, node, [address for address in addresses if address])
    return _rules(run, node, networks, ports, "in", outcome)


def open_outbound(run: Run, node: str, ports: str, outcome: DialClass = "drop") -> tuple[Fix, ...]:
    """Return what lets `node` out to `ports` of all nodes."""
    return _rules(run, node, [""], ports, "out", outcome)


def ephemeral_range(run: Run, node: str) -> str:
    """Return the range of random ports of a node: "32768-60999"."""
    report = run.reports.get(node)
    ports = report.facts.ports if report is not None else None
    low, high = (ports.range_low, ports.range_high) if ports is not None else (0, 0)
    low, high = (low, high) if high else DEFAULT_RANGE
    return f"{low}-{high}"


def _rules(
    run: Run, node: str, networks: Collection[str], ports: str, way: str, outcome: DialClass
) -> tuple[Fix, ...]:
    tool = _tool(run, node, outcome)
    if not tool:
        where = ", ".join(network for network in networks if network) or "all nodes"
        text = f"# security group of {node}: allow {way}bound tcp {ports}"
        text += f" {'from' if way == 'in' else 'to'} {where}"
        return (Fix(node=node, command=text, owner="provider"),)
    make = _MAKERS[tool]
    commands = [make(network, ports, way) for network in networks]
    if tool == "firewalld":
        commands.append("sudo firewall-cmd --reload")
    return (Fix(node=node, command=" && ".join(commands), owner="admin"),)


def _tool(run: Run, node: str, outcome: DialClass) -> str:
    """Return the tool whose rules these are: the first that is there, which rules the others."""
    report = run.reports.get(node)
    host = report.facts.host if report is not None else None
    there = host.firewall_tools if host is not None else ()
    if outcome == "prohibited" and "firewalld" in there:
        return "firewalld"  # its reject is admin-prohibited
    return next((tool for tool in there if tool in _MAKERS), "")


def _ufw(network: str, ports: str, way: str) -> str:
    ports = ports.replace("-", ":")
    if way == "out":
        return f"sudo ufw allow out to any port {ports} proto tcp"
    return f"sudo ufw allow from {network or 'any'} to any port {ports} proto tcp"


def _firewalld(network: str, ports: str, way: str) -> str:
    if way == "out":
        rule = f"OUTPUT 0 -p tcp --dport {ports.replace('-', ':')} -j ACCEPT"
        return f"sudo firewall-cmd --permanent --direct --add-rule ipv4 filter {rule}"
    if not network:
        return f"sudo firewall-cmd --permanent --add-port={ports}/tcp"
    family = "ipv6" if ":" in network else "ipv4"
    rule = f'rule family="{family}" source address="{network}" port port="{ports}" protocol="tcp"'
    return f"sudo firewall-cmd --permanent --add-rich-rule='{rule} accept'"


def _nft(network: str, ports: str, way: str) -> str:
    version = "ip6" if ":" in network else "ip"
    match = f"{version} saddr {network}" if network else "meta l4proto tcp"
    return _NFT.format(way=way, version=version, match=match, ports=ports)


def _iptables(network: str, ports: str, way: str) -> str:
    tool = "ip6tables" if ":" in network else "iptables"
    source = f" -s {network}" if network else ""
    chain = "INPUT" if way == "in" else "OUTPUT"
    return f"sudo {tool} -I {chain} -p tcp{source} --dport {ports.replace('-', ':')} -j ACCEPT"


_MAKERS = {"ufw": _ufw, "firewalld": _firewalld, "nft": _nft, "iptables": _iptables}


def _first_address(run: Run, node: str) -> str:
    report = run.reports.get(node)
    return next(iter(report.addresses), "") if report is not None else ""


def _networks(run: Run, node: str, addresses: Collection[str]) -> list[str]:
    """Return the node's own subnet if it holds all addresses, else these, else ""."""
    interface = interface_towards(run, node)
    for own in interface.addresses if interface is not None else ():
        network = ipaddress.ip_interface(own).network
        if addresses and all(ipaddress.ip_address(one) in network for one in addresses):
            few = len(addresses) == 1 and len(run.expected) > 2
            return list(addresses) if few else [str(network)]
    return sorted(set(addresses)) if 0 < len(addresses) <= MAX_SOURCES else [""]
