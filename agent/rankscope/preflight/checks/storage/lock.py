"""fs.lock: locks on the checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.storage import HANG_LIMIT_S
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class FsLock:
    """Files in the checkpoint directory can be locked, by flock and by fcntl.

    Dataset caches and file stores lock; without a lock service they fail, or wait for ever.
    """

    id: ClassVar[str] = "fs.lock"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"checkpoint-dir"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where a lock is refused or never granted."""
        yield from not_measured(self.id, run, "storage")
        path = run.options.checkpoint_dir
        bad: dict[str, list[str]] = {}
        untold: list[str] = []
        for report in run.present:
            locked = report.facts.storage.locked if report.facts.storage is not None else None
            if locked is None:
                continue
            if locked.untold or (locked.error and not locked.is_hung):
                untold.append(report.node)
            elif locked.is_hung:
                bad.setdefault(f"no lock in {HANG_LIMIT_S:g} s", []).append(report.node)
            else:
                words = [f"flock {locked.flock}", f"fcntl {locked.fcntl}"]
                what = "; ".join(word for word in words if len(word.split()) > 1)
                if what:
                    bad.setdefault(what, []).append(report.node)
        for what, nodes in bad.items():
            yield Finding(
                id=self.id,
                status="warn",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: files in {path} cannot be locked: {what}",
                evidence={"path": path, "error": what},
                told=tuple(f"{node}: {what}" for node in nodes),
                fix=tuple(
                    Fix(
                        node=node,
                        command=f"findmnt -T {quote(path)}   # NFS 3: start rpc-statd; Lustre: "
                        "mount with -o flock",
                        owner="admin",
                    )
                    for node in nodes
                ),
                would="dataset caches and file:// rendezvous fail with a lock error, or hang",
                wrong_if="nothing in the job locks files there",
            )
        if untold:
            title = f"{listed(untold)}: the file to be locked could not be made"
            yield Finding(id=self.id, status="unknown", nodes=tuple(untold), title=title)
