"""Entries of the Flight Recorder find the slots of the same calls, whatever either side counts."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.files.flight_recorder import Dump, DumpError, open_entries, parse
from rankscope.node.flight.match import Matched, Matcher
from rankscope.node.flight.reader import summary
from rankscope.wire import schema
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.flight_dumps import LATE_NS, Recorder
from tests.shared_data import SHARED_DATA, named

GROUPS = {1: "0"}
DATA = SHARED_DATA / "flight_recorder"


@pytest.fixture
def flight(tmp_path: Path) -> Recorder:
    return Recorder(FakeRank(tmp_path, 3))


def match(
    matcher: Matcher, flight: Recorder, groups: dict[int, str] = GROUPS
) -> tuple[Matched, dict[int, Any]]:
    """Return what a dump of now gives, and its ends by slot number."""
    dump = parse(msgspec.json.encode(flight.dump()))
    found = matcher.take(dump, flight.slots(), groups, (0, flight.wall_ahead))
    return found, {int(row["number"]): row for row in found.rows}


def test_each_end_is_told_once_with_the_exact_time_on_the_device(flight: Recorder) -> None:
    matcher = Matcher(is_timed=True)
    for _ in range(50):
        flight.call()
    flight.complete(flight.entries[:30])
    found, ends = match(matcher, flight)
    assert sorted(ends) == list(range(30))
    assert found.in_flight.tolist() == list(range(30, 50))
    for entry in flight.entries[:30]:
        row = ends[flight.slot_of[entry["record_id"]]]
        created = entry["time_created_ns"] - flight.wall_ahead
        assert (row["device_ns"], row["ended_ns"]) == (2_500_000, created + LATE_NS)
        assert row["started_ns"] == row["ended_ns"] - 2_500_000
    assert not match(matcher, flight)[1]  # the same dump again
    flight.complete(flight.entries)
    assert sorted(match(matcher, flight)[1]) == list(range(30, 50))


@pytest.mark.parametrize("between_ns", [20_000, 3_000_000])
@pytest.mark.parametrize("missed", [3, 37])
def test_an_agent_that_came_late_counts_otherwise(
    flight: Recorder, between_ns: int, missed: int
) -> None:
    flight.between_ns = between_ns
    for _ in range(missed):  # before the agent was there: entries alone
        flight.now += between_ns
        flight.entry("nccl:all_reduce")
    for _ in range(100):
        flight.call()
    flight.complete(flight.entries)
    found, ends = match(Matcher(), flight)
    assert sorted(ends) == list(range(100))
    for entry in flight.entries[missed:]:
        row = ends[flight.slot_of[entry["record_id"]]]
        assert row["ended_ns"] == entry["time_created_ns"] - flight.wall_ahead + LATE_NS
    assert found.unmatched == 0


def test_a_coalesced_batch_is_told_by_the_entry_that_ends_it(flight: Recorder) -> None:
    matcher = Matcher(is_timed=True)
    flight.call()
    for at in range(3):
        flight.slot("all_reduce")
        flight.entry("nccl:all_reduce", same_batch=at > 0)
    batch = flight.entry("nccl:coalesced", same_batch=True)
    for _ in range(5):
        flight.call()
    flight.complete([batch], 9.0)
    found, ends = match(matcher, flight)
    assert {number: row["device_ns"] for number, row in ends.items()} == dict.fromkeys(
        (1, 2, 3), 9_000_000
    )
    assert found.in_flight.tolist() == [0, 4, 5, 6, 7, 8]
    flight.complete(flight.entries[5:], 1.0)  # NCCL counted three calls as one
    assert sorted(match(matcher, flight)[1]) == [4, 5, 6, 7, 8]


def test_pieces_of_unequal_size_belong_to_one_call(flight: Recorder) -> None:
    flight.call()
    flight.slot("all_gather")
    for at in range(4):
        flight.entry("nccl:_broadcast_oop", same_batch=at > 0)
    flight.entry("nccl:coalesced", same_batch=True)
    for _ in range(6):
        flight.call()
    flight.complete(flight.entries)
    found, ends = match(Matcher(), flight)
    assert sorted(ends) == list(range(8))
    assert found.unmatched == 0


def test_exchanges_are_told_apart_by_peer_and_direction(flight: Recorder) -> None:
    flight.pg_config = {"0": {"name": "0", "desc": "pipeline", "ranks": "[3, 7, 11, 15]"}}
    slots = []
    for at in range(10):  # rank 3 is number 0 of its group; a pair in either direction at once
        slots.append(flight.slot("send", sequence=at + 1, peer_rank=7, flags=schema.FLAG_P2P))
        slots.append(flight.slot("recv", sequence=at + 1, peer_rank=15, flags=schema.FLAG_P2P))
        flight.entry("nccl:recv 0<-3", is_p2p=True)
        flight.entry("nccl:send 0->1", is_p2p=True)
    sends = [entry for entry in flight.entries if "send" in entry["profiling_name"]]
    flight.complete(sends)
    found, ends = match(Matcher(), flight)
    assert sorted(ends) == slots[::2]
    assert found.in_flight.tolist() == slots[1::2]


def test_a_world_made_again_has_its_own_slots(flight: Recorder) -> None:
    for group_id, pg_id in ((1, 0), (2, 7)):  # labels "0" and "0#2", both "0" to torch
        flight.now += 1_000_000_000
        for sequence in range(1, 21):
            flight.call(pg_id=pg_id, group_id=group_id, sequence=sequence)
    flight.complete(flight.entries)
    found, ends = match(Matcher(), flight, {1: "0", 2: "0#2", 3: "01"})
    assert sorted(ends) == list(range(40))
    assert found.unmatched == 0
    for entry in flight.entries:
        created = entry["time_created_ns"] - flight.wall_ahead
        assert ends[flight.slot_of[entry["record_id"]]]["ended_ns"] == created + LATE_NS


def test_entries_that_were_overwritten_are_counted_and_the_rest_is_found(flight: Recorder) -> None:
    matcher = Matcher()
    for _ in range(20):
        flight.call()
    flight.complete(flight.entries)
    match(matcher, flight)
    for _ in range(200):
        flight.call()
    del flight.entries[:150]
    flight.complete(flight.entries)
    found, ends = match(matcher, flight)
    assert (found.overwritten, found.unmatched) == (130, 0)
    assert sorted(ends) == list(range(150, 220))


def test_a_recorder_that_was_reset_begins_anew(flight: Recorder) -> None:
    matcher = Matcher()
    for _ in range(20):
        flight.call()
    flight.complete(flight.entries)
    match(matcher, flight)
    flight.entries.clear()
    flight.records = 0
    for _ in range(5):
        flight.call()
    flight.complete(flight.entries)
    assert sorted(match(matcher, flight)[1]) == [20, 21, 22, 23, 24]


def test_a_duration_may_come_after_the_end(flight: Recorder) -> None:
    matcher = Matcher(is_timed=True)
    with_time, without = flight.call(), flight.call()
    flight.complete(flight.entries, None)
    assert not match(matcher, flight)[1]
    with_time["duration_ms"] = 4.0
    ends = match(matcher, flight)[1]
    assert {number: int(row["device_ns"]) for number, row in ends.items()} == {0: 4_000_000, 1: -1}
    assert without["record_id"] == 1


def test_a_call_that_nobody_recorded_takes_no_slot_of_another_kind(flight: Recorder) -> None:
    for _ in range(3):
        flight.call("broadcast")
    flight.now += 5_000_000
    flight.entry("nccl:all_to_all")
    for _ in range(3):
        flight.call("broadcast")
    flight.complete(flight.entries)
    found, ends = match(Matcher(), flight)
    assert (sorted(ends), found.unmatched) == ([0, 1, 2, 3, 4, 5], 1)


def test_gloo_says_that_but_not_when(flight: Recorder) -> None:
    for _ in range(2):
        flight.call()
    for entry in flight.entries:
        entry["profiling_name"] = "gloo:all_reduce"
    flight.entries[0]["retired"] = True
    found, ends = match(Matcher(), flight)
    assert [(number, int(row["ended_ns"])) for number, row in ends.items()] == [(0, 0)]
    assert found.in_flight.tolist() == [1]


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\x80\x04]q\x00.", b"[]", b'{"entries": 3}', b'{"entries": [{}]}', b"[" * 100_000,
        b'{"entries": [{"record_id": "1"}]}', b"\xff\xfe{}", b'{"pg_status": {"0": 4}}',
    ],
)  # fmt: skip
def test_what_is_no_dump_is_refused(answer: bytes) -> None:
    with pytest.raises(DumpError):
        parse(answer)


# --- real dumps ---------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):  # noqa: S301 - it resolves no globals
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: only plain values are read")


def real_dumps() -> list[Path]:
    return sorted(DATA.glob("*/_dump_*")) if DATA.is_dir() else []


def load(path: Path) -> Dump:
    """Return a recorded dump as our values; NCCL writes the status with numbers in pickles."""
    with path.open("rb") as file:
        return msgspec.convert(_PlainUnpickler(file).load(), Dump)


needs_data = pytest.mark.skipif(not real_dumps(), reason=f"no recorded dumps in {named(DATA)}")


@needs_data
def test_real_dumps_of_a_stuck_job_are_summed_up() -> None:
    for path in real_dumps():
        dump = load(path)
        fields = summary(dump)
        waiting = open_entries(dump)
        assert len(waiting) == len(dump.entries)  # these dumps hold what was active alone
        oldest = min(waiting, key=lambda entry: entry.record_id)
        assert oldest.profiling_name in fields["oldest open"]
        assert sum(name.startswith("group ") for name in fields) == min(len(dump.pg_status), 30)


@needs_data
def test_every_entry_of_real_dumps_finds_the_slot_of_its_call(tmp_path: Path) -> None:
    for index, path in enumerate(real_dumps()):
        dump = load(path)
        wall_ahead = dump.entries[0].time_created_ns - 10**13
        fake = FakeRank(tmp_path, index)
        labels = {place: name for place, name in enumerate(dump.pg_config, 1)}
        for entry in dump.entries:
            _issue(fake, dump, entry, labels, wall_ahead)
        recorder = Recorder(fake)
        found = Matcher().take(dump, recorder.slots(), labels, (0, wall_ahead))
        assert found.in_flight.tolist() == list(range(len(dump.entries))), path
        assert (found.unmatched, len(found.rows)) == (0, 0)


def _issue(fake: FakeRank, dump: Dump, entry: Any, labels: dict[int, str], wall_ahead: int) -> None:
    """Write the slot that our hooks would have written for a real entry."""
    created = entry.time_created_ns - wall_ahead
    peer = re.search(r"(send|recv) \d+(?:->|<-)(\d+)", entry.profiling_name)
    names = {"_all_gather_base": "all_gather_into_tensor", "all_to_all": "all_to_all_single",
             "_reduce_scatter_base": "reduce_scatter_tensor"}  # fmt: skip
    name = entry.profiling_name.partition(":")[2]
    ranks = [int(r) for r in re.findall(r"\d+", dump.pg_config[entry.process_group[0]]["ranks"])]
    fake.issue(
        state=schema.RETURNED, arrived_ns=created - 15_000, returned_ns=created + 40_000,
        sequence=entry.sequence + 1000,  # ours differs
        operation=schema.OPERATIONS.index(peer[1] if peer else names.get(name, name)),
        group_id={label: number for number, label in labels.items()}[entry.process_group[0]],
        peer_rank=ranks[int(peer[2])] if peer else -1,
        flags=schema.FLAG_P2P if peer else 0,
    )  # fmt: skip
