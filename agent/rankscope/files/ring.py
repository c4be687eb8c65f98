"""The ring: fixed slots in a memory-mapped file, written by a rank, read by the node collector.

The pages belong to the kernel, so what was written survives SIGKILL, abort and a rank that holds
the interpreter lock for ever. One writer process (any of its threads), any number of readers, no
lock: a slot's `number` is written last and is the commit mark. Times are `time.monotonic_ns`,
common to all processes of a host; the header carries a (monotonic, wall) pair to convert them.

The writer holds a shared `flock` on the file for as long as it, or a process that it forked, lives:
so a reader in another pid namespace, which cannot see the process, knows whether it is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

from rankscope.process.family import process_start_ticks

MAGIC = b"RSCRING1"
LAYOUT_VERSION = 2
HEADER_BYTES = 4096
MIN_SLOTS = 1024

# --- header ---------------------------------------------------------------------------------
# magic, layout_version, slot_bytes, num_slots, pid, attempt, rank, world_size, local_rank, pad,
# pid_start_ticks, boot_id
IDENTITY = struct.Struct("<8sHHIIIIIIIQ16s")
HEAD_AT = 64  # u64: slots ever begun
HEARTBEAT_AT = 72  # u64: monotonic ns of the last hook
STEP_AT = 80  # u64
PHASE_SINCE_AT = 88  # u64: monotonic ns
PHASE_AT = 96  # u8: index into schema.PHASES
STACK_SIGNAL_AT = 97  # u8: 0 = not registered, no signal is sent then
ENDED_AT = 98  # u8: one of RUNNING, CLEAN, EXCEPTION, UNLOADED, FINISHED
CLOCK_AT = 104  # u64 version (odd = being written), u64 monotonic ns, u64 wall ns
DROPPED_AT = 128  # 8 x u64, by reason: DROP_REASONS
HOOK_ERRORS_AT = 192  # u64
# What the sources of collectives, in Python or C++, and the step clock read of each other:
BLOCKED_AT = 200  # u64: ns for which the training thread was blocked in waits, ever
LATEST_END_AT = 208  # u64: monotonic ns of the latest end of a collective
ENGINE_NUMBER_AT = 216  # u64: slot number + 1 of the last collective that autograd called, 0 none
ENGINE_ARRIVED_AT = 224  # u64: its arrival, monotonic ns
ENGINE_SITE_AT = 232  # u64: call site of this backward pass + 1, 0 = not looked up yet
OWN_NS_AT = 240  # u64: CPU ns inside our own code, of the calls that were measured
OWN_CALLS_AT = 248  # u64, just behind: how many calls were measured
THINNED_AT = 257  # u8: 1 = the step in progress is thinned: collectives are counted, no ends
THINNING_WANTED_AT = 258  # u8: level that this rank needs to keep its budget
THINNING_AT = 259  # u8: level in force: 0 all, 1 no call sites, 2, 3, 4 ... one step in 2, 4, 8 ...
THINNING_ASKED_AT = 260  # u8: level that a server which does not keep up asks for, 0 none
IS_LOCKED_AT = 261  # u8: 1 = the writer holds a lock on this file
OWN_THINNED_NS_AT = 264  # u64: as OWN_NS_AT, of calls in thinned steps
OWN_THINNED_CALLS_AT = 272  # u64, just behind
OWN_SWITCH_NS_AT = 280  # u64: CPU ns of taking kernels out for thinned steps, and putting them in
OWN_SWITCHES_AT = 288  # u64, just behind: how often
TRAINING_THREAD_AT = 296  # u64: native id of the thread that trains
PID_NAMESPACE_AT = 304  # u64: inode of the namespace that the pid is of, 0 unknown
RUNNING, CLEAN, EXCEPTION, UNLOADED = 0, 1, 2, 3
FINISHED = 4  # training is over: what ends the process then is no failure
DROP_REASONS: tuple[str, ...] = (
    "overwritten", "disk full", "journal full", "hook failed", "too many alike",
)  # fmt: skip

U64 = struct.Struct("<Q")
_CLOCK = struct.Struct("<QQQ")

# --- slots: (name, numpy type, struct code); both forms below come from these tables -----------
COLLECTIVE_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("number", "<u8", "Q"),  # slot number + 1, written last
    ("arrived_ns", "<u8", "Q"),  # the call was entered; monotonic
    ("started_ns", "<u8", "Q"),  # the backend began to work on it; 0 = unknown
    ("returned_ns", "<u8", "Q"),  # the call came back; 0 = not yet
    ("ended_ns", "<u8", "Q"),  # 0 = not yet or unknown
    ("input_bytes", "<u8", "Q"),  # of the tensors that this rank hands in
    ("output_bytes", "<u8", "Q"),  # of the tensors that receive the result here
    ("blocked_ns", "<u8", "Q"),  # time its issuer was blocked in Work.wait for it
    ("sequence", "<u4", "I"),
    ("step", "<u4", "I"),
    ("thread_id", "<u4", "I"),
    ("peer_rank", "<i4", "i"),  # global rank of root or peer, -1 none
    ("call_site", "<u4", "I"),  # index into the journal's call sites, 0 none
    ("group_id", "<u2", "H"),  # index into the journal's groups
    ("num_tensors", "<u2", "H"),
    ("operation", "u1", "B"),  # index into schema.OPERATIONS
    ("state", "u1", "B"),
    ("dtype", "u1", "B"),
    ("flags", "u1", "B"),
    ("reduce_op", "u1", "B"),  # index into schema.REDUCE_OPS
    ("issued_by", "u1", "B"),  # index into schema.ISSUED_BY
    ("ended_by", "u1", "B"),  # index into schema.ENDED_BY
    ("reserved", "u1", "B"),
)
STEP_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("number", "<u8", "Q"),
    ("started_ns", "<u8", "Q"),  # monotonic
    ("ended_ns", "<u8", "Q"),
    *((f"{phase}_ns", "<u8", "Q") for phase in (
        "other", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation",
    )),
    *((f"{phase}_blocked_ns", "<u8", "Q") for phase in (
        "forward", "backward", "optimizer", "other",
    )),
    ("cpu_ns", "<u8", "Q"),  # CPU time of the main thread
    ("process_cpu_ns", "<u8", "Q"),  # CPU time of all threads of the process
    ("gc_ns", "<u8", "Q"),  # pauses of the garbage collector in the main thread
    ("copy_ns", "<u8", "Q"),  # main thread inside copies from host to device
    ("step", "<u4", "I"),
    ("microbatches", "<u4", "I"),
    ("num_collectives", "<u4", "I"),
    ("flags", "<u4", "I"),
    # of the main thread, as the kernel counts them
    ("minor_faults", "<u4", "I"),
    ("major_faults", "<u4", "I"),
    ("voluntary_switches", "<u4", "I"),
    ("involuntary_switches", "<u4", "I"),
)  # fmt: skip


def slot_struct(fields: tuple[tuple[str, str, str], ...]) -> struct.Struct:
    """Return the packed form of a slot."""
    return struct.Struct("<" + "".join(code for _, _, code in fields))


def field_offset(fields: tuple[tuple[str, str, str], ...], name: str) -> int:
    """Return the byte offset of a field within its slot."""
    before = [code for _, _, code in fields[: [field[0] for field in fields].index(name)]]
    return struct.calcsize("<" + "".join(before))


COLLECTIVE_SLOT = slot_struct(COLLECTIVE_FIELDS)
STEP_SLOT = slot_struct(STEP_FIELDS)


class RingFull(OSError):
    """No room for even the smallest ring; the message names the directory."""


class RingWriter:
    """Owns one ring file. `buffer` is written in place by the recorder's hot path.

    Raises RingFull where not even MIN_SLOTS fit. The file is allocated before it is mapped: a
    sparse file on a full file system would deliver SIGBUS to the training process.
    A process that replaced its program (exec) continues in the ring that it made before: `begun`
    is the number of slots that it had written.
    """

    def __init__(
        self,
        path: Path,
        slot_bytes: int,
        num_slots: int,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        local_rank: int,
    ) -> None:
        mine = _reopen(path, slot_bytes) if path.exists() else None
        descriptor, self.num_slots = mine or _allocate(path, slot_bytes, num_slots)
        try:
            self.buffer = mmap.mmap(descriptor, HEADER_BYTES + slot_bytes * self.num_slots)
            self.buffer[IS_LOCKED_AT] = _lock(descriptor, fcntl.LOCK_SH) is True  # the map keeps it
        finally:
            os.close(descriptor)
        # in words of 8 bytes and the machine's order, which is the ring's, as in the probe: to
        # index those is quicker than `struct`, and one is written at once
        self.words = memoryview(self.buffer).cast("Q")
        self.begun = self.words[HEAD_AT // 8]
        self.path = path
        self.slot_bytes = slot_bytes
        IDENTITY.pack_into(
            self.buffer, 0, b"\0" * 8, LAYOUT_VERSION, slot_bytes, self.num_slots, os.getpid(),
            attempt, rank, world_size, local_rank, 0, process_start_ticks(os.getpid()), boot_id(),
        )  # fmt: skip
        self.words[PID_NAMESPACE_AT // 8] = pid_namespace()
        self.renew_clock()
        self.buffer[0:8] = MAGIC  # last: a reader takes no half-made header

    def offset(self, number: int) -> int:
        """Return where slot `number` (counted from 0, for ever) begins."""
        return HEADER_BYTES + (number % self.num_slots) * self.slot_bytes

    def renew_clock(self) -> None:
        """Write a fresh (monotonic, wall) pair; readers convert times with it."""
        words, at = self.words, CLOCK_AT // 8
        version = words[at] | 1
        words[at] = version
        words[at + 1], words[at + 2] = time.monotonic_ns(), time.time_ns()
        words[at] = version + 1

    def add(self, at: int, amount: int = 1) -> None:
        """Add to a u64 counter of the header, for example one of the drop counts."""
        self.words[at // 8] += amount


def _allocate(path: Path, slot_bytes: int, num_slots: int) -> tuple[int, int]:
    while num_slots >= MIN_SLOTS:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + slot_bytes * num_slots)
        except OSError:
            os.close(descriptor)
            path.unlink()
            num_slots //= 2
            continue
        return descriptor, num_slots
    raise RingFull(f"no room for a ring of {MIN_SLOTS} slots in {path.parent}")


def _lock(descriptor: int, kind: int) -> bool | None:
    """Return whether a file is locked by this call; None where its file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_of_another(path: Path) -> bool:
    """Return whether an earlier process, whose number this one has again, made this ring."""
    try:
        with path.open("rb") as file:
            head = file.read(IDENTITY.size)
    except FileNotFoundError:
        return False
    if len(head) < IDENTITY.size:
        return True
    *_, ticks, boot = IDENTITY.unpack(head)
    return (ticks, boot) != (process_start_ticks(os.getpid()), boot_id())


