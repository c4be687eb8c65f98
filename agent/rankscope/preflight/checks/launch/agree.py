"""env.agree: all nodes were told the same job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, odd_ones
from rankscope.preflight.checks.launch.local import is_local
from rankscope.preflight.facts.launch import LaunchFacts, Mode
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Status, Tier

_FIELDS: tuple[tuple[str, str, Callable[[LaunchFacts], object]], ...] = (
    # what people call it, the option that says it, the value
    ("port of the endpoint", "--master-port", lambda launch: launch.master_port),
    ("number of nodes", "--nnodes", lambda launch: _nodes(launch)),
    ("world size", "WORLD_SIZE", lambda launch: launch.world_size),
    ("rendezvous id", "--rdzv-id", lambda launch: launch.rendezvous_id or "none"),
    ("rendezvous", "--rdzv-backend", lambda launch: launch.mode),
)
_WOULD: dict[Mode, str] = {
    "static": "torchrun waits 5 to 15 min, or trains with another number of nodes than you meant; "
    "with nnodes 3, 3, 2 it ends only after the 300 s exit barrier",
    "c10d": "RendezvousTimeoutError on all nodes after 10 min",
    "env": "init_process_group waits 30 min for ranks that never come",
}


class EnvAgree:
    """Endpoint, port, nodes, world size and rendezvous are the same on all nodes."""

    id: ClassVar[str] = "env.agree"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where nodes would not meet; warn where they only differ."""
        told = {n: launch for n, launch in run.launches.items() if launch.launcher != "hand"}
        by_nodes: dict[tuple[str, ...], list[tuple[str, str, dict[str, object]]]] = {}
        for what, option, read in _FIELDS:
            values = {node: read(launch) for node, launch in told.items()}
            values = {node: value for node, value in values.items() if value is not None}
            self._add(by_nodes, what, option, values)
        self._add(by_nodes, "endpoint", "--master-addr", dict(_endpoints(run, told)))
        for nodes, fields in by_nodes.items():
            yield self._finding(run, nodes, fields, "fail")
        nproc = {n: launch.nproc_per_node for n, launch in told.items() if launch.nproc_per_node}
        odd = odd_ones(nproc)
        if odd:
            field = ("processes per node", "--nproc-per-node", dict[str, object](nproc))
            yield self._finding(run, odd, [field], "warn")
        yield from self._asked(run)

    @staticmethod
    def _add(
        by_nodes: dict[tuple[str, ...], list[tuple[str, str, dict[str, object]]]],
        what: str,
        option: str,
        values: dict[str, object],
    ) -> None:
        odd = odd_ones(values)
        if odd:
            by_nodes.setdefault(odd, []).append((what, option, values))

    def _finding(
        self,
        run: Run,
        nodes: tuple[str, ...],
        fields: list[tuple[str, str, dict[str, object]]],
        status: Status,
    ) -> Finding:
        names = ", ".join(what for what, _, _ in fields)
        what, _, values = fields[0]
        usual = _most(values, nodes)
        is_tie = usual is None
        said = f"{values[nodes[0]]}" + ("" if is_tie else f", the others {usual}")
        title = f"{listed(nodes)}: {names} differ"
        title += f" ({what}: no majority)" if is_tie else f" ({what} {said})"
        return Finding(
            id=self.id,
            status=status,
            nodes=nodes,
            title=title,
            evidence={what: dict(values) for what, _, values in fields},
            told=tuple(f"{w}: {line}" for w, _, v in fields for line in compared(v)),
            fix=() if is_tie else tuple(_fixes(fields, nodes)),
            would=_WOULD[run.mode] if status == "fail" else "ranks are spread unevenly",
            wrong_if="" if status == "fail" else "the nodes have different numbers of GPUs",
        )

    def _asked(self, run: Run) -> Iterator[Finding]:
        """Warn where preflight itself was asked different questions."""
        odd = odd_ones({report.node: _key(report) for report in run.present})
        if odd:
            yield Finding(
                id=self.id,
                status="warn",
                nodes=odd,
                title=f"{listed(odd)}: preflight was started with other options than elsewhere",
                evidence={r.node: repr(r.options) for r in run.present},
                would="the job is not changed by it; the checks may answer another question",
            )


def _key(report: NodeReport) -> str:
    return repr(report.options)


def _nodes(launch: LaunchFacts) -> str | None:
    if launch.num_nodes is None:
        return None
    return f"{launch.min_nodes}:{launch.num_nodes}" if launch.min_nodes else str(launch.num_nodes)


def _endpoints(run: Run, told: dict[str, LaunchFacts]) -> Iterator[tuple[str, str]]:
    """Yield each node's endpoint; names that mean the same address count as the same."""
    groups: list[tuple[str, set[str]]] = []
    for node, launch in told.items():
        name = launch.master_addr
        if not name or is_local(name):  # that is env.endpoint.local's
            continue
        facts = run.reports[node].facts.names
        resolved = facts.master.addresses if facts is not None and facts.master is not None else ()
        meaning = {name, *resolved}
        first = next((label for label, members in groups if members & meaning), "")
        if not first:
            groups.append((name, meaning))
        yield node, first or name


def _most(values: dict[str, object], odd: tuple[str, ...]) -> object | None:
    """Return what those say who are not odd; None in a tie."""
    rest = [value for node, value in values.items() if node not in odd]
    return rest[0] if rest else None


def _fixes(fields: list[tuple[str, str, dict[str, object]]], odd: tuple[str, ...]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    wanted = [(option, _most(values, odd)) for _, option, values in fields]
    options = [f"{option} {value}" for option, value in wanted if option.startswith("--")]
    exports = [f"{option}={value}" for option, value in wanted if not option.startswith("--")]
    for node in odd:
        if options:
            yield Fix(node=node, command=f"torchrun {' '.join(options)} ...")
        else:
            yield Fix(node=node, command=f"export {' '.join(exports)}")
