"""Storage: room, pace, locks, and one checkpoint directory for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote
from statistics import median
from typing import Literal

from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.comparing import compared, odd_ones
from rankscope.preflight.facts.caches import Cache
from rankscope.preflight.facts.storage import (
    HANG_LIMIT_S,
    SEE_SECONDS,
    WRITE_SECONDS,
    Folder,
    StorageFacts,
)
from rankscope.preflight.model import CheckFinding, Fix, Status

_STALE = ("ESTALE", "EIO", "ENOTCONN", "EHOSTDOWN")


class FsHang(BuiltinCheck, id="fs.hang"):
    """Every directory that the job uses answers: no stale handle, no hung mount.

    A process that touches a hung mount cannot even be killed.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where stat did not answer, or the handle is stale."""
        yield from self.not_measured(run, "storage")
        bad: dict[tuple[str, str], list[str]] = defaultdict(list)
        roles: dict[str, str] = {}
        not_read: dict[str, list[str]] = defaultdict(list)
        for node, storage in run.each(lambda facts: facts.storage).items():
            for folder in storage.folders:
                roles[folder.path] = folder.role
                if folder.not_known:
                    not_read[folder.not_known].append(node)
                elif folder.is_hung:
                    bad[folder.path, f"no answer in {HANG_LIMIT_S:g} s"].append(node)
                elif folder.error.startswith(_STALE):
                    bad[folder.path, folder.error].append(node)
        for reason, nodes in not_read.items():
            yield self.unknown(reason, at=dict.fromkeys(nodes))
        for (path, what), nodes in bad.items():
            yield self.fail(
                f"{path} ({roles[path]}) does not work: {what}",
                at=nodes,
                evidence={"path": path, "limit_s": HANG_LIMIT_S, "answer": what},
                lines=(f"{node}: stat {path}: {what}" for node in nodes),
                fix=on_each(
                    nodes,
                    f"findmnt -T {quote(path)}; sudo umount -fl {quote(path)}"
                    "   # then mount it again",
                    "admin",
                ),
                impact="the rank that touches it hangs in the kernel, and the others wait for it",
                unless="the file server was only slow at that moment: try again",
            )


GB = 10**9
LEAST_BYTES = GB  # a compiler cache, a spilled batch or a core file takes some 100 MB
LEAST_INODES = 1000  # a sharded checkpoint of 1,000 ranks is as many files


class FsFree(BuiltinCheck, id="fs.free"):
    """There is room for the checkpoint, for temporary files and for the model caches.

    The checkpoint directory is compared with --ckpt-gb; the others warn below 1 GB.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the checkpoint does not fit, warn where little is left."""
        yield from self.not_measured(run, "storage")
        found: dict[tuple[Status, str, str], dict[str, Folder]] = {}
        for node, storage in run.each(lambda facts: facts.storage).items():
            for folder in storage.folders:
                verdict = _shortage(folder, run)
                if verdict is not None:
                    found.setdefault((*verdict, folder.path), {})[node] = folder
        for (status, wanted, path), bad in found.items():
            yield self._finding(run, status, wanted, path, bad)

    def _finding(
        self, run: Run, status: Status, wanted: str, path: str, bad: dict[str, Folder]
    ) -> CheckFinding:
        least = min(bad.values(), key=lambda folder: folder.free_bytes)
        if least.error or not least.is_directory:
            what = least.error or "is no directory"
        elif wanted == "inodes":
            what = f"{least.free_inodes} inodes free, {LEAST_INODES} wanted"
        else:
            what = f"{least.free_bytes / GB:.1f} GB free, {wanted} wanted"
        if least.error.startswith("ENOENT"):
            fix = on_each(bad, f"mkdir -p {quote(path)}   # or mount what belongs there")
        else:
            fix = tuple(_room(node, folder, run) for node, folder in bad.items())
        return self.finding(
            status,
            f"{path} ({least.role}): {what}",
            at=bad,
            evidence={
                "path": path,
                "free_bytes": {node: folder.free_bytes for node, folder in bad.items()},
                "free_inodes": {node: folder.free_inodes for node, folder in bad.items()},
            },
            lines=(
                f"{node}: {folder.error or f'{folder.free_bytes / GB:.1f} GB free'}"
                f"{f' on {folder.mount_source}' if folder.mount_source else ''}"
                for node, folder in bad.items()
            ),
            fix=fix,
            impact="the job runs until the first checkpoint, then torch.save fails: "
            "'unexpected pos 640 vs 534'"
            if least.role == "checkpoint"
            else "compiling, downloading or spilling fails with 'No space left on device'",
            unless="something else is removed there before the first checkpoint",
        )


def _room(node: str, folder: Folder, run: Run) -> Fix:
    """Return what gives files of this role room: a directory of the node that has it."""
    storage = run.reports[node].facts.storage
    others = [
        other
        for other in (storage.folders if storage is not None else ())
        if other.is_directory and not other.error and not other.is_read_only
        and other.role not in ("data", "checkpoint") and other.free_bytes > 2 * LEAST_BYTES
    ]  # fmt: skip
    if folder.role.isupper() and others:  # the role is the variable
        best = max(others, key=lambda other: other.free_bytes)
        place = quote(f"{best.path}/{folder.role.lower()}")
        return Fix(node=node, command=f"mkdir -p {place} && export {folder.role}={place}")
    text = f"# make room at {quote(folder.path)} (du -xh -d1 shows what is there), or name another"
    return Fix(node=node, command=text)


def _shortage(folder: Folder, run: Run) -> tuple[Status, str] | None:
    """Return the status and what was wanted; None: enough, or `fs.hang` says what is known."""
    is_checkpoint = folder.role == "checkpoint"
    if folder.is_hung or folder.not_known:
        return None
    if folder.error or not folder.is_directory:
        is_named = is_checkpoint or folder.role in ("data", "TMPDIR")
        is_stale = folder.error.startswith(_STALE)
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


class FsCache(BuiltinCheck, id="fs.cache"):
    """What libraries download and compile can be written: HF_HOME, TORCH_HOME, HOME/.cache."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn on a place where a job would write by itself, and cannot."""
        yield from self.not_measured(run, "storage")
        closed = run.each(lambda facts: facts.storage)
        bad = {node: tuple(c for c in s.caches if c.closed) for node, s in closed.items()}
        groups: dict[tuple[Cache, ...], list[str]] = defaultdict(list)
        for node, caches in bad.items():
            if caches:
                groups[caches].append(node)
        for caches, nodes in groups.items():
            names = listed([cache.variable for cache in caches])
            yield self.warn(
                f"no cache can be written: {names} ({caches[0].closed})",
                at=nodes,
                evidence={cache.variable: cache.path for cache in caches},
                lines=(f"{cache.variable}: {cache.path}: {cache.closed}" for cache in caches),
                fix=(Fix(node=node, command=_move(run, node, caches)) for node in nodes),
                impact="downloads of models and data, or compiling, end with an error on the ranks "
                "there; the others wait for them",
                unless="the job loads and compiles nothing by these libraries, or all is there",
                confidence="likely",
            )


