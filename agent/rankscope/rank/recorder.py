"""The recorder: what the hooks of one training process write, and nothing else.

It owns the two rings and the journal of this rank. No socket, no thread, no lock: the hot path
is a few writes to a mapped file.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rankscope.files import journal, ring
from rankscope.files.identity import RankIdentity
from rankscope.files.run_directory import COLLECTIVES_RING, STEPS_RING, make_private
from rankscope.rank.backward_wait import BackwardWait
from rankscope.rank.group import Group, GroupMade, backend_of
from rankscope.settings import Settings
from rankscope.wire import schema
from rankscope.wire.thinning import is_thinned

_BODY = struct.Struct("<" + "".join(code for _, _, code in ring.COLLECTIVE_FIELDS[1:]))
# in words of 8 bytes, of a slot or the header
_ARRIVED = ring.field_offset(ring.COLLECTIVE_FIELDS, "arrived_ns") // 8
_RETURNED = ring.field_offset(ring.COLLECTIVE_FIELDS, "returned_ns") // 8
_ENDED = ring.field_offset(ring.COLLECTIVE_FIELDS, "ended_ns") // 8
_BLOCKED = ring.field_offset(ring.COLLECTIVE_FIELDS, "blocked_ns") // 8
_HEAD, _HEARTBEAT = ring.HEAD_AT // 8, ring.HEARTBEAT_AT // 8
_THREAD_BLOCKED, _LATEST_END = ring.BLOCKED_AT // 8, ring.LATEST_END_AT // 8
_ENGINE_SITE, _STEP = ring.ENGINE_SITE_AT // 8, ring.STEP_AT // 8
_PHASE_SINCE = ring.PHASE_SINCE_AT // 8
_ENGINE_NUMBER, _ENGINE_ARRIVED = ring.ENGINE_NUMBER_AT // 8, ring.ENGINE_ARRIVED_AT // 8
_STATE_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "state")
_FLAGS_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "flags")
_ENDED_BY_AT = ring.field_offset(ring.COLLECTIVE_FIELDS, "ended_by")
_BY_WAIT = schema.ENDED_BY.index("wait")
_BY_ERROR = schema.ENDED_BY.index("error")
_HEADER_BYTES, _SLOT_BYTES = ring.HEADER_BYTES, ring.COLLECTIVE_SLOT.size
MAX_CALL_SITES = 50_000
# Calls between two readings of our own CPU time: a prime, so that the calls measured fall on
# recorded and on thinned steps alike, whatever number of them a step has.
MEASURE_EVERY = 17
_pack_body = _BODY.pack_into
get_ident = threading.get_ident
_now = time.monotonic_ns


class Recorder:
    """The rings and the journal of one rank. Made once; `disown` in a forked child."""

    def __init__(self, directory: Path, identity: RankIdentity, settings: Settings) -> None:
        make_private(directory)
        self.directory = directory
        self.identity = identity
        self.active = True
        self.step = 1
        self._num_at_step = 0
        # collectives that were not seen one by one: `hooks.collectives.outside`
        self.num_outside = 0
        self.outside_in_step: Callable[[], int] | None = None
        self.step_begins: Callable[[], None] | None = None
        self.waits_unknown = False  # in the step in progress
        self.on_group: Callable[[GroupMade], None] = lambda made: None
        self.journal = journal.JournalWriter(directory)
        self.call_sites = CallSites(self.journal)
        self._ring = self._open_ring(
            COLLECTIVES_RING, ring.COLLECTIVE_SLOT.size, settings.collective_slots
        )
        self._steps = self._open_ring(STEPS_RING, ring.STEP_SLOT.size, settings.step_slots)
        self._num_slots = self._ring.num_slots
        self._threads: dict[int, int] = {}
        self._numbers = itertools.count(self._ring.begun)
        self._groups_by_id: dict[int, Group] = {}
        self._worlds = 0
        self._members: tuple[int, ...] = ()  # of the default group, where it is not of all ranks
        self._instances: dict[tuple[int, str], int] = {}
        self._group_lock = threading.Lock()
        self._is_alone = False
        self.thinning = 0
        self.buffer = self._ring.buffer
        self._words = self._ring.words
        self.costs = OwnCosts(self._ring)
        self.backward = BackwardWait(self._ring)

    def _open_ring(self, name: str, slot_bytes: int, num_slots: int) -> ring.RingWriter:
        who = self.identity
        return ring.RingWriter(
            self.directory / name,
            slot_bytes,
            num_slots,
            attempt=who.attempt,
            rank=who.rank,
            world_size=who.world_size,
            local_rank=who.local_rank,
        )

    def disown(self) -> None:
        """Stop writing: this is a forked child, the files belong to the parent."""
        self.active = False

    # --- collectives ---------------------------------------------------------------------

    def issued(
        self,
        operation: int,
        group: Group,
        sequence: int,
        input_bytes: int,
        output_bytes: int,
        dtype: int,
        num_tensors: int,
        peer_rank: int,
        reduce_op: int,
        flags: int,
        call_site: int,
        issued_by: int,
    ) -> int:
        """Record that a collective was entered; return its slot number, the token."""
        number = next(self._numbers)
        at = _HEADER_BYTES + number % self._num_slots * _SLOT_BYTES
        words, word = self._words, at >> 3
        thread = self._threads.get(get_ident()) or self._native_id()
        words[word] = 0
        arrived = _now()
        _pack_body(
            self.buffer, at + 8, arrived, 0, 0, 0, input_bytes, output_bytes, 0, sequence,
            self.step, thread, peer_rank, call_site, group.index,
            num_tensors if num_tensors < 65536 else 65535, operation,
            schema.ISSUED, dtype, flags, reduce_op, issued_by, 0, 0,
        )  # fmt: skip
        words[word] = words[_HEAD] = number + 1
        words[_HEARTBEAT] = arrived
        return number

    def _native_id(self) -> int:
        native = self._threads[get_ident()] = threading.get_native_id()  # a system call
        return native

    def returned(self, number: int) -> None:
        """Record that the call of a collective came back (it may still run)."""
        at = _HEADER_BYTES + number % self._num_slots * _SLOT_BYTES
        words, word = self._words, at >> 3
        if words[word] == number + 1:
            words[word + _RETURNED] = words[_HEARTBEAT] = _now()
            if self.buffer[at + _STATE_AT] == schema.ISSUED:
                self.buffer[at + _STATE_AT] = schema.RETURNED

    def failed(self, number: int) -> None:
        """Record that a collective raised."""
        self._finish(number, schema.FAILED, 0, _BY_ERROR)

    def ended(self, number: int, flags: int, ended_by: int) -> None:
        """Record that a collective ended; only the first end counts."""
        self._finish(number, schema.ENDED, flags, ended_by)

    def _finish(self, number: int, state: int, flags: int, ended_by: int) -> None:
        at = _HEADER_BYTES + number % self._num_slots * _SLOT_BYTES
        buffer, words, word = self.buffer, self._words, at >> 3
        if not self.active or words[word] != number + 1 or buffer[at + _STATE_AT] >= schema.ENDED:
            return
        words[word + _ENDED] = words[_LATEST_END] = _now()
        buffer[at + _FLAGS_AT] |= flags
        buffer[at + _ENDED_BY_AT] = ended_by
        buffer[at + _STATE_AT] = state

    def waited(self, number: int, duration_ns: int, is_end: bool, in_training: bool) -> None:
        """Record a wait in Python for a collective, which ends it or not, and of which thread.

        The end is written as in `_finish`, without the calls: each synchronous collective pays.
        """
        at = _HEADER_BYTES + number % self._num_slots * _SLOT_BYTES
        buffer, words, word = self.buffer, self._words, at >> 3
        if words[word] == number + 1:
            if is_end and buffer[at + _STATE_AT] < schema.ENDED and self.active:
                words[word + _ENDED] = words[_LATEST_END] = _now()
                buffer[at + _FLAGS_AT] |= schema.FLAG_END_FROM_WAIT
                buffer[at + _ENDED_BY_AT] = _BY_WAIT
                buffer[at + _STATE_AT] = schema.ENDED
            words[word + _BLOCKED] += duration_ns
        if in_training:
            words[_THREAD_BLOCKED] += duration_ns

    def blocked(self, number: int, duration_ns: int) -> None:
        """Add time for which the caller was blocked waiting for a collective."""
        word = self._ring.offset(number) >> 3
        if self._words[word] == number + 1:
            self._words[word + _BLOCKED] += duration_ns

    # --- groups ----------------------------------------------------------------------------

    @property
    def num_collectives(self) -> int:
        """Number of collectives so far, without those of `outside_in_step`."""
        return self.num_issued + self.num_outside

    @property
    def num_issued(self) -> int:
        """Number of slots begun so far."""
        return self._words[_HEAD]

    @property
    def collectives_in_step(self) -> int:
        """Number of collectives since `begin_step`."""
        seen: int = self._words[_HEAD] + self.num_outside - self._num_at_step
        return seen if self.outside_in_step is None else seen + self.outside_in_step()

    @property
    def callers(self) -> Collection[int]:
        """Identities of the threads that ever called a collective."""
        return self._threads.keys()

    def thread_blocked(self, duration_ns: int) -> None:
        """Add time for which the training thread was blocked; the step clock takes it."""
        self._words[_THREAD_BLOCKED] += duration_ns

    @property
    def thread_blocked_ns(self) -> int:
        """Time for which the training thread was blocked in waits, ever."""
        return self._words[_THREAD_BLOCKED]

    # --- thinning, and the backward pass -------------------------------------------------

    def leave_thinned(self) -> None:
        """Thin the step in progress, though it should be whole: it cannot be."""
        self.buffer[ring.THINNED_AT] = True

    def thin(self, level: int) -> None:
        """Put a level of thinning in force, from the step in progress on."""
        self.thinning = level
        self.buffer[ring.THINNING_AT] = level
        self.buffer[ring.THINNED_AT] = is_thinned(self.step, level)

    @property
    def is_thinned(self) -> bool:
        """Whether the collectives of the step in progress are only counted."""
        return bool(self.buffer[ring.THINNED_AT])

    @property
    def step_flags(self) -> int:
        """Flags of the step in progress that say how much of it is recorded."""
        if self.waits_unknown:
            return schema.STEP_THINNED | schema.STEP_WAITS_UNKNOWN
        return schema.STEP_THINNED if self.buffer[ring.THINNED_AT] else 0

    def engine_site(self) -> int:
        """Return the call site of this backward pass, -1 if it was not looked up yet."""
        return self._words[_ENGINE_SITE] - 1

    def set_engine_site(self, call_site: int) -> None:
        """Keep the call site of this backward pass."""
        self._words[_ENGINE_SITE] = call_site + 1

    def engine_issued(self, number: int) -> None:
        """Remember that the autograd engine itself called this collective (DDP's reducer)."""
        words = self._words
        words[_ENGINE_ARRIVED] = words[(self._ring.offset(number) >> 3) + _ARRIVED]
        words[_ENGINE_NUMBER] = number + 1

    def group(self, process_group: Any) -> Group:
        """Return the record of a process group, defining it at its first use.

        A world that is destroyed and made again reuses its names: the number of the world, which
        all ranks count alike, is part of the label.
        """
        known = self._groups_by_id.get(id(process_group))
        if known is not None and known.reference() is process_group:
            return known
        with self._group_lock:
            return self._define(process_group.group_name, process_group)

    def has_group(self, process_group: Any) -> bool:
        """Return whether a process group was used."""
        known = self._groups_by_id.get(id(process_group))
        return known is not None and known.reference() is process_group

    def _define(self, name: str, process_group: Any) -> Group:
        known = self._groups_by_id.get(id(process_group))
        if known is not None and known.reference() is process_group:
            return known  # another thread was faster
        import torch.distributed as dist

        world = max(1, self._worlds)
        instance = self._instances[world, name] = self._instances.get((world, name), 0) + 1
        label = name if world == 1 else f"{name}#{world}"
        if instance > 1:
            label = f"{label}.{instance}"
        if self._is_alone:
            label = f"{label}@{self.identity.rank}"
        ranks = [int(rank) for rank in dist.get_process_group_ranks(process_group)]
        if self._members:
            ranks = [self._members[rank] for rank in ranks]
        backend = backend_of(process_group)
        group = Group(sum(self._instances.values()), label, ranks, weakref.ref(process_group))
        index = journal.INDEXED.pack(group.index)
        self.journal.append(journal.GROUP, index + label.encode(errors="replace"), urgent=True)
        self.record(
            schema.GroupDefined(
                **self.here(),
                group=label,
                ranks=[self.identity.rank] if self._is_alone else ranks,
                backend=backend,
                description=str(getattr(process_group, "group_desc", "")),
            ),
            urgent=True,
        )
        self._groups_by_id[id(process_group)] = group
        self.on_group(GroupMade(backend, label, process_group))
        return group

    def world_made(self) -> None:
        """Count a default group: the names of groups begin anew with it."""
        self._worlds += 1

    def regrouped(self, epoch: int, members: Sequence[int]) -> None:
        """The next default group is number `epoch`, of these ranks of the run in its order."""
        self._worlds, self._members = epoch - 1, tuple(members)

    def forget_groups(self) -> None:
        """Go on under new names that no peer has: from here on the sequences differ."""
        with self._group_lock:
            self._is_alone = True
            self._groups_by_id.clear()

    # --- steps ---------------------------------------------------------------------------

    @property
    def rings(self) -> tuple[ring.RingWriter, ring.RingWriter]:
        """The rings of collectives and of steps; the step clock writes into both."""
        return self._ring, self._steps

    def set_training_thread(self, native_id: int) -> None:
        """Publish which thread trains: the waits of that one are the step's."""
        self._words[ring.TRAINING_THREAD_AT // 8] = native_id

    def set_phase(self, phase: int, since_ns: int) -> None:
        """Publish where the rank is."""
        words = self._words
        words[_PHASE_SINCE] = words[_HEARTBEAT] = since_ns
        self.buffer[ring.PHASE_AT] = phase

    def begin_step(self, step: int) -> None:
        """Publish the number of the step that begins."""
        self.step = step
        if self.step_begins is not None:
            self.step_begins()
        words = self._words
        self._num_at_step = words[_HEAD] + self.num_outside
        words[_STEP] = step
        self.buffer[ring.THINNED_AT] = self.thinning > 0 and is_thinned(step, self.thinning)

    # --- journal and header --------------------------------------------------------------

    def here(self) -> dict[str, Any]:
        """Return attempt, rank and time, as every record carries them."""
        who = self.identity
        return {"attempt": who.attempt, "rank": who.rank, "time_ns": time.time_ns()}

    def record(self, record: schema.Record, *, urgent: bool = False) -> None:
        """Append a record of the wire to the journal."""
        if self.active and not self.journal.append(
            journal.RECORD, schema.encode(record), urgent=urgent
        ):
            self.count_drop("journal full")

    def count_drop(self, reason: str) -> None:
        """Count something lost, by reason."""
        self._ring.add(ring.DROPPED_AT + 8 * ring.DROP_REASONS.index(reason))

    def set_stack_signal(self, number: int) -> None:
        """Allow the collector to send this signal for stacks; 0 forbids it."""
        self.buffer[ring.STACK_SIGNAL_AT] = number

    @property
    def has_ended(self) -> bool:
        """Whether the process has said how it ends."""
        return bool(self.buffer[ring.ENDED_AT] != ring.RUNNING)

    def end(self, how: int) -> None:
        """Say how the process ends; an exception is not overwritten by the clean exit after it."""
        if self.active and self.buffer[ring.ENDED_AT] == ring.RUNNING:
            self.buffer[ring.ENDED_AT] = how


class OwnCosts:
    """CPU time inside our own code; C++ sources add theirs in the same places."""

    def __init__(self, writer: ring.RingWriter) -> None:
        self._ring = writer

    def of_calls(self, *, thinned: bool = False) -> tuple[int, int]:
        """Return (CPU ns, calls) of the collectives that were measured."""
        return self._pair(ring.OWN_THINNED_NS_AT if thinned else ring.OWN_NS_AT)

    def add_call(self, cpu_ns: int) -> None:
        """Add the measured cost of recording one collective."""
        is_thinned = self._ring.buffer[ring.THINNED_AT]
        self._add(ring.OWN_THINNED_NS_AT if is_thinned else ring.OWN_NS_AT, cpu_ns)

    def of_switches(self) -> tuple[int, int]:
        """Return (CPU ns, times) of taking kernels out of the dispatcher and putting them in."""
        return self._pair(ring.OWN_SWITCH_NS_AT)

    def add_switch(self, cpu_ns: int) -> None:
        """Add what it took to take them out, or to put them in."""
        self._add(ring.OWN_SWITCH_NS_AT, cpu_ns)

    def _pair(self, at: int) -> tuple[int, int]:
        amount, times = (
            ring.U64.unpack_from(self._ring.buffer, where)[0] for where in (at, at + 8)
        )
        return amount, times

    def _add(self, at: int, cpu_ns: int) -> None:
        self._ring.add(at, cpu_ns)
        self._ring.add(at + 8)


class CallSites:
    """The places in the user's code that call collectives, numbered in the journal at their first.

    `known` is looked up for each collective.
    """

    def __init__(self, writer: journal.JournalWriter) -> None:
        self._journal = writer
        self._by_line: dict[tuple[CodeType, int], int] = {}
        # (id of the code, place of the instruction) -> number: to find the line of an instruction
        # takes Python time, and so does the hash of a code object. The code is kept for its id.
        self.known: dict[tuple[int, int], tuple[int, CodeType]] = {}

    def of_frame(self, frame: FrameType) -> int:
        """Return the number of the line of a frame, known from then on; 0: there are too many."""
        code = frame.f_code
        number = self.of_line(code, frame.f_lineno)
        if number and len(self.known) < MAX_CALL_SITES:
            self.known[id(code), frame.f_lasti] = number, code
        return number

    def of_line(self, code: CodeType, line: int) -> int:
        """Return the number of a line, 0 when there are too many."""
        number = self._by_line.get((code, line))
        if number is None:
            if len(self._by_line) >= MAX_CALL_SITES:
                return 0
            number = self._by_line[code, line] = len(self._by_line) + 1
            text = f"{code.co_filename}:{line} {code.co_name}"
            self._journal.append(
                journal.CALL_SITE,
                journal.INDEXED.pack(number) + text.encode(errors="replace"),
                urgent=True,
            )
        return number
