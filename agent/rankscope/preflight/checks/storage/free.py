"""fs.free: room for checkpoints, temporary files and caches."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.facts.storage import Folder
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier

GB = 10**9
LEAST_BYTES = GB  # a compiler cache, a spilled batch or a core file takes some 100 MB
LEAST_INODES = 1000  # a sharded checkpoint of 1,000 ranks is as many files


class FsFree:
    """There is room for the checkpoint, for temporary files and for the model caches.

    The checkpoint directory is held against --ckpt-gb; the others warn below 1 GB.
    """

    id: ClassVar[str] = "fs.free"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the checkpoint does not fit, warn where little is left."""
        yield from not_measured(self.id, run, "storage")
        found: dict[tuple[Status, str, str], dict[str, Folder]] = {}
        for report in run.present:
            storage = report.facts.storage
            for folder in storage.folders if storage is not None else ():
                verdict = _verdict(folder, run)
                if verdict is not None:
                    found.setdefault((*verdict, folder.path), {})[report.node] = folder
        for (status, wanted, path), bad in found.items():
            yield self._finding(status, wanted, path, bad)

    def _finding(self, status: Status, wanted: str, path: str, bad: dict[str, Folder]) -> Finding:
        one = min(bad.values(), key=lambda folder: folder.free_bytes)
        if one.error or not one.is_directory:
            what = one.error or "is no directory"
        elif wanted == "inodes":
            what = f"{one.free_inodes} inodes free, {LEAST_INODES} wanted"
        else:
            what = f"{one.free_bytes / GB:.1f} GB free, {wanted} wanted"
        command = f"df -h {quote(path)}; du -xh -d1 {quote(path)} | sort -h | tail"
        if one.error.startswith("ENOENT"):
            command = f"mkdir -p {quote(path)}   # or mount what belongs there"
        return Finding(
            id=self.id,
            status=status,
            nodes=tuple(bad),
            title=f"{listed(bad)}: {path} ({one.role}): {what}",
            evidence={
                "path": path,
                "free_bytes": {node: folder.free_bytes for node, folder in bad.items()},
                "free_inodes": {node: folder.free_inodes for node, folder in bad.items()},
            },
            told=tuple(
                f"{node}: {folder.error or f'{folder.free_bytes / GB:.1f} GB free'}"
                f"{f' on {folder.mount_source}' if folder.mount_source else ''}"
                for node, folder in bad.items()
            ),
            fix=tuple(Fix(node=node, command=command) for node in bad),
            would=_WOULD["checkpoint" if one.role == "checkpoint" else "other"],
            wrong_if="something else is removed there before the first checkpoint",
        )


_WOULD = {
    "checkpoint": "the job runs until the first checkpoint, then torch.save fails: "
    "'unexpected pos 640 vs 534'",
    "other": "compiling, downloading or spilling fails with 'No space left on device'",
}


def _verdict(folder: Folder, run: Run) -> tuple[Status, str] | None:
    """Return the status and what was wanted; None: enough, or `fs.hang` says what is known."""
    is_checkpoint = folder.role == "checkpoint"
    if folder.is_hung or folder.untold:
        return None
    if folder.error or not folder.is_directory:
        is_named = is_checkpoint or folder.role in ("data", "TMPDIR")
        is_stale = folder.error.startswith(("ESTALE", "EIO", "ENOTCONN", "EHOSTDOWN"))
        return ("fail", "a directory") if is_named and not is_stale else None
    wanted = run.options.checkpoint_gb * GB if is_checkpoint else 0.0
    if folder.free_bytes < wanted:
        return "fail", f"{run.options.checkpoint_gb:g} GB"
    if folder.role == "data" or folder.is_read_only:
        return None  # nothing is written there
    if folder.free_bytes < LEAST_BYTES:
        return "warn", f"{LEAST_BYTES / GB:g} GB"
    if folder.total_inodes and folder.free_inodes < LEAST_INODES:
        return "warn", "inodes"
    return None