def _reopen(path: Path, slot_bytes: int) -> tuple[int, int] | None:
    """Return descriptor and slots of a ring of this very process, None for any other file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    header = os.pread(descriptor, IDENTITY.size, 0)
    if len(header) == IDENTITY.size:
        magic, version, own_bytes, num_slots, pid, *_, ticks, boot = IDENTITY.unpack(header)
        whole = os.fstat(descriptor).st_size == HEADER_BYTES + slot_bytes * num_slots
        if (magic, version, own_bytes, pid, ticks, boot, whole) == (
            MAGIC, LAYOUT_VERSION, slot_bytes, os.getpid(), process_start_ticks(pid), boot_id(),
            True,
        ):  # fmt: skip
            return descriptor, num_slots
    os.close(descriptor)
    return None


def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the kernel, zeros where unknown."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.strip().replace("-", ""))


def pid_namespace() -> int:
    """Return the number of the namespace that this process's pid is of, 0 where unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class RingDamaged(ValueError):
    """The file is not a ring that this version can read; the message says why."""


class RingReader:
    """Read-only view of a ring file, for another process. Nothing in the file is trusted.

    Raises RingDamaged if the header is not of this layout, or its sizes do not fit the file.
    """

    def __init__(self, path: Path, fields: tuple[tuple[str, str, str], ...]) -> None:
        import numpy as np

        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES:
                raise RingDamaged(f"{path}: {size} bytes, shorter than a header")
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path = path
        self._dtype = np.dtype([(name, form) for name, form, _ in fields])
        (magic, version, slot_bytes, num_slots, self.pid, self.attempt, self.rank,
         self.world_size, self.local_rank, _, self.pid_start_ticks, self.boot_id,
        ) = IDENTITY.unpack_from(self.buffer, 0)  # fmt: skip
        if magic != MAGIC or version != LAYOUT_VERSION:
            raise RingDamaged(f"{path}: magic {magic!r}, layout {version}: not a ring of ours")
        if slot_bytes != self._dtype.itemsize or size != HEADER_BYTES + slot_bytes * num_slots:
            raise RingDamaged(f"{path}: {num_slots} slots of {slot_bytes} bytes in {size} bytes")
        self.num_slots = num_slots
        self._size = size
        self._slots: Any = np.frombuffer(self.buffer, self._dtype, num_slots, HEADER_BYTES)

    def check_size(self) -> None:
        """Raise RingDamaged for a file that was cut short: to touch what is gone is a SIGBUS."""
        size = self.buffer.size()  # of the file as it is now
        if size < self._size:
            raise RingDamaged(f"{self.path}: cut short from {self._size} to {size} bytes")

    def is_held(self) -> bool | None:
        """Return whether the writer, or a process that it forked, lives; None: that is not known.

        The writer must be of this boot: locks are the kernel's.
        """
        if not self.u8(IS_LOCKED_AT):
            return None
        try:
            with self.path.open("rb") as file:
                is_free = _lock(file.fileno(), fcntl.LOCK_EX)
        except OSError:
            return None
        return None if is_free is None else not is_free

    def u64(self, at: int) -> int:
        """Return a u64 of the header."""
        value: int = U64.unpack_from(self.buffer, at)[0]
        return value

    def u8(self, at: int) -> int:
        """Return a byte of the header."""
        return self.buffer[at]

    def clock(self) -> tuple[int, int]:
        """Return a consistent (monotonic ns, wall ns) pair."""
        for _ in range(100):
            version, monotonic, wall = _CLOCK.unpack_from(self.buffer, CLOCK_AT)
            if version % 2 == 0 and self.u64(CLOCK_AT) == version:
                break
        return monotonic, wall

    def read(self, numbers: Any) -> tuple[Any, Any]:
        """Copy the slots with these numbers (an int64 array, counted from 0).

        Returns (slots, state) of equal length. state is 1 where the slot is whole, 0 where it is
        not yet committed, -1 where a later event has overwritten it. Raises RingDamaged.
        """
        import numpy as np

        self.check_size()
        places = numbers % self.num_slots
        before = self._slots["number"][places].astype(np.int64)
        slots = self._slots[places]  # fancy indexing copies
        after = self._slots["number"][places].astype(np.int64)
        wanted = numbers + 1
        state = np.where((before == wanted) & (after == wanted), 1, 0)
        return slots, np.where((before > wanted) | (after > wanted), -1, state)
