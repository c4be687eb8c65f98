"""env.complete: each rank is told who it is and where to meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class EnvComplete:
    """Ranks, sizes and the endpoint are set, are integers, and fit together.

    torch reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; what is missing ends the rank at
    once, what does not fit (RANK >= WORLD_SIZE) leaves the others waiting.
    """

    id: ClassVar[str] = "env.complete"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on values that are missing, unreadable, or out of their range."""
        yield from not_measured(self.id, run, "launch")
        untold = [n for n, launch in run.launches.items() if launch.launcher == "hand"]
        if untold:
            title = f"{listed(untold)}: no launcher has set anything to check"
            yield Finding(id=self.id, status="skipped", nodes=tuple(untold), title=title)
        by_cause: dict[str, list[str]] = {}
        for node, launch in run.launches.items():
            if launch.launcher != "hand":
                for cause in _faults(launch):
                    by_cause.setdefault(cause, []).append(node)
        for cause, nodes in by_cause.items():
            yield Finding(
                id=self.id,
                status="fail",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {cause}",
                evidence={"cause": cause, "launcher": run.launches[nodes[0]].launcher},
                told=tuple(_told(run, node) for node in nodes[:4]),
                fix=tuple(_fixes(run, nodes, cause)),
                would="that rank ends with an error at init_process_group, or never starts; "
                "the others wait 10 to 30 min for it",
                wrong_if="the script sets the value itself before it calls init_process_group",
            )


def _faults(launch: LaunchFacts) -> Iterator[str]:
    """Yield what is wrong, in words that are the same on all nodes with the same cause."""
    yield from launch.errors
    told = {error.partition("=")[0] for error in launch.errors}
    if launch.launcher == "env":
        needed = {"MASTER_ADDR": launch.master_addr, "RANK": launch.rank,
                  "WORLD_SIZE": launch.world_size}  # fmt: skip
        missing = [name for name, value in needed.items() if value in ("", None)]
        missing = [name for name in missing if name not in told]
        if missing:
            yield f"{', '.join(missing)} not set"
    if not 0 < launch.master_port < 65536:
        yield f"MASTER_PORT={launch.master_port} is no port"
    yield from _out_of_range(launch)


def _out_of_range(launch: LaunchFacts) -> Iterator[str]:
    pairs = (
        ("RANK", launch.rank, "WORLD_SIZE", launch.world_size),
        ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.nproc_per_node),
    )
    for name, value, size_name, size in pairs:
        if value is not None and value < 0:
            yield f"{name}={value} is negative"
        elif value is not None and size is not None and value >= size:
            yield f"{name}={value}, but {size_name}={size}: ranks are counted from 0"
    sizes = (("WORLD_SIZE", launch.world_size), ("nodes", launch.num_nodes),
             ("processes per node", launch.nproc_per_node))  # fmt: skip
    for name, value in sizes:
        if value is not None and value < 1:
            yield f"{name}={value}: at least 1 is needed"
    if launch.min_nodes is not None and launch.num_nodes is not None:
        if launch.min_nodes > launch.num_nodes:
            yield f"--nnodes={launch.min_nodes}:{launch.num_nodes}: the smaller number comes first"


def _told(run: Run, node: str) -> str:
    launch = run.launches[node]
    return (
        f"{node} ({launch.launcher}): MASTER_ADDR={launch.master_addr or '(not set)'} "
        f"RANK={_or_unset(launch.rank)} WORLD_SIZE={_or_unset(launch.world_size)} "
        f"LOCAL_RANK={_or_unset(launch.local_rank)}"
    )


def _or_unset(value: int | None) -> str:
    return "(not set)" if value is None else str(value)


def _fixes(run: Run, nodes: list[str], cause: str) -> Iterator[Fix]:
    """Yield export lines with the values that the other nodes and the order of nodes tell."""
    if run.launches[nodes[0]].launcher not in ("env", "kubernetes", "mpi"):
        return
    addresses = [launch.master_addr for launch in run.launches.values() if launch.master_addr]
    sizes = [launch.world_size for launch in run.launches.values() if launch.world_size]
    for node in nodes:
        nproc = run.nproc(node)
        world = max(set(sizes), key=sizes.count) if sizes else nproc * len(run.expected)
        position = run.expected.index(node) if node in run.expected else 0
        values = {
            "MASTER_ADDR": addresses[0] if addresses else run.master,
            "MASTER_PORT": str(run.master_port if 0 < run.master_port < 65536 else 29500),
            "WORLD_SIZE": str(world),
            "RANK": str(position * nproc),
        }
        wanted = [f"{name}={value}" for name, value in values.items() if name in cause]
        if wanted:
            yield Fix(node=node, command=f"export {' '.join(wanted)}")
