from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.files import journal
from tests.damage import damaged


def read_all(directory: Path) -> list[bytes]:
    return [
        body
        for _, path in journal.segments(directory)
        for _, body, _ in journal.read_frames(path, 0)
    ]


def test_frames_from_many_threads_arrive_whole(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)

    def work(name: int) -> None:
        for number in range(200):
            writer.append(journal.RECORD, f"{name}:{number}".encode() * 20)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_all(tmp_path)) == 800


def test_torn_tail_is_cut_and_what_stands_before_it_is_kept(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    for number in range(3):
        writer.append(journal.RECORD, bytes([number]) * 50)
    path = tmp_path / "journal.0"
    path.write_bytes(path.read_bytes()[:-7])
    assert [body[0] for body in read_all(tmp_path)] == [0, 1]


def test_goes_on_in_new_segments_and_stops_when_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal, "_RETRY_SECONDS", 0.0)
    writer = journal.JournalWriter(tmp_path)
    kept = sum(writer.append(journal.RECORD, b"x" * 100) for _ in range(100))
    assert len(journal.segments(tmp_path)) == journal.MAX_SEGMENTS
    assert writer.dropped == 100 - kept
    assert writer.last_error == "journal full"
    assert writer.append(journal.RECORD, b"an error", urgent=True)
    journal.segments(tmp_path)[0][1].unlink()  # the collector has sent it
    assert writer.append(journal.RECORD, b"room again")


def test_full_disk_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = journal.JournalWriter(tmp_path)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        assert not writer.append(journal.RECORD, b"lost")
    assert (writer.dropped, writer.last_error) == (1, "No space left on device")
    assert writer.append(journal.RECORD, b"kept")


def test_half_written_frame_does_not_hide_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = journal.JournalWriter(tmp_path)
    write = journal.os.write
    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", lambda fd, data: write(fd, data[:5]))
        assert not writer.append(journal.RECORD, b"torn")
    assert writer.append(journal.RECORD, b"kept")
    assert read_all(tmp_path) == [b"kept"]


def test_too_large_a_frame_is_refused(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    assert not writer.append(journal.RECORD, b"x" * (journal.MAX_BODY_BYTES + 1))
    assert writer.dropped == 1


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.data())
def test_of_a_damaged_segment_what_comes_before_the_damage_is_kept(
    tmp_path: Path, bodies: list[bytes], data: st.DataObject
) -> None:
    (tmp_path / "journal.0").unlink(missing_ok=True)
    writer = journal.JournalWriter(tmp_path)
    for body in bodies:
        writer.append(journal.RECORD, body)
    writer.close()
    path = tmp_path / "journal.0"
    good = path.read_bytes()
    bad = data.draw(damaged(good))
    path.write_bytes(bad)
    same = next((at for at, now in enumerate(bad) if now != good[at]), len(bad))
    starts = itertools.accumulate(journal.FRAME.size + len(body) for body in bodies)
    whole = sum(end <= same for end in starts)
    assert read_all(tmp_path)[:whole] == bodies[:whole]


def test_a_number_that_the_script_closed_and_uses_is_left_to_it(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path)
    writer.append(journal.RECORD, b"before")
    os.close(writer._file.descriptor)
    with (tmp_path / "checkpoint").open("wb") as users:
        assert users.fileno() == writer._file.descriptor
        assert writer.append(journal.RECORD, b"after")
        writer.close()
        users.write(b"weights")
    assert (tmp_path / "checkpoint").read_bytes() == b"weights"
    assert read_all(tmp_path) == [b"before", b"after"]
    assert not writer.append(journal.RECORD, b"closed")


def test_a_new_segment_frees_no_number(tmp_path: Path) -> None:
    """A thread may be about to write to it."""
    writer = journal.JournalWriter(tmp_path)
    number = writer._file.descriptor
    assert writer._next_segment()
    with (tmp_path / "checkpoint").open("wb") as users:
        assert users.fileno() != number
    assert os.get_inheritable(number) is False
    assert writer.append(journal.RECORD, b"in the second")
    (_, second) = journal.segments(tmp_path)
    assert [body for _, body, _ in journal.read_frames(second[1], 0)] == [b"in the second"]
    writer.close()
