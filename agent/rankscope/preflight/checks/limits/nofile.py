"""lim.nofile: open files, of which every connection to a peer is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.limits import UNLIMITED
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

# Measured with torch 2.13 and gloo, 2, 3, 4 and 6 ranks: a process group takes one file for each
# other rank and 4 of its own; the rank that hosts the store takes 9 more and one for each rank.
PER_GROUP, PER_STORE = 4, 9
NUM_GROUPS = 4  # the default one, and those of a device mesh of three dimensions
OWN_FILES = 64  # of Python, torch, logs, a loader's pipes: 64 files carried 3 ranks, barely
WANTED = 4096  # below, a few hundred loader pipes or checkpoint shards are enough to end a rank
GENEROUS = 65536


def needed_files(world_size: int) -> int:
    """Return how many files a rank opens at most in a job of so many ranks."""
    groups = NUM_GROUPS * (world_size - 1 + PER_GROUP)
    return OWN_FILES + groups + PER_STORE + world_size


class LimNofile:
    """A rank may open a file for each of its peers, in each process group, and more.

    Below what gloo needs it fails; below 4,096 it warns, for loader pipes and checkpoint shards.
    """

    id: ClassVar[str] = "lim.nofile"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Compare the soft limit with what the ranks will open."""
        yield from not_measured(self.id, run, "limits")
        nodes = set(run.expected) | set(run.reports)
        world_size = sum(run.nproc(node) for node in nodes)
        need = needed_files(world_size)
        found: dict[Status, dict[str, tuple[int, int]]] = {"fail": {}, "warn": {}}
        for report in run.present:
            limits = report.facts.limits
            if limits is None or limits.nofile_soft in (None, UNLIMITED):
                continue
            soft, hard = limits.nofile_soft or 0, limits.nofile_hard
            if soft < max(need, WANTED):
                status: Status = "fail" if soft < need else "warn"
                found[status][report.node] = (soft, soft if hard is None else hard)
        for status, bad in found.items():
            if bad:
                yield _finding(run, status, bad, need if status == "fail" else max(need, WANTED))


def _finding(run: Run, status: Status, bad: dict[str, tuple[int, int]], wanted: int) -> Finding:
    least = min(soft for soft, _ in bad.values())
    return Finding(
        id=LimNofile.id,
        status=status,
        nodes=tuple(bad),
        title=f"{listed(bad)}: {least} open files allowed, {wanted} wanted",
        evidence={
            "nofile_soft": {node: soft for node, (soft, _) in bad.items()},
            "nofile_wanted": wanted,
        },
        told=tuple(
            f"{node}: ulimit -n is {soft}, hard limit {_words(hard)}"
            for node, (soft, hard) in bad.items()
        ),
        fix=tuple(_fix(run, node, hard, wanted) for node, (_, hard) in bad.items()),
        would=(
            "a rank dies with 'Too many open files' while it connects to its peers, or as soon as "
            "loader workers or a checkpoint open more"
            if status == "fail"
            else "works until loader workers or checkpoint shards open more: 'Too many open files'"
        ),
        wrong_if="the job is started with another limit than this shell",
    )


def _words(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _fix(run: Run, node: str, hard: int, wanted: int) -> Fix:
    if hard == UNLIMITED or hard >= wanted:
        best = max(wanted, GENEROUS)
        return Fix(node=node, command=f"ulimit -n {best if hard == UNLIMITED else min(best, hard)}")
    best = max(wanted, GENEROUS)
    host = run.reports[node].facts.host
    container = host.container if host is not None else ""
    if container in ("docker", "podman"):
        command = f"{container} run --ulimit nofile={best}:{best} ...   # start it with this"
        return Fix(node=node, command=command)
    command = f"sudo prlimit --nofile={best}:{best} --pid $$   # for good: limits.d, LimitNOFILE="
    return Fix(node=node, command=command, owner="admin")
