"""What an agent would have sent of ranks whose Flight Recorder dumps are at hand.

A dump says for each group how far a rank has come (`pg_status`) and lists operations (`entries`).
It does not say when it was taken: PyTorch writes it when an operation has run into its time-out,
so the oldest open operation began that long before. It does not say either which number a group
without entries has; where the groups and the statuses are equally many they are in one order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.files.flight_recorder import Dump, FlightEntry, open_entries
from rankscope.importers.flight_dumps import newest_ns
from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope.wire.formulas import item_bytes

SOURCE = "Flight Recorder dump"
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_NUMBERS = re.compile(r"\d+")
# Names of torch's ProcessGroup classes, longest match first, and what we call the operation.
OPERATIONS = (
    ("all_reduce_barrier", "barrier"), ("barrier", "barrier"),
    ("allreduce_coalesced", "all_reduce_coalesced"), ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("allgather_into_tensor_coalesced", "all_gather_into_tensor_coalesced"),
    ("_all_gather_base", "all_gather_into_tensor"), ("_allgather_base", "all_gather_into_tensor"),
    ("all_gather", "all_gather"), ("allgather", "all_gather"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    ("_reduce_scatter_base", "reduce_scatter_tensor"), ("reduce_scatter", "reduce_scatter"),
    ("all_to_all", "all_to_all"), ("alltoall", "all_to_all"), ("broadcast", "broadcast"),
    ("gather", "gather"), ("scatter", "scatter"), ("reduce", "reduce"), ("send", "send"),
    ("recv", "recv"),
)  # fmt: skip


@dataclass(slots=True)
class Imported:
    """What the dumps of one run become; times are wall clock of the ranks' hosts."""

    world_size: int
    records: list[schema.Record] = field(default_factory=list)
    chunks: list[schema.Chunk] = field(default_factory=list)
    num_open: int = 0  # operations that did not end


def convert(dumps: Mapping[int, Dump], attempt: int = 0) -> Imported:
    """Return the records and chunks of a job of which these dumps are left, by rank."""
    members = _members(dumps)
    world_size = 1 + max(rank for ranks in (dumps, *members.values()) for rank in ranks)
    imported = Imported(world_size)
    now_ns = _taken_ns(dumps)
    for rank, dump in sorted(dumps.items()):
        _convert_rank(imported, rank, dump, members, attempt, now_ns)
    return imported


def label(name: str, description: str) -> str:
    """Return what a group is called: its description where it has one, and torch's name."""
    if description in ("", "undefined", "default_pg"):
        return name
    return f"{description} {name}"[:256]


def _convert_rank(
    imported: Imported, rank: int, dump: Dump, members: Mapping[str, tuple[int, ...]],
    attempt: int, now_ns: int,
) -> None:  # fmt: skip
    who: dict[str, Any] = {"attempt": attempt, "rank": rank, "time_ns": now_ns}
    backend = next((e.profiling_name.partition(":")[0] for e in dump.entries), "")
    first_ns = min((entry.time_created_ns for entry in dump.entries), default=now_ns)
    imported.records.append(
        schema.RankRegistered(
            **{**who, "time_ns": first_ns}, world_size=imported.world_size, local_rank=0,
            local_world_size=1, node_rank=-1, host="", pid=0, backend=backend,
            sources={"collectives": SOURCE},
        )
    )  # fmt: skip
    imported.records += [
        schema.GroupDefined(
            **who, group=group, ranks=list(ranks), backend=backend,
            description=group.rpartition(" ")[0],
        )
        for group, ranks in members.items()
        if rank in ranks
    ]  # fmt: skip
    waiting = open_entries(dump)
    imported.num_open += len(waiting)
    imported.records.append(
        schema.RankState(
            **who, step=0, phase="other", phase_since_ns=newest_ns(dump),
            heartbeat_ns=newest_ns(dump), groups=_groups(dump, waiting, members),
        )
    )  # fmt: skip
    chunk = _chunk(dump, waiting, members, attempt, rank)
    if chunk is not None:
        imported.chunks.append(chunk)


def _taken_ns(dumps: Mapping[int, Dump]) -> int:
    """Return when the dumps were taken, as early as they can have been."""
    newest = max(newest_ns(dump) for dump in dumps.values())
    waiting = [entry for dump in dumps.values() for entry in open_entries(dump)]
    ran_out = (entry.time_created_ns + entry.timeout_ms * 1_000_000 for entry in waiting)
    return max(newest, min(ran_out, default=0))


