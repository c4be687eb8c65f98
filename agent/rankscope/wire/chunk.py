"""The columnar form of dense events: narrow integers, byte-shuffled, one zstd frame.

Layout: magic (4 bytes, the last one is the format version), count (u32), one zstd frame. The
frame holds the length of the header (u32), the header (msgpack) and the columns one after the
other. A column is stored as offsets from a base, as deltas, or as offsets from an earlier column
that is nearly the same (the call of a synchronous collective takes as long as the collective),
whichever is narrowest; nothing but its base if that says it all. `*_ns` columns count
microseconds, finer than any clock they come from. The frame begins with a dictionary known to
both sides (`chunk_dictionary`), so that a chunk of a dozen events is hardly larger than the events.

What the ranks of a node did in the same second may be one chunk: the events of one rank after those
of the other, a base and a slope for each of them, forms and widths in common. Such a chunk (its
version is 3) says which ranks it is of, and is read as one with a column `of_rank` more. Eight
chunks of some hundred events each take more bytes, and more of the server's time. Ranks end a
collective together, so the ends of all but the first are stored as what they differ by from its
ends, where that says less; so are their beginnings.

Nothing in a chunk is trusted: counts, sizes, widths and places are bounded and checked.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import or_
from typing import Any, TypeAlias, overload

import msgspec
import numpy as np

from rankscope.wire import zstd
from rankscope.wire.arrays import begins_of_runs
from rankscope.wire.chunk_dictionary import DICTIONARY
from rankscope.wire.rank_parts import Parts

MAGIC, MAGIC_OF_RANKS = b"RSC2", b"RSC3"
MAX_EVENTS = 200_000
MAX_RAW_BYTES = 64 << 20
MAX_COLUMNS = 64
BLOCK_RANKS = 64  # the ranks of a chunk are all in one block of so many
RANK = "of_rank"  # the column that chunks of several ranks have beside those of their kind
NS_PER_UNIT = 1_000
ZSTD_LEVEL = 6  # hardly more CPU than 3, and 3 % smaller

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Column: TypeAlias = "Array | list[str] | Words"
OFFSET, DELTA, FLOAT, BESIDE = range(4)  # forms
WORDS = 0x10  # added to the form of a column whose numbers are places in a list of words
# Added to OFFSET or DELTA, which is how the first rank has it: the numbers of the others are beside
# those of the first; or their sums with another column are, as beginnings and durations are ends.
ACROSS, MEETING = 0x20, 0x40
_FORMS = frozenset({OFFSET, DELTA, BESIDE}) | {
    form | more for form in (OFFSET, DELTA) for more in (ACROSS, ACROSS | MEETING)
}
_MAX_BASE = 1 << 62
_MAX_NAMES = 8_192  # letters
_MAX_KNOWN_BYTES = 4_096
_CHUNKS_AT_ONCE, _EVENTS_AT_ONCE = 256, 100_000  # that are decoded together
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LITTLE = {width: np.dtype(kind).newbyteorder("<") for width, kind in _TYPES.items()}
# columns that are often nearly another one
_NEAR = {
    "started_ns": "duration_ns", "returned_ns": "duration_ns", "blocked_ns": "duration_ns",
    "input_bytes": "size_bytes", "output_bytes": "size_bytes",
    "other_ns": "duration_ns", "process_cpu_ns": "cpu_ns",
}  # fmt: skip
# What ranks may have in common: a column, and another one with which it is to be summed; and what
# says which of their events are the same call.
_IN_COMMON = {"arrived_ns": "", "duration_ns": "arrived_ns"}
_KEY, _KEY_WITHIN = "sequence", "group"
_WORTH_RATIO = 0.95  # of the bits without: to read it takes longer
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
    """The columns of chunks of one layout, chunk after chunk, whole numbers side by side.

    `rows` says which column is where, in the order of the sender: the first rows are those of
    `numbers` (columns x events, int64), the others those of `constants` (int64, read-only: most are
    one number for all events). Rows of words are places in their list of `words`. `begins` are the
    first events of the chunks; `lowest` and `highest` (int64) are columns x chunks.
    """

    rows: dict[str, int]
    numbers: Array
    constants: list[Array]
    begins: Array
    lowest: Array
    highest: Array
    words: list[dict[str, list[str]]]  # of each chunk, by column
    floats: dict[str, Array]  # float32
    ranks: Array | None  # of each event; None where a chunk is of one rank, and does not say whose

    @property
    def num_events(self) -> int:
        """Return how many events there are."""
        return int(self.numbers.shape[1])

    def columns(self, words: Mapping[str, Words]) -> dict[str, Column]:
        """Return all of them by name; `words` are `words_in_common`."""
        found: dict[str, Column] = {name: self._row(row) for name, row in self.rows.items()}
        found |= {**words, **self.floats}
        return found if self.ranks is None else found | {RANK: self.ranks}

    def part(self, number: int) -> dict[str, Column]:
        """Return those of one chunk."""
        begin, *after = self.begins[number : number + 2].tolist()
        events = slice(begin, after[0] if after else None)
        numbers = [*self.numbers[:, events], *(column[events] for column in self.constants)]
        found: dict[str, Column] = {name: numbers[row] for name, row in self.rows.items()}
        for name, of_column in self.words[number].items():
            found[name] = Words(numbers[self.rows[name]], of_column)
        found |= {name: values[events] for name, values in self.floats.items()}
        return found if self.ranks is None else found | {RANK: self.ranks[events]}

    def words_in_common(self) -> dict[str, Words]:
        """Return the columns of words, each with one list of words for all chunks.

        Where all chunks have the same list it is that of the first.
        """
        found = {}
        for name, first in self.words[0].items():
            codes, lists = self._row(self.rows[name]), [known[name] for known in self.words]
            if all(one is first or one == first for one in lists):
                found[name] = Words(codes, first)
                continue
            places: dict[str, int] = {}
            united = [places.setdefault(word, len(places)) for one in lists for word in one]
            starts = np.cumsum([0, *map(len, lists[:-1])])
            counts = np.diff(self.begins, append=len(codes))
            found[name] = Words(np.array(united)[codes + np.repeat(starts, counts)], list(places))
        return found

    def _row(self, row: int) -> Array:
        varying = len(self.numbers)
        found: Array = self.numbers[row] if row < varying else self.constants[row - varying]
        return found


class _Header(msgspec.Struct, array_like=True):
    """One entry of each list per column: the names together are a single match for zstd."""

    names: str  # separated by spaces
    forms: bytes
    widths: bytes  # bytes per value; 0: every value is what the base says
    bases: list[int]  # of several ranks those of the first rank, then those of the next
    # DELTA: what each delta has at least; BESIDE: place of the other column; MEETING, of all ranks
    # but the first: the same
    slopes: list[int]
    words: msgspec.Raw  # a list for each of the columns of WORDS: what their numbers mean


class _RanksHeader(_Header, array_like=True):
    """Of a chunk of several ranks: which they are, ascending, and how many events each has."""

    ranks: list[int]
    counts: list[int]
    shifts: list[int]  # see `Parts.shifts`


@dataclass(frozen=True, slots=True)
class _Packed:
    """One column as it is in a chunk."""

    name: str
    form: int
    width: int
    bases: Array  # of each rank
    slopes: Array
    values: Array  # unsigned, `width` bytes each

    @property
    def bits(self) -> float:
        """Return about how many bits the values take when they are compressed.

        The entropy of each of their bytes: what zstd comes near to where nothing repeats. A few
        values far from the others make all of them large, but hardly take more room.
        """
        planes = self.values.astype(_LITTLE[self.width], copy=False).view(np.uint8)
        counts = [np.bincount(plane) for plane in planes.reshape(-1, self.width).T]
        num = len(self.values)
        known = [count[count > 0] for count in counts]
        return sum(num * math.log2(num) - float((one * np.log2(one)).sum()) for one in known)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """What follows from the names, forms and widths of columns: the same in most chunks.

    A body is planes of one byte for each event, each column as many as it is wide, the lowest
    byte first. Rows are whole numbers (and codes of words), the widest first, then those without
    bytes that vary, then those that are their base: what is done to some is done to a slice.
    """

    rows: dict[str, int]  # by name, in the order of the sender
    places: tuple[int, ...]  # of the rows among all columns
    planes: tuple[Array, ...]  # by byte: where the first rows, as many as have it, have it
    num_varying: int
    deltas: tuple[int, ...]  # rows
    first_deltas: tuple[int, ...]  # of the first rank alone
    across: tuple[int, ...]  # rows of which the first rank's are to be added to those of the others
    meeting: tuple[tuple[int, int], ...]  # such a row, and the one that is summed with it
    beside: tuple[tuple[int, int], ...]  # a row and the row that it is beside, in order
    times: tuple[slice, ...]  # rows in units of the chunk
    words: tuple[tuple[str, int, int], ...]  # name, row, place among the lists of words
    floats: tuple[tuple[str, int], ...]  # name, first plane
    num_planes: int
    num_lists: int  # of words


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk that was unpacked and whose header is sound; its columns are still bytes."""

    count: int
    layout: _Layout
    header: _Header
    body: Array  # planes x events

    @property
    def form(self) -> Hashable:
        """Return what chunks have alike that are decoded together."""
        return self.layout, bool(self.ranks)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that the chunk says it is of; none if it is of one."""
        return self.header.ranks if isinstance(self.header, _RanksHeader) else []

    @property
    def counts(self) -> list[int]:
        """Return how many events each of its parts has."""
        return self.header.counts if isinstance(self.header, _RanksHeader) else [self.count]

    @property
    def shifts(self) -> list[int]:
        """Return of each part where in the first one its events begin."""
        return self.header.shifts if isinstance(self.header, _RanksHeader) else [0]


_encode = msgspec.msgpack.Encoder().encode
_decode_words = msgspec.msgpack.Decoder(list[list[str]]).decode
_decode_header = {
    MAGIC: msgspec.msgpack.Decoder(_Header).decode,
    MAGIC_OF_RANKS: msgspec.msgpack.Decoder(_RanksHeader).decode,
}


# --- writing --------------------------------------------------------------------------------


def encode_chunk(columns: Mapping[str, Column]) -> bytes:
    """Pack equally long columns: arrays of integers or float32, lists of strings.

    Raises ValueError if the columns differ in length or are empty.
    """
    return _encoded([columns], [])


def encode_ranks(of_ranks: Mapping[int, Mapping[str, Column]]) -> bytes:
    """Pack the columns of each of several ranks of one block as one chunk.

    Raises ValueError if columns of a rank differ in length or are empty, or ranks have others.
    """
    ranks = sorted(of_ranks)
    if not _are_of_one_block(ranks):
        raise ValueError(f"ranks {ranks} are not several of one block of {BLOCK_RANKS}")
    return _encoded([of_ranks[rank] for rank in ranks], ranks)


def _are_of_one_block(ranks: Sequence[int]) -> bool:
    """Return whether these are two ranks and more, ascending, as a chunk may have them."""
    is_ascending = all(one < other for one, other in itertools.pairwise(ranks))
    blocks = {rank // BLOCK_RANKS for rank in ranks}
    return is_ascending and len(ranks) > 1 and len(blocks) == 1 and ranks[0] >= 0


def _encoded(of_ranks: Sequence[Mapping[str, Column]], ranks: list[int]) -> bytes:
    lengths = [_length_of(columns) for columns in of_ranks]
    if any(columns.keys() != of_ranks[0].keys() for columns in of_ranks):
        raise ValueError("the ranks of a chunk need the same columns")
    words: list[list[str]] = []
    numbers, of_words = {}, []
    for name in of_ranks[0]:
        joined = _joined([columns[name] for columns in of_ranks])
        of_words.append(WORDS if is_words(joined) else 0)
        numbers[name] = _to_numbers(name, joined, words)
    parts = Parts(np.cumsum([0, *lengths[:-1]]), np.array(lengths))
    shifts = _shifts(numbers, parts)
    packed = [_pack(name, numbers, parts, shifts) for name in numbers]
    header: dict[str, Any] = {
        "names": " ".join(numbers),
        "forms": bytes(map(or_, (column.form for column in packed), of_words)),
        "widths": bytes(column.width for column in packed),
        "bases": np.stack([column.bases for column in packed], axis=1).reshape(-1).tolist(),
        "slopes": np.stack([column.slopes for column in packed], axis=1).reshape(-1).tolist(),
        "words": msgspec.Raw(_encode(words)),
    }
    if ranks:
        head: _Header = _RanksHeader(**header, ranks=ranks, counts=lengths, shifts=shifts.tolist())
    else:
        head = _Header(**header)
    encoded = _encode(head)
    bodies = [_shuffle(column.values, column.width) for column in packed]
    raw = b"".join([_LENGTH.pack(len(encoded)), encoded, *bodies])
    magic = MAGIC_OF_RANKS if ranks else MAGIC
    return _HEAD.pack(magic, sum(lengths)) + zstd.pack(raw, ZSTD_LEVEL, _WORDS)


def _length_of(columns: Mapping[str, Column]) -> int:
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("a chunk needs columns of one length above zero")
    return lengths.pop()


def _joined(columns: Sequence[Column]) -> Column:
    """Return a column of several ranks, one behind the other."""
    if len(columns) == 1:
        return columns[0]
    if any(is_words(column) for column in columns):
        places: dict[str, int] = {}
        codes = []
        for coded in map(Words.of, columns):
            known = [places.setdefault(word, len(places)) for word in coded.words]
            codes.append(np.array(known, np.int64)[coded.codes])
        return Words(np.concatenate(codes), list(places))
    return np.concatenate([np.asarray(column) for column in columns])


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


def _shifts(numbers: Mapping[str, Array], parts: Parts) -> Array:
    """Return where in the first rank's events the others begin, where columns say so."""
    if _KEY not in numbers or len(parts.begins) == 1:
        return np.zeros(len(parts.begins), np.int64)
    keys, within = numbers[_KEY], numbers.get(_KEY_WITHIN)
    return parts.shifts(keys if within is None else (keys << 16) + within)


