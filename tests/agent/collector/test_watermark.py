"""What a server has accepted and not stored yet is held, and sent again where it lost it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.node.offsets import Offsets
from rankscope.node.upload.server import Server
from rankscope.node.upload.spool import Spool, SpoolEntry, SpoolHeader
from rankscope.node.upload.uploader import Uploader
from rankscope.wire import schema, zstd
from rankscope.wire.schema import Watermark
from tests.agent.collector.processes import wait_for
from tests.agent.collector.receiver import Receiver

P = "p"


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Held:
    """A spool whose batches are all accepted."""

    def __init__(self, folder: Path, count: int, limit: int = 1 << 20) -> None:
        self.clock = Clock()
        self.spool = Spool(folder, limit, self.clock)
        for number in range(1, count + 1):
            self.put(number)
        self.accept_all()

    def put(self, number: int) -> SpoolEntry:
        body = schema.encode(
            schema.Batch(
                schema_version=1, run_id="r", producer=P, sequence=number, host="h", sent_ns=1
            )
        )
        header = SpoolHeader(P, number, 1, Offsets(P, number))
        entry = self.spool.write(header, zstd.pack(body))
        self.spool.offer(entry)
        return entry

    def accept_all(self) -> list[int]:
        """Send what waits; return its numbers."""
        sent = []
        while (entry := self.spool.take(0.0)) is not None:
            sent.append(entry.sequence)
            self.spool.hold(entry)
        return sent

    def files(self) -> list[int]:
        return sorted(int(path.stem) for path in self.spool._directory.glob("*.batch"))


def test_what_is_accepted_is_held_until_it_is_below_the_watermark(tmp_path: Path) -> None:
    held = Held(tmp_path, 4)
    assert (held.spool.waiting()[0], held.spool.is_empty()) == (0, False)
    assert held.spool.oldest_held() == {P: 1}
    held.spool.settle(P, Watermark(durable=2, newest=2))
    assert (held.files(), held.spool.oldest_held()) == ([3, 4], {P: 3})
    held.spool.settle("another", Watermark(durable=9, newest=9))
    assert held.files() == [3, 4]
    held.spool.settle(P, Watermark(durable=4, newest=4))
    assert (held.files(), held.spool.is_empty(), held.spool.waiting()) == ([], True, (0, 0))


def test_what_a_later_one_overtook_is_sent_again(tmp_path: Path) -> None:
    held = Held(tmp_path, 6)
    held.spool.settle(P, Watermark(durable=1, newest=5))
    assert held.accept_all() == [2, 3, 4]  # the fifth is stored, the sixth may be on its way
    held.spool.settle(P, Watermark(durable=6, newest=6))
    assert held.spool.is_empty()


def test_where_nothing_moves_the_oldest_is_sent_again_and_then_what_was_before_it(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, 5)
    for pause, expected in ((29, []), (2, [1]), (58, []), (2, [2]), (118, []), (2, [3])):
        held.clock.now += pause
        held.spool.send_again_if_still()
        assert held.accept_all() == expected
    # The third is stored now: those that were accepted before it, and are not, were lost.
    held.spool.settle(P, Watermark(durable=3, newest=3))
    assert held.accept_all() == [4, 5]
    held.spool.settle(P, Watermark(durable=5, newest=5))
    assert held.spool.is_empty()


def test_a_full_spool_lets_go_of_what_is_accepted_first_and_counts_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(tmp_path, 3)
    size = held.spool.waiting()[1] // 3 - 16
    held.put(4)
    held.spool._limit_bytes = held.spool.waiting()[1]
    assert not held.spool.has_room(size)
    assert held.spool.make_room(size) == []
    assert held.files() == [2, 3, 4]
    assert "the spool is full of batches that the server has accepted" in caplog.text
    gone = held.spool.make_room(4 * size)  # then what waits to be sent, which is a loss
    assert [entry.sequence for entry in gone] == [4]
    assert held.spool.oldest_held() == {}


def test_a_new_life_sends_what_was_held(tmp_path: Path) -> None:
    Held(tmp_path, 3)
    again = Spool(tmp_path, 1 << 20)
    assert again.waiting()[0] == 3
    entry = again.take(0.0)
    assert entry is not None
    assert (entry.sequence, entry.producer) == (1, P)


@pytest.fixture
def upload(receiver: Receiver, tmp_path: Path) -> Held:
    """A spool that is emptied into a receiver."""
    held = Held(tmp_path / "spool", 0)
    held.refused = []  # type: ignore[attr-defined]
    Uploader(
        Server(receiver.url, ""), held.spool, lambda *what: held.refused.append(what),  # type: ignore[attr-defined]
        lambda: 0.0, run_id="r",
    ).start()  # fmt: skip
    return held


def test_the_upload_asks_until_all_is_stored(receiver: Receiver, upload: Held) -> None:
    receiver.watermark = Watermark(durable=0, newest=0)
    for number in (1, 2):
        upload.put(number)
    wait_for(lambda: receiver.asked)
    assert receiver.asked[0] == {"run_id": ["r"], "producer": [P], "held_from": ["1"]}
    assert receiver.headers[schema.HELD_HEADER] == "1"
    assert upload.files() == [1, 2]
    receiver.watermark = Watermark(durable=1, newest=1)
    wait_for(lambda: upload.files() == [2])
    receiver.watermark = Watermark(durable=2, newest=2)
    wait_for(upload.spool.is_empty)
    assert receiver.num_posts == 2


def test_what_is_refused_later_is_counted_once(receiver: Receiver, upload: Held) -> None:
    receiver.watermark = Watermark(durable=0, newest=0)
    upload.put(1)
    wait_for(lambda: receiver.num_posts == 1)
    receiver.watermark = Watermark(durable=0, newest=0, refused=3)
    wait_for(lambda: upload.refused)  # type: ignore[attr-defined]
    receiver.watermark = Watermark(durable=1, newest=1, refused=3)
    wait_for(upload.spool.is_empty)
    assert upload.refused == [(3, "refused when it was accepted already")]  # type: ignore[attr-defined]


def test_a_server_that_gives_no_watermark_frees_at_once(receiver: Receiver, upload: Held) -> None:
    for number in (1, 2, 3):
        upload.put(number)
    wait_for(upload.spool.is_empty)
    assert (upload.files(), receiver.asked) == ([], [])


@pytest.mark.parametrize("said", ['{"durable": "all"}', "7", "[]"])
def test_a_watermark_that_is_none_is_as_good_as_no_one(
    receiver: Receiver, upload: Held, said: str
) -> None:
    receiver.answer = (200, f'{{"accepted_records": 1, "watermark": {said}}}')
    upload.put(1)
    wait_for(upload.spool.is_empty)
