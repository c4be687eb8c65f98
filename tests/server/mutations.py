"""Batches that came to harm: a sound one of every kind of record and chunk, changed at one layer.

The layers are those that ingest unpacks one after the other: noise, the zstd frame, the bytes of
msgpack, the envelope, one record, extremes of its values, the fields of a chunk, its bytes, the
header in its frame, its columns. The same seed and number give the same bytes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from rankscope.wire import schema, zstd
from rankscope.wire.chunk import MAGIC, encode_chunk, encode_ranks
from rankscope.wire.chunk_dictionary import DICTIONARY

NOW_NS = 1_790_000_000_000_000_000
EVENTS = 12  # of each chunk
_WORDS = zstd.ZstdDict(DICTIONARY, is_raw=True)
_HEAD, _LENGTH = struct.Struct("<4sI"), struct.Struct("<I")
_EDGES = (
    -1, 0, 1, 127, 255, 65_536, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, 1 << 31,
    1 << 48, 1 << 53, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 62),
    -(1 << 63), 1_000, NOW_NS,
)  # fmt: skip
_PLAIN = {inspect.BoolType: True, inspect.FloatType: 0.5, inspect.AnyType: "any"}
_TEXTS = (
    "", "\0", "a\0b", " ", "\n", "\x1b[31m", "\u202e", "\U0001f4a5", "\ufffd", "x" * 70_000,
    "nan", "../..", "'; DROP TABLE run; --", "%s%n", "node-a", "all_reduce", "loss", "0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Body:
    """What one request carries."""

    layer: str
    data: bytes
    encoding: str = ""  # of its content


# --- a sound batch ---------------------------------------------------------------------------


def sound_batch(run_id: str, producer: str, sequence: int) -> dict[str, Any]:
    """Return a batch of every kind of record and of chunk, as what msgpack makes of it."""
    return {
        "schema_version": schema.SCHEMA_VERSION, "run_id": run_id, "producer": producer,
        "sequence": sequence, "host": "node-a", "sent_ns": NOW_NS,
        "records": [sound_record(kind) for kind in schema.RECORD_KINDS],
        "chunks": [sound_chunk(kind) for kind in schema.CHUNK_COLUMNS]
        + [chunk_of_ranks(kind) for kind in ("collectives", "steps")],
    }  # fmt: skip


def sound_record(kind: type[schema.Record]) -> dict[str, Any]:
    """Return a record with every field of its kind."""
    values = {"kind": kind.__struct_config__.tag} | sound_struct(kind)
    return values | {"rank": 0, "time_ns": NOW_NS}


def sound_struct(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a struct with a value in every field, as what msgpack makes of it."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return {part.name: _sound_value(part.name, part.type) for part in found.fields}


def _sound_value(name: str, kind: inspect.Type) -> Any:
    match kind:
        case inspect.IntType():
            return NOW_NS if name.endswith("_ns") else 1
        case inspect.StrType():
            return name
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return _sound_value(name, types[0])
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [_sound_value(name, item)]
        case inspect.TupleType(item_types=items):
            return [*map(_sound_value, [name] * len(items), items)]
        case inspect.DictType(value_type=value):
            return {"loss": _sound_value(name, value)}
        case inspect.StructType(cls=cls):
            return sound_struct(cls)
    return _PLAIN[type(kind)]


def sound_chunk(kind: str, rank: int = 0) -> dict[str, Any]:
    """Return a chunk of a few events, as what msgpack makes of it."""
    return {
        "kind": kind, "attempt": 0, "rank": rank, "host": "node-a", "count": EVENTS,
        "time_lo_ns": NOW_NS, "time_hi_ns": NOW_NS, "step_lo": 1, "step_hi": EVENTS,
        "data": encode_chunk(sound_columns(kind)),
    }  # fmt: skip


def chunk_of_ranks(kind: str) -> dict[str, Any]:
    """Return a chunk of three ranks."""
    data = encode_ranks({rank: sound_columns(kind) for rank in (1, 2, 5)})
    return sound_chunk(kind, rank=1) | {"count": 3 * EVENTS, "data": data}


def sound_columns(kind: str) -> dict[str, Any]:
    """Return the columns of a chunk of this kind."""
    steps = np.arange(1, EVENTS + 1)
    columns: dict[str, Any] = {}
    for name in schema.CHUNK_COLUMNS[kind]:
        if name in schema.STRING_COLUMNS:
            columns[name] = [("all_reduce", "broadcast")[step % 2] for step in steps.tolist()]
        elif name in schema.FLOAT_COLUMNS:
            columns[name] = steps.astype(np.float32) / EVENTS
        elif name in ("arrived_ns", "time_ns") or (name == "started_ns" and kind == "steps"):
            columns[name] = NOW_NS + steps * 1_000_000_000
        else:
            columns[name] = steps
    if kind == "collectives":
        columns["state"] = np.full(EVENTS, schema.ENDED)
    return columns


# --- what harms it ---------------------------------------------------------------------------


def odd_value(rng: random.Random) -> Any:
    """Return a value that is seldom what a field wants, or is at the edge of it."""
    draw = rng.randrange(10)
    if draw < 4:
        return rng.choice(_EDGES)
    if draw < 6:
        return rng.choice(_TEXTS)
    if draw == 6:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324))
    if draw == 7:
        return rng.choice((None, True, False, b"", b"\xff" * 9, [], {}))
    if draw == 8:
        return rng.choice(
            ([rng.choice(_EDGES)] * rng.randrange(1, 6_000), [[]], {"": 0}, {"loss": None},
             {str(n): rng.choice(_TEXTS[:8]) for n in range(rng.randrange(1, 5_000))},
             {str(n): 0.5 for n in range(rng.randrange(1, 5_000))})
        )  # fmt: skip
    return _deep(rng.choice((3, 100, 2_000)))


def _deep(levels: int) -> Any:
    return msgspec.Raw(b"\x91" * levels + b"\xc0")


def harmed_bytes(rng: random.Random, good: bytes) -> bytes:
    """Return bytes of which some were changed, put in, taken out, doubled or cut off."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 12))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 40))
        draw = rng.randrange(6)
        if draw < 3:
            data[at : at + 1] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
        elif draw == 3:
            data[at:at] = rng.randbytes(size)
        elif draw == 4:
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size]
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data)