def _pack(name: str, all_numbers: Mapping[str, Array], parts: Parts, shifts: Array) -> _Packed:
    """Return the narrowest form of a column."""
    numbers = all_numbers[name]
    if numbers.dtype.kind == "f":
        nothing = np.zeros(len(parts.counts), np.int64)
        return _Packed(name, FLOAT, 4, nothing, nothing, numbers.view("<u4"))
    best = _offsets(name, OFFSET, numbers, 0, parts)
    if best.width and len(numbers) > 1:
        best = min(best, _deltas(name, numbers, parts), key=lambda packed: packed.width)
    near, names = _NEAR.get(name, ""), list(all_numbers)
    is_near = near in names[: names.index(name)] and all_numbers[near].dtype.kind != "f"
    if best.width and is_near:
        beside = _offsets(name, BESIDE, numbers - all_numbers[near], names.index(near), parts)
        best = min(best, beside, key=lambda packed: packed.width)
    if best.width and len(parts.begins) > 1 and name in _IN_COMMON:
        across = _across(name, all_numbers, parts, shifts)
        if across is not None and (not across.width or across.bits < _WORTH_RATIO * best.bits):
            return across
    return best


def _across(
    name: str, all_numbers: Mapping[str, Array], parts: Parts, shifts: Array
) -> _Packed | None:
    """Return a column whose numbers of other ranks are beside those of the first.

    None where what it is to be summed with is not there.
    """
    first = parts.counts[:1]
    alone = _pack(
        name, {name: all_numbers[name][: first[0]]}, Parts(parts.begins[:1], first), shifts[:1]
    )
    to_sum, names = _IN_COMMON[name], list(all_numbers)
    if to_sum and to_sum not in names[: names.index(name)]:
        return None
    sums = all_numbers[name] + (all_numbers[to_sum] if to_sum else 0)
    others, counterparts = parts.counterparts(shifts, np.zeros(len(shifts), np.int64))
    rest = Parts(parts.begins[1:] - first, parts.counts[1:])
    slope = names.index(to_sum) if to_sum else 0
    beside = _offsets(name, OFFSET, sums[others] - sums[counterparts], slope, rest)
    values = np.concatenate([alone.values, beside.values])
    return _Packed(
        name, alone.form | ACROSS | (MEETING if to_sum else 0), max(alone.width, beside.width),
        np.append(alone.bases, beside.bases), np.append(alone.slopes, beside.slopes), values,
    )  # fmt: skip


