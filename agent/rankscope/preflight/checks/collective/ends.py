"""What the torch children of all nodes say together: who spoilt it, and who only suffered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import Finding, Fix

# gloo names the peer it waits for: `third_party/gloo/gloo/transport/tcp/pair.cc`
_REMOTE = re.compile(r"remote=\[([^\]]+)\]")
# p90 by which a 20 ms sleep is late; the same as for paths (section 7, silence rules).
BUSY_MS = 15.0
_NOT_MET = "the members of the smoke test did not meet: coll.rdzv says why"
_WOULD = (
    "the first collective of this size hangs; torch gives up after 30 min "
    '("Timed out waiting 1800000ms"), and nothing names the cause'
)


def began(run: Run) -> dict[str, SmokeFacts]:
    """Return what the children say of all nodes on which one was started."""
    told = {report.node: report.facts.smoke for report in run.present}
    return {node: smoke for node, smoke in told.items() if smoke is not None and not smoke.skipped}


def elsewhere(run: Run, id: str, backend: str) -> Finding | None:
    """Return the skipped finding if the smoke test ran over another backend than `backend`."""
    members = began(run).values()
    used = {smoke.backend for smoke in members if smoke.stage not in ("not started", "imported")}
    if backend in used:
        return None
    title = f"the smoke test ran over {', '.join(sorted(used))}" if used else _NOT_MET
    return Finding(id=id, status="skipped" if used else "unknown", title=title)


def wrong_sums(run: Run, id: str) -> Iterator[Finding]:
    """Yield one finding if a sum was wrong anywhere."""
    wrong = {
        node: next(size for size in smoke.sizes if size.num_wrong)
        for node, smoke in began(run).items()
        if any(size.num_wrong for size in smoke.sizes)
    }
    if not wrong:
        return
    members = began(run)
    is_everywhere = len(wrong) == len(members)  # then the first to send it wrong is not known
    smallest = min(size.size_bytes for size in wrong.values())
    where = "all nodes" if is_everywhere else ", ".join(wrong)
    yield Finding(
        id=id,
        status="fail",
        title=f"an all-reduce of {amount(smallest)} gives a wrong sum on {where}",
        nodes=() if is_everywhere else tuple(wrong),
        evidence={node: {"size_bytes": s.size_bytes, "num_wrong": s.num_wrong}
                  for node, s in wrong.items()},
        told=tuple(
            f"{node}: {s.num_wrong} of {max(1, s.size_bytes // 4)} numbers are wrong"
            for node, s in wrong.items()
        ),
        fix=tuple(
            Fix(node=node, command=f"ethtool -S {name} | grep -iE 'err|crc|drop'", owner="admin")
            for node in wrong
            if (name := _interface(members[node]))
        ),
        would="training goes on with wrong gradients: the loss diverges or turns NaN, no error",
        wrong_if="another program wrote into this process, or this build of the backend is broken",
        confidence="likely",
    )  # fmt: skip


def stalls(run: Run, id: str) -> Iterator[Finding]:
    """Yield one finding if the members met and then did not get through the collectives."""
    members = began(run)
    failed = {
        node: smoke
        for node, smoke in members.items()
        if smoke.error and smoke.stage in ("store", "group", "collectives", "halving")
    }
    if not failed:
        return
    died = {node: smoke for node, smoke in failed.items() if smoke.ended_by == "died"}
    if died:  # the others lost it, and say so
        yield _dead(id, died)
        return
    busy = {r.node: r.delay_p90_ms for r in run.present if r.delay_p90_ms > BUSY_MS}
    if busy and set(busy) & set(members):
        node = max(busy, key=lambda name: busy[name])
        title = f"{node} was too busy to tell a hang from a pause ({busy[node]:.0f} ms)"
        yield Finding(id=id, status="unknown", title=title)
        return
    size = min((_open_size(smoke) for smoke in failed.values()), default=0)
    what = f"an all-reduce of {amount(size)}" if size else "connecting all members"
    passed = max((_passed(smoke) for smoke in members.values()), default=0)
    hung = [node for node, smoke in failed.items() if smoke.ended_by == "limit"]
    is_one = len(hung) == 1 and len(failed) > 1  # the rest had torch's own time-out
    edges = _edges(run, failed)
    after = f"; {amount(passed)} passed" if passed else ""
    by = f" on {hung[0]}, for which the others waited" if is_one else _between(edges)
    yield Finding(
        id=id,
        status="fail",
        title=f"{what} did not end{by}{after}",
        nodes=tuple(hung) if is_one else (),
        edges=edges,
        evidence={"size_bytes": size, "passed_bytes": passed, "stages": _stages(failed)},
        told=tuple(f"{node}: {_first_line(smoke)}" for node, smoke in failed.items()),
        fix=_probes(run, edges, hung if is_one else []),
        would=_WOULD if size else "init_process_group hangs on some ranks for up to 33 min",
        wrong_if="the machine was so busy that a few MB took longer than the limit",
        confidence="likely",
    )


def amount(size_bytes: int) -> str:
    """Return a size for people: "64 kB"; the sizes are powers of two."""
    for unit, factor in (("MB", 2**20), ("kB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def _dead(id: str, died: Mapping[str, SmokeFacts]) -> Finding:
    return Finding(
        id=id,
        status="fail",
        title=f"the torch process of {', '.join(died)} died in the smoke test",
        nodes=tuple(died),
        evidence={"stages": _stages(died)},
        told=tuple(f"{node}: {_first_line(smoke)}" for node, smoke in died.items()),
        fix=tuple(
            Fix(node=node, command="journalctl -k --since -5min | grep -iE 'oom|killed|segfault'")
            for node in died
        ),
        would='its ranks die in the first collective, the others with "Connection closed by peer"',
        wrong_if="somebody ended this process by hand",
    )


def _stages(members: Mapping[str, SmokeFacts]) -> dict[str, str]:
    return {node: smoke.stage for node, smoke in members.items()}


def _open_size(smoke: SmokeFacts) -> int:
    return next((size.size_bytes for size in smoke.sizes if size.elapsed_ms < 0), 0)


def _passed(smoke: SmokeFacts) -> int:
    return max((size.size_bytes for size in smoke.sizes if size.elapsed_ms >= 0), default=0)


def _edges(run: Run, failed: Mapping[str, SmokeFacts]) -> tuple[tuple[str, str], ...]:
    """Return the paths on which a backend says that it waited, by the address it names."""
    owners = {address: r.node for r in run.present for address in r.addresses}
    found: dict[tuple[str, str], None] = {}
    for node, smoke in failed.items():
        for address in _REMOTE.findall(f"{smoke.error}\n{smoke.output_tail}"):
            peer = owners.get(address.partition("%")[0])
            if peer is not None and peer != node:
                found[node, peer] = None
    return tuple(found)


def _between(edges: tuple[tuple[str, str], ...]) -> str:
    return f" between {edges[0][0]} and {edges[0][1]}" if len(edges) == 1 else ""


def _probes(run: Run, edges: tuple[tuple[str, str], ...], hung: list[str]) -> tuple[Fix, ...]:
    if hung:
        return (Fix(node=hung[0], command="journalctl -k --since -5min | tail -n 50"),)
    return tuple(
        Fix(node=start, command=f"ping -c 3 -M do -s 1472 {run.reports[end].addresses[0]}")
        for start, end in edges[:3]
        if run.reports[end].addresses
    )


def _first_line(smoke: SmokeFacts) -> str:
    return (smoke.error.splitlines() or [""])[0][:200]


def _interface(smoke: SmokeFacts) -> str:
    return next((choice.interface for choice in smoke.gloo if choice.interface), "")