def harm_map(rng: random.Random, values: dict[str, Any]) -> None:
    """Change some fields of a map, take one out, or put one in."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(values) or [""])
        draw = rng.randrange(12)
        if draw == 0:
            values.pop(name, None)
        elif draw == 1:
            values[rng.choice(("", "more", "kind", "\0", "x" * 300))] = odd_value(rng)
        elif draw < 4 and isinstance(values.get(name), dict) and values[name]:
            harm_map(rng, values[name])
        elif draw < 4 and isinstance(values.get(name), list) and values[name]:
            _harm_list(rng, values[name])
        else:
            values[name] = odd_value(rng)


def _harm_list(rng: random.Random, values: list[Any]) -> None:
    at = rng.randrange(len(values))
    if isinstance(values[at], dict) and values[at]:
        harm_map(rng, values[at])
    else:
        values[at] = odd_value(rng)


def _noise(rng: random.Random, batch: dict[str, Any]) -> Body:
    start = rng.choice((b"", b"\x88", b"\x28\xb5\x2f\xfd", MAGIC))
    return Body("noise", start + rng.randbytes(rng.randrange(400)), rng.choice(("", "zstd")))


def _frame(rng: random.Random, batch: dict[str, Any]) -> Body:
    return Body("frame", harmed_bytes(rng, zstd.pack(_encode(batch))), "zstd")


def _msgpack(rng: random.Random, batch: dict[str, Any]) -> Body:
    return _sent("msgpack", rng, harmed_bytes(rng, _encode(batch)))


def _envelope(rng: random.Random, batch: dict[str, Any]) -> Body:
    harm_map(rng, batch)
    return _sent("envelope", rng, _encode(batch))


def _record(rng: random.Random, batch: dict[str, Any]) -> Body:
    for _ in range(rng.choice((1, 1, 3))):
        harm_map(rng, rng.choice(batch["records"]))
    return _sent("record", rng, _encode(batch))


def _extreme(rng: random.Random, batch: dict[str, Any]) -> Body:
    """Change values to others of their type: what is stored then is at its edge."""
    for values in batch["records"]:
        for name in rng.sample(list(values), rng.randrange(1, 4)):
            if name != "kind":
                values[name] = _of_type(rng, values[name])
    return _sent("extreme", rng, _encode(batch))


def _of_type(rng: random.Random, value: Any) -> Any:
    match value:
        case bool():
            return rng.random() < 0.5
        case int():
            return rng.choice([edge for edge in _EDGES if 0 <= edge <= 1 << 62])
        case float():
            return rng.choice((0.0, -0.0, 1e308, -1e308, 5e-324, 1.0))
        case str():
            return rng.choice((value, *_TEXTS))
        case list() if value:
            return [_of_type(rng, value[0]) for _ in range(rng.choice((0, 1, 2, 300)))]
        case dict():
            return {name: _of_type(rng, part) for name, part in value.items()}
    return value


def _chunk(rng: random.Random, batch: dict[str, Any]) -> Body:
    harm_map(rng, rng.choice(batch["chunks"]))
    return _sent("chunk", rng, _encode(batch))


def _chunk_bytes(rng: random.Random, batch: dict[str, Any]) -> Body:
    chunk = rng.choice(batch["chunks"])
    chunk["data"] = harmed_bytes(rng, chunk["data"])
    return _sent("chunk bytes", rng, _encode(batch))


def _chunk_header(rng: random.Random, batch: dict[str, Any]) -> Body:
    """Change what is in the frame: the header's lists, the count, the bytes of the columns."""
    chunk = rng.choice(batch["chunks"])
    magic, count = _HEAD.unpack_from(chunk["data"])
    raw = zstd.unpack(chunk["data"][_HEAD.size :], 1 << 26, _WORDS)
    size = _LENGTH.unpack_from(raw)[0]
    header = msgspec.msgpack.decode(raw[_LENGTH.size : _LENGTH.size + size])
    body = raw[_LENGTH.size + size :]
    for _ in range(rng.choice((1, 1, 2))):
        _harm_header(rng, header)
    if rng.random() < 0.2:
        count = rng.choice((0, 1, count - 1, count + 1, 200_000, 200_001, (1 << 32) - 1))
    if rng.random() < 0.2:
        body = harmed_bytes(rng, body)
    packed = _encode(header)
    length = len(packed) if rng.random() < 0.9 else rng.choice((0, 1, len(raw), (1 << 32) - 1))
    again = zstd.pack(_LENGTH.pack(length) + packed + body, 3, _WORDS)
    chunk["data"] = _HEAD.pack(magic, count) + again
    return _sent("chunk header", rng, _encode(batch))


