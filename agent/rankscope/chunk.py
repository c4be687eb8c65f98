"""The columnar form of dense events: narrow integers, byte-shuffled, one zstd frame.

Layout: magic (4 bytes), header length (u32), header (msgpack), body (one zstd frame of all
columns one after the other). A column is stored as offsets from a base or, where that is
narrower, as zigzag deltas; `*_ns` columns count microseconds, finer than any clock they come
from. Nothing that a header says is trusted: counts, sizes and widths are bounded and checked.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import zstandard

from rankscope.schema import FLOAT_COLUMNS, STRING_COLUMNS

MAGIC = b"RSC1"
FORMAT_VERSION = 1
MAX_EVENTS = 200_000
MAX_RAW_BYTES = 64 << 20
MAX_COLUMNS = 64
NS_PER_UNIT = 1_000
ZSTD_LEVEL = 3

Column: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | list[str]"
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_local = threading.local()  # zstandard objects must not be shared between threads


class ChunkError(ValueError):
    """These bytes are not a chunk; the message says which part and why."""


class _ColumnHeader(msgspec.Struct, array_like=True):
    name: str
    form: str  # "offset", "delta", "float"
    width: int  # bytes per value
    base: int
    words: list[str] | None = None  # dictionary of a string column


class _Header(msgspec.Struct):
    version: int
    count: int
    columns: list[_ColumnHeader]


_decode_header = msgspec.msgpack.Decoder(_Header).decode


def encode_chunk(columns: Mapping[str, Column]) -> bytes:
    """Pack equally long columns; integers as int64 arrays, strings as lists.

    Raises ValueError if the columns differ in length or are empty.
    """
    count = len(next(iter(columns.values()), ()))
    if count == 0 or any(len(values) != count for values in columns.values()):
        raise ValueError("a chunk needs columns of one length above zero")
    headers, parts = [], []
    for name, values in columns.items():
        header, body = _encode_column(name, values)
        headers.append(header)
        parts.append(body)
    head = msgspec.msgpack.encode(_Header(FORMAT_VERSION, count, headers))
    body = _compressor().compress(b"".join(parts))
    return MAGIC + struct.pack("<I", len(head)) + head + body


def decode_chunk(data: bytes, only: Collection[str] | None = None) -> dict[str, Column]:
    """Unpack a chunk into int64 or float32 arrays and lists of strings.

    `only` names the columns wanted; a wanted column that is absent is not an error, so newer
    readers can read older chunks. Raises ChunkError on anything malformed.
    """
    header, body_at = _read_header(data)
    raw_bytes = sum(column.width for column in header.columns) * header.count
    raw = _decompress(data[body_at:], raw_bytes)
    columns: dict[str, Column] = {}
    at = 0
    for column in header.columns:
        size = column.width * header.count
        if only is None or column.name in only:
            columns[column.name] = _decode_column(column, raw[at : at + size], header.count)
        at += size
    return columns


def chunk_count(data: bytes) -> int:
    """Return the number of events, reading the header only. Raises ChunkError."""
    return _read_header(data)[0].count


def _encode_column(name: str, values: Column) -> tuple[_ColumnHeader, bytes]:
    if name in FLOAT_COLUMNS:
        floats = np.ascontiguousarray(values, dtype="<f4")
        return _ColumnHeader(name, "float", 4, 0), _shuffle(floats.view(np.uint32))
    words = None
    if name in STRING_COLUMNS:
        positions: dict[str, int] = {}
        numbers = np.fromiter(
            (positions.setdefault(str(word), len(positions)) for word in values), dtype=np.int64
        )
        words = list(positions)
    else:
        numbers = np.asarray(values, dtype=np.int64)
        if name.endswith("_ns"):
            numbers = numbers // NS_PER_UNIT
    base = int(numbers.min())
    offsets = (numbers - base).astype(np.uint64)
    deltas = np.diff(numbers, prepend=numbers[:1])
    zigzag = ((deltas << 1) ^ (deltas >> 63)).astype(np.uint64)
    if _width(zigzag) < _width(offsets):
        return _packed(name, "delta", int(numbers[0]), zigzag, words)
    return _packed(name, "offset", base, offsets, words)


def _packed(
    name: str, form: str, base: int, values: np.ndarray[Any, Any], words: list[str] | None
) -> tuple[_ColumnHeader, bytes]:
    width = _width(values)
    return _ColumnHeader(name, form, width, base, words), _shuffle(values.astype(_WIDTHS[width]))


def _decode_column(column: _ColumnHeader, raw: bytes, count: int) -> Column:
    values = np.frombuffer(raw, np.uint8).reshape(column.width, count).T
    packed = np.ascontiguousarray(values).view(_WIDTHS[column.width]).reshape(count)
    if column.form == "float":
        if column.width != 4:
            raise ChunkError(f"column {column.name!r}: a float is 4 bytes, not {column.width}")
        return packed.view(np.float32)
    if column.form == "offset":
        numbers = packed.astype(np.int64) + column.base
    elif column.form == "delta":
        wide = packed.astype(np.uint64)
        deltas = (wide >> 1).astype(np.int64) ^ -(wide & 1).astype(np.int64)
        numbers = np.cumsum(deltas) + column.base
    else:
        raise ChunkError(f"column {column.name!r}: unknown form {column.form!r}")
    if column.words is not None:
        return _words(column, numbers)
    if column.name.endswith("_ns"):
        return np.where(numbers < 0, -1, numbers * NS_PER_UNIT)
    return numbers


def _words(column: _ColumnHeader, numbers: np.ndarray[Any, Any]) -> list[str]:
    words = column.words or []
    if len(numbers) and not (0 <= numbers.min() and numbers.max() < len(words)):
        raise ChunkError(f"column {column.name!r}: an index points outside its dictionary")
    return [words[number] for number in numbers.tolist()]


def _read_header(data: bytes) -> tuple[_Header, int]:
    if data[:4] != MAGIC:
        raise ChunkError("does not begin with RSC1: not a Rankscope chunk")
    if len(data) < 8:
        raise ChunkError("truncated before the header")
    (size,) = struct.unpack_from("<I", data, 4)
    if size > len(data) - 8:
        raise ChunkError(f"header of {size} bytes in a chunk of {len(data)}: truncated")
    try:
        header = _decode_header(data[8 : 8 + size])
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: not UTF-8
        raise ChunkError(f"header: {error}") from error
    _check_header(header)
    return header, 8 + size


def _check_header(header: _Header) -> None:
    if header.version != FORMAT_VERSION:
        raise ChunkError(f"format version {header.version}; this reader knows {FORMAT_VERSION}")
    if not 0 < header.count <= MAX_EVENTS:
        raise ChunkError(f"count {header.count} is outside 1..{MAX_EVENTS}")
    if not 0 < len(header.columns) <= MAX_COLUMNS:
        raise ChunkError(f"{len(header.columns)} columns; 1..{MAX_COLUMNS} are allowed")
    for column in header.columns:
        if column.width not in _WIDTHS:
            raise ChunkError(f"column {column.name!r}: width {column.width} is not 1, 2, 4 or 8")
        if not -(1 << 62) < column.base < (1 << 62):
            raise ChunkError(f"column {column.name!r}: base is out of range")


def _decompress(data: bytes, raw_bytes: int) -> bytes:
    if raw_bytes > MAX_RAW_BYTES:
        raise ChunkError(f"would unpack to {raw_bytes} bytes; at most {MAX_RAW_BYTES}")
    try:
        declared = zstandard.frame_content_size(data)
        if declared != raw_bytes:
            raise ChunkError(f"body unpacks to {declared} bytes, the header says {raw_bytes}")
        raw = _decompressor().decompress(data, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise ChunkError(f"body: {error}") from error
    if len(raw) != raw_bytes:
        raise ChunkError(f"body holds {len(raw)} bytes, the header says {raw_bytes}")
    return raw


def _width(values: np.ndarray[Any, Any]) -> int:
    largest = int(values.max())
    return next(width for width in _WIDTHS if largest < 1 << (8 * width))


def _shuffle(values: np.ndarray[Any, Any]) -> bytes:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(len(values), -1).T.tobytes()


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor
