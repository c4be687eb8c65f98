"""The columnar form of dense events: narrow integers, byte-shuffled, one zstd frame.

Layout: magic (4 bytes, the last one is the format version), count (u32), one zstd frame. The
frame holds the length of the header (u32), the header (msgpack) and the columns one after the
other. A column is stored as offsets from a base, as deltas, or as offsets from an earlier column
that is nearly the same (the call of a synchronous collective takes as long as the collective),
whichever is narrowest; nothing but its base if that says it all. `*_ns` columns count
microseconds, finer than any clock they come from. The frame begins with a dictionary known to
both sides (`chunk_words`), so that a chunk of a dozen events is hardly larger than the events.

Nothing in a chunk is trusted: counts, sizes, widths and places are bounded and checked.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import or_
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rankscope.wire import zstd
from rankscope.wire.chunk_dictionary import DICTIONARY

FORMAT_VERSION = 2
MAGIC = b"RSC2"
MAX_EVENTS = 200_000
MAX_RAW_BYTES = 64 << 20
MAX_COLUMNS = 64
NS_PER_UNIT = 1_000
ZSTD_LEVEL = 6  # hardly more CPU than 3, and 3 % smaller

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Column: TypeAlias = "Array | list[str]"
OFFSET, DELTA, FLOAT, BESIDE = range(4)  # forms
WORDS = 0x10  # added to the form of a column whose numbers are places in a list of words
_MAX_BASE = 1 << 62
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LITTLE = {width: np.dtype(kind).newbyteorder("<") for width, kind in _TYPES.items()}
# columns that are often nearly another one
_NEAR = {
    "started_ns": "duration_ns", "returned_ns": "duration_ns", "blocked_ns": "duration_ns",
    "input_bytes": "size_bytes", "output_bytes": "size_bytes",
    "other_ns": "duration_ns", "process_cpu_ns": "cpu_ns",
}  # fmt: skip
_HEAD = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_WORDS = zstd.ZstdDict(DICTIONARY, is_raw=True)


class ChunkError(ValueError):
    """These bytes are not a chunk; the message says which part and why."""


class _Header(msgspec.Struct, array_like=True):
    """One entry of each list per column: the names together are a single match for zstd."""

    names: str  # separated by spaces
    forms: bytes
    widths: bytes  # bytes per value; 0: every value is what the base says
    bases: list[int]
    slopes: list[int]  # DELTA: what each delta has at least; BESIDE: place of the other column
    words: list[list[str]]  # of the columns of WORDS, what their numbers mean


@dataclass(frozen=True, slots=True)
class _Packed:
    """One column as it is in a chunk."""

    name: str
    form: int
    width: int
    base: int
    slope: int
    values: Array  # unsigned, `width` bytes each


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the columns of a chunk are, whatever is in them."""

    names: list[str]
    beside: list[int]  # places of those that are stored beside another one
    words: list[int]  # places of those whose numbers are places in a list of words
    starts: list[int]  # bytes of one event in all columns before; the last: of an event


@dataclass(frozen=True, slots=True)
class _Frame:
    """A chunk whose header is sound; its columns are decoded when they are wanted."""

    count: int
    names: list[str]
    header: _Header
    layout: _Layout
    body_at: int  # where the columns begin in `raw`
    raw: bytes


_decode_header = msgspec.msgpack.Decoder(_Header).decode


# --- writing --------------------------------------------------------------------------------


def encode_chunk(columns: Mapping[str, Column]) -> bytes:
    """Pack equally long columns: arrays of integers or float32, lists of strings.

    Raises ValueError if the columns differ in length or are empty.
    """
    count = len(next(iter(columns.values()), ()))
    if count == 0 or any(len(values) != count for values in columns.values()):
        raise ValueError("a chunk needs columns of one length above zero")
    words: list[list[str]] = []
    numbers = {name: _to_numbers(name, values, words) for name, values in columns.items()}
    packed = [_pack(name, numbers) for name in numbers]
    of_words = [WORDS if isinstance(values, list) else 0 for values in columns.values()]
    head = msgspec.msgpack.encode(
        _Header(
            names=" ".join(numbers),
            forms=bytes(map(or_, (column.form for column in packed), of_words)),
            widths=bytes(column.width for column in packed),
            bases=[column.base for column in packed],
            slopes=[column.slope for column in packed],
            words=words,
        )
    )
    bodies = [_shuffle(column.values, column.width) for column in packed]
    raw = b"".join([_LENGTH.pack(len(head)), head, *bodies])
    return _HEAD.pack(MAGIC, count) + zstd.pack(raw, ZSTD_LEVEL, _WORDS)