def _offsets(name: str, form: int, numbers: Array, slope: int, parts: Parts) -> _Packed:
    bases = np.minimum.reduceat(numbers, parts.begins)
    values = (numbers - parts.each(bases)).astype(np.uint64)
    return _Packed(name, form, _width(values), bases, np.full(len(bases), slope), values)


def _deltas(name: str, numbers: Array, parts: Parts) -> _Packed:
    """Return the first number of each rank as base and what each delta exceeds its least one by."""
    deltas = np.empty_like(numbers)
    deltas[1:] = np.diff(numbers)
    deltas[parts.begins] = np.iinfo(np.int64).max  # there is none
    slopes = np.minimum.reduceat(deltas, parts.begins)
    slopes[parts.counts == 1] = 0
    deltas -= parts.each(slopes)
    deltas[parts.begins] = 0
    values = deltas.astype(np.uint64)
    return _Packed(name, DELTA, _width(values), numbers[parts.begins], slopes, values)


def _width(values: Array) -> int:
    largest = int(values.max())
    return next(width for width in (0, *_TYPES) if largest < 1 << (8 * width))


def _shuffle(values: Array, width: int) -> bytes:
    if width == 0:
        return b""
    little = values.astype(_LITTLE[width], copy=False)
    return little.view(np.uint8).reshape(len(values), width).T.tobytes()


