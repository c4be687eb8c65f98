"""Where ranks are and how they ended goes past batches that wait."""

from __future__ import annotations

from pathlib import Path

from rankscope.node.upload.server import Server
from rankscope.node.upload.spool import Spool, SpoolEntry
from rankscope.node.upload.uploader import Uploader
from rankscope.node.upload.vitals import EVERY_SECONDS, MANY_WAITING, Vitals
from rankscope.wire import schema, zstd
from tests.agent.collector.processes import wait_for
from tests.agent.collector.receiver import Receiver


def state(rank: int, step: int) -> schema.RankState:
    return schema.RankState(
        attempt=0, rank=rank, time_ns=step, step=step, phase="forward", phase_since_ns=0,
        heartbeat_ns=step,
    )  # fmt: skip


def end(rank: int) -> schema.RankEnded:
    return schema.RankEnded(attempt=0, rank=rank, time_ns=9, reason="exit_code", exit_code=1)


def read(body: bytes | None) -> tuple[schema.Batch, list[schema.AnyRecord]]:
    assert body is not None
    batch = schema.decode_batch(zstd.unpack(body, 1 << 20))
    return batch, [schema.decode_record(raw) for raw in batch.records]


def batch(number: int) -> bytes:
    one = schema.Batch(
        schema_version=1, run_id="r", producer="p", sequence=number, host="h", sent_ns=0
    )
    return zstd.pack(schema.encode(one))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_newest_of_each_rank_and_only_where_batches_wait() -> None:
    clock = Clock()
    vitals = Vitals("r", "h", clock)
    for record in (state(0, 1), state(1, 1), state(0, 2), end(1)):
        vitals.note(record)
    body = vitals.due(MANY_WAITING)
    sent, records = read(body)
    assert records == [state(0, 2), state(1, 1), end(1)]
    assert (sent.run_id, sent.host, sent.sequence, sent.chunks) == ("r", "h", 1, [])
    vitals.sent(is_accepted=True)
    assert vitals.due(MANY_WAITING) is None  # not so soon
    clock.now += EVERY_SECONDS
    vitals.note(state(0, 3))
    again, records = read(vitals.due(MANY_WAITING + 7))
    assert (again.producer, again.sequence) == (sent.producer, 2)
    assert records == [state(0, 3), state(1, 1), end(1)]
    clock.now += EVERY_SECONDS
    assert vitals.due(MANY_WAITING - 1) is None  # all of it is on its way
    assert vitals.due(MANY_WAITING) is None


def test_a_number_is_given_to_one_batch() -> None:
    clock = Clock()
    vitals = Vitals("r", "h", clock)
    vitals.note(state(0, 1))
    first, _ = read(vitals.due(MANY_WAITING))
    vitals.sent(is_accepted=False)  # stored, or not
    clock.now += EVERY_SECONDS
    vitals.note(state(0, 2))
    second, _ = read(vitals.due(MANY_WAITING))
    assert second.sequence == 1
    assert second.producer != first.producer


def test_an_end_comes_before_what_waits(tmp_path: Path, receiver: Receiver) -> None:
    spool = Spool(tmp_path, 1 << 20)
    for number in range(1, 6):
        spool.offer(SpoolEntry(number, 1, 1, None, batch(number)))
    vitals = Vitals("r", "h")
    vitals.note(end(3))
    uploader = Uploader(Server(receiver.url, ""), spool, lambda items, why: None, vitals=vitals)
    uploader.start()
    wait_for(lambda: len(receiver.batches) == 5)
    ((key, early),) = receiver.early.items()
    assert [schema.decode_record(raw) for raw in early.records] == [end(3)]
    assert receiver.arrived[key] <= min(receiver.arrived[one] for one in receiver.batches)
    assert list(receiver.batches) == [("p", number) for number in range(1, 6)]