def _harm_header(rng: random.Random, header: list[Any]) -> None:
    place = rng.randrange(len(header))
    value = header[place]
    if not value or rng.random() < 0.1:
        header[place] = odd_value(rng)
    elif isinstance(value, str):
        names = value.split(" ")
        names[rng.randrange(len(names))] = rng.choice((*names, "", "more", "x" * 9_000, "\0"))
        header[place] = " ".join(names)
    elif isinstance(value, bytes):
        changed = bytearray(value)
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 4, 8, 0x10, 0x12, 0xFF))
        header[place] = bytes(changed)
    elif isinstance(value, list):
        _harm_list(rng, value)


def _columns(rng: random.Random, batch: dict[str, Any]) -> Body:
    chunk = rng.choice(batch["chunks"])
    columns = sound_columns(chunk["kind"])
    for _ in range(rng.choice((1, 1, 2, 5))):
        name = rng.choice(list(columns) or ["step"])
        draw = rng.randrange(12)
        if draw == 0 and len(columns) > 1:
            del columns[name]
        elif draw == 1:
            columns[rng.choice(("more", "\0", "y" * 200))] = _odd_column(rng)
        else:
            columns[name] = _odd_column(rng)
    # numbers beside fractions are more than the encoder takes
    with np.errstate(over="ignore"), contextlib.suppress(ValueError):
        chunk["data"] = encode_chunk(columns)
    return _sent("columns", rng, _encode(batch))


def _odd_column(rng: random.Random) -> Any:
    draw = rng.randrange(6)
    small = [edge for edge in _EDGES if -(1 << 61) <= edge <= 1 << 61]
    if draw == 0:
        return [rng.choice(_TEXTS) for _ in range(EVENTS)]
    if draw == 1:
        kinds = (float("nan"), float("inf"), -float("inf"), 3e38, -1.0)
        return np.array([rng.choice(kinds) for _ in range(EVENTS)], np.float32)
    if draw == 2:
        return np.full(EVENTS, rng.choice(small))
    if draw == 3:
        return np.array([rng.choice(small) for _ in range(EVENTS)])
    if draw == 4:
        return np.arange(EVENTS) * rng.choice((-1, 1 << 20, 1 << 40))
    return np.array([rng.randrange(-(1 << 40), 1 << 40) for _ in range(EVENTS)])


_encode = msgspec.msgpack.Encoder().encode
Harm = Callable[[random.Random, dict[str, Any]], Body]
LAYERS: tuple[Harm, ...] = (
    _noise, _frame, _msgpack, _envelope, _record, _extreme, _chunk, _chunk_bytes, _chunk_header,
    _columns,
)  # fmt: skip


def _sent(layer: str, rng: random.Random, data: bytes) -> Body:
    if rng.random() < 0.5:
        return Body(layer, data)
    return Body(layer, zstd.pack(data, 1), "zstd")


class Mutator:
    """Makes harmed batches of one producer, by seed and number."""

    def __init__(self, seed: int, run_id: str, producer: str) -> None:
        self._seed, self._sound = seed, sound_batch(run_id, producer, 1)

    def body(self, number: int) -> Body:
        """Return the bytes of this number; its batch has the number as its sequence."""
        rng = random.Random(self._seed << 32 | number)
        batch = {**copy.deepcopy(self._sound), "sequence": number}
        # of few parts, so that a mutation is seldom beside the point and a request quick
        batch["records"] = rng.sample(batch["records"], rng.randrange(1, 5))
        batch["chunks"] = rng.sample(batch["chunks"], rng.randrange(1, 4))
        return LAYERS[number % len(LAYERS)](rng, batch)
