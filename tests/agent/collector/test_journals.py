from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.files import journal
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks import journals
from rankscope.node.ranks.journals import JournalFollower
from rankscope.wire import schema
from tests.agent.collector.processes import wait_for


class Reading:
    """A follower and what it passed on."""

    def __init__(self, directory: Path, offsets: RankOffsets | None = None) -> None:
        self.texts: list[str] = []
        self.losses: list[tuple[str, int]] = []
        self.follower = JournalFollower(
            directory, offsets or RankOffsets(), lambda *loss: self.losses.append(loss)
        )

    def read(self) -> bool:
        return self.follower.read(
            lambda body: self.texts.append(schema.decode_record(body).message)  # type: ignore[union-attr]
        )

    def offsets(self) -> RankOffsets:
        offsets = RankOffsets()
        self.follower.save(offsets)
        return offsets


def line(text: str) -> bytes:
    return schema.encode(schema.LogLine(attempt=0, rank=0, time_ns=1, level=20, message=text))


def test_follows_over_segments_and_deletes_only_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.GROUP, journal.INDEXED.pack(4) + b"tp")
    reading = Reading(tmp_path)
    for number in range(20):
        writer.append(journal.RECORD, line(f"{number} {'x' * 100}"))
        reading.read()
    wait_for(reading.read)
    assert [text.split()[0] for text in reading.texts] == [str(number) for number in range(20)]
    before = journal.segments(tmp_path)
    reading.follower.delete_sent()
    assert journal.segments(tmp_path) == before  # nothing is committed
    reading.follower.committed(reading.offsets())
    reading.follower.delete_sent()
    assert [number for number, _ in journal.segments(tmp_path)] == [before[-1][0]]
    again = Reading(tmp_path, reading.offsets())  # a restart knows the name from the deleted one
    assert again.follower.names.groups == {4: "tp"}
    writer.append(journal.RECORD, line("new"))
    assert again.read()
    assert again.texts == ["new"]


def test_a_frame_in_the_making_is_awaited_and_a_torn_one_is_skipped(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, line("whole"))
    path = tmp_path / "journal.0"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-3])
    reading = Reading(tmp_path)
    assert reading.read()
    path.write_bytes(whole + whole)
    reading.read()
    assert reading.texts == ["whole", "whole"]
    path.write_bytes(whole + whole + whole[:-3])
    (tmp_path / "journal.1").write_bytes(whole)
    assert not reading.read()  # a newer segment is there: a little longer at this one
    wait_for(reading.read)
    assert reading.texts == ["whole"] * 3
    assert reading.losses == [("torn frame", 1)]


def test_a_record_whose_bytes_changed_on_the_disk_is_not_passed_on(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    for text in ("whole", "rank 3 lost", "behind it"):
        writer.append(journal.RECORD, line(text))
    path = tmp_path / "journal.0"
    path.write_bytes(path.read_bytes().replace(b"rank 3", b"rank 7"))  # it still decodes
    journal.JournalWriter(tmp_path).append(journal.RECORD, line("next segment"))
    reading = Reading(tmp_path)
    wait_for(reading.read)
    assert reading.texts == ["whole", "behind it", "next segment"]
    assert reading.losses == [("torn frame", 1)]


DAMAGE = {
    "a length that is none": b"\xff" * 9,
    "a frame that is longer than what follows": b"\x50\0\0\0garbage",
    "zeros": bytes(3 << 20),
    "text": b"a line of another program\n" * 50_000,
    "what looks like frames": b"\xff\xff\x0f\0abcd\1" * 20,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_what_is_damaged_is_skipped_and_counted_once(tmp_path: Path, damage: bytes) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, line("before"))
    reading = Reading(tmp_path)
    assert reading.read()
    with (tmp_path / "journal.0").open("ab") as file:
        file.write(damage)
    assert reading.read()
    assert reading.losses == []  # it may be a frame in the making
    writer.append(journal.GROUP, journal.INDEXED.pack(4) + b"tp")
    writer.append(journal.RECORD, line("behind"))
    wait_for(reading.read)  # megabytes take several turns
    assert reading.texts == ["before", "behind"]
    assert reading.losses == [("torn frame", 1)]
    again = Reading(tmp_path, reading.offsets())
    assert again.follower.names.groups == {4: "tp"}
    assert again.read()
    assert (again.texts, again.losses) == ([], [])


def test_noise_that_looks_like_frames_without_end_costs_no_more_than_its_segment(
    tmp_path: Path,
) -> None:
    (tmp_path / "journal.0").write_bytes(DAMAGE["what looks like frames"] * 50_000)
    (tmp_path / "journal.1").write_bytes(b"")
    journal.JournalWriter(tmp_path).append(journal.RECORD, line("next segment"))
    reading = Reading(tmp_path)
    wait_for(lambda: reading.read() and reading.texts, 10.0)
    assert reading.losses == [("torn frame", 1)]


def test_a_segment_that_was_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, line("before"))
    reading = Reading(tmp_path)
    assert reading.read()
    os.truncate(tmp_path / "journal.0", 0)
    assert reading.read()
    writer.append(journal.RECORD, line("since then"))
    assert reading.read()
    assert reading.texts == ["before", "since then"]
    assert reading.losses == [("segment cut short", 1)]


def test_what_is_torn_where_the_writer_is_gone_is_counted(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, line("whole"))
    path = tmp_path / "journal.0"
    path.write_bytes(path.read_bytes() * 2)
    os.truncate(path, path.stat().st_size - 3)
    reading = Reading(tmp_path)
    assert reading.read()
    for _ in range(2):
        reading.follower.end()
    assert (reading.texts, reading.losses) == (["whole"], [("torn frame", 1)])


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa4kind", b"no msgpack", b"\x80"])
def test_a_record_that_would_spoil_a_batch_is_counted(tmp_path: Path, body: bytes) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, body)
    writer.append(journal.RECORD, line("good"))
    reading = Reading(tmp_path)
    reading.read()
    assert reading.texts == ["good"]
    assert reading.losses == [("malformed record", 1)]


def test_names_are_bounded(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.GROUP, b"\1")
    writer.append(journal.GROUP, journal.INDEXED.pack(1) + b"a" * 1000)
    writer.append(journal.GROUP, journal.INDEXED.pack(2) + b"a" * 1001)
    writer.append(journal.CALL_SITE, journal.INDEXED.pack(3) + b"\xff\0" * 9000)
    reading = Reading(tmp_path)
    reading.read()
    names = reading.follower.names
    assert len(names.groups[1]) < 256
    assert names.groups[1] != names.groups[2]
    assert len(names.call_sites[3]) <= 4096
    assert "\0" not in names.call_sites[3]


def test_a_later_writer_begins_behind_what_is_there(tmp_path: Path) -> None:
    reading = Reading(tmp_path)
    for text in ("first launch", "second launch"):
        writer = journal.JournalWriter(tmp_path)
        writer.append(journal.RECORD, line(text))
        writer.close()
        wait_for(reading.read)
    assert reading.texts == ["first launch", "second launch"]


def test_without_a_server_the_start_and_the_latest_part_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(journals, "LAST_FRAME_SECONDS", 0.0)
    writer = journal.JournalWriter(tmp_path)
    reading = Reading(tmp_path)
    for number in range(100):
        assert writer.append(journal.RECORD, line(f"{number} {'x' * 100}"))
        reading.read()
        reading.follower.keep_bounded()
    numbers = [number for number, _ in journal.segments(tmp_path)]
    assert len(numbers) <= journal.MAX_SEGMENTS
    assert numbers[0] == 0
    assert numbers[-1] > 5
