from __future__ import annotations

import contextlib
import threading
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.wire import chunk, zstd
from rankscope.wire.chunk import (
    ChunkError,
    by_rank,
    chunk_count,
    decode_chunk,
    decode_chunks,
    encode_chunk,
    encode_ranks,
)
from rankscope.wire.chunk_dictionary import DICTIONARY
from rankscope.wire.schema import CHUNK_COLUMNS, STRING_COLUMNS
from tests.damage import damaged

WORDS = zstd.ZstdDict(DICTIONARY, is_raw=True)
BY_ZSTANDARD = bytes.fromhex(  # a chunk that zstandard 0.25.0 packed
    "525343320600000028b52ffd20707d0200a4034800000096b46b696ec403001002c40301010493cf00038d7ea4c6"
    "80000000930000009192aaaa000104091019000180800040803f3e3f40404006003806b9c61a0564891330ff15ec"
    "8e868103"
)


def columns(count: int = 500, seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {
        "arrived_ns": 1_763_700_000 * 10**9 + np.cumsum(chance.integers(10**5, 10**7, count)),
        "duration_ns": np.where(chance.random(count) < 0.1, -1, chance.integers(0, 10**8, count)),
        "sequence": np.arange(1, count + 1),
        "peer_rank": chance.integers(-1, 4, count),
        "size_bytes": chance.integers(0, 2**40, count),
        "operation": chance.choice(["all_reduce", "broadcast"], count).tolist(),
        "cpu_ratio": chance.random(count).astype(np.float32),
    }


def test_round_trip_to_the_microsecond() -> None:
    before = columns()
    after = decode_chunk(encode_chunk(before))
    for name in ("sequence", "peer_rank", "size_bytes"):
        assert (after[name] == before[name]).all()
    assert after["operation"] == before["operation"]
    assert (after["cpu_ratio"] == before["cpu_ratio"]).all()
    assert (after["arrived_ns"] == before["arrived_ns"] // 1000 * 1000).all()
    assert ((after["duration_ns"] == -1) == (before["duration_ns"] == -1)).all()


def test_a_chunk_of_the_earlier_library_is_read_and_written_alike() -> None:
    before = decode_chunk(BY_ZSTANDARD)
    assert before["kind"] == ["all_reduce", "all_gather"] * 3
    assert list(before["started_ns"]) == [10**18 + 1000 * number**2 for number in range(6)]
    assert list(before["loss"]) == [0.5, 0.25, 1, 2, 3, 4]
    assert len(encode_chunk(before)) <= len(BY_ZSTANDARD)


def test_is_small() -> None:
    before = columns(5000)
    assert len(encode_chunk(before)) / 5000 < 20  # eight columns, one of them random 40-bit sizes


def test_one_event_and_constant_columns() -> None:
    after = decode_chunk(encode_chunk({"step": np.array([7]), "group": ["0"]}))
    assert list(after["step"]) == [7]
    assert after["group"] == ["0"]


def test_only_the_wanted_columns() -> None:
    data = encode_chunk(columns())
    assert set(decode_chunk(data, only={"sequence", "of_the_future"})) == {"sequence"}
    assert chunk_count(data) == 500


def test_refuses_unequal_columns() -> None:
    with pytest.raises(ValueError, match="one length"):
        encode_chunk({"step": np.arange(3), "group": ["0"]})


@settings(max_examples=1000)
@given(damaged(encode_chunk(columns()), reach=400))
def test_damaged_bytes_raise_chunk_error_only(data: bytes) -> None:
    with contextlib.suppress(ChunkError):
        assert isinstance(decode_chunk(data), dict)


def repacked(raw: bytes, count: int = 500) -> bytes:
    """Return these unpacked bytes as a chunk, so that damage reaches what lies behind zstd."""
    return b"RSC2" + count.to_bytes(4, "little") + zstd.pack(raw, words=WORDS)


def unpacked(data: bytes) -> bytes:
    return zstd.unpack(data[8:], 1 << 20, WORDS)


RAW = unpacked(encode_chunk(columns()))


@settings(max_examples=1000)
@given(
    damaged(RAW, reach=260) | damaged(RAW),  # mostly the header
    st.just(500) | st.integers(0, (1 << 32) - 1),
)
def test_damage_behind_zstd_raises_chunk_error_only(raw: bytes, count: int) -> None:
    with contextlib.suppress(ChunkError):
        assert isinstance(decode_chunk(repacked(raw, count)), dict)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"widths": b"\x03"}, "width 3"),
        ({"widths": b"\x00\x00"}, "differ in length"),
        ({"bases": [1 << 62]}, "out of range"),
        ({"bases": ["x"]}, "header"),
        ({"slopes": [-(1 << 62)]}, "out of range"),
        ({"forms": b"\x04"}, "unknown form 4"),
        ({"forms": b"\x02", "widths": b"\x02"}, "unknown form 2 of width 2"),
        ({"forms": b"\x03"}, "is based on column 0"),
        ({"words": [["a"]]}, "list of words"),
        ({"forms": b"\x10"}, "list of words"),
        ({"forms": b"\x10", "words": [["a"]]}, "outside its dictionary"),
        ({"names": "step step"}, "different names"),
        ({"names": " ".join(map(str, range(65)))}, "65 columns"),
        ({"widths": b"\x08"}, "its header says"),
    ],
)
def test_a_header_that_lies_is_named(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "names": "step", "forms": b"\x00", "widths": b"\x00", "bases": [7], "slopes": [0],
        "words": [],
    }  # fmt: skip
    assert decode_chunk(header_only(fields))["step"].tolist() == [7, 7, 7]  # type: ignore[union-attr]
    with pytest.raises(ChunkError, match=reason):
        decode_chunk(header_only(fields | changes))


