from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.files import journal
from rankscope.node import offsets as progress
from rankscope.node.loop import windows_of
from rankscope.node.losses import Ledger
from rankscope.node.offsets import Offsets, RankOffsets, from_ranges, to_ranges
from rankscope.node.upload.outbox import LocalOutbox, SpoolingOutbox
from rankscope.node.upload.spool import Spool, SpoolEntry
from rankscope.wire import schema, zstd

LINE = schema.LogLine(attempt=0, rank=0, time_ns=1, level=20, message="hello")


class Box:
    """An outbox with its spool, as one life of the collector has them."""

    def __init__(self, node: Path, limit: int = 1 << 20) -> None:
        self.node = node
        self.spool = Spool(node / "spool", limit)
        known = [progress.load(node), self.spool.recovered]
        self.start = max(
            (offsets for offsets in known if offsets is not None),
            key=lambda offsets: offsets.sequence,
            default=Offsets("producer-1"),
        )
        self.ledger = Ledger(self.start.losses)
        self.outbox = SpoolingOutbox("run", "host", node, self.spool, self.start, self.ledger)

    def commit(self, read_to: int = 0, message: str = "hello") -> None:
        self.outbox.record(msgspec.structs.replace(LINE, message=message))
        self.outbox.commit({"0/0.1": RankOffsets(read_to=read_to)}, [], [])

    def drain(self) -> list[schema.Batch]:
        batches = []
        while (entry := self.spool.take(0.0)) is not None:
            batches.append(decoded(entry))
            self.spool.done(entry)
        return batches


def decoded(entry: SpoolEntry) -> schema.Batch:
    raw = zstd.unpack(entry.body(), 1 << 30)
    return schema.decode_batch(raw)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_numbers_go_on_over_lives(tmp_path: Path) -> None:
    first = Box(tmp_path)
    first.commit(10)
    first.commit(20)
    assert [batch.sequence for batch in first.drain()] == [1, 2]
    second = Box(tmp_path)
    assert second.start.files["0/0.1"].read_to == 20
    second.commit(30)
    (batch,) = second.drain()
    assert (batch.producer, batch.sequence) == ("producer-1", 3)


def test_the_more_batches_wait_the_more_the_next_one_holds(tmp_path: Path) -> None:
    box, found = Box(tmp_path), []
    for number in range(8):
        found.append(windows_of(box.outbox.num_waiting()))
        box.commit(number)
    assert found == [1, 1, 2, 3, 4, 5, 5, 5]
    box.drain()
    assert windows_of(box.outbox.num_waiting()) == 1


def test_a_batch_holds_every_record_and_chunk_that_was_added(tmp_path: Path) -> None:
    box = Box(tmp_path)
    chunks = [
        schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="host", count=1, time_lo_ns=1, time_hi_ns=1,
            data=f"steps of rank {rank}".encode(),
        )
        for rank in range(3)
    ]  # fmt: skip
    for chunk in chunks:
        box.outbox.chunk(chunk)
    box.commit()
    box.commit()
    first, second = box.drain()
    assert first.chunks == chunks
    assert [schema.decode_record(raw) for raw in first.records] == [LINE]
    assert second.chunks == []  # once


def test_killed_between_the_file_and_the_copy_of_the_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path)
    box.commit(10)
    with monkeypatch.context() as patch:
        patch.setattr(progress, "save", _killed)
        with pytest.raises(KeyboardInterrupt):
            box.commit(20)
    again = Box(tmp_path)
    assert again.start.files["0/0.1"].read_to == 20  # from the header of the spool file
    assert [batch.sequence for batch in again.drain()] == [1, 2]


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_killed_before_the_file_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(tmp_path)
    box.commit(10)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _killed)
        with pytest.raises(KeyboardInterrupt):
            box.commit(20)
    again = Box(tmp_path)
    assert again.start.files["0/0.1"].read_to == 10
    assert not list((tmp_path / "spool").glob("*.tmp"))
    again.commit(20)
    assert [batch.sequence for batch in again.drain()] == [1, 2]


def test_without_any_file_a_new_producer_begins(tmp_path: Path) -> None:
    Box(tmp_path).commit(10)
    for path in (tmp_path / "spool").glob("*.batch"):
        path.write_bytes(b"noise")
    (tmp_path / progress.OFFSETS_FILE).write_bytes(b"{")
    box = Box(tmp_path)
    assert box.start.files == {}
    assert box.spool.num_damaged == 1
    assert box.spool.take(0.0) is None


def test_full_disk_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(tmp_path)
    box.commit(10)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", no_space)
        box.commit(20, "in memory")
        box.commit(30, "in memory")
        safe = box.outbox.safe()
        assert safe is None or safe.files["0/0.1"].read_to == 10  # no journal may be deleted
    first, second, third = box.drain()
    assert first.producer == "producer-1"
    assert second.producer == third.producer != "producer-1"
    kinds = [type(schema.decode_record(raw)).__name__ for raw in second.records]
    assert kinds == ["LogLine", "Event"]  # it is said, once
    safe = box.outbox.safe()
    assert safe is not None
    assert safe.files["0/0.1"].read_to == 30  # all is acknowledged
    box.commit(40)
    (batch,) = box.drain()
    assert (batch.producer, batch.sequence) == ("producer-1", 2)
    assert Box(tmp_path).start.files["0/0.1"].read_to == 40


def test_memory_is_bounded_and_says_what_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path)
    monkeypatch.setattr("rankscope.node.upload.spool.MAX_MEMORY_BYTES", 3000)
    monkeypatch.setattr("os.replace", no_space)
    for number in range(40):
        box.commit(number)
    kept = box.drain()
    assert len(kept) < 40
    assert [batch.sequence for batch in kept] == list(range(41 - len(kept), 41))  # the newest
    totals = {(loss.source, loss.reason): loss.count for loss in box.ledger.totals()}
    assert totals["spool", "disk full"] >= 40 - len(kept)


def test_a_full_spool_keeps_the_newest_batches(tmp_path: Path) -> None:
    box = Box(tmp_path, limit=2000)
    for number in range(20):
        box.commit(number)
    kept = [batch.sequence for batch in box.drain()]
    assert 1 < len(kept) < 20
    assert kept == list(range(21 - len(kept), 21))


def test_what_was_dropped_is_named_in_later_batches_and_later_lives(tmp_path: Path) -> None:
    box = Box(tmp_path, limit=2000)
    for number in range(20):
        box.commit(number)
    waiting, size = box.spool.waiting()
    assert waiting < 20
    assert size <= 2000
    box.commit(99)
    again = Box(tmp_path)
    again.ledger.add("spool", "spool full", 1)
    again.commit(100)
    last = again.drain()[-1]
    losses = [r for raw in last.records if isinstance(r := schema.decode_record(raw), schema.Loss)]
    assert losses[0].count >= 20 - waiting + 1


def items_of(boxes: Box) -> int:
    return sum(loss.count for loss in boxes.ledger.totals())


@pytest.mark.parametrize("when", ["before the file", "before the deletion"])
def test_killed_while_a_batch_is_dropped_it_is_counted_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    box = Box(tmp_path, limit=2000)
    made = 0
    while not items_of(box):
        box.commit(made)
        made += 1
    for _ in range(5):
        with monkeypatch.context() as patch:
            if when == "before the file":
                patch.setattr("os.replace", _killed)
            else:
                patch.setattr(Spool, "delete", staticmethod(_killed))
            with pytest.raises(KeyboardInterrupt):
                box.commit(made)
        made += when == "before the deletion"
        box = Box(tmp_path, limit=2000)
        box.commit(made)
        made += 1
    batches = box.drain()
    lines = [
        record
        for batch in batches
        for record in map(schema.decode_record, batch.records)
        if isinstance(record, schema.LogLine)
    ]
    kept = len({batch.sequence for batch in batches})
    dropped_records = items_of(box)
    assert len(lines) == kept == made - (batches[-1].sequence - kept)
    # every dropped batch had its line and, from the second on, the record of the losses
    dropped = batches[-1].sequence - kept
    assert dropped <= dropped_records <= 2 * dropped


def test_the_batch_that_is_being_sent_is_not_dropped(tmp_path: Path) -> None:
    box = Box(tmp_path, limit=2000)
    box.commit(0, "first")
    sending = box.spool.take(0.0)
    assert sending is not None
    for number in range(20):
        box.commit(number)
    assert decoded(sending).sequence == 1
    box.spool.done(sending)
    assert sending.path is not None
    assert not sending.path.exists()


def test_take_waits_for_a_batch(tmp_path: Path) -> None:
    box = Box(tmp_path)
    begun = time.monotonic()
    assert box.spool.take(0.1) is None
    assert time.monotonic() - begun >= 0.09


def test_ranges() -> None:
    numbers = np.array([3, 4, 5, 9, 20, 21], dtype=np.int64)
    flat = to_ranges(numbers)
    assert flat == [3, 3, 9, 1, 20, 2]
    assert from_ranges(flat, 100).tolist() == numbers.tolist()
    assert to_ranges(numbers[:0]) == []
    assert from_ranges([], 100).tolist() == []
    assert len(from_ranges([0, 1 << 50], 100)) == 100  # a file is not trusted


def test_ledger_sends_totals_when_they_change() -> None:
    ledger = Ledger(wall_ns=lambda: 5)
    ledger.add("journal", "torn frame", 2, attempt=1, rank=3)
    ledger.add("journal", "torn frame", 0)
    (loss,) = ledger.take_records()
    assert (loss.attempt, loss.rank, loss.source, loss.count) == (1, 3, "journal", 2)
    assert ledger.take_records() == []
    ledger.add("journal", "torn frame", 1, attempt=1, rank=3)
    assert [loss.count for loss in ledger.take_records()] == [3]
    ledger.say_all_again()
    assert len(ledger.take_records()) == 1
    assert [loss.count for loss in Ledger(ledger.totals()).totals()] == [3]


def test_a_loss_that_no_batch_holds_yet_is_still_to_be_sent(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.commit()
    box.drain()
    assert box.outbox.is_empty()
    box.ledger.add("upload", "HTTP 413", 3)
    assert not box.outbox.is_empty()
    box.outbox.commit({}, [], [])
    assert [len(batch.records) for batch in box.drain()] == [1]
    assert box.outbox.is_empty()


def test_what_a_full_disk_does_not_take_without_a_server_is_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(wall_ns=lambda: 1)
    outbox = LocalOutbox(tmp_path, ledger)
    end = schema.RankEnded(
        attempt=0, rank=0, time_ns=1, reason="signal", exit_code=None, signal=9, last_step=1
    )
    with monkeypatch.context() as full:
        full.setattr(journal.os, "write", no_space)
        for _ in range(3):
            outbox.record(end)
            outbox.commit({}, [], [])
    outbox.commit({}, [], [])
    outbox.commit({}, [], [])
    (path,) = (tmp_path / "collector").glob("journal.*")
    kept = [schema.decode_record(body) for _, body, _ in journal.read_frames(path, 0)]
    (loss,) = kept
    assert isinstance(loss, schema.Loss)
    assert (loss.source, loss.count) == ("collector journal", 3)
    assert loss.reason == "No space left on device"