def _move(run: Run, node: str, caches: tuple[Cache, ...]) -> str:
    """Return the variables that lead to a place that can be written."""
    storage = run.reports[node].facts.storage
    temporary = storage.folder("TMPDIR") if storage is not None else None
    host = run.reports[node].facts.host
    base = "/tmp"
    if temporary is not None and temporary.is_writable:
        base = temporary.path
    place = f"{base.rstrip('/')}/cache-{host.user if host is not None else 'job'}"
    moved = {}
    for cache in caches:
        if cache.variable == "TMPDIR":
            moved["TMPDIR"] = "/tmp"
        elif cache.is_set or cache.variable.startswith("TRITON"):
            moved[cache.variable] = f"{place}/{cache.variable.partition('_')[0].lower()}"
        else:
            moved["XDG_CACHE_HOME"] = place
    words = (f"{name}={quote(value)}" for name, value in moved.items())
    return f"export {' '.join(words)}"


class FsShared(BuiltinCheck, id="fs.shared", scope="all", needs=("peers", "checkpoint-dir")):
    """Every node sees in the checkpoint directory what the others wrote there.

    Each node writes a small file and reads those of all others. Seen one way is proof enough: a
    directory that is shared is shared both ways.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where a node's directory is not that of the others."""
        yield from self.not_measured(run, "storage")
        facts = run.each(lambda facts: facts.storage)
        able = {n: f for n, f in facts.items() if f.token and f.seen is not None}
        unable = {n: f for n, f in facts.items() if n not in able and _is_reachable(f)}
        if unable:
            reasons = {_why_not_shared(f) for f in unable.values()}
            yield self.unknown(
                f"not known if it is shared: {'; '.join(sorted(reasons))}", at=unable
            )
        groups = _groups(able)
        if len(groups) > 1:
            yield self._finding(run, groups, able)

    def _finding(
        self, run: Run, groups: list[list[str]], facts: dict[str, StorageFacts]
    ) -> CheckFinding:
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
        where_from = f", {source} as on the other nodes" if has_majority and ":" in source else ""
        text = (
            f"# mount the shared directory at {quote(path)}{where_from}: findmnt -T shows what is"
        )
        return self.fail(
            title,
            nodes=odd,
            evidence={"groups": groups, "mounts": where, "waited_s": SEE_SECONDS},
            lines=(
                f"{listed(group)}: {'see each other' if len(group) > 1 else 'sees only itself'}"
                f" ({where.get(group[0], 'mount unknown')})"
                for group in groups[:8]
            ),
            fix=on_each(odd, text, "admin"),
            impact="checkpoints are scattered: the job saves, and cannot resume, or rank 0 waits "
            "for files that never come",
            unless="each node is meant to keep its own part on a local disk",
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

    for node, storage in facts.items():
        for token in (storage.seen or {}).values():
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
        folder.not_known or (facts.has_checkpoint and folder.is_directory)
    )