def header_only(fields: dict[str, Any]) -> bytes:
    head = msgspec.msgpack.encode(list(fields.values()))
    return repacked(len(head).to_bytes(4, "little") + head, count=3)


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "MAX_RAW_BYTES", 1 << 16)
    with pytest.raises(ChunkError, match="would unpack to 65537"):
        decode_chunk(repacked(bytes((1 << 16) + 1)))


def test_the_shared_words_are_those_of_this_format() -> None:
    changed = "stored chunks become unreadable: a changed dictionary is a new format version"
    assert (chunk.MAGIC, zlib.crc32(DICTIONARY)) == (b"RSC2", 0x28D4FA12), changed


def test_an_older_format_is_named() -> None:
    with pytest.raises(ChunkError, match="format version '1'; this reader knows 2"):
        decode_chunk(b"RSC1" + bytes(100))


def test_constant_growing_and_equal_columns_take_no_bytes() -> None:
    size = np.random.default_rng(1).integers(0, 2**40, 4000)
    alone = len(encode_chunk({"size_bytes": size}))
    together: dict[str, Any] = {
        "size_bytes": size,
        "input_bytes": size,
        "output_bytes": size + 8,
        "sequence": np.arange(7, 4007),
        "peer_rank": np.full(4000, -1),
        "group": ["0"] * 4000,
    }
    data = encode_chunk(together)
    assert len(data) - alone < 100
    after = decode_chunk(data)
    assert all(list(after[name]) == list(values) for name, values in together.items())
    assert list(decode_chunk(data, only={"output_bytes"})["output_bytes"]) == list(size + 8)


def test_one_event_is_hardly_larger_than_its_numbers() -> None:
    for kind, limit in (("collectives", 220), ("steps", 180)):
        values: dict[str, Any] = {
            name: ["0"]
            if name in STRING_COLUMNS
            else np.array([1_763_700_000_123_456_000 if place == 0 else 12_345_678])
            for place, name in enumerate(CHUNK_COLUMNS[kind])
        }  # fmt: skip
        data = encode_chunk(values)
        assert len(data) < limit, (kind, len(data))
        assert list(decode_chunk(data)) == list(values)


@pytest.mark.parametrize("seed", range(40))
def test_any_numbers_round_trip(seed: int) -> None:
    chance = np.random.default_rng(seed)
    count = int(chance.integers(1, 50))
    wide = int(chance.integers(1, 61))
    before: dict[str, Any] = {
        name: np.cumsum(chance.integers(0, 1 << 50, count)) if name == "sequence"
        else chance.integers(-(1 << wide), 1 << wide, count)
        for name in ("size_bytes", "input_bytes", "sequence", "flags")
    }  # fmt: skip
    after = decode_chunk(encode_chunk(before))
    assert all(list(after[name]) == list(values) for name, values in before.items())


def test_threads_do_not_share_compressors() -> None:
    failures: list[object] = []

    def work(seed: int) -> None:
        for turn in range(50):
            before = columns(300, seed * 100 + turn)
            after = decode_chunk(encode_chunk(before))
            if not (after["sequence"] == before["sequence"]).all():
                failures.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_floats_have_one_kind_of_nan() -> None:
    """One that signals makes numpy warn wherever it is converted."""
    signalling = np.array([0x7F800001, 0x3F800000, 0xFFA00000], np.uint32).view(np.float32)
    data = encode_chunk({"cpu_ratio": signalling, "time_ns": np.arange(3)})
    read = np.asarray(decode_chunk(data)["cpu_ratio"])
    assert read.view(np.uint32).tolist() == [0x7FC00000, 0x3F800000, 0x7FC00000]


