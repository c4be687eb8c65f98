"""RDMA: ports, GIDs, the rights of this user."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, on_each
from rankscope.preflight.checks.comparing import compared, odd_ones
from rankscope.preflight.facts.rdma import Gid, RdmaFacts, RdmaPort
from rankscope.preflight.model import CheckFinding, Fix


def chosen(facts: RdmaFacts) -> tuple[RdmaPort, ...]:
    """Return the ports that NCCL_IB_HCA leaves.

    Its syntax (NCCL's documentation): a list of prefixes, "mlx5_0:1" with a port; "=" before it
    asks for exact names, "^" leaves out what is named.
    """
    text = facts.hca_filter
    is_left_out, text = text.startswith("^"), text.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return facts.ports
    return tuple(
        port
        for port in facts.ports
        if any(_fits(port, name, is_exact) for name in names) != is_left_out
    )


def _ports(run: Run) -> Iterator[tuple[str, RdmaPort]]:
    for node, rdma in run.each(lambda facts: facts.rdma).items():
        for port in chosen(rdma):
            yield node, port


def _fits(port: RdmaPort, name: str, is_exact: bool) -> bool:
    device, _, number = name.partition(":")
    if number and number != str(port.number):
        return False
    return port.device == device if is_exact else port.device.startswith(device)


class IbPort(BuiltinCheck, id="ib.port", scope="all", needs=("rdma",)):
    """The RDMA ports of every node are up, as many and as fast as on the other nodes.

    A port that is down on all nodes is one that is not cabled.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where a port is down or slow that is up or fast on most nodes."""
        yield from self.not_measured(run, "rdma")
        ports = {
            node: {port.name: port for port in chosen(rdma)}
            for node, rdma in run.each(lambda facts: facts.rdma).items()
        }
        names = sorted({name for of_node in ports.values() for name in of_node})
        down = _down(ports, names)
        slow = _slow(ports, names)
        yield from self._finding(ports, down, "is not up")
        yield from self._finding(ports, slow, "is slower than on the other nodes")
        if not down and not slow:
            yield from _counts(ports)

    def _finding(
        self, ports: dict[str, dict[str, RdmaPort]], bad: dict[str, list[str]], words: str
    ) -> Iterator[CheckFinding]:
        if not bad:
            return
        texts = {
            node: [f"{name} {_port_words(ports[node].get(name))}" for name in names]
            for node, names in bad.items()
        }
        lines = [f"{node}: {text}" for node, of_node in texts.items() for text in of_node]
        yield self.fail(
            f"{next(iter(texts.values()))[0]}: it {words}",
            at=bad,
            evidence={"ports": texts},
            lines=lines[:16],
            fix=(
                Fix(
                    node=node,
                    command=f"ibstat {names[0].partition(':')[0]}; sudo ibdiagnet -r | tail"
                    "   # cable, transceiver, switch port",
                    owner="admin",
                )
                for node, names in bad.items()
            ),
            impact="NCCL leaves the port out: less bandwidth on this node, or 'no route' at init",
            unless="the port is meant to be unused: then name the others in NCCL_IB_HCA",
        )


def _down(ports: dict[str, dict[str, RdmaPort]], names: list[str]) -> dict[str, list[str]]:
    """Return ports that are up on most nodes, and those that wait for a subnet manager."""
    bad: dict[str, list[str]] = {}
    for name in names:
        states = {node: some[name].state for node, some in ports.items() if name in some}
        up = [node for node, state in states.items() if state == "ACTIVE"]
        for node, state in states.items():
            is_half_up = state in ("INIT", "ARMED")  # cabled, and no subnet manager answers
            if state != "ACTIVE" and (2 * len(up) >= len(states) or is_half_up):
                bad.setdefault(node, []).append(name)
    return bad


def _slow(ports: dict[str, dict[str, RdmaPort]], names: list[str]) -> dict[str, list[str]]:
    bad: dict[str, list[str]] = {}
    for name in names:
        rates = {
            node: some[name].rate_gbit
            for node, some in ports.items()
            if name in some and some[name].state == "ACTIVE" and some[name].rate_gbit
        }
        odd = odd_ones(rates)
        usual = [rate for node, rate in rates.items() if node not in odd]
        for node in odd:
            if usual and rates[node] < usual[0]:
                bad.setdefault(node, []).append(name)
    return bad


def _counts(ports: dict[str, dict[str, RdmaPort]]) -> Iterator[CheckFinding]:
    """Report where a node has fewer active ports, or ports of another kind."""
    for what, ask in (
        ("active RDMA ports", lambda some: sum(port.state == "ACTIVE" for port in some)),
        ("link layer", lambda some: ", ".join(sorted({p.link_layer for p in some})) or "none"),
    ):
        values: dict[str, object] = {node: ask(some.values()) for node, some in ports.items()}
        odd = odd_ones(values)
        if odd and 2 * len(odd) < len(values):
            yield IbPort.fail(
                f"{what}: {values[odd[0]]}, not as on the other nodes",
                at=odd,
                evidence={what: values},
                lines=compared(values),
                fix=on_each(odd, "ibstat; lspci | grep -i mellanox"),
                impact="NCCL uses fewer ports on this node: all wait for it, or init fails",
                unless="the nodes are of different make",
            )
            return


def _port_words(port: RdmaPort | None) -> str:
    if port is None:
        return "is absent"
    return f"{port.state or 'in unknown state'}/{port.phys_state or '?'}, {port.rate or 'no rate'}"


V2 = "RoCE v2"


class IbGid(BuiltinCheck, id="ib.gid", scope="all", needs=("rdma",)):
    """On RoCE, NCCL_IB_GID_INDEX names an entry that exists and is RoCE v2 on all nodes.

    Without the variable NCCL since 2.21 looks for one itself.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the entry is absent, of another kind, or no RoCE v2 entry exists."""
        yield from self.not_measured(run, "rdma")
        kinds: dict[str, str] = {}
        bad: dict[str, dict[str, str]] = {}
        good: dict[str, int] = {}
        for node, rdma in run.each(lambda facts: facts.rdma).items():
            for port in chosen(rdma):
                if port.link_layer != "Ethernet" or port.state != "ACTIVE":
                    continue
                what, kind = _gid_used(port, rdma.gid_index)
                good[node] = next((g.index for g in port.gids if _is_v2(g)), -1)
                if what:
                    bad.setdefault(what, {})[node] = port.name
                elif kind:
                    kinds[node] = kind
        if not kinds and not bad:
            yield self.skipped("no active RoCE port")
            return
        for what, nodes in bad.items():
            yield self._finding(what, nodes, good)
        odd = odd_ones(kinds)
        if odd and not bad:
            yield self.fail(
                f"{kinds[odd[0]]}, not as on the other nodes",
                at=odd,
                evidence={"kinds": kinds},
                lines=compared(kinds),
                fix=(
                    Fix(node=node, command=f"export NCCL_IB_GID_INDEX={good[node]}") for node in odd
                ),
                impact="queue pairs between these nodes fail: NCCL 'ibv_modify_qp failed'",
                unless="the launcher sets NCCL_IB_GID_INDEX for each node",
            )

    def _finding(self, what: str, nodes: dict[str, str], good: dict[str, int]) -> CheckFinding:
        return self.fail(
            f"{next(iter(nodes.values()))}: {what}",
            at=nodes,
            evidence={"ports": nodes, "index_of_v2": {node: good[node] for node in nodes}},
            lines=(f"{node}: {port}: {what}" for node, port in nodes.items()),
            fix=(
                Fix(node=node, command=f"export NCCL_IB_GID_INDEX={good[node]}")
                if good[node] >= 0
                else Fix(
                    node=node,
                    command="show_gids   # give the interface an IPv4 address",
                    owner="admin",
                )
                for node in nodes
            ),
            impact="NCCL cannot connect over RoCE: 'ibv_modify_qp failed', or dropped packets",
            unless="the launcher sets NCCL_IB_GID_INDEX for each node",
        )


def _is_v2(gid: Gid) -> bool:
    return gid.kind == V2 and gid.gid.startswith("0000:0000:0000:0000:0000:ffff")


def _gid_used(port: RdmaPort, index: int | None) -> tuple[str, str]:
    """Return what is wrong, or else the kind of the entry that will be used."""
    if index is None or index < 0:
        kinds = {gid.kind for gid in port.gids}
        if V2 not in kinds:
            return f"no address of the kind {V2}", ""
        return "", V2
    entry = next((gid for gid in port.gids if gid.index == index), None)
    if entry is None:
        return f"NCCL_IB_GID_INDEX={index} names no address", ""
    if entry.kind != V2:
        return f"NCCL_IB_GID_INDEX={index} is {entry.kind or 'of unknown kind'}, not {V2}", ""
    return "", entry.kind


class IbUser(BuiltinCheck, id="ib.user", scope="all", needs=("rdma",)):
    """This user may open the RDMA adapters, the library is there, and no port makes errors."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where an adapter is closed, warn of the rest."""
        yield from self.not_measured(run, "rdma")
        if run.backend != "nccl":
            yield self.skipped(f"{run.backend} does not use RDMA")
            return
        yield from self._closed(run)
        yield from self._errors(run)
        yield from self._mtu(run)

    def _closed(self, run: Run) -> Iterator[CheckFinding]:
        reasons: dict[str, list[str]] = {}
        for node, rdma in run.each(lambda facts: facts.rdma).items():
            if not rdma.ports:
                continue
            devices = {port.device for port in chosen(rdma)}
            closed = [rdma.verbs.get(name, "no /dev/infiniband/uverbs* for it") for name in devices]
            why = next((text for text in sorted(closed) if text), "")
            if not why and not rdma.has_library:
                why = "libibverbs.so.1 is not installed"
            if why:
                reasons.setdefault(why, []).append(node)
        for why, nodes in reasons.items():
            command = "ls -l /dev/infiniband   # in a container: --device=/dev/infiniband"
            if "libibverbs" in why:
                command = "sudo apt-get install libibverbs1 ibverbs-providers"
            yield self.fail(
                f"RDMA cannot be used here: {why}",
                at=nodes,
                evidence={"error": why},
                lines=(f"{node}: {why}" for node in nodes),
                fix=on_each(nodes, command, "admin"),
                impact="NCCL falls back to sockets on this node: a tenth of the bandwidth, or init "
                "fails where the others insist on RDMA",
                unless="the job runs in another container, with the devices",
            )

    def _errors(self, run: Run) -> Iterator[CheckFinding]:
        bad: dict[str, str] = {}
        for node, port in _ports(run):
            if port.errors_during:
                errors = ", ".join(f"{name} +{n}" for name, n in port.errors_during.items())
                bad[node] = f"{port.name}: {errors}"
        if bad:
            yield self.warn(
                f"errors while this preflight ran: {next(iter(bad.values()))}",
                at=bad,
                evidence={"errors": bad},
                lines=(f"{node}: {text}" for node, text in bad.items()),
                fix=on_each(bad, "sudo perfquery -x; ibdiagnet   # cable or transceiver", "admin"),
                impact="retransmissions: this node is slow, or its connections break under load",
                unless="a cable was touched at that moment",
            )

    def _mtu(self, run: Run) -> Iterator[CheckFinding]:
        sizes = {
            node: f"{port.interface_mtu_bytes} bytes"
            for node, port in _ports(run)
            if port.state == "ACTIVE" and port.interface_mtu_bytes
        }
        if odd := odd_ones(sizes):
            yield self.warn(
                f"the RoCE interface has an MTU of {sizes[odd[0]]}, not as elsewhere",
                at=odd,
                evidence={"mtu": sizes},
                lines=compared(sizes),
                fix=on_each(odd, "ip -br link   # then: sudo ip link set NAME mtu BYTES", "admin"),
                impact="RoCE agrees on the smaller size: slower; or packets are lost in the switch",
                unless="the ports belong to networks of different kinds",
            )