# --- reading --------------------------------------------------------------------------------


def decode_chunk(data: bytes, only: Collection[str] | None = None) -> dict[str, Column]:
    """Unpack a chunk into int64 or float32 arrays and columns of words.

    `only` names the columns wanted; a wanted column that is absent is not an error, so newer
    readers can read older chunks. Raises ChunkError on anything malformed.
    """
    return next(decode_chunks([data], only))


def decode_chunks(
    data: Iterable[bytes], only: Collection[str] | None = None
) -> Iterator[dict[str, Column]]:
    """Unpack chunks, those of one layout together: half of the time of one after the other.

    Takes some at a time, so that memory is bounded. Raises ChunkError where one is malformed.
    """
    wanted = None if only is None else frozenset(only)
    opened: list[OpenChunk] = []
    count = 0
    for one in data:
        opened.append(open_chunk(one, wanted))
        count += opened[-1].count
        if count >= _EVENTS_AT_ONCE or len(opened) >= _CHUNKS_AT_ONCE:
            yield from _decode_some(opened, wanted)
            opened, count = [], 0
    yield from _decode_some(opened, wanted)


def _decode_some(
    opened: Sequence[OpenChunk], wanted: frozenset[str] | None
) -> list[dict[str, Column]]:
    """Return the columns of each chunk. Raises ChunkError where one of them is malformed."""
    places: dict[Hashable, list[int]] = {}
    for place, chunk in enumerate(opened):
        places.setdefault(chunk.form, []).append(place)
    found: list[dict[str, Column]] = [{} for _ in opened]
    for alike in places.values():
        decoded = decode_alike([opened[place] for place in alike])
        for number, place in enumerate(alike):
            columns = decoded.part(number)
            found[place] = {
                name: column for name, column in columns.items() if wanted is None or name in wanted
            }
    return found