def _why_not_shared(facts: StorageFacts) -> str:
    folder = facts.folder("checkpoint")
    reason = folder.not_known if folder is not None else ""
    late = "the files of the others were not looked for"
    return reason or facts.token_error or facts.seen_error or late


_NETWORK = tuple("nfs lustre gpfs ceph beegfs smb cifs 9p fuse wekafs panfs".split())
_ROLES: tuple[Literal["checkpoint", "data"], ...] = ("checkpoint", "data")


class FsSame(BuiltinCheck, id="fs.same", scope="all", needs=("peers",)):
    """The checkpoint and data directories are on the same kind of file system everywhere.

    The server's name may differ, for many are reached by several addresses.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where a mount is missing or is of another type or right."""
        yield from self.not_measured(run, "storage")
        for role in _ROLES:
            kinds: dict[str, str] = {}
            paths: set[str] = set()
            for node, storage in run.each(lambda facts: facts.storage).items():
                folder = storage.folder(role)
                if folder is None or not folder.file_system:
                    continue
                right = ", read-only" if folder.is_read_only else ""
                kinds[node] = f"{_kind(folder.file_system)}{right}"
                paths.add(folder.path)
            odd = odd_ones(kinds)
            if not odd:
                continue
            path = min(paths)
            yield self.warn(
                f"{path} ({role}) is on {kinds[odd[0]]}, not as elsewhere",
                at=odd,
                evidence={"file_systems": kinds},
                lines=compared(kinds),
                fix=on_each(odd, f"findmnt -T {quote(path)}", "admin"),
                impact="this node reads or writes other files than the others, or at another pace",
                unless="the nodes mount the same storage in different ways on purpose",
            )


def _kind(file_system: str) -> str:
    """Return the type; local disks of whatever format are one kind."""
    if file_system.startswith(_NETWORK):
        return file_system.rstrip("34")
    return "memory (tmpfs)" if file_system in ("tmpfs", "ramfs") else "a local disk"


MB = 10**6
SLOW_RATIO = 5.0  # against the median of the nodes: less is the weather of a shared file server
LEAST_NODES = 3  # of two, it cannot be said which is the slow one
# 100 MB/s is a disk of 2010: a faster one is not worth a warning, however fast the others are
FAST_ENOUGH_MB_PER_S = 100.0


