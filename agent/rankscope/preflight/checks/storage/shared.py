"""fs.shared: the checkpoint directory is one and the same for all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.storage import SEE_SECONDS, StorageFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class FsShared:
    """Every node sees in the checkpoint directory what the others wrote there.

    Each node writes a small file and reads those of all others. Seen one way is proof enough: a
    directory that is shared is shared both ways.
    """

    id: ClassVar[str] = "fs.shared"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "checkpoint-dir"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where a node's directory is not that of the others."""
        yield from not_measured(self.id, run, "storage")
        facts = {
            report.node: report.facts.storage
            for report in run.present
            if report.facts.storage is not None
        }
        able = {n: f for n, f in facts.items() if f.token and f.seen is not None}
        unable = {n: f for n, f in facts.items() if n not in able and _is_reachable(f)}
        if unable:
            reasons = {_why(f) for f in unable.values()}
            title = f"{listed(unable)}: not known if it is shared: {'; '.join(sorted(reasons))}"
            yield Finding(id=self.id, status="unknown", nodes=tuple(unable), title=title)
        groups = _groups(able)
        if len(groups) > 1:
            yield self._finding(run, groups, able)

    def _finding(
        self, run: Run, groups: list[list[str]], facts: dict[str, StorageFacts]
    ) -> Finding:
        path = run.options.checkpoint_dir
        has_majority = 2 * len(groups[0]) > len(facts)
        odd = [node for group in groups[1 if has_majority else 0 :] for node in group]
        where = {
            node: f"{folder.file_system or 'unknown'} {folder.mount_source}".strip()
            for node in facts
            if (folder := facts[node].folder("checkpoint")) is not None
        }
        if has_majority:
            title = f"{listed(odd)}: {path} is another directory there than on the other nodes"
        elif len(groups) == len(facts):
            title = f"{path} is a directory of its own on each of {len(facts)} nodes"
        else:
            title = f"{path} is {len(groups)} different directories on {len(facts)} nodes"
        source = where.get(groups[0][0], "").split(" ")[-1]
        command = f"findmnt -T {quote(path)}   # mount the shared one there"
        if has_majority and ":" in source:
            command = f"findmnt -T {quote(path)}   # the others have {source} there"
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(odd),
            title=title,
            evidence={"groups": groups, "mounts": where, "waited_s": SEE_SECONDS},
            told=tuple(
                f"{listed(group)}: {'see each other' if len(group) > 1 else 'sees only itself'}"
                f" ({where.get(group[0], 'mount unknown')})"
                for group in groups[:8]
            ),
            fix=tuple(Fix(node=node, command=command, owner="admin") for node in odd),
            would=(
                "checkpoints are scattered: the job saves, and cannot resume, or rank 0 waits for "
                "files that never come"
            ),
            wrong_if="each node is meant to keep its own part on a local disk",
        )


def _groups(facts: dict[str, StorageFacts]) -> list[list[str]]:
    """Return the nodes by directory, the largest group first: who saw whose file, either way."""
    owner = {facts[node].token: node for node in facts}
    root = {node: node for node in facts}

    def find(node: str) -> str:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node, one in facts.items():
        for token in (one.seen or {}).values():
            if token in owner:
                root[find(owner[token])] = find(node)
    groups: dict[str, list[str]] = {}
    for node in facts:
        groups.setdefault(find(node), []).append(node)
    return sorted(groups.values(), key=lambda group: -len(group))


def _is_reachable(facts: StorageFacts) -> bool:
    """Return whether the directory is there: if not, `fs.hang` or `fs.free` says so."""
    folder = facts.folder("checkpoint")
    return folder is not None and bool(
        folder.untold or (facts.has_checkpoint and folder.is_directory)
    )


def _why(facts: StorageFacts) -> str:
    folder = facts.folder("checkpoint")
    untold = folder.untold if folder is not None else ""
    late = "the files of the others were not looked for"
    return untold or facts.token_error or facts.seen_error or late