def by_rank(rank: int, columns: Mapping[str, Column]) -> Iterator[tuple[int, dict[str, Column]]]:
    """Yield each rank of a decoded chunk with its columns; `rank` is that of a chunk of one."""
    ranks = columns.get(RANK)
    if ranks is None:
        yield rank, dict(columns)
        return
    begins = begins_of(np.asarray(ranks))
    for begin, end in zip(begins, [*begins[1:], len(ranks)], strict=True):
        of_rank = {name: column[begin:end] for name, column in columns.items() if name != RANK}
        yield int(np.asarray(ranks)[begin]), of_rank


def begins_of(ranks: Array) -> list[int]:
    """Return where the events of each rank begin in a column `RANK`."""
    begins: list[int] = begins_of_runs(ranks).tolist()
    return begins


def chunk_count(data: bytes) -> int:
    """Return the number of events, without unpacking them. Raises ChunkError."""
    if data[:3] != MAGIC[:3]:
        raise ChunkError("does not begin with RSC: not a Rankscope chunk")
    if data[:4] not in _decode_header:
        version = data[3:4].decode("latin-1")
        raise ChunkError(f"format version {version!r}; this reader knows 2 and 3")
    if len(data) < _HEAD.size:
        raise ChunkError("truncated before the count")
    count: int = _HEAD.unpack_from(data)[1]
    if not 0 < count <= MAX_EVENTS:
        raise ChunkError(f"count {count} is outside 1..{MAX_EVENTS}")
    return count


def open_chunk(data: bytes, only: frozenset[str] | None = None) -> OpenChunk:
    """Unpack a chunk: all columns, or some and those that they rest on. Raises ChunkError."""
    count = chunk_count(data)
    raw = _decompress(data[_HEAD.size :])
    if len(raw) < _LENGTH.size:
        raise ChunkError("the frame ends before its header")
    body_at = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
    if body_at > len(raw):
        raise ChunkError(f"a header up to byte {body_at} in a frame of {len(raw)}")
    try:
        header = _decode_header[data[:4]](raw[_LENGTH.size : body_at])
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: not UTF-8
        raise ChunkError(f"header: {error}") from error
    if isinstance(header, _RanksHeader):
        _check_ranks(header, count)
    layout = _layout_of(header, only)
    if body_at + layout.num_planes * count != len(raw):
        size = body_at + layout.num_planes * count
        raise ChunkError(f"the frame holds {len(raw)} bytes, its header says {size}")
    body = np.frombuffer(raw, np.uint8, offset=body_at).reshape(layout.num_planes, count)
    return OpenChunk(count, layout, header, body)


def _check_ranks(header: _RanksHeader, count: int) -> None:
    """Raise ChunkError where a chunk cannot be one of these ranks."""
    ranks, counts = header.ranks, header.counts
    if not _are_of_one_block(ranks):
        raise ChunkError(f"ranks {ranks[:3]} are not several of one block of {BLOCK_RANKS}")
    if len(header.shifts) != len(ranks) or any(abs(n) > MAX_EVENTS for n in header.shifts):
        raise ChunkError("the shifts of the ranks are not those of chunks")
    if len(counts) != len(ranks) or min(counts) < 1 or sum(counts) != count:
        raise ChunkError("the counts of the ranks are not those of the events")
    if RANK in header.names.split(" "):
        raise ChunkError(f"a column {RANK!r} in a chunk that says its ranks")


