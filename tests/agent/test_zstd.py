from __future__ import annotations

import io
import threading
import tracemalloc

import pytest

from rankscope.wire import zstd


def test_what_just_fits_is_unpacked_and_one_byte_more_is_not() -> None:
    frame = zstd.pack(b"x" * 1000)
    assert zstd.declared_bytes(frame) == 1000
    assert zstd.unpack(frame, 1000) == b"x" * 1000
    with pytest.raises(zstd.UnpackedTooLargeError, match="more than 999 bytes"):
        zstd.unpack(frame, 999)


def test_a_bomb_stops_at_the_limit_whether_or_not_it_gives_its_size() -> None:
    stream = io.BytesIO()
    with zstd.zstd.ZstdFile(stream, "w") as file:
        file.write(bytes(64 << 20))
    assert zstd.declared_bytes(stream.getvalue()) is None
    for bomb in (zstd.pack(bytes(64 << 20)), stream.getvalue()):
        tracemalloc.start()
        with pytest.raises(zstd.UnpackedTooLargeError):
            zstd.unpack(bomb, 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


@pytest.mark.parametrize("damaged", [b"", b"no frame", zstd.pack(b"word" * 99)[:-3]])
def test_what_is_damaged_or_cut_short_is_an_error(damaged: bytes) -> None:
    with pytest.raises(zstd.ZstdError):
        zstd.unpack(damaged, 1000)


def test_threads_pack_beside_each_other() -> None:
    texts = [bytes([number]) * 100_000 for number in range(8)]
    packed: dict[int, list[bytes]] = {}

    def pack(number: int) -> None:
        packed[number] = [zstd.pack(texts[number], level) for level in (1, 3, 6) * 20]

    threads = [threading.Thread(target=pack, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(texts):
        assert all(zstd.unpack(frame, 100_000) == text for frame in packed[number])


def test_a_stream_gives_what_came_before_it_was_cut() -> None:
    frames = zstd.pack(b"first\n") + zstd.pack(b"second\n")
    assert zstd.open_stream(io.BytesIO(frames)).read() == b"first\nsecond\n"
    stream = zstd.open_stream(io.BytesIO(frames[:-4]))
    assert stream.read1(1 << 20) == b"first\n"  # type: ignore[attr-defined]
    with pytest.raises(EOFError):
        list(iter(lambda: stream.read1(1 << 20), b""))  # type: ignore[attr-defined]
