"""From slots of a ring to the columns of a chunk. Pure numpy; nothing in a slot is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk

_MAX_NS = 1 << 61  # what the server takes, with room for sums
_FUTURE_NS = 3600 * 10**9
_MAX_STEP = 1 << 31


def collective_chunk(
    slots: Any,
    clock: tuple[int, int],
    groups: Mapping[int, str],
    call_sites: Mapping[int, str],
    identity: tuple[int, int, str],
    device_ns: Callable[[Any], Any],
) -> tuple[schema.Chunk | None, int]:
    """Return the chunk of these final slots, and how many were refused as damaged.

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
    return _chunk("collectives", columns, "arrived_ns", identity), damaged


def step_chunk(
    slots: Any, clock: tuple[int, int], identity: tuple[int, int, str]
) -> tuple[schema.Chunk | None, int]:
    """Return the chunk of these steps, and how many were refused as damaged."""
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
    return _chunk("steps", columns, "started_ns", identity), damaged


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
    return _chunk(kind, columns, "time_ns", (0, schema.NODE_RANK, host))


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


def _words(indices: Any, names: Mapping[int, str], unknown: str) -> list[str]:
    distinct, places = np.unique(indices, return_inverse=True)
    words = [names.get(index) or unknown.format(index) for index in distinct.tolist()]
    return [words[place] for place in places.tolist()]


def _known(indices: Any, words: tuple[str, ...]) -> list[str]:
    return [words[index] if index < len(words) else words[0] for index in indices.tolist()]


def _chunk(
    kind: schema.ChunkKind,
    columns: dict[str, Column],
    time_column: str,
    identity: tuple[int, int, str],
) -> schema.Chunk:
    attempt, rank, host = identity
    times: Any = columns[time_column]
    steps: Any = columns.get("step")
    durations: Any = columns.get("duration_ns")
    ends = times if durations is None else times + np.maximum(durations, 0)
    return schema.Chunk(
        kind=kind,
        attempt=attempt,
        rank=rank,
        host=host,
        count=len(times),
        time_lo_ns=int(times.min()),
        time_hi_ns=int(ends.max()),
        step_lo=0 if steps is None else int(steps.min()),
        step_hi=0 if steps is None else int(steps.max()),
        data=encode_chunk(columns),
    )