def _layout_of(header: _Header, only: frozenset[str] | None) -> _Layout:
    """Return the layout of a chunk with a sound header. Raises ChunkError."""
    bases, slopes = header.bases, header.slopes
    num_columns = _num_columns(header.names[: _MAX_NAMES + 1])
    num_parts = len(header.ranks) if isinstance(header, _RanksHeader) else 1
    is_whole = len(bases) == len(slopes) == num_columns * num_parts
    if not is_whole or not len(header.forms) == len(header.widths) == num_columns:
        raise ChunkError("the lists of the header differ in length")
    if min(*bases, *slopes) <= -_MAX_BASE or max(*bases, *slopes) >= _MAX_BASE:
        raise ChunkError(f"column {_out_of_range(header)!r}: base or slope is out of range")
    rests_on = _rests_on(header.forms, num_parts)
    others = tuple([header.slopes[at] for _, at in rests_on])
    layout = _layout(header.names, header.forms, header.widths, num_parts > 1, others, only)
    if layout.num_lists != len(_words_of(header.words)):
        raise ChunkError("a list of words for each column of words, and no more, is needed")
    return layout


def _words_of(raw: msgspec.Raw) -> list[list[str]]:
    """Return the lists of words, not to be changed. Raises ChunkError."""
    return (_known_words if len(raw) <= _MAX_KNOWN_BYTES else _read_words)(bytes(raw))


def _read_words(raw: bytes) -> list[list[str]]:
    try:
        return _decode_words(raw)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: not UTF-8
        raise ChunkError(f"words: {error}") from error


_known_words = lru_cache(maxsize=2_048)(_read_words)  # most chunks have those of others


@lru_cache(maxsize=512)
def _num_columns(joined: str) -> int:
    """Return how many names there are. Raises ChunkError where they are not to be had."""
    names = joined.split(" ")
    if len(names) > MAX_COLUMNS or len(set(names)) < len(names) or len(joined) > _MAX_NAMES:
        raise ChunkError(f"{len(names)} columns; 1..{MAX_COLUMNS} of different names are allowed")
    return len(names)


def _out_of_range(header: _Header) -> str:
    """Return the first column with a number that is out of range."""
    names = header.names.split(" ")
    for place, numbers in enumerate(zip(header.bases, header.slopes, strict=True)):
        if not all(-_MAX_BASE < number < _MAX_BASE for number in numbers):
            return names[place % len(names)]
    return ""


@lru_cache(maxsize=512)
def _rests_on(forms: bytes, num_parts: int) -> list[tuple[int, int]]:
    """Return columns that rest on another, and which slope is its place. Raises ChunkError."""
    found = []
    for place, form in enumerate(forms):
        if form & (ACROSS | MEETING) and num_parts < 2:
            raise ChunkError("a column of the first rank's is in a chunk of one rank")
        if form & ~WORDS == BESIDE:
            found.append((place, place))
        elif form & MEETING:
            found.append((place, len(forms) + place))
    return found


