"""Directories that the job reads and writes: room, speed, locks, and whether all nodes see one.

Everything that touches a file system happens in a child process with a limit of its own: on a
hung mount the child is left behind, and the fact says so.

What the others wrote can only be seen after they have: `collect` writes this node's file,
`see_others` reads those of all, `clean` removes ours.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rankscope.preflight.facts import caches, child, storage_child
from rankscope.preflight.facts.caches import Cache
from rankscope.preflight.system import System

if TYPE_CHECKING:
    from rankscope.preflight.options import Options

HANG_LIMIT_S = 3.0  # stat of a healthy mount takes milliseconds, of a busy one a second
SEE_SECONDS = 5.0  # listing asks an NFS server anew, which a busy one answers late
MAX_SEEN, NUM_FIRST, NUM_DRAWN = 64, 3, 8  # nodes; above, files are looked for by lot
WRITE_BYTES, WRITE_SECONDS = 64 << 20, 1.5
Role = Literal["checkpoint", "data", "TMPDIR", "HF_HOME", "TORCH_HOME"]


class Folder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One directory as this node sees it."""

    role: Role
    path: str
    error: str = ""  # "ENOENT: No such file or directory"
    is_hung: bool = False  # no answer in HANG_LIMIT_S, twice
    not_known: str = msgspec.field(
        default="", name="untold"
    )  # why nothing is known: this machine was too busy
    is_directory: bool = False
    is_writable: bool = False
    is_read_only: bool = False
    total_bytes: int = 0
    free_bytes: int = 0  # for this user
    total_inodes: int = 0  # 0: the file system does not count them
    free_inodes: int = 0
    inode: int = 0
    mounted_at: str = ""
    mount_source: str = ""  # "nas1:/export/home", "/dev/sda1"
    file_system: str = ""  # nfs4, lustre, ext4, overlay ...


