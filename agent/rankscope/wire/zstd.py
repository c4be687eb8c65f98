"""zstd of the standard library (Python 3.14) or its backport; unpacking always has a limit."""

from __future__ import annotations

import sys
import threading
from typing import BinaryIO, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 3
ZstdError = zstd.ZstdError  # the data is damaged or cut short
ZstdDict = zstd.ZstdDict
_compressors = threading.local()  # to make one costs more than to pack a small chunk


class UnpackedTooLargeError(ValueError):
    """The data would unpack to more bytes than allowed."""


def pack(data: bytes, level: int = LEVEL, words: ZstdDict | None = None) -> bytes:
    """Return the data as one frame that says its size; `words` is a dictionary."""
    known = _compressors.__dict__
    key = f"{level}/{id(words)}"
    if key not in known:  # with the dictionary, so that its id stays its own
        known[key] = (zstd.ZstdCompressor(level=level, zstd_dict=words), words)
    compressor = known[key][0]
    return cast(bytes, compressor.compress(data, compressor.FLUSH_FRAME))


def unpack(data: bytes, max_bytes: int, words: ZstdDict | None = None) -> bytes:
    """Return the content of the frame that the data begins with.

    Raises ZstdError where it is damaged or cut short, UnpackedTooLargeError above `max_bytes`,
    after no more than that was unpacked.
    """
    frame = zstd.ZstdDecompressor(zstd_dict=words)
    # One byte more than allowed distinguishes "too large" from "just fits".
    content = frame.decompress(data, max_bytes + 1)
    if len(content) > max_bytes:
        raise UnpackedTooLargeError(f"it unpacks to more than {max_bytes} bytes")
    if not frame.eof:
        raise ZstdError("the frame is cut short")
    return content


def declared_bytes(data: bytes) -> int | None:
    """Return the size that a frame gives for its content. Raises ZstdError if it is no frame."""
    return zstd.get_frame_info(data).decompressed_size


def open_stream(file: BinaryIO) -> BinaryIO:
    """Return a reader of the content of all frames in a file.

    It raises ZstdError where they are damaged, EOFError where they are cut short.
    """
    return cast(BinaryIO, zstd.ZstdFile(file))
