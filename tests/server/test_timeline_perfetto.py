"""Traces of steps, as Perfetto's own trace_processor reads them: the same as the API says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Sender, serving
from tests.server.steps_sent import Job, pipeline
from tests.server.trace_processor import TraceProcessor, reading

STEP, STEPS, RANKS = 25, 3, 4
# what is lost in reading, and what Perfetto put right
_LOST = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
_SLICES = """
    select slice.name, slice.ts, slice.dur, process.name as process, thread.name as thread,
           slice.depth, extract_arg(slice.arg_set_id, 'args.step') as step
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) left join process using (upid)
"""
_FLOWS = """
    select source.name as operation, target.name as part, out.name as source,
           into_.name as target
    from flow
    join slice source on source.id = flow.slice_out join slice target on target.id = flow.slice_in
    join thread_track a on a.id = source.track_id join thread t using (utid)
    join process out on out.upid = t.upid
    join thread_track b on b.id = target.track_id join thread u on u.utid = b.utid
    join process into_ on into_.upid = u.upid
"""


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """A run of four ranks, of which rank 2 comes last to each collective."""
    with serving(tmp_path_factory.mktemp("perfetto"), "") as client:
        sender = Sender(client)
        job = Job(hosts=2, more={(2, "backward"): 40.0})
        sender.send(*job.records())
        sender.send(chunks=job.chunks())
        yield sender


def read(sender: Sender, path: str) -> Any:
    reply = sender.client.get(f"/api/v1/runs/run{path}")
    assert reply.status_code == 200, reply.text
    return reading(reply.content)


def rank_of(name: str) -> int:
    return int(name.removeprefix("rank ").partition(" ")[0])


def shown(perfetto: TraceProcessor) -> tuple[Counter[Any], dict[Any, int]]:
    """Return how many slices of the lanes there are by step, rank and name, and how long."""
    counts, lengths = Counter[Any](), defaultdict[Any, int](int)
    for row in perfetto.rows(_SLICES):
        if row["process"] == "critical path" or row["thread"] != "step":
            continue
        key = (row["step"], rank_of(row["process"]), row["name"])
        counts[key] += 1
        lengths[key] += row["dur"]
    return counts, lengths


def said(sender: Sender, steps: range) -> tuple[Counter[Any], dict[Any, int]]:
    """Return the same of the API."""
    counts, lengths = Counter[Any](), defaultdict[Any, int](int)
    for step in steps:
        answer = sender.get(f"/steps/{step}")
        columns = answer["slices"]
        for lane, kind, begin, end in zip(
            columns["lane"], columns["kind"], columns["begin_us"], columns["end_us"], strict=True
        ):
            key = (step, answer["lanes"][lane]["rank"], answer["kinds"][kind])
            counts[key] += 1
            lengths[key] += (end - begin) * 1_000
    return counts, lengths


def between_ranks(perfetto: TraceProcessor) -> Counter[Any]:
    """Return how many arrows there are by operation, and from which rank to which."""
    return Counter(
        (row["operation"], rank_of(row["source"]), rank_of(row["target"]))
        for row in perfetto.rows(_FLOWS)
        if row["part"] in ("transfer", "recv")
    )


def test_lanes_are_those_of_the_page(sender: Sender) -> None:
    """As many slices, as long; each rank is a process, and nothing is lost in reading."""
    with read(sender, f"/steps/{STEP}/trace?to={STEP + STEPS - 1}") as perfetto:
        assert perfetto.rows(_LOST) == []
        counts, lengths = shown(perfetto)
        known, known_lengths = said(sender, range(STEP, STEP + STEPS))
        assert counts == known
        for key, length_ns in known_lengths.items():  # the API gives whole microseconds
            assert lengths[key] == pytest.approx(length_ns, abs=1_000 * counts[key] + 1), key
        processes = [row["name"] for row in perfetto.rows("select name from process where pid > 0")]
        ranks = [f"rank {rank} on node-{rank // 2}" for rank in range(RANKS)]
        assert sorted(processes) == ["critical path", *ranks]
        threads = perfetto.rows("select name, count(*) as n from thread where tid > 0 group by 1")
        assert {row["name"]: row["n"] for row in threads} == {"operations 1": 4, "step": 5}


def test_operations_and_the_critical_path_are_those_of_the_page(sender: Sender) -> None:
    answer = sender.get(f"/steps/{STEP}")
    with read(sender, f"/steps/{STEP}/trace") as perfetto:
        rows = perfetto.rows(_SLICES)
    flights = answer["flights"]
    wanted = {
        answer["lanes"][lane]["rank"]: end - begin
        for lane, begin, end in zip(
            flights["lane"], flights["begin_us"], flights["end_us"], strict=True
        )
    }
    inside = [row for row in rows if row["depth"]]
    assert [row["name"] for row in inside] == ["transfer"] * 3  # of those that waited, since then
    operations = [row for row in rows if row["thread"] == "operations 1" and not row["depth"]]
    assert {row["name"] for row in operations} == {"all_reduce"}
    found = {rank_of(row["process"]): row["dur"] for row in operations}
    assert found == {rank: pytest.approx(us * 1_000, abs=1_001) for rank, us in wanted.items()}
    path = [row for row in rows if row["process"] == "critical path"]
    assert len(path) == len(answer["path"])
    length_us = sum(part["end_us"] - part["begin_us"] for part in answer["path"])
    assert sum(row["dur"] for row in path) == pytest.approx(length_us * 1_000, abs=5_000)


def test_arrows_lead_from_the_last_to_all_others(sender: Sender) -> None:
    with read(sender, f"/steps/{STEP}/trace?to={STEP + STEPS - 1}") as perfetto:
        assert perfetto.value("select count(*) from flow") == (RANKS - 1) * STEPS
        assert between_ranks(perfetto).total() == (RANKS - 1) * STEPS
        arrows = {arrow: n for arrow, n in between_ranks(perfetto).items() if arrow[1] == 2}
        assert arrows.keys() == {("all_reduce", 2, rank) for rank in (0, 1, 3)}


def test_chosen_ranks_alone(sender: Sender) -> None:
    with read(sender, f"/steps/{STEP}/trace?ranks=1-2") as perfetto:
        assert perfetto.rows(_LOST) == []
        counts, _ = shown(perfetto)
        known, _ = said(sender, range(STEP, STEP + 1))
        assert counts == {key: n for key, n in known.items() if key[1] in (1, 2)}
        assert between_ranks(perfetto) == {("all_reduce", 2, 1): 1}


def test_sends_lead_to_their_receives(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Three stages and three microbatches: six sends ahead, six back, each to its neighbour."""
    with serving(tmp_path_factory.mktemp("pipeline"), "") as client:
        sender = Sender(client)
        pipeline(sender)
        with read(sender, "/steps/1/trace") as perfetto:
            assert perfetto.rows(_LOST) == []
            assert between_ranks(perfetto) == {
                ("send", source, target): 3 for source, target in ((0, 1), (1, 2), (2, 1), (1, 0))
            }
            counts, _ = shown(perfetto)
            known, _ = said(sender, range(1, 2))
            assert counts == known
