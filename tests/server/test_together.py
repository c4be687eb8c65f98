"""Batches that are validated together come out as each alone does, whatever is beside them."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema, zstd
from rankscope_server.batch_log.validating import Prepared, Validator
from rankscope_server.ingest.batch import (
    ValidatedBatch,
    read_batch,
    validate_batch,
    validate_batches,
)
from rankscope_server.ingest.operations import MAX_SIZES, sum_collectives
from rankscope_server.problems import Problem
from rankscope_server.store.batches import Journal
from tests.server.raw_run import Collective, batches_of, collective_chunk, make_run

MAX_BYTES = 1 << 28


def body_of(run_id: str, sequence: int, records: list[Any], chunks: list[Any]) -> bytes:
    body = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": run_id, "producer": "node",
        "sequence": sequence, "host": "node", "sent_ns": 1, "records": records, "chunks": chunks,
    }  # fmt: skip
    return zstd.pack(msgspec.msgpack.encode(body))


def plain(value: Any) -> Any:
    """Return a validated thing so that two of them can be compared."""
    if isinstance(value, ValidatedBatch):
        names = ("run_id", "producer", "sequence", "host", "records", "refused", "num_bytes")
        said = [repr(getattr(value, name)) for name in names]  # NaN is what it is
        return said + [plain(one) for one in value.chunks]
    columns = {
        name: list(column) if isinstance(column[0], str) else np.asarray(column).tolist()
        for name, column in value.columns.items()
    }
    calls, sums = value.calls, None
    if value.durations is not None:
        found = sum_collectives([value.durations])
        sums = {
            key: (one.count, one.open, one.sum_ns, one.blocked_ns, one.max_ns, one.percentile_ms(1))
            for key, one in found.items()
            if one.count
        }
    return (
        value.chunk, columns, value.ranks, value.begins.tolist(), value.max_duration_ns,
        value.spans() if value.chunk.rank >= 0 else None, sums,
        None if calls is None else [calls.shapes[code] for code in calls.codes.tolist()],
        None if value.values is None
        else {name: repr(cells.tolist()) for name, cells in value.values.items()},
    )  # fmt: skip


def bodies(seed: int) -> list[bytes]:
    """Return batches of two runs in one random order; the same words are other numbers in each."""
    rng = random.Random(seed)
    found = []
    for name in ("one", "two"):
        run = make_run(rng.randrange(1 << 30), rng.randint(1, 9), [(1, 6), (4, 9)], 5, 2)
        parts = batches_of(run, seed)
        found += [body_of(name, at, *part) for at, part in enumerate(parts, 1)]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_batches_together_are_what_each_is_alone(seed: int) -> None:
    sent = bodies(seed)
    alone = [validate_batch(body, "zstd", MAX_BYTES) for body in sent]
    together = validate_batches([read_batch(body, "zstd", MAX_BYTES) for body in sent])
    for one, other in zip(alone, together, strict=True):
        assert plain(one) == plain(other)


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_chunk_is_refused_alone(seed: int) -> None:
    rng = random.Random(seed)
    sent = [msgspec.msgpack.decode(zstd.unpack(body, MAX_BYTES)) for body in bodies(seed)]
    harmed = rng.choice([one for one in sent if one["chunks"]])
    chunk = rng.choice(harmed["chunks"])
    harm = rng.choice(("cut", "count", "rank", "time"))
    if harm == "cut":
        chunk["data"] = chunk["data"][: rng.randrange(len(chunk["data"]))]
    elif harm == "time":  # sound as a chunk, refused for what it says
        lost = Collective(0, 0, 1 << 60, "all_reduce", "world", 8, 1, 1, 0, schema.ENDED)
        harmed["chunks"].append(msgspec.to_builtins(collective_chunk((0, 0), [lost]),
                                                    builtin_types=(bytes,)))  # fmt: skip
    else:
        chunk[harm] += 1 << 40
    packed = [zstd.pack(msgspec.msgpack.encode(one)) for one in sent]
    alone = [validate_batch(body, "zstd", MAX_BYTES) for body in packed]
    together = validate_batches([read_batch(body, "zstd", MAX_BYTES) for body in packed])
    assert sum(len(one.refused) for one in alone) == 1
    for one, other in zip(alone, together, strict=True):
        assert plain(one) == plain(other)


def test_many_sizes_in_all_do_not_blur_the_few_of_each() -> None:
    """Beyond a number of sizes a chunk's are put into doublings: never for another chunk's sake."""
    sent = [
        body_of("run", rank + 1, [], [collective_chunk((0, rank), [
            Collective(0, rank, 1, "all_to_all", "world", 1_000 + rank * 40 + n, 1, 1, 0,
                       schema.ENDED)
            for n in range(40)
        ])])
        for rank in range(MAX_SIZES // 16)
    ]  # fmt: skip
    together = validate_batches([read_batch(body, "zstd", MAX_BYTES) for body in sent])
    for rank, batch in enumerate(together):
        (chunk,) = batch.chunks
        assert chunk.durations is not None
        sizes = {key.size_bytes for key in sum_collectives([chunk.durations])}
        assert sizes == {1_000 + rank * 40 + n for n in range(40)}


def results(futures: list[Future[Prepared]]) -> list[Any]:
    return [future.exception(30) or future.result() for future in futures]


@pytest.mark.parametrize("num_under_way", [1, 100], ids=["few", "many"])
def test_the_validator_answers_each_with_its_own(num_under_way: int) -> None:
    validator = Validator(MAX_BYTES, lambda: num_under_way)
    sent = bodies(3)
    futures = [validator.submit(body, "zstd", takes_commands=False) for body in sent]
    futures[2].cancel()  # its sender went away
    broken = validator.submit(b"no batch", "zstd", takes_commands=False)
    validator.start()
    found = results([future for future in futures if future is not futures[2]])
    validator.close()
    expected = [validate_batch(body, "zstd", MAX_BYTES) for body in sent if body is not sent[2]]
    assert [plain(batch) for batch, _ in found] == [plain(batch) for batch in expected]
    assert isinstance(broken.exception(30), Problem)


def test_a_defect_costs_the_batch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope_server.batch_log import validating

    def journal_of(records: list[Any]) -> Journal:
        if any(isinstance(record, schema.Loss) for record in records):
            raise ArithmeticError("a defect of ours")
        return Journal(None, {})

    monkeypatch.setattr(validating, "pack_journal", journal_of)
    validator = Validator(MAX_BYTES, lambda: 100)
    sent = bodies(5)
    futures = [validator.submit(body, "zstd", takes_commands=False) for body in sent]
    validator.start()
    found = results(futures)
    validator.close()
    losses = [
        any(isinstance(record, schema.Loss) for record in
            validate_batch(body, "zstd", MAX_BYTES).records)
        for body in sent
    ]  # fmt: skip
    assert True in losses
    assert False in losses
    assert [isinstance(one, ArithmeticError) for one in found] == losses