@lru_cache(maxsize=512)
def _layout(
    joined: str, all_forms: bytes, widths: bytes, is_of_ranks: bool,
    rests_on: tuple[int, ...], only: frozenset[str] | None,
) -> _Layout:  # fmt: skip
    """Return the layout; `rests_on` are the places of what columns rest on, in order."""
    names, forms = joined.split(" "), [form & ~WORDS for form in all_forms]
    resting = [place for place, _ in _rests_on(all_forms, 1 + is_of_ranks)]
    others = dict(zip(resting, rests_on, strict=True))
    _check_columns(names, forms, widths, others)
    wanted = {place for place, name in enumerate(names) if only is None or name in only}
    for place in range(len(forms) - 1, -1, -1):
        if place in wanted and place in others:
            wanted.add(others[place])
    of_words = [place for place, form in enumerate(all_forms) if form & WORDS]
    times = {p for p in wanted if names[p].endswith("_ns") and p not in of_words}

    def order(place: int) -> tuple[int, bool, bool]:
        return -widths[place], forms[place] == OFFSET, place not in times

    places = sorted((p for p in wanted if forms[p] != FLOAT), key=order)
    row_of = {place: row for row, place in enumerate(places)}
    starts = [sum(widths[:place]) for place in range(len(names))]
    planes = []
    for byte in range(max((widths[place] for place in places), default=0)):
        having = [starts[place] + byte for place in places if widths[place] > byte]
        planes.append(np.array(having))
    return _Layout(
        rows={names[place]: row_of[place] for place in sorted(places)},
        places=tuple(places),
        planes=tuple(planes),
        num_varying=sum(widths[p] > 0 or forms[p] != OFFSET for p in places),
        deltas=tuple(row_of[p] for p in places if forms[p] == DELTA),
        first_deltas=tuple(row_of[p] for p in places if forms[p] & ~MEETING == DELTA | ACROSS),
        across=tuple(row_of[p] for p in places if forms[p] & (ACROSS | MEETING) == ACROSS),
        meeting=tuple((row_of[p], row_of[others[p]]) for p in places if forms[p] & MEETING),
        beside=tuple((row_of[p], row_of[others[p]]) for p in sorted(places) if forms[p] == BESIDE),
        times=tuple(_slices([row_of[p] for p in places if p in times])),
        words=tuple((names[p], row_of[p], n) for n, p in enumerate(of_words) if p in row_of),
        floats=tuple((names[p], starts[p]) for p in sorted(wanted) if forms[p] == FLOAT),
        num_planes=sum(widths),
        num_lists=len(of_words),
    )


