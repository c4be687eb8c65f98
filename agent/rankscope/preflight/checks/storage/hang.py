"""fs.hang: a directory that does not answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.storage import HANG_LIMIT_S
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class FsHang:
    """Every directory that the job uses answers: no stale handle, no hung mount.

    A process that touches a hung mount cannot even be killed.
    """

    id: ClassVar[str] = "fs.hang"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where stat did not answer, or the handle is stale."""
        yield from not_measured(self.id, run, "storage")
        bad: dict[tuple[str, str], list[str]] = defaultdict(list)
        roles: dict[str, str] = {}
        untold: dict[str, list[str]] = defaultdict(list)
        for report in run.present:
            storage = report.facts.storage
            for folder in storage.folders if storage is not None else ():
                roles[folder.path] = folder.role
                if folder.untold:
                    untold[folder.untold].append(report.node)
                elif folder.is_hung:
                    bad[folder.path, f"no answer in {HANG_LIMIT_S:g} s"].append(report.node)
                elif folder.error.startswith(("ESTALE", "EIO", "ENOTCONN", "EHOSTDOWN")):
                    bad[folder.path, folder.error].append(report.node)
        for reason, nodes in untold.items():
            names = tuple(dict.fromkeys(nodes))
            title = f"{listed(names)}: {reason}"
            yield Finding(id=self.id, status="unknown", nodes=names, title=title)
        for (path, what), nodes in bad.items():
            yield Finding(
                id=self.id,
                status="fail",
                nodes=tuple(nodes),
                title=f"{listed(nodes)}: {path} ({roles[path]}) does not work: {what}",
                evidence={"path": path, "limit_s": HANG_LIMIT_S, "answer": what},
                told=tuple(f"{node}: stat {path}: {what}" for node in nodes),
                fix=tuple(
                    Fix(
                        node=node,
                        command=f"findmnt -T {quote(path)}; sudo umount -fl {quote(path)}"
                        "   # then mount it again",
                        owner="admin",
                    )
                    for node in nodes
                ),
                would="the rank that touches it hangs in the kernel, and the others wait for it",
                wrong_if="the file server was only slow at that moment: try again",
            )