def test_numbers_are_not_told_by_floats_beside_them() -> None:
    near = np.array([np.inf, 3.5, 0.0], np.float32)
    sizes = np.array([7, 70_000, 8])
    got = decode_chunk(encode_chunk({"size_bytes": near, "input_bytes": sizes}))
    assert np.array_equal(np.asarray(got["input_bytes"]), sizes)
    assert np.array_equal(np.asarray(got["size_bytes"]), near)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8))
def test_many_chunks_are_read_as_one_by_one(sizes: list[tuple[int, int]]) -> None:
    """Of other widths, lengths and words, in any order."""
    data = []
    for seed, (count, exponent) in enumerate(sizes):
        numbers = np.random.default_rng(seed).integers(0, 300**exponent + 1, count)
        words = [f"group{seed}-{number % 3}" for number in numbers.tolist()]
        floats = numbers.astype(np.float32) / 3
        values = {"arrived_ns": numbers.cumsum() * 1_000, "size_bytes": numbers}
        data.append(encode_chunk({**values, "group": words, "cpu_ratio": floats}))
    for only in (None, frozenset({"group", "size_bytes"})):
        together = decode_chunks(data, only)
        for one, columns in zip(data, together, strict=True):
            alone = decode_chunk(one, only)
            assert list(columns) == list(alone)
            assert all(list(columns[name]) == list(alone[name]) for name in alone)


# --- several ranks in one --------------------------------------------------------------------


@pytest.mark.core
@given(
    st.dictionaries(st.integers(64, 127), st.tuples(st.integers(1, 40), st.integers(0, 3)),
                    min_size=2, max_size=9)
)  # fmt: skip
def test_ranks_together_are_read_as_each_alone(sizes: dict[int, tuple[int, int]]) -> None:
    """Of other lengths, widths and words."""
    of_ranks: dict[int, dict[str, Any]] = {}
    for rank, (count, exponent) in sizes.items():
        numbers = np.random.default_rng(rank).integers(-9, 300**exponent + 1, count)
        of_ranks[rank] = {
            "arrived_ns": numbers.cumsum() * 1_000, "duration_ns": numbers * 1_000,
            "returned_ns": numbers * 1_000 + 5_000, "sequence": np.arange(count) + rank,
            "group": [f"group{number % 3}-{rank % 4}" for number in numbers.tolist()],
            "cpu_ratio": numbers.astype(np.float32) / 3,
        }  # fmt: skip
    data = encode_ranks(of_ranks)
    assert chunk_count(data) == sum(count for count, _ in sizes.values())
    single = encode_chunk(of_ranks[max(sizes)])  # decoded beside it, of another form
    for only in (None, frozenset({"group", "returned_ns", chunk.RANK})):
        alone, together, again = decode_chunks([single, data, data], only)
        assert chunk.RANK not in alone
        read = dict(by_rank(-1, together))
        assert list(read) == sorted(sizes)
        for rank, columns in read.items():
            expected = decode_chunk(encode_chunk(of_ranks[rank]), only)
            assert list(columns) == list(expected)
            assert all(list(columns[name]) == list(expected[name]) for name in expected)
        assert all(list(again[name]) == list(together[name]) for name in together)
    assert next(iter(by_rank(7, alone)))[0] == 7


