"""Compressed blobs: zstd around arrays, JSON and msgpack."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.wire import zstd

_LEVEL = 1  # blobs are rewritten while they grow; level 3 costs twice as much for 5 % less
_KINDS = "bhiq"
_MAX_BYTES = 1 << 30  # a blob of this server is far smaller; a damaged one stops here


def pack(data: bytes, level: int = _LEVEL) -> bytes:
    """Compress."""
    return zstd.pack(data, level)


def unpack(data: bytes) -> bytes:
    """Decompress a blob that this server wrote."""
    return zstd.unpack(data, _MAX_BYTES)


def pack_array(values: np.ndarray[Any, Any]) -> bytes:
    """Compress an array, bytes of equal weight side by side."""
    return pack(shuffled(values))


def unpack_array(data: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the flat array that `pack_array` compressed; the caller owns it."""
    return unshuffled(unpack(data), dtype)


def shuffled(values: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of an array, those of equal weight side by side."""
    width = values.dtype.itemsize
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, width)
    return flat.T.tobytes()


def unshuffled(data: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the flat array whose bytes `shuffled` parted; the caller owns it."""
    flat = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    values = np.empty(flat.shape[1], dtype)
    parted = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for place, part in enumerate(flat):  # a copy of the transposed takes four times as long
        parted[:, place] = part
    return values


def narrowed(values: np.ndarray[Any, Any]) -> bytes:
    """Return whole numbers in the narrowest type that holds them all, its letter before them."""
    lo, hi = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    kind = next(kind for kind in _KINDS if np.iinfo(kind).min <= lo and hi <= np.iinfo(kind).max)
    return kind.encode() + shuffled(values.astype(f"<{kind}"))


def widened(data: bytes) -> np.ndarray[Any, Any]:
    """Return the whole numbers that `narrowed` packed; the caller owns them."""
    dtype = np.dtype(f"<{data[:1].decode()}")
    if dtype.itemsize == 1:
        return np.frombuffer(data, dtype, offset=1).astype(np.int64)
    return unshuffled(data[1:], dtype).astype(np.int64)