def _to_numbers(name: str, values: Column, words: list[list[str]]) -> Array:
    """Return the column as numbers, in the units of the chunk; add its dictionary to `words`."""
    if isinstance(values, list):
        positions: dict[str, int] = {}
        places = (positions.setdefault(str(word), len(positions)) for word in values)
        numbers = np.fromiter(places, dtype=np.int64, count=len(values))
        words.append(list(positions))
        return numbers
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, dtype="<f4")
    numbers = np.asarray(values, dtype=np.int64)
    return numbers // NS_PER_UNIT if name.endswith("_ns") else numbers


def _pack(name: str, all_numbers: Mapping[str, Array]) -> _Packed:
    """Return the narrowest form of a column."""
    numbers = all_numbers[name]
    if numbers.dtype.kind == "f":
        return _Packed(name, FLOAT, 4, 0, 0, numbers.view("<u4"))
    best = _offsets(name, OFFSET, numbers, 0)
    if best.width and len(numbers) > 1:
        best = min(best, _deltas(name, numbers), key=lambda packed: packed.width)
    near, names = _NEAR.get(name, ""), list(all_numbers)
    if best.width and near in names[: names.index(name)]:
        beside = _offsets(name, BESIDE, numbers - all_numbers[near], names.index(near))
        best = min(best, beside, key=lambda packed: packed.width)
    return best


def _offsets(name: str, form: int, numbers: Array, slope: int) -> _Packed:
    base = int(numbers.min())
    values = (numbers - base).astype(np.uint64)
    return _Packed(name, form, _width(values), base, slope, values)


def _deltas(name: str, numbers: Array) -> _Packed:
    """Return the first number as base and what each delta exceeds the smallest one by."""
    deltas = np.diff(numbers)
    slope = int(deltas.min())
    values = np.concatenate(([0], deltas - slope)).astype(np.uint64)
    return _Packed(name, DELTA, _width(values), int(numbers[0]), slope, values)


def _width(values: Array) -> int:
    largest = int(values.max())
    return next(width for width in (0, *_TYPES) if largest < 1 << (8 * width))


def _shuffle(values: Array, width: int) -> bytes:
    if width == 0:
        return b""
    little = values.astype(_LITTLE[width], copy=False)
    return little.view(np.uint8).reshape(len(values), width).T.tobytes()


# --- reading --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Words:
    """A column of strings as the chunk holds it: for each row the place of its word."""

    codes: Array
    words: list[str]


def decode_coded(data: bytes, only: Collection[str]) -> tuple[dict[str, Array], dict[str, Words]]:
    """Unpack the columns `only` of a chunk: numbers, and strings as places in a list of words.

    Raises ChunkError on anything malformed.
    """
    frame = _open(data)
    numbers: dict[str, Array] = {}
    words: dict[str, Words] = {}
    for place, (name, form) in enumerate(zip(frame.names, frame.header.forms, strict=True)):
        if name in only:
            found = words if form & WORDS else numbers
            found[name] = _decode_column(frame, place, coded=True)
    return numbers, words


def decode_chunk(data: bytes, only: Collection[str] | None = None) -> dict[str, Column]:
    """Unpack a chunk into int64 or float32 arrays and lists of strings.

    `only` names the columns wanted; a wanted column that is absent is not an error, so newer
    readers can read older chunks. Raises ChunkError on anything malformed.
    """
    frame = _open(data)
    wanted = [name for name in frame.names if only is None or name in only]
    return {name: _decode_column(frame, frame.names.index(name)) for name in wanted}


def chunk_count(data: bytes) -> int:
    """Return the number of events, without unpacking them. Raises ChunkError."""
    if data[:3] != MAGIC[:3]:
        raise ChunkError("does not begin with RSC: not a Rankscope chunk")
    if data[3:4] != MAGIC[3:]:
        version = data[3:4].decode("latin-1")
        raise ChunkError(f"format version {version!r}; this reader knows {FORMAT_VERSION}")
    if len(data) < _HEAD.size:
        raise ChunkError("truncated before the count")
    count: int = _HEAD.unpack_from(data)[1]
    if not 0 < count <= MAX_EVENTS:
        raise ChunkError(f"count {count} is outside 1..{MAX_EVENTS}")
    return count


def _open(data: bytes) -> _Frame:
    count = chunk_count(data)
    raw = _decompress(data[_HEAD.size :])
    if len(raw) < _LENGTH.size:
        raise ChunkError("the frame ends before its header")
    body_at = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
    if body_at > len(raw):
        raise ChunkError(f"a header up to byte {body_at} in a frame of {len(raw)}")
    try:
        header = _decode_header(raw[_LENGTH.size : body_at])
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: not UTF-8
        raise ChunkError(f"header: {error}") from error
    layout = _check_header(header)
    end = body_at + layout.starts[-1] * count
    if end != len(raw):
        raise ChunkError(f"the frame holds {len(raw)} bytes, its header says {end}")
    return _Frame(count, layout.names, header, layout, body_at, raw)


