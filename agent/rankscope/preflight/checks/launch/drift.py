"""env.drift: variables that steer NCCL, gloo and CUDA are the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, odd_ones
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

UNSET = "(not set)"
# these choose a protocol that both ends must speak: where they differ, NCCL hangs or aborts
_MUST_AGREE = ("NCCL_NET", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_FAMILY", "NCCL_IB_DISABLE")
# differ between ranks or nodes by design; names of interfaces are judged where they stand
_OWN = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|NCCL_HOSTID|NCCL_COMM_ID|"
    r"NCCL_IB_HCA|.*_SOCKET_IFNAME|.*_(FILE|DIR|PATH|CPUSET|PREFIX)|.*RANK.*"
)


class EnvDrift:
    """NCCL_*, GLOO_*, TORCH_*, CUDA_*, OMP_* and NCCL's files are the same on all nodes."""

    id: ClassVar[str] = "env.drift"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn on different values; fail on those that both ends must share."""
        launches = run.launches
        names = {name for launch in launches.values() for name in launch.environment}
        paths = {path for launch in launches.values() for path in launch.conf_files}
        rows = {
            name: {node: launch.environment.get(name, UNSET) for node, launch in launches.items()}
            for name in sorted(names)
            if not _OWN.fullmatch(name)
        }
        for path in sorted(paths):
            rows[path] = {n: launch.conf_files.get(path, UNSET) for n, launch in launches.items()}
        groups: dict[tuple[Status, tuple[str, ...]], list[str]] = {}
        for name, values in rows.items():
            odd = odd_ones(values)
            if odd:
                must = name in _MUST_AGREE and run.backend == "nccl"
                groups.setdefault(("fail" if must else "warn", odd), []).append(name)
        for (status, nodes), drifted in groups.items():
            yield self._finding(status, nodes, {name: rows[name] for name in drifted})

    def _finding(
        self, status: Status, nodes: tuple[str, ...], rows: dict[str, dict[str, str]]
    ) -> Finding:
        name, values = next(iter(rows.items()))
        more = f" and {len(rows) - 1} more differ" if len(rows) > 1 else " differs"
        usual = {n: v for n, v in values.items() if n not in nodes}
        said = ""
        if usual:
            said = f" ({_short(values[nodes[0]])}, elsewhere {_short(next(iter(usual.values())))})"
        return Finding(
            id=self.id,
            status=status,
            nodes=nodes,
            title=f"{listed(nodes)}: {name}{more}{said}",
            evidence={"variables": rows},
            told=tuple(
                f"{name} = {line}" for name, v in list(rows.items())[:6] for line in _lines(v)
            ),
            fix=tuple(_fixes(nodes, rows)),
            would="NCCL hangs at the first collective, or aborts"
            if status == "fail"
            else "nodes behave differently: another speed, another path, another amount of output",
            wrong_if="the launcher or the script sets it for all ranks later",
        )


def _short(value: str) -> str:
    line = value.strip().partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:37]}..."


def _lines(values: dict[str, str]) -> tuple[str, ...]:
    return compared({node: _short(value) for node, value in values.items()})


def _fixes(nodes: tuple[str, ...], rows: dict[str, dict[str, str]]) -> Iterator[Fix]:
    """Yield what makes the odd nodes say what the others say."""
    for name, values in rows.items():
        usual = [value for node, value in values.items() if node not in nodes]
        if not usual or name.startswith(("/", "~")):
            continue
        command = f"unset {name}" if usual[0] == UNSET else f"export {name}='{usual[0]}'"
        for node in nodes:
            yield Fix(node=node, command=command)
