"""fs.write: the checkpoint directory takes data, and fast enough."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from statistics import median
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.storage import HANG_LIMIT_S, WRITE_SECONDS, Folder, StorageFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

MB = 10**6
SLOW_RATIO = 5.0  # against the median of the nodes: less is the weather of a shared file server
LEAST_NODES = 3  # of two, nobody can say which is the slow one
# 100 MB/s is a disk of 2010: whoever is faster is not worth a warning, however fast the others are
FAST_ENOUGH_MB_PER_S = 100.0


class FsWrite:
    """The checkpoint directory takes 64 MB and an fsync on every node, at a like pace.

    Finds read-only mounts, quotas, and a node that writes five times slower than the others.
    """

    id: ClassVar[str] = "fs.write"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"checkpoint-dir"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where nothing could be written, warn where it was slow."""
        yield from not_measured(self.id, run, "storage")
        errors: dict[str, list[str]] = {}
        speeds: dict[str, float] = {}
        stuck: list[str] = []
        untold: list[str] = []
        for report in run.present:
            storage = report.facts.storage
            folder = storage.folder("checkpoint") if storage is not None else None
            if storage is None or folder is None or folder.error or folder.is_hung:
                continue  # fs.hang and fs.free say so
            error, done = _error(storage, folder), storage.written
            if error:
                errors.setdefault(error, []).append(report.node)
            elif folder.untold or done is None or done.untold:
                untold.append(report.node)
            elif done.is_hung:
                stuck.append(report.node)
            elif done.elapsed_s > 0:
                speeds[report.node] = done.written_bytes / done.elapsed_s / MB
        if untold:
            title = f"{listed(untold)}: no time was found to write there"
            yield Finding(id=self.id, status="unknown", nodes=tuple(untold), title=title)
        for error, nodes in errors.items():
            yield self._fails(run.options.checkpoint_dir, error, nodes)
        if stuck:
            yield self._stuck(run.options.checkpoint_dir, stuck)
        yield from self._slow(run.options.checkpoint_dir, speeds)

    def _fails(self, path: str, error: str, nodes: list[str]) -> Finding:
        word = error.partition(":")[0]
        return Finding(
            id=self.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: cannot write to {path}: {error}",
            evidence={"path": path, "error": error},
            told=tuple(f"{node}: {error}" for node in nodes),
            fix=tuple(
                Fix(
                    node=node,
                    command=_COMMANDS.get(word, "ls -ld {path}; id; findmnt -T {path}").format(
                        path=quote(path)
                    ),
                    owner="you" if word in ("EDQUOT", "ENOSPC") else "admin",
                )
                for node in nodes
            ),
            would="the job runs until the first checkpoint, then fails there",
            wrong_if="only other nodes write checkpoints",
        )

    def _stuck(self, path: str, nodes: list[str]) -> Finding:
        limit_s = WRITE_SECONDS + HANG_LIMIT_S
        return Finding(
            id=self.id,
            status="warn",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: {path} did not take 64 MB and an fsync in {limit_s:g} s",
            evidence={"limit_s": limit_s},
            told=tuple(f"{node}: no answer in {limit_s:g} s" for node in nodes),
            fix=tuple(
                Fix(node=node, command=f"findmnt -T {quote(path)}; iostat -x 1 3", owner="admin")
                for node in nodes
            ),
            would="every checkpoint holds the job up, or hangs",
            wrong_if="something else wrote there at that moment: measure again",
            confidence="likely",
        )

    def _slow(self, path: str, speeds: dict[str, float]) -> Iterator[Finding]:
        if len(speeds) < LEAST_NODES:
            return
        usual = median(speeds.values())
        slow = {
            node: speed
            for node, speed in speeds.items()
            if speed * SLOW_RATIO < usual and speed < FAST_ENOUGH_MB_PER_S
        }
        if not slow:
            return
        yield Finding(
            id=self.id,
            status="warn",
            nodes=tuple(slow),
            title=f"{listed(slow)}: writes {min(slow.values()):.0f} MB/s to {path}, "
            f"the others {usual:.0f} MB/s",
            evidence={"mb_per_s": speeds, "median_mb_per_s": usual},
            told=tuple(f"{node}: {speed:.1f} MB/s with fsync" for node, speed in slow.items()),
            fix=tuple(
                Fix(node=node, command=f"findmnt -T {quote(path)}; iostat -x 1 3", owner="admin")
                for node in slow
            ),
            would="every checkpoint waits for this node",
            wrong_if="something else wrote there at that moment: measure again",
            confidence="likely",
        )


_COMMANDS = {
    "EROFS": "sudo mount -o remount,rw {path}   # findmnt -T {path} says why it is read-only",
    "EDQUOT": "quota -s; lfs quota -h {path} 2>/dev/null; du -sh {path}",
    "ENOSPC": "df -h {path}; df -i {path}",
}


def _error(storage: StorageFacts, folder: Folder) -> str:
    """Return why this node cannot write, if it cannot."""
    if not folder.is_directory:
        return ""  # fs.free says so
    if folder.is_read_only:
        return "EROFS: Read-only file system"
    if storage.token_error:
        return storage.token_error
    done = storage.written
    return "" if done is None or done.is_hung else done.error