class FsWrite(BuiltinCheck, id="fs.write", tier="default", needs=("checkpoint-dir",)):
    """The checkpoint directory takes 64 MB and an fsync on every node, at a like pace.

    Finds read-only mounts, quotas, and a node that writes five times slower than the others.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where nothing could be written, warn where it was slow."""
        yield from self.not_measured(run, "storage")
        errors: dict[str, list[str]] = {}
        speeds: dict[str, float] = {}
        stuck: list[str] = []
        not_tried: list[str] = []
        for node, storage in run.each(lambda facts: facts.storage).items():
            folder = storage.folder("checkpoint")
            if folder is None or folder.error or folder.is_hung:
                continue  # fs.hang and fs.free say so
            error, done = _write_error(storage, folder), storage.written
            if error:
                errors.setdefault(error, []).append(node)
            elif folder.not_known or done is None or done.not_known:
                not_tried.append(node)
            elif done.is_hung:
                stuck.append(node)
            elif done.elapsed_s > 0:
                speeds[node] = done.written_bytes / done.elapsed_s / MB
        yield from self.note("unknown", not_tried, "no time was found to write there")
        for error, nodes in errors.items():
            yield self._fails(run.options.checkpoint_dir, error, nodes)
        if stuck:
            yield self._stuck(run.options.checkpoint_dir, stuck)
        yield from self._slow(run.options.checkpoint_dir, speeds)

    def _fails(self, path: str, error: str, nodes: list[str]) -> CheckFinding:
        word = error.partition(":")[0]
        return self.fail(
            f"cannot write to {path}: {error}",
            at=nodes,
            evidence={"path": path, "error": error},
            lines=(f"{node}: {error}" for node in nodes),
            fix=on_each(
                nodes,
                _WRITE_COMMANDS.get(word, "ls -ld {path}; id; findmnt -T {path}").format(
                    path=quote(path)
                ),
                "you" if word in ("EDQUOT", "ENOSPC") else "admin",
            ),
            impact="the job runs until the first checkpoint, then fails there",
            unless="only other nodes write checkpoints",
        )

    def _stuck(self, path: str, nodes: list[str]) -> CheckFinding:
        limit_s = WRITE_SECONDS + HANG_LIMIT_S
        return self.warn(
            f"{path} did not take 64 MB and an fsync in {limit_s:g} s",
            at=nodes,
            evidence={"limit_s": limit_s},
            lines=(f"{node}: no answer in {limit_s:g} s" for node in nodes),
            fix=on_each(nodes, f"findmnt -T {quote(path)}; iostat -x 1 3", "admin"),
            impact="every checkpoint holds the job up, or hangs",
            unless="something else wrote there at that moment: measure again",
            confidence="likely",
        )

    def _slow(self, path: str, speeds: dict[str, float]) -> Iterator[CheckFinding]:
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
        yield self.warn(
            f"writes {min(slow.values()):.0f} MB/s to {path}, the others {usual:.0f} MB/s",
            at=slow,
            evidence={"mb_per_s": speeds, "median_mb_per_s": usual},
            lines=(f"{node}: {speed:.1f} MB/s with fsync" for node, speed in slow.items()),
            fix=on_each(slow, f"findmnt -T {quote(path)}; iostat -x 1 3", "admin"),
            impact="every checkpoint waits for this node",
            unless="something else wrote there at that moment: measure again",
            confidence="likely",
        )


_WRITE_COMMANDS = {
    "EROFS": "sudo mount -o remount,rw {path}   # findmnt -T {path} says why it is read-only",
    "EDQUOT": "quota -s; lfs quota -h {path} 2>/dev/null; du -sh {path}",
    "ENOSPC": "df -h {path}; df -i {path}",
}


def _write_error(storage: StorageFacts, folder: Folder) -> str:
    """Return why this node cannot write, if it cannot."""
    if not folder.is_directory:
        return ""  # fs.free says so
    if folder.is_read_only:
        return "EROFS: Read-only file system"
    if storage.token_error:
        return storage.token_error
    done = storage.written
    return "" if done is None or done.is_hung else done.error


class FsLock(BuiltinCheck, id="fs.lock", tier="default", needs=("checkpoint-dir",)):
    """Files in the checkpoint directory can be locked, by flock and by fcntl.

    Dataset caches and file stores lock; without a lock service they fail, or wait for ever.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where a lock is refused or never granted."""
        yield from self.not_measured(run, "storage")
        path = run.options.checkpoint_dir
        bad: dict[str, list[str]] = {}
        not_tried: list[str] = []
        locks = run.each(lambda facts: facts.storage.locked if facts.storage else None)
        for node, locked in locks.items():
            if locked.not_known or (locked.error and not locked.is_hung):
                not_tried.append(node)
            elif locked.is_hung:
                bad.setdefault(f"no lock in {HANG_LIMIT_S:g} s", []).append(node)
            else:
                words = [f"flock {locked.flock}", f"fcntl {locked.fcntl}"]
                what = "; ".join(word for word in words if len(word.split()) > 1)
                if what:
                    bad.setdefault(what, []).append(node)
        for what, nodes in bad.items():
            yield self.warn(
                f"files in {path} cannot be locked: {what}",
                at=nodes,
                evidence={"path": path, "error": what},
                lines=(f"{node}: {what}" for node in nodes),
                fix=on_each(
                    nodes,
                    f"findmnt -T {quote(path)}   # NFS 3: start rpc-statd; Lustre: "
                    "mount with -o flock",
                    "admin",
                ),
                impact="dataset caches and file:// rendezvous fail with a lock error, or hang",
                unless="nothing in the job locks files there",
            )
        yield from self.note("unknown", not_tried, "the file to be locked could not be made")
