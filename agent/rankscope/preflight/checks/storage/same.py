"""fs.same: one path is one kind of place on all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar, Literal

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.model import Finding, Fix, Scope, Tier

_NETWORK = (
    "nfs",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "smb",
    "cifs",
    "9p",
    "fuse",
    "wekafs",
    "panfs",
)
_ROLES: tuple[Literal["checkpoint", "data"], ...] = ("checkpoint", "data")


class FsSame:
    """The checkpoint and data directories lie on the same kind of file system everywhere.

    The server's name may differ, for many are reached by several addresses.
    """

    id: ClassVar[str] = "fs.same"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where a mount is missing or is of another type or right."""
        yield from not_measured(self.id, run, "storage")
        for role in _ROLES:
            kinds: dict[str, str] = {}
            paths: set[str] = set()
            for report in run.present:
                storage = report.facts.storage
                folder = storage.folder(role) if storage is not None else None
                if folder is None or not folder.file_system:
                    continue
                right = ", read-only" if folder.is_read_only else ""
                kinds[report.node] = f"{_kind(folder.file_system)}{right}"
                paths.add(folder.path)
            odd = odd_ones(kinds)
            if not odd:
                continue
            path = min(paths)
            yield Finding(
                id=self.id,
                status="warn",
                nodes=odd,
                title=f"{listed(odd)}: {path} ({role}) lies on {kinds[odd[0]]}, not as elsewhere",
                evidence={"file_systems": kinds},
                told=compared(kinds),
                fix=tuple(
                    Fix(node=node, command=f"findmnt -T {quote(path)}", owner="admin")
                    for node in odd
                ),
                would="this node reads or writes other files than the others, or at another pace",
                wrong_if="the nodes mount the same storage in different ways on purpose",
            )


def _kind(file_system: str) -> str:
    """Return the type; local disks of whatever format are one kind."""
    if file_system.startswith(_NETWORK):
        return file_system.rstrip("34")
    return "memory (tmpfs)" if file_system in ("tmpfs", "ramfs") else "a local disk"