@pytest.mark.parametrize("ranks", [(3,), (63, 64), (-1, 0)])
def test_only_ranks_of_one_block_are_put_together(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not several of one block of 64"):
        encode_ranks({rank: {"step": np.arange(2)} for rank in ranks})


@pytest.mark.parametrize(
    ("ranks", "counts", "reason"),
    [
        ([2, 1], [2, 1], "not several of one block"),
        ([1, 1], [2, 1], "not several of one block"),
        ([1], [3], "not several of one block"),
        ([1, 64], [2, 1], "not several of one block"),
        ([1, 2], [3], "counts of the ranks"),
        ([1, 2], [3, 0], "counts of the ranks"),
        ([1, 2], [2, 2], "counts of the ranks"),
        ([1, 2, 3], [1, 1, 1], "lists of the header differ in length"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks: list[int], counts: list[int], reason: str) -> None:
    fields: dict[str, Any] = {
        "names": "step", "forms": b"\0", "widths": b"\0", "bases": [7, 9], "slopes": [0, 0],
        "words": [], "ranks": [1, 2], "counts": [2, 1], "shifts": [0, 0],
    }  # fmt: skip
    sound = decode_chunk(b"RSC3" + header_only(fields)[4:])
    assert list(sound["step"]) == [7, 7, 9]
    assert list(sound[chunk.RANK]) == [1, 1, 2]
    changed = {"ranks": ranks, "counts": counts, "shifts": [0] * len(ranks)}
    with pytest.raises(ChunkError, match=reason):
        decode_chunk(b"RSC3" + header_only(fields | changed)[4:])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shifts": [0]}, "the shifts of the ranks"),
        ({"shifts": [0, chunk.MAX_EVENTS + 1]}, "the shifts of the ranks"),
        ({"forms": b"\0\x60", "slopes": [0, 0, 0, 1]}, "is based on column 1"),
        ({"forms": b"\0\x60", "slopes": [0, 0, 0, -1]}, "is based on column -1"),
        ({"forms": b"\3\0"}, "is based on column 0"),
        ({"forms": b"\0\x40"}, "unknown form"),
        ({"forms": b"\0\x22"}, "unknown form"),
        ({"forms": b"\x60\x60", "slopes": [0, 0, 0, 0]}, "is based on column 0"),
    ],
)
def test_what_ranks_cannot_have_in_common_is_refused(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "names": "step size_bytes", "forms": b"\0\x60", "widths": b"\0\0",
        "bases": [7, 1, 9, 2], "slopes": [0, 0, 0, 0], "words": [], "ranks": [1, 2],
        "counts": [2, 1], "shifts": [0, 1],
    }  # fmt: skip
    sound = decode_chunk(b"RSC3" + header_only(fields)[4:])
    assert list(sound["step"]) == [7, 7, 9]
    assert list(sound["size_bytes"]) == [1, 1, 2 + (7 + 1) - 9]  # beside the sum of the first
    with pytest.raises(ChunkError, match=reason):
        decode_chunk(b"RSC3" + header_only(fields | changes)[4:])


def test_one_rank_has_nothing_in_common_with_a_first() -> None:
    fields = {"names": "step", "forms": b"\x20", "widths": b"\0", "bases": [7], "slopes": [0],
              "words": []}  # fmt: skip
    with pytest.raises(ChunkError, match="in a chunk of one rank"):
        decode_chunk(header_only(fields))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), min_size=2, max_size=6),
    st.sampled_from(["alike", "no key", "apart"]),
)
def test_what_ranks_end_together_is_stored_once(parts: list[tuple[int, int]], how: str) -> None:
    """From where on each of them is in the chunk, and for how many calls, differs."""
    random = np.random.default_rng(len(parts))
    ends = np.cumsum(random.integers(1_000, 3_000_000, 100))
    of_ranks: dict[int, dict[str, Any]] = {}
    for rank, (begin, count) in enumerate(parts):
        late = random.integers(1, 900, 100)
        duration = np.where(late % 7 == 0, -1_000, late * 1_000)  # of some the end is not known
        columns = {
            "arrived_ns": ends * 1_000 - late * 1_000, "duration_ns": duration,
            "started_ns": duration + 7_000,
            "sequence": np.arange(100) + 1_000 * rank * (how == "apart"),
            "group": [f"g{number % 2}" for number in range(100)],
        }  # fmt: skip
        of_ranks[rank] = {name: values[begin : begin + count] for name, values in columns.items()}
        if how == "no key":
            del of_ranks[rank]["sequence"]
    decoded = decode_chunk(encode_ranks(of_ranks))
    for rank, read in by_rank(-1, decoded):
        for name, values in of_ranks[rank].items():
            expected = np.maximum(values, -1) if name.endswith("_ns") else values
            assert list(read[name]) == list(expected)


def test_ends_that_ranks_have_in_common_take_hardly_any_bytes() -> None:
    random = np.random.default_rng(1)
    late = random.integers(1, 900, (8, 400))
    ends = np.cumsum(random.integers(1_000, 3_000_000, 400))
    of_ranks = {
        rank: {
            "arrived_ns": (ends - late[rank])[rank:] * 1_000, "sequence": np.arange(rank, 400),
            "duration_ns": (late[rank] + random.integers(0, 8, 400))[rank:] * 1_000,
        }
        for rank in range(8)
    }  # fmt: skip
    apart = sum(len(encode_chunk(one)) for one in of_ranks.values())
    assert len(encode_ranks(of_ranks)) < 0.6 * apart


def test_a_rank_more_costs_less_than_a_chunk_more() -> None:
    of_ranks = {rank: columns(300, seed=rank) for rank in range(8)}
    apart = sum(len(encode_chunk(one)) for one in of_ranks.values())
    assert len(encode_ranks(of_ranks)) < 0.97 * apart


@given(damaged(encode_ranks({1: columns(40), 2: columns(30, seed=1)}), reach=400))
def test_damaged_chunks_of_ranks_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(ChunkError):
        assert isinstance(decode_chunk(data), dict)
