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

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any, TypeAlias, overload

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
Column: TypeAlias = "Array | list[str] | Words"
OFFSET, DELTA, FLOAT, BESIDE = range(4)  # forms
WORDS = 0x10  # added to the form of a column whose numbers are places in a list of words
_MAX_BASE = 1 << 62
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
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


class Words(Sequence[str]):
    """A column of words as it is in a chunk: the place of each in a list of words.

    Reads like a list of strings; who takes `codes` and `words` needs no string for each event.
    """

    __slots__ = ("codes", "words")

    def __init__(self, codes: Array, words: list[str]) -> None:
        self.codes, self.words = codes, words

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        words = self.words
        return iter([words[code] for code in self.codes.tolist()])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Words: ...
    def __getitem__(self, index: int | slice) -> str | Words:
        if isinstance(index, slice):
            return Words(self.codes[index], self.words)
        return self.words[int(self.codes[index])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # its arrays may change

    @staticmethod
    def of(values: Column) -> Words:
        """Return a column of words with its codes, whatever it was."""
        if isinstance(values, Words):
            return values
        places: dict[str, int] = {}
        codes = (places.setdefault(str(word), len(places)) for word in values)
        return Words(np.fromiter(codes, dtype=np.int64, count=len(values)), list(places))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The columns of a chunk, its whole numbers side by side.

    `numbers` is columns x events (int64), in the order of `names`; the rows of words are places
    in their list of `words`.
    """

    names: tuple[str, ...]
    numbers: Array
    words: dict[str, list[str]]
    floats: dict[str, Array]  # float32
    order: list[str]  # of all columns in the chunk
    count: int

    def column(self, name: str) -> Column:
        """Return one column. Raises KeyError, ValueError for one that is not there."""
        if name in self.floats:
            return self.floats[name]
        row: Array = self.numbers[self.names.index(name)]
        return Words(row, self.words[name]) if name in self.words else row


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
class _Frame:
    """A chunk whose header is sound; its columns are decoded when they are wanted."""

    count: int
    names: list[str]
    header: _Header
    starts: list[int]  # of the columns in `raw`
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
    of_words = [WORDS if is_words(values) else 0 for values in columns.values()]
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


def is_words(values: Column) -> bool:
    """Return whether a column holds words, not numbers."""
    return isinstance(values, list | Words)


def _to_numbers(name: str, values: Column, words: list[list[str]]) -> Array:
    """Return the column as numbers, in the units of the chunk; add its dictionary to `words`."""
    if isinstance(values, list | Words):
        coded = Words.of(values)
        words.append(coded.words)
        return coded.codes
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
    little = values.astype(np.dtype(_TYPES[width]).newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(len(values), width).T.tobytes()


# --- reading --------------------------------------------------------------------------------


def decode_chunk(data: bytes, only: Collection[str] | None = None) -> dict[str, Column]:
    """Unpack a chunk into int64 or float32 arrays and columns of words.

    `only` names the columns wanted; a wanted column that is absent is not an error, so newer
    readers can read older chunks. Raises ChunkError on anything malformed.
    """
    decoded = _decode(_open(data), only)
    names = sorted((*decoded.names, *decoded.floats), key=decoded.order.index)
    return {name: decoded.column(name) for name in names if only is None or name in only}


def decode_together(data: bytes) -> Decoded:
    """Unpack all columns of a chunk into one array. Raises ChunkError on anything malformed."""
    return _decode(_open(data))


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
    names = header.names.split(" ")
    _check_header(header, names)
    starts = [body_at]
    for width in header.widths:
        starts.append(starts[-1] + width * count)
    if starts[-1] != len(raw):
        raise ChunkError(f"the frame holds {len(raw)} bytes, its header says {starts[-1]}")
    return _Frame(count, names, header, starts, raw)


def _check_header(header: _Header, names: list[str]) -> None:
    lists = (header.forms, header.widths, header.bases, header.slopes)
    if len(names) > MAX_COLUMNS or len(set(names)) != len(names):
        raise ChunkError(f"{len(names)} columns; 1..{MAX_COLUMNS} of different names are allowed")
    if any(len(values) != len(names) for values in lists):
        raise ChunkError("the lists of the header differ in length")
    if sum(bool(form & WORDS) for form in header.forms) != len(header.words):
        raise ChunkError("a list of words for each column of words, and no more, is needed")
    for place, (name, form, width, base, slope) in enumerate(zip(names, *lists, strict=True)):
        if width != 0 and width not in _TYPES:
            raise ChunkError(f"column {name!r}: width {width} is not 0, 1, 2, 4 or 8")
        if not (-_MAX_BASE < base < _MAX_BASE and -_MAX_BASE < slope < _MAX_BASE):
            raise ChunkError(f"column {name!r}: base or slope is out of range")
        if form & ~WORDS not in (OFFSET, DELTA, BESIDE) and (form, width) != (FLOAT, 4):
            raise ChunkError(f"column {name!r}: unknown form {form} of width {width}")
        is_beside = form & ~WORDS == BESIDE
        if is_beside and not (0 <= slope < place and header.forms[slope] != FLOAT):
            raise ChunkError(f"column {name!r}: is based on column {slope}, which cannot be")


def _decode(frame: _Frame, only: Collection[str] | None = None) -> Decoded:
    """Return all columns, or some and those that they rest on; what overflows is only wrong."""
    header, forms = frame.header, [form & ~WORDS for form in frame.header.forms]
    wanted = {place for place, name in enumerate(frame.names) if only is None or name in only}
    for place in range(len(forms) - 1, -1, -1):
        if place in wanted and forms[place] == BESIDE:
            wanted.add(header.slopes[place])
    places = [place for place in sorted(wanted) if forms[place] != FLOAT]
    row_of = {place: row for row, place in enumerate(places)}
    numbers = np.empty((len(places), frame.count), np.int64)
    for place, row in row_of.items():
        _put(frame, place, numbers[row])
        if forms[place] == DELTA:
            numbers[row, 1:] += header.slopes[place]
            np.cumsum(numbers[row], out=numbers[row])
    numbers += np.array([header.bases[place] for place in places], np.int64)[:, None]
    for place, row in row_of.items():
        if forms[place] == BESIDE:
            numbers[row] += numbers[row_of[header.slopes[place]]]
    names = tuple(frame.names[place] for place in places)
    words = _words_of(frame, places, numbers)
    for place, name in enumerate(names):
        if name.endswith("_ns") and name not in words:  # the numbers of words are codes
            numbers[place] *= NS_PER_UNIT
            np.maximum(numbers[place], -1, out=numbers[place])  # not known
    floats = {
        frame.names[place]: np.ascontiguousarray(_planes(frame, place).T).view("<f4").reshape(-1)
        for place in sorted(wanted) if forms[place] == FLOAT
    }  # fmt: skip
    return Decoded(names, numbers, words, floats, frame.names, frame.count)


def _words_of(frame: _Frame, places: list[int], numbers: Array) -> dict[str, list[str]]:
    """Return the list of words of each column that has one. Raises ChunkError."""
    of_words = [place for place, form in enumerate(frame.header.forms) if form & WORDS]
    found = {}
    for place, words in zip(of_words, frame.header.words, strict=True):
        if place in places:
            name, codes = frame.names[place], numbers[places.index(place)]
            if not (0 <= codes.min() and codes.max() < len(words)):
                raise ChunkError(f"column {name!r}: an index points outside its dictionary")
            found[name] = words
    return found


def _put(frame: _Frame, place: int, row: Array) -> None:
    """Write what a column holds beside its base: its bytes lie in planes, the lowest first."""
    planes = _planes(frame, place)
    row[:] = planes[0] if len(planes) else 0
    for byte in range(1, len(planes)):
        row += planes[byte].astype(np.int64) << 8 * byte


def _planes(frame: _Frame, place: int) -> Array:
    raw = frame.raw[frame.starts[place] : frame.starts[place + 1]]
    return np.frombuffer(raw, np.uint8).reshape(frame.header.widths[place], frame.count)


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