class Written(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The test of writing in the checkpoint directory."""

    error: str = ""  # "EDQUOT: Disk quota exceeded"
    is_hung: bool = False
    not_known: str = msgspec.field(default="", name="untold")
    written_bytes: int = 0
    elapsed_s: float = 0.0  # with fsync


class Locked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The test of locks in the checkpoint directory; empty texts: both work."""

    error: str = ""
    is_hung: bool = False
    not_known: str = msgspec.field(default="", name="untold")
    flock: str = ""
    fcntl: str = ""


class StorageFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Directories that the job reads and writes."""

    folders: tuple[Folder, ...] = ()
    written: Written | None = None  # None: not tried
    locked: Locked | None = None
    token: str = ""  # what this node wrote for the others to find; empty: it could not
    token_error: str = ""
    seen: dict[str, str] | None = None  # node: token, as read here; None: not looked for yet
    seen_error: str = ""
    caches: tuple[Cache, ...] = ()

    def folder(self, role: Role) -> Folder | None:
        """Return the directory of a role; None if there is none."""
        return next((folder for folder in self.folders if folder.role == role), None)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint directory that answers."""
        found = self.folder("checkpoint")
        return found is not None and not (found.error or found.is_hung or found.not_known)


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_ANSWERS = msgspec.json.Decoder(dict[str, Any])


def collect(system: System, options: Options, run_id: str = "", node: str = "") -> StorageFacts:
    """Look at all directories side by side, and try the checkpoint directory; 0.2 to 3 s."""
    places = _places(system, options)
    with ThreadPoolExecutor(max(len(places), 1)) as pool:
        folders = tuple(pool.map(lambda place: _look(system, *place), places))
    facts = StorageFacts(folders=folders, caches=_caches(system))
    if not facts.has_checkpoint:
        return facts
    token, name = secrets.token_hex(8), _name(run_id, node)
    answer = _child(system, "put", options.checkpoint_dir, name, token)
    error = str(answer.get("error") or answer.get("not_known") or "")
    if not error:
        facts = msgspec.structs.replace(facts, token=token)
    facts = msgspec.structs.replace(facts, token_error=error)
    if options.tier == "quick" or error:
        return facts
    return msgspec.structs.replace(
        facts,
        written=_write(system, options.checkpoint_dir, name),
        locked=_lock(system, options.checkpoint_dir, name),
    )


def see_others(
    system: System, options: Options, run_id: str, expected: Sequence[str], facts: StorageFacts
) -> StorageFacts:
    """Return `facts` with what the other nodes' files say here; to be called when all collected.

    Ends as soon as all are seen, else after `SEE_SECONDS`. In a large job each node looks for the
    first nodes, whom all look for, and for a few others: so all that share one are connected.
    """
    if not facts.has_checkpoint:
        return facts
    names = {_name(run_id, node): node for node in _whom(expected, facts.token)}
    answer = _child(
        system, "see", options.checkpoint_dir, list(names), SEE_SECONDS,
        limit_s=SEE_SECONDS + 2, times=1,
    )  # fmt: skip
    if "found" not in answer:
        error = str(answer.get("error") or answer.get("not_known"))
        return msgspec.structs.replace(facts, seen_error=error)
    seen = {names[name]: token for name, token in answer["found"].items()}
    return msgspec.structs.replace(facts, seen=seen)


def _whom(expected: Sequence[str], token: str) -> Sequence[str]:
    """Return for whose files a node looks; its token is as good a lot as any."""
    if len(expected) <= MAX_SEEN:
        return expected
    drawn = random.Random(token).sample(expected, NUM_DRAWN)
    return list(dict.fromkeys([*expected[:NUM_FIRST], *drawn]))


def clean(system: System, options: Options, run_id: str, node: str) -> None:
    """Remove what this node wrote; always to be called, also after an interruption."""
    if options.checkpoint_dir:
        name = _name(run_id, node)
        names = [f"{name}{end}" for end in ("", ".new", ".write", ".lock")]
        _child(system, "clean", options.checkpoint_dir, names, times=1)


def fingerprint(system: System, folder: str, most: int, seconds: float) -> Mapping[str, Any]:
    """Return count, bytes and digest of the names and sizes below a directory, or an error."""
    return _child(system, "walk", folder, most, seconds, limit_s=seconds + HANG_LIMIT_S)


def _places(system: System, options: Options) -> list[tuple[Role, str]]:
    environ = system.environ
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    places: list[tuple[Role, str]] = [
        ("checkpoint", options.checkpoint_dir),
        ("data", options.data_dir),
        ("TMPDIR", environ.get("TMPDIR") or "/tmp"),
        ("HF_HOME", environ.get("HF_HOME") or f"{cache}/huggingface"),
        ("TORCH_HOME", environ.get("TORCH_HOME") or f"{cache}/torch"),
    ]
    return [(role, path) for role, path in places if path]


def _caches(system: System) -> tuple[Cache, ...]:
    """Return the caches of libraries, with why they cannot be written; none if a mount hangs."""
    found = tuple(caches.places(system))
    answer = _child(system, "can_write", [cache.path for cache in found], times=1)
    closed = answer.get("closed", {})
    return tuple(
        msgspec.structs.replace(cache, closed=closed[cache.path])
        for cache in found
        if cache.path in closed
    )


def _look(system: System, role: Role, path: str) -> Folder:
    answer = _child(system, "look", path)
    if "mounted_at" not in answer:
        return Folder(role=role, path=path, **answer)
    source, kind = _mounts(system).get(str(answer["mounted_at"]), ("", ""))
    return Folder(role=role, path=path, mount_source=source, file_system=kind, **answer)


def _mounts(system: System) -> dict[str, tuple[str, str]]:
    """Return source and type by mount point; the last mount on a point is the one that is seen."""
    found = {}
    for line in (system.read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) > 4 and len(rest) > 1:
            found[fields[4].replace("\\040", " ")] = (rest[1], rest[0])
    return found


def _write(system: System, folder: str, name: str) -> Written:
    answer = _child(
        system, "write", folder, f"{name}.write", WRITE_BYTES, WRITE_SECONDS,
        limit_s=WRITE_SECONDS + HANG_LIMIT_S, times=1,
    )  # fmt: skip
    return Written(**answer)


def _lock(system: System, folder: str, name: str) -> Locked:
    return Locked(**_child(system, "lock", folder, f"{name}.lock"))


def _name(run_id: str, node: str) -> str:
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in f"{run_id}-{node}")
    return f"{storage_child.PREFIX}{safe}"


def _child(
    system: System, work: str, *arguments: Any, limit_s: float = HANG_LIMIT_S, times: int = 2
) -> dict[str, Any]:
    """Return what the child prints, or its "error", with "is_hung", or why it is "not_known"."""
    argv = [sys.executable, "-I", "-S", str(Path(storage_child.__file__)), work]
    try:
        text = child.ask(system, [*argv, msgspec.json.encode(arguments).decode()], limit_s, times)
        return _ANSWERS.decode(text)
    except child.Hung as reason:
        return {"error": str(reason), "is_hung": True}
    except (child.NotKnown, msgspec.MsgspecError) as reason:
        return {"not_known": f"not known: {reason}"}