def _slices(rows: list[int]) -> list[slice]:
    """Return rows that follow each other as slices."""
    ends = [row + 1 for row in rows if row + 1 not in rows]
    begins = [row for row in rows if row - 1 not in rows]
    return [slice(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _check_columns(
    names: list[str], forms: list[int], widths: bytes, others: dict[int, int]
) -> None:
    for place, (name, form, width) in enumerate(zip(names, forms, widths, strict=True)):
        if width != 0 and width not in _TYPES:
            raise ChunkError(f"column {name!r}: width {width} is not 0, 1, 2, 4 or 8")
        if form not in _FORMS and (form, width) != (FLOAT, 4):
            raise ChunkError(f"column {name!r}: unknown form {form} of width {width}")
        other = others.get(place, 0)
        is_there = 0 <= other < place and forms[other] != FLOAT
        # what ranks have in common is known before what is beside another column
        is_early = is_there and forms[other] != BESIDE and not forms[other] & MEETING
        if (form == BESIDE and not is_there) or (form & MEETING and not is_early):
            raise ChunkError(f"column {name!r}: is based on column {other}, which cannot be")


def decode_alike(chunks: Sequence[OpenChunk]) -> Decoded:
    """Decode chunks of one layout; what overflows is only wrong.

    Raises ChunkError where one of them is malformed.
    """
    layout = chunks[0].layout
    counts = [count for chunk in chunks for count in chunk.counts]  # of each rank of each chunk
    begins = np.cumsum([0, *counts[:-1]])
    firsts = np.cumsum([0, *(len(chunk.counts) for chunk in chunks[:-1])])  # ranks, of each chunk
    bases = _by_column([chunk.header.bases for chunk in chunks], layout.places, len(counts))
    slopes = _by_column([chunk.header.slopes for chunk in chunks], layout.places, len(counts))
    num_varying = layout.num_varying  # rows; each of the others is what the base says
    numbers = np.empty((num_varying, sum(counts)), np.int64)
    body = chunks[0].body if len(chunks) == 1 else np.concatenate([c.body for c in chunks], axis=1)
    _take_bytes(layout, body, numbers)
    events = [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    for row in layout.deltas:
        each = slopes[row] if len(counts) == 1 else np.repeat(slopes[row], counts)
        _sum_up(numbers[row], each, begins)
    for row, first in itertools.product(layout.first_deltas, firsts.tolist()):
        deltas = numbers[row, events[first]]
        deltas[1:] += slopes[row, first]
        np.cumsum(deltas, out=deltas)
    for place, those in enumerate(events):
        numbers[:, those] += bases[:num_varying, place, None]
    _add_others(layout, numbers, bases, Parts(begins, np.array(counts)), chunks)
    lowest, highest = np.ascontiguousarray(bases), bases.copy()
    if num_varying:
        np.minimum.reduceat(numbers, begins, axis=1, out=lowest[:num_varying])
        np.maximum.reduceat(numbers, begins, axis=1, out=highest[:num_varying])
    for rows in layout.times:
        _in_ns(numbers[rows], lowest[rows], highest[rows])
    constants = [_repeated(of_parts, counts) for of_parts in lowest[num_varying:]]
    ranks = None
    if chunks[0].ranks:
        ranks = np.repeat([rank for chunk in chunks for rank in chunk.ranks], counts)
        lowest = np.minimum.reduceat(lowest, firsts, axis=1)
        highest = np.maximum.reduceat(highest, firsts, axis=1)
        begins = begins[firsts]
    lists = [_words_of(chunk.header.words) for chunk in chunks]
    words = [{name: of_chunk[at] for name, _, at in layout.words} for of_chunk in lists]
    for name, row, _ in layout.words:
        num_words = np.array([len(of_chunk[name]) for of_chunk in words])
        if lowest[row].min() < 0 or (highest[row] >= num_words).any():
            raise ChunkError(f"column {name!r}: an index points outside its dictionary")
    floats = {
        name: _one_nan(np.ascontiguousarray(body[start : start + 4].T).view("<f4").reshape(-1))
        for name, start in layout.floats
    }
    return Decoded(layout.rows, numbers, constants, begins, lowest, highest, words, floats, ranks)


def _repeated(of_parts: Array, counts: Sequence[int]) -> Array:
    """Return a number of each part for each of its events; of one number it takes no memory."""
    if (of_parts == of_parts[0]).all():
        return np.broadcast_to(of_parts[0], sum(counts))
    return np.repeat(of_parts, counts)


def _add_others(
    layout: _Layout, numbers: Array, bases: Array, parts: Parts, chunks: Sequence[OpenChunk]
) -> None:
    """Add what numbers are beside: those of the first rank of their chunk, or of another column."""

    def of_row(row: int) -> Array:
        return numbers[row] if row < len(numbers) else parts.each(bases[row])

    if layout.across or layout.meeting:
        _add_first(layout, numbers, of_row, parts, chunks)
    for row, other in layout.beside:
        numbers[row] += of_row(other)


def _add_first(
    layout: _Layout, numbers: Array, of_row: Callable[[int], Array], parts: Parts,
    chunks: Sequence[OpenChunk],
) -> None:  # fmt: skip
    num_parts = [len(chunk.counts) for chunk in chunks]
    first = np.repeat(np.cumsum([0, *num_parts[:-1]]), num_parts)
    shifts = np.array([shift for chunk in chunks for shift in chunk.shifts])
    others, counterparts = parts.counterparts(shifts, first)
    for row in layout.across:
        numbers[row, others] += numbers[row, counterparts]
    for row, summed in layout.meeting:
        base = of_row(summed)
        ends = numbers[row, counterparts] + base[counterparts]
        numbers[row, others] += ends - base[others]


def _by_column(lists: Sequence[list[int]], places: Sequence[int], num_parts: int) -> Array:
    """Return what headers say of each rank (columns) for the columns at these places (rows)."""
    numbers = np.array([number for one in lists for number in one], np.int64)
    return np.ascontiguousarray(numbers.reshape(num_parts, -1)[:, list(places)].T)


def _in_ns(times: Array, lowest: Array, highest: Array) -> None:
    """Turn units of time and their extremes into nanoseconds; -1 is not known."""
    is_some_unknown = lowest.min() < 0
    for those in (times, lowest, highest):
        those *= NS_PER_UNIT
        if is_some_unknown:
            np.maximum(those, -1, out=those)


def _sum_up(deltas: Array, slopes: Array, begins: Array) -> None:
    """Turn deltas into numbers, those of each chunk for itself."""
    first = deltas[begins]
    deltas += slopes
    deltas[begins] = first
    deltas[begins[1:]] -= np.add.reduceat(deltas, begins)[:-1]
    np.cumsum(deltas, out=deltas)


def _one_nan(values: Array) -> Array:
    """Return floats with one kind of NaN: to convert one that "signals" is an error of its own."""
    is_nan = np.isnan(values)
    return np.where(is_nan, np.float32(np.nan), values) if is_nan.any() else values


def _take_bytes(layout: _Layout, body: Array, rows: Array) -> None:
    """Put what the bytes of a body say into the rows; 0 where a row has none."""
    planes = layout.planes
    rows[len(planes[0]) if planes else 0 :] = 0
    if not planes:
        return
    num_wide = len(planes[1]) if len(planes) > 1 else 0
    rows[num_wide : len(planes[0])] = body[planes[0][num_wide:]]
    if num_wide:  # two bytes at once: half of the work of one after the other
        rows[:num_wide] = (
            np.left_shift(body[planes[1]], 8, dtype=np.uint16) | body[planes[0][:num_wide]]
        )
    for byte, of_byte in enumerate(planes[2:], 2):
        rows[: len(of_byte)] += np.left_shift(body[of_byte], 8 * byte, dtype=np.int64)


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
