"""From slots of rings to chunks. Pure numpy; nothing in a slot is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import BLOCK_RANKS, Column, Words, encode_chunk, encode_ranks

MAX_EVENTS_OF_RANKS = 16_384  # of a chunk of several ranks: who reads one rank reads all of it
_MAX_NS = 1 << 61  # what the server takes, with room for sums
_FUTURE_NS = 3600 * 10**9
_MAX_STEP = 1 << 31
_TIME_COLUMNS = {"collectives": "arrived_ns", "steps": "started_ns"}


@dataclass(frozen=True, slots=True)
class RankEvents:
    """What was read of one rank, of one kind."""

    kind: schema.ChunkKind
    attempt: int
    rank: int
    host: str
    columns: dict[str, Column]
    num_events: int


def chunks_of(events: Iterable[RankEvents]) -> list[schema.Chunk]:
    """Return events as chunks: those of ranks that are near each other and few together."""
    chunks, near = [], _Near()
    for one in sorted(events, key=lambda one: (one.kind, one.attempt, one.rank)):
        if not near.takes(one):
            chunks.append(near.chunk())
            near = _Near()
        near.add(one)
    return [*chunks, near.chunk()] if near.of_ranks else chunks


class _Near:
    """Events that are to be one chunk."""

    def __init__(self) -> None:
        self.of_ranks: dict[int, RankEvents] = {}
        self._num_events = 0
        self._form: tuple[object, ...] = ()

    def takes(self, events: RankEvents) -> bool:
        """Return whether these may be in it, too."""
        if not self.of_ranks:
            return True
        is_few = self._num_events + events.num_events <= MAX_EVENTS_OF_RANKS
        return is_few and _form(events) == self._form and events.rank not in self.of_ranks

    def add(self, events: RankEvents) -> None:
        self.of_ranks[events.rank] = events
        self._num_events += events.num_events
        self._form = _form(events)

    def chunk(self) -> schema.Chunk:
        first, *others = self.of_ranks.values()
        if others:
            data = encode_ranks({rank: one.columns for rank, one in self.of_ranks.items()})
        else:
            data = encode_chunk(first.columns)
        return _chunk(list(self.of_ranks.values()), data)


def _form(events: RankEvents) -> tuple[object, ...]:
    """Return what the events of a chunk have in common."""
    return events.kind, events.attempt, events.host, events.rank // BLOCK_RANKS


def collective_events(
    slots: Any,
    clock: tuple[int, int],
    groups: Mapping[int, str],
    call_sites: Mapping[int, str],
    identity: tuple[int, int, str],
    device_ns: Callable[[Any], Any],
) -> tuple[RankEvents | None, int]:
    """Return the events of these final slots, and how many were refused as damaged.

    `clock` is a (monotonic, wall) pair, `identity` is (attempt, rank, host); `device_ns` gives
    the time on the device by slot number.
    """
    slots, damaged = _plausible(slots, "arrived_ns", clock)
    if len(slots) == 0:
        return None, damaged
    arrived = _int(slots["arrived_ns"])
    columns: dict[str, Column] = {
        "arrived_ns": arrived + (clock[1] - clock[0]),
        "started_ns": _since(slots["started_ns"], arrived),
        "duration_ns": _since(slots["ended_ns"], arrived),
        "device_duration_ns": device_ns(slots["number"].astype(np.int64) - 1),
        "returned_ns": _since(slots["returned_ns"], arrived),
        "blocked_ns": _int(slots["blocked_ns"]),
        "sequence": _int(slots["sequence"]),
        "step": _int(slots["step"]),
        "size_bytes": _int(np.maximum(slots["input_bytes"], slots["output_bytes"])),
        "input_bytes": _int(slots["input_bytes"]),
        "output_bytes": _int(slots["output_bytes"]),
        "peer_rank": _int(slots["peer_rank"]),
        "num_tensors": _int(slots["num_tensors"]),
        "state": _int(slots["state"]),
        "flags": _int(slots["flags"]),
        "group": _words(slots["group_id"], groups, "group {}"),
        "operation": _known(slots["operation"], schema.OPERATIONS),
        "dtype": _known(slots["dtype"], schema.DTYPES),
        "reduce_op": _known(slots["reduce_op"], schema.REDUCE_OPS),
        "call_site": _words(slots["call_site"], call_sites, ""),
        "issued_by": _known(slots["issued_by"], schema.ISSUED_BY),
        "ended_by": _known(slots["ended_by"], schema.ENDED_BY),
    }
    return RankEvents("collectives", *identity, columns, len(slots)), damaged


def step_events(
    slots: Any, clock: tuple[int, int], identity: tuple[int, int, str]
) -> tuple[RankEvents | None, int]:
    """Return these steps, and how many were refused as damaged."""
    slots, damaged = _plausible(slots, "started_ns", clock)
    bad = slots["step"] == 0  # steps count from 1
    slots, damaged = slots[~bad], damaged + int(bad.sum())
    if len(slots) == 0:
        return None, damaged
    started = _int(slots["started_ns"])
    columns: dict[str, Column] = {
        "step": _int(slots["step"]),
        "started_ns": started + (clock[1] - clock[0]),
        "duration_ns": _since(slots["ended_ns"], started),
    }
    for name in schema.STEP_COLUMNS[3:]:
        columns[name] = _int(slots[name])
    return RankEvents("steps", *identity, columns, len(slots)), damaged


def sample_chunk(
    kind: schema.ChunkKind, rows: Sequence[Mapping[str, float | str]], host: str
) -> schema.Chunk:
    """Return samples as a chunk; what a row does not hold is not known."""
    columns: dict[str, Column] = {}
    for name in schema.CHUNK_COLUMNS[kind]:
        if name in schema.STRING_COLUMNS:
            columns[name] = [str(row.get(name, "")) for row in rows]
            continue
        is_float = name in schema.FLOAT_COLUMNS
        values = [_number(row.get(name, -1)) for row in rows]
        columns[name] = np.array(values, dtype=np.float32 if is_float else np.int64)
    events = RankEvents(kind, 0, schema.NODE_RANK, host, columns, len(rows))
    return _chunk([events], encode_chunk(columns))


def _number(value: float | str) -> float:
    """Return a number that a chunk can hold, -1 for what is none."""
    return value if not isinstance(value, str) and -1 <= value < _MAX_NS else -1


def _plausible(slots: Any, time_field: str, clock: tuple[int, int]) -> tuple[Any, int]:
    """Keep the slots whose time may be one; sort by number, which a chunk packs best."""
    times = _int(slots[time_field])
    good = (times > 0) & (times < clock[0] + _FUTURE_NS) & (slots["step"] < _MAX_STEP)
    kept = slots[good]
    return kept[np.argsort(kept["number"], kind="stable")], int((~good).sum())


def _int(values: Any) -> Any:
    wide = values.astype(np.int64)
    return np.where((wide < -_MAX_NS) | (wide > _MAX_NS), -1, wide)


def _since(ends: Any, begins: Any) -> Any:
    ended = _int(ends)
    return np.where((ended > 0) & (ended >= begins), ended - begins, -1)


def _words(indices: Any, names: Mapping[int, str], unknown: str) -> Words:
    distinct, places = np.unique(indices, return_inverse=True)
    words = [names.get(index) or unknown.format(index) for index in distinct.tolist()]
    return _each_once(places, words)


def _known(indices: Any, words: tuple[str, ...]) -> Words:
    distinct, places = np.unique(indices, return_inverse=True)
    known = [words[index] if index < len(words) else words[0] for index in distinct.tolist()]
    return _each_once(places, known)


def _each_once(places: Any, words: list[str]) -> Words:
    """Return a column of words from places in a list that may name one twice."""
    codes = Words.of(words)
    return Words(codes.codes[places], codes.words)


def _chunk(of_ranks: Sequence[RankEvents], data: bytes) -> schema.Chunk:
    first, spans = of_ranks[0], [_span(events) for events in of_ranks]
    return schema.Chunk(
        kind=first.kind,
        attempt=first.attempt,
        rank=first.rank,
        host=first.host,
        count=sum(events.num_events for events in of_ranks),
        time_lo_ns=min(span[0] for span in spans),
        time_hi_ns=max(span[1] for span in spans),
        step_lo=min(span[2] for span in spans),
        step_hi=max(span[3] for span in spans),
        data=data,
    )


def _span(events: RankEvents) -> tuple[int, int, int, int]:
    """Return the first and the last time of events, and their first and last step (0: none)."""
    columns: Any = events.columns
    times, steps = columns[_TIME_COLUMNS.get(events.kind, "time_ns")], columns.get("step")
    durations = columns.get("duration_ns")
    ends = times if durations is None else times + np.maximum(durations, 0)
    lo, hi = (0, 0) if steps is None else (int(steps.min()), int(steps.max()))
    return int(times.min()), int(ends.max()), lo, hi