def _check_header(header: _Header) -> _Layout:
    """Return what the header says of its columns, once all of it is sound."""
    layout = _layout(header.names, header.forms, header.widths)
    count = len(layout.names)
    if len(header.bases) != count or len(header.slopes) != count:
        raise ChunkError("the lists of the header differ in length")
    if len(layout.words) != len(header.words):
        raise ChunkError("a list of words for each column of words, and no more, is needed")
    for values in (header.bases, header.slopes):
        if min(values) <= -_MAX_BASE or max(values) >= _MAX_BASE:
            name = next(
                name
                for name, value in zip(layout.names, values, strict=True)
                if not -_MAX_BASE < value < _MAX_BASE
            )
            raise ChunkError(f"column {name!r}: base or slope is out of range")
    for place in layout.beside:
        other = header.slopes[place]
        if not (0 <= other < place and header.forms[other] != FLOAT):
            name = layout.names[place]
            raise ChunkError(f"column {name!r}: is based on column {other}, which cannot be")
    return layout


@functools.lru_cache(maxsize=256)
def _layout(names: str, forms: bytes, widths: bytes) -> _Layout:
    """Return what columns of these names, forms and widths are; chunks of a source share it."""
    found = names.split(" ")
    if len(found) > MAX_COLUMNS or len(set(found)) != len(found):
        raise ChunkError(f"{len(found)} columns; 1..{MAX_COLUMNS} of different names are allowed")
    if not len(forms) == len(widths) == len(found):
        raise ChunkError("the lists of the header differ in length")
    for name, form, width in zip(found, forms, widths, strict=True):
        if width != 0 and width not in _TYPES:
            raise ChunkError(f"column {name!r}: width {width} is not 0, 1, 2, 4 or 8")
        if form & ~WORDS not in (OFFSET, DELTA, BESIDE) and (form, width) != (FLOAT, 4):
            raise ChunkError(f"column {name!r}: unknown form {form} of width {width}")
    return _Layout(
        names=found,
        beside=[place for place, form in enumerate(forms) if form & ~WORDS == BESIDE],
        words=[place for place, form in enumerate(forms) if form & WORDS],
        starts=[0, *itertools.accumulate(widths)],
    )


def _decode_column(frame: _Frame, place: int, *, coded: bool = False) -> Any:
    name, header = frame.names[place], frame.header
    if header.forms[place] == FLOAT:
        return _values(frame, place).view(np.float32)
    numbers = _numbers(frame, place)
    if header.forms[place] & WORDS:
        words = header.words[frame.layout.words.index(place)]
        _check_words(name, numbers[:1] if header.widths[place] == 0 else numbers, words)
        return Words(numbers, words) if coded else [words[number] for number in numbers.tolist()]
    if name.endswith("_ns"):
        is_offset = header.forms[place] == OFFSET and header.widths[place] <= 4
        if is_offset and header.bases[place] >= 0:  # none is below zero
            return numbers * NS_PER_UNIT
        return np.where(numbers < 0, -1, numbers * NS_PER_UNIT)
    return numbers


def _numbers(frame: _Frame, place: int) -> Array:
    """Return an integer column in the units of the chunk; what overflows is only wrong."""
    header = frame.header
    form, base, slope = header.forms[place] & ~WORDS, header.bases[place], header.slopes[place]
    if header.widths[place] == 0 and form == OFFSET:
        return np.full(frame.count, base, dtype=np.int64)
    if header.widths[place] == 0:
        values: Array = np.zeros(frame.count, dtype=np.int64)
    else:
        values = _values(frame, place).astype(np.int64)
    if form == DELTA:
        values[1:] += slope
        values = np.add.accumulate(values)
    elif form == BESIDE:
        values += _numbers(frame, slope)
    values += base
    return values


def _values(frame: _Frame, place: int) -> Array:
    width, starts = frame.header.widths[place], frame.layout.starts
    begin = frame.body_at + starts[place] * frame.count
    flat = np.frombuffer(frame.raw, np.uint8, width * frame.count, begin)
    if width == 1:
        return flat
    planes = flat.reshape(width, frame.count).T
    values: Array = np.ascontiguousarray(planes).view(_LITTLE[width]).reshape(frame.count)
    return values


def _check_words(name: str, numbers: Array, words: list[str]) -> None:
    if not (0 <= numbers.min() and numbers.max() < len(words)):
        raise ChunkError(f"column {name!r}: an index points outside its dictionary")


def _decompress(data: bytes) -> bytes:
    try:
        declared = zstd.declared_bytes(data)
        if declared is None or not 0 < declared <= MAX_RAW_BYTES:
            raise ChunkError(f"would unpack to {declared} bytes; 1..{MAX_RAW_BYTES} are allowed")
        raw = zstd.unpack(data, declared, _WORDS)
    except (zstd.ZstdError, zstd.UnpackedTooLargeError) as error:
        raise ChunkError(f"frame: {error}") from error
    if len(raw) != declared:
        raise ChunkError(f"the frame holds {len(raw)} bytes and declares {declared}")
    return raw
