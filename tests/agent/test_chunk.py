from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from rankscope.chunk import ChunkError, chunk_count, decode_chunk, encode_chunk


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


def test_is_small() -> None:
    before = columns(5000)
    assert len(encode_chunk(before)) / 5000 < 20  # eight columns, one of them random 40-bit sizes


def test_one_event_and_constant_columns() -> None:
    after = decode_chunk(encode_chunk({"step": np.array([7]), "group": ["0"]}))
    assert after["step"].tolist() == [7]
    assert after["group"] == ["0"]


def test_only_the_wanted_columns() -> None:
    data = encode_chunk(columns())
    assert set(decode_chunk(data, only={"sequence", "of_the_future"})) == {"sequence"}
    assert chunk_count(data) == 500


def test_refuses_unequal_columns() -> None:
    with pytest.raises(ValueError, match="one length"):
        encode_chunk({"step": np.arange(3), "group": ["0"]})


def test_mutated_bytes_raise_chunk_error_only() -> None:
    data = encode_chunk(columns())
    chance = random.Random(2)
    refused = 0
    for turn in range(3000):
        bad = bytearray(data[: chance.randrange(len(data))] if turn % 4 == 0 else data)
        for _ in range(3):
            if bad:
                bad[chance.randrange(min(len(bad), 400))] = chance.randrange(256)
        try:
            decode_chunk(bytes(bad))
        except ChunkError:
            refused += 1
    assert refused > 1500


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