# --- groups ---------------------------------------------------------------------------------


def _members(dumps: Mapping[int, Dump]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group in group order; gloo lists none: those that used it."""
    listed: dict[str, tuple[int, ...]] = {}
    used: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, config in dump.pg_config.items():
            ranks = tuple(int(one) for one in _NUMBERS.findall(config.get("ranks", "")))
            if ranks and max(ranks) < schema.MAX_RANK:
                listed[label(name, config.get("desc", ""))] = ranks
        for entry in dump.entries:
            used.setdefault(label(*entry.process_group), set()).add(rank)
    return {group: tuple(sorted(ranks)) for group, ranks in used.items()} | listed


def _names(dump: Dump) -> dict[str, str]:
    """Return the group of each number in `pg_status`."""
    sure = {str(entry.pg_id): label(*entry.process_group) for entry in dump.entries}
    named = sorted(
        (name for name, config in dump.pg_config.items() if config.get("ranks", "[]") != "[]"),
        key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0),
    )
    numbers = sorted(dump.pg_status, key=int)
    if len(named) != len(numbers) or not all(name.isdigit() for name in named):
        return sure
    ordered = {
        number: label(name, dump.pg_config[name].get("desc", ""))
        for number, name in zip(numbers, named, strict=True)
    }
    return ordered if sure.items() <= ordered.items() else sure


def _groups(
    dump: Dump, waiting: list[FlightEntry], members: Mapping[str, tuple[int, ...]]
) -> list[schema.GroupState]:
    """Return how far a rank is in each of its groups."""
    entries: dict[str, list[FlightEntry]] = {}
    for entry in dump.entries:
        entries.setdefault(label(*entry.process_group), []).append(entry)
    status = {
        group: dump.pg_status[number]
        for number, group in _names(dump).items()
        if number in dump.pg_status
    }
    is_open = {entry.record_id for entry in waiting}
    return [
        _group(group, entries.get(group, []), status.get(group, {}), is_open, members[group])
        for group in dict.fromkeys([*status, *entries])
        if group in members
    ]


def _group(
    group: str,
    entries: list[FlightEntry],
    status: Mapping[str, str | int],
    is_open: set[int],
    ranks: tuple[int, ...],
) -> schema.GroupState:
    entries = sorted(entries, key=lambda entry: entry.record_id)
    collectives = [entry for entry in entries if not entry.is_p2p]
    exchanges = [entry for entry in entries if entry.is_p2p]
    waiting = [entry for entry in collectives if entry.record_id in is_open]
    # Of a group with exchanges the status counts these; each of them has the collectives, too.
    counts = {} if exchanges else status
    known = [entry.collective_seq_id for entry in entries]
    issued = max([_count(counts, "last_enqueued_collective"), *known])
    ended = _count(counts, "last_completed_collective") if counts else issued
    fields: dict[str, Any] = {}
    if waiting:
        first, last = waiting[0], collectives[-1]
        ended = min(ended, first.collective_seq_id - 1)
        fields = {
            "open_sequence": first.collective_seq_id,
            "open_operation": operation_of(first), "open_bytes": max(_sizes(first)),
            "open_ns": first.time_created_ns,
            "operation": operation_of(last), "size_bytes": max(_sizes(last)),
            "issued_ns": last.time_created_ns, "call_site": _call_site(last),
        }  # fmt: skip
    return schema.GroupState(
        group=group, issued=issued, ended=min(ended, issued), ends_are_known=True, **fields,
        **_exchanges([entry for entry in exchanges if entry.record_id in is_open], ranks),
    )  # fmt: skip


def _exchanges(waiting: list[FlightEntry], ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the oldest open exchange and how many are open with each peer in each direction.

    What has ended has ended on both sides, so the open ones of two ranks count alike from 1.
    """
    counts: dict[int, dict[str, int]] = {}
    first: dict[str, Any] = {}
    for entry in waiting:
        kind, peer = peer_of(entry, ranks)
        if peer < 0:
            continue
        count = counts.setdefault(peer, {"send": 0, "recv": 0})
        count[kind] += 1
        if not first:
            first = {
                "p2p_operation": kind, "p2p_peer": peer, "p2p_sequence": 1,
                "p2p_issued_ns": entry.time_created_ns,
            }  # fmt: skip
    peers = [
        schema.PeerState(peer=peer, sent=count["send"], received=count["recv"])
        for peer, count in counts.items()
    ]
    return {**first, "peers": peers}


def peer_of(entry: FlightEntry, ranks: tuple[int, ...]) -> tuple[str, int]:
    """Return (send or recv, global rank of the peer); -1 where the name does not have it."""
    match = _PEER.search(entry.profiling_name)
    if match is None or int(match[3]) >= len(ranks):
        return "", -1
    return match[1], ranks[int(match[3])]


# --- operations -----------------------------------------------------------------------------


def operation_of(entry: FlightEntry) -> str:
    """Return our name of an operation."""
    text = entry.profiling_name.partition(":")[2] or entry.profiling_name
    return next((ours for theirs, ours in OPERATIONS if theirs in text), "other")


def _chunk(
    dump: Dump, waiting: list[FlightEntry], members: Mapping[str, tuple[int, ...]], attempt: int,
    rank: int,
) -> schema.Chunk | None:  # fmt: skip
    entries = [entry for entry in dump.entries if not entry.ends_batch and entry.time_created_ns]
    if not entries:
        return None
    is_open = {entry.record_id for entry in waiting}
    sizes = [_sizes(entry) for entry in entries]
    arrived = np.array([entry.time_created_ns for entry in entries], np.int64)
    blank = np.full(len(entries), -1, np.int64)
    inputs, outputs = np.array(sizes, np.int64).T
    columns: dict[str, Column] = {name: blank for name in schema.COLLECTIVE_COLUMNS}
    columns |= {
        "arrived_ns": arrived,
        "started_ns": _since(arrived, (e.time_discovered_started_ns for e in entries)),
        "duration_ns": _since(arrived, (e.time_discovered_completed_ns for e in entries)),
        "device_duration_ns": np.array([int((e.duration_ms or -1e-6) * 1e6) for e in entries]),
        "blocked_ns": blank * 0,
        "step": blank * 0,
        # exchanges are counted per group here, not per peer: their sequence is not ours
        "sequence": np.array([0 if e.is_p2p else e.collective_seq_id for e in entries]),
        "size_bytes": np.maximum(inputs, outputs),
        "input_bytes": inputs,
        "output_bytes": outputs,
        "peer_rank": np.array(
            [peer_of(e, members.get(label(*e.process_group), ()))[1] for e in entries]
        ),
        "num_tensors": np.array([max(len(e.input_sizes), len(e.output_sizes)) for e in entries]),
        "state": np.array(
            [schema.ISSUED if e.record_id in is_open else schema.ENDED for e in entries]
        ),
        "flags": np.array([schema.FLAG_P2P if e.is_p2p else schema.FLAG_ASYNC for e in entries]),
        "group": [label(*e.process_group) for e in entries],
        "operation": [operation_of(e) for e in entries],
        "dtype": [_dtype(e.input_dtypes or e.output_dtypes) for e in entries],
        "reduce_op": [""] * len(entries),
        "call_site": [_call_site(e) for e in entries],
        "issued_by": [""] * len(entries),
        "ended_by": ["" if e.record_id in is_open else "flight recorder" for e in entries],
    }
    return schema.Chunk(
        kind="collectives", attempt=attempt, rank=rank, host="", count=len(entries),
        time_lo_ns=int(arrived.min()), time_hi_ns=int(arrived.max()), data=encode_chunk(columns),
    )  # fmt: skip


def _since(arrived: Any, times: Iterable[int | None]) -> Any:
    known = np.array([time or 0 for time in times], np.int64)
    return np.where(known >= arrived, known - arrived, -1)


def _sizes(entry: FlightEntry) -> tuple[int, int]:
    """Return the bytes of the inputs and of the outputs; -1 where they cannot be numbers."""
    return (
        _bytes(entry.input_sizes, entry.input_dtypes),
        _bytes(entry.output_sizes, entry.output_dtypes),
    )


def _bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    total = 0
    for place, shape in enumerate(sizes):
        dtype = _dtype(dtypes[place : place + 1] or dtypes[:1])
        total += math.prod(shape) * item_bytes(dtype)
    return total if 0 <= total < 1 << 61 else -1


def _dtype(names: list[str]) -> str:
    return schema.C10_DTYPES.get(names[0], "other") if names else "other"


def _call_site(entry: FlightEntry) -> str:
    """Return the innermost frame outside torch."""
    for frame in entry.frames:
        if "/torch/" not in frame.filename and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.line} {frame.name}"[:4096]
    return ""


def _count(status: Mapping[str, str | int], name: str) -> int:
    try:
        return min(max(int(status.get(name, 0)), 0), 1 << 61)
    except ValueError:
        return 0
