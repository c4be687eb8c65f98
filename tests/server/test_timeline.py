"""One step: its slices are what ranks reported, its sentence is right, and it accuses nobody."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.api.timeline.lanes import folded, parse_ranks
from rankscope_server.api.timeline.schema import SliceKind
from tests.server.conftest import Sender
from tests.server.steps_sent import BEGIN_NS, MS, Job, call_chunk, chunk, pipeline

STEP = 25


def sent(sender: Sender, job: Job) -> Job:
    sender.send(*job.records())
    sender.send(chunks=job.chunks())
    return job


def rows_of(answer: dict[str, Any], name: str = "slices") -> list[dict[str, Any]]:
    """Return columns as rows; kinds by their names."""
    columns = answer[name]
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    for row in rows:
        if "kind" in row:
            row["kind"] = answer["kinds"][row["kind"]]
        row["rank"] = answer["lanes"][row["lane"]]["rank"]
        row["length_us"] = row["end_us"] - row["begin_us"]
    return rows


def lengths(answer: dict[str, Any]) -> dict[tuple[int, str], int]:
    """Return the sum of the slices of each rank and kind, in us."""
    found: dict[tuple[int, str], int] = defaultdict(int)
    for row in rows_of(answer):
        found[row["rank"], row["kind"]] += row["length_us"]
    return found


# --- slices are what ranks reported -------------------------------------------------------------


def test_slices_fill_the_step_and_sum_to_what_was_reported(sender: Sender) -> None:
    job = sent(sender, Job(more={(2, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP}")
    assert [lane["rank"] for lane in answer["lanes"]] == [0, 1, 2, 3]
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows_of(answer):
        by_rank[row["rank"]].append(row)
    found = lengths(answer)
    least = min(job.rows[rank, STEP]["blocked"] for rank in range(4))
    for rank, rows in by_rank.items():
        truth = job.rows[rank, STEP]
        lane = answer["lanes"][rank]
        assert rows[0]["begin_us"] == lane["begin_us"]
        assert rows[-1]["end_us"] == lane["end_us"]
        assert [row["end_us"] for row in rows[:-1]] == [row["begin_us"] for row in rows[1:]]
        assert lane["end_us"] - lane["begin_us"] == pytest.approx(truth["length"] / 1e3, abs=2)
        for phase, ns in truth["own"].items():
            assert found[rank, phase] == pytest.approx(ns / 1e3, abs=8), phase  # cells are float32
        assert found[rank, "communication"] == pytest.approx(least / 1e3, abs=2)
        waited = truth["blocked"] - least
        assert found[rank, "waiting"] == pytest.approx(waited / 1e3, abs=2)
    (call,) = answer["calls"]
    assert (call["last_rank"], call["num_recorded"], call["num_members"]) == (2, 4, 4)
    assert call["is_sure"]
    assert call["transfer_ms"] == pytest.approx(least / 1e6)
    assert call["usual_ms"] == pytest.approx(5.0, abs=0.5)


def test_the_critical_path_leads_back_to_who_came_last(sender: Sender) -> None:
    job = sent(sender, Job(more={(2, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP}")
    parts = answer["path"]
    assert [part["end_us"] for part in parts[:-1]] == [part["begin_us"] for part in parts[1:]]
    assert parts[-1]["end_us"] == answer["length_us"]
    own = sum(p["end_us"] - p["begin_us"] for p in parts if p["rank"] == 2 and p["call"] < 0)
    truth = job.rows[2, STEP]
    assert own >= (truth["arrived"] - truth["started"]) / 1e3 - 3
    assert "rank 2" in answer["path_text"]


@pytest.mark.parametrize(
    ("flags", "note"),
    [(schema.STEP_THINNED, "counted, not recorded"), (0, "None of its 4 operations is stored")],
)
def test_a_wait_that_no_call_says_of_is_shown_as_that(
    sender: Sender, flags: int, note: str
) -> None:
    job = Job(more={(2, "backward"): 40.0}, flags=flags)
    sender.send(*job.records())
    steps = [one for one in job.chunks() if one.kind == "steps"]
    sender.send(chunks=steps)
    answer = sender.get(f"/steps/{STEP}")
    found = lengths(answer)
    for rank in range(4):
        blocked = job.rows[rank, STEP]["blocked"] / 1e3
        assert found[rank, "blocked"] == pytest.approx(blocked, abs=8)
        assert found[rank, "waiting"] == 0
    assert note in answer["notes"][0]
    assert answer["path"] == []
    assert answer["path_text"] == "The critical path is not known."
    assert answer["answer"]["ranks"] == [2], "self time is known without them"


def test_the_path_ends_where_it_is_not_known_for_whom_a_rank_waited(sender: Sender) -> None:
    job = sent(sender, Job(more={(3, "forward"): 40.0}, missing=((3, STEP),)))
    answer = sender.get(f"/steps/{STEP}")
    found = lengths(answer)
    assert all(found[rank, "waiting"] == 0 for rank in range(3)), "the last may be the missing one"
    assert found[0, "blocked"] == pytest.approx(job.rows[0, STEP]["blocked"] / 1e3, abs=2)
    (part,) = answer["path"]
    truth = job.rows[part["rank"], STEP]
    own = truth["length"] - (truth["ended"] - truth["started"])
    assert part["end_us"] - part["begin_us"] == pytest.approx(own / 1e3, abs=10)
    assert answer["path_text"].endswith("Before that it is not known.")


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_with_a_root_only_one_side_waits(sender: Sender, operation: str) -> None:
    """In a broadcast nobody waits for a rank that only receives."""
    sender.send(*Job(ranks=3).records())
    for rank, (called, begin, end) in enumerate([(0, 0, 1), (20, 20, 21), (5, 5, 40)]):  # ms
        row = {
            "arrived_ns": BEGIN_NS + called * MS, "duration_ns": (end - called) * MS, "step": 1,
            "blocked_ns": (end - begin) * MS, "sequence": 1, "size_bytes": 8, "peer_rank": 2,
        }  # fmt: skip
        step = {
            "step": [1], "started_ns": [BEGIN_NS], "duration_ns": [50 * MS],
            "forward_ns": [50 * MS], "forward_blocked_ns": [(end - begin) * MS],
            "num_collectives": [1],
        }  # fmt: skip
        columns = {name: np.array(step.get(name, [0]), np.int64) for name in schema.STEP_COLUMNS}
        sender.send(
            chunks=[
                chunk("steps", rank, "node-0", "started_ns", dict(columns)),
                call_chunk(rank, "node-0", [row], operation),
            ]
        )
    found = lengths(sender.get("/steps/1"))
    if operation == "reduce":  # rank 2 is the root: it waits until rank 1 has called
        assert found[2, "waiting"] == 15_000
        assert found[2, "communication"] == 20_000
    else:  # the root waits for none
        assert found[2, "waiting"] == 0
    assert found[0, "waiting"] == (1_000 if operation == "broadcast" else 0)
    assert found[1, "waiting"] == 0


# --- sentences ---------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], bool | None, str, list[int], str]] = {
    "slow rank": (
        {"more": {(2, "forward"): 20.0, (2, "backward"): 30.0}}, True, "rank", [2],
        "rank 2 on node-0 works 150 ms, its 3 peers 100 ms, most of the excess in backward",
    ),
    "late through its data": (
        {"more": {(1, "data"): 60.0}}, True, "data", [1],
        "rank 1 on node-0 waits 64.0 ms for its data, its 3 peers 4.0 ms",
    ),
    "checkpoint": (
        {"more": {(0, "checkpoint"): 400.0}}, True, "checkpoint", [0],
        "rank 0 on node-0 writes a checkpoint for 400 ms, its 3 peers 0.0 ms",
    ),
    "slow link": (
        {"odd_transfer_ms": 45.0}, True, "communication", [],
        "communication takes 45.0 ms on every rank instead of 5.0 ms, most in all_reduce of 1.0 MiB"
        " among all 4 ranks",
    ),
    "healthy": ({}, False, "none", [], "is not slow: it takes 105 ms, the median step 105 ms"),
    "all ranks": (
        {"more": {(-1, "forward"): 40.0}}, True, "all_ranks", [],
        "all 4 ranks work longer, 140 ms instead of 100 ms, most of it in forward",
    ),
    "missing rank": (
        {"more": {(3, "forward"): 40.0}, "missing": ((3, STEP),)}, True, "missing", [],
        "the 3 recorded ranks wait at least 44.",
    ),
    "two ranks, one of them slow": (
        {"ranks": 2, "more": {(1, "forward"): 40.0}}, True, "rank", [1],
        "rank 1 on node-0 works 140 ms instead of 100.0 ms, the 1 other rank as usual, most of the "
        "excess in forward",
    ),
    "two ranks, both slow": (
        {"ranks": 2, "more": {(-1, "forward"): 40.0}}, True, "all_ranks", [],
        "all 2 ranks work longer",
    ),
    "one rank only": (
        {"ranks": 1, "more": {(0, "backward"): 40.0}}, True, "all_ranks", [],
        "the only rank works longer, 140 ms instead of 99.9 ms, most of it in backward",
    ),
    "always slow": (
        {"always": {(2, "backward"): 30.0}}, False, "rank", [2],
        "in it rank 2 on node-0 works 1.3\N{MULTIPLICATION SIGN} as long as its peers",
    ),
    "too few steps": ({"steps": 4, "odd_step": 3}, None, "none", [], "fewer than 5 other steps"),
    "first of its process": (
        {"more": {(-1, "forward"): 90.0}, "flags": schema.STEP_FIRST}, True, "first_step", [],
        "it is the first of its process",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(sender: Sender, name: str) -> None:
    choices, is_slow, cause, ranks, words = CASES[name]
    job = sent(sender, Job(**choices))
    answer = sender.get(f"/steps/{job.odd_step}")["answer"]
    assert words in answer["what"]
    assert (answer["is_slow"], answer["cause"], answer["ranks"]) == (is_slow, cause, ranks)


def test_a_healthy_step_beside_it_is_not_slow(sender: Sender) -> None:
    sent(sender, Job(more={(2, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP - 1}")
    assert answer["answer"]["is_slow"] is False
    assert answer["slowest"][0]["step"] == STEP


@pytest.mark.parametrize("seed", range(8))
def test_noise_accuses_nobody(sender: Sender, seed: int) -> None:
    """Ranks that vary by a tenth, all alike: a step that is longer by chance has no culprit."""
    rng = np.random.default_rng(seed)
    job = Job(ranks=8, steps=40)
    for (_rank, _step), row in job.rows.items():
        row["own"]["forward"] = round(row["own"]["forward"] * rng.lognormal(0, 0.1) / 1e3) * 1_000
    now = np.full(8, BEGIN_NS)
    for step in range(1, 41):
        for rank in range(8):
            row = job.rows[rank, step]
            row["started"] = int(now[rank])
            row["arrived"] = row["started"] + sum(row["own"].values()) - row["own"]["optimizer"]
        end = max(job.rows[rank, step]["arrived"] for rank in range(8)) + 5 * MS
        for rank in range(8):
            row = job.rows[rank, step]
            row["blocked"] = end - row["arrived"]
            now[rank] = end + row["own"]["optimizer"]
            row["length"] = int(now[rank]) - row["started"]
    sent(sender, job)
    named = 0
    for step in range(6, 41):
        answer = sender.get(f"/steps/{step}")["answer"]
        own = np.array([sum(job.rows[rank, step]["own"].values()) for rank in range(8)])
        for rank in answer["ranks"]:  # who is named worked longest, and not by a little
            named += 1
            assert rank == own.argmax()
            assert own[rank] > 1.08 * np.median(own)
            assert answer["is_slow"] is False
    assert named <= 3


def test_what_devices_did_is_not_made_up(sender: Sender) -> None:
    """Hosts that only enqueue: no phase is drawn, and no rank is named for what is not known."""
    job = sent(sender, Job(backend="nccl", more={(2, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP}")
    assert {lane["state"] for lane in answer["lanes"]} == {"not measured"}
    assert {row["kind"] for row in rows_of(answer)} == {"unknown"}
    assert all(lane["self_ms"] is lane["waiting_ms"] is None for lane in answer["lanes"])
    said = answer["answer"]
    assert (said["is_slow"], said["cause"], said["ranks"]) == (True, "device", [])
    flights = rows_of(answer, "flights")
    truth = job.rows[0, STEP]
    assert flights[0]["length_us"] == pytest.approx(truth["blocked"] / 2e3, abs=2)
    assert "only enqueue" in " ".join(answer["notes"])
    assert answer["path"] == []


# --- clocks ------------------------------------------------------------------------------------


def test_clocks_that_are_seconds_apart_are_brought_together(sender: Sender) -> None:
    job = sent(sender, Job(hosts=2, ahead_ms=(0.0, 5_000.0), more={(3, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP}")
    assert answer["is_clock_sure"]
    assert "2 hosts were up to 2,500 ms off" in answer["clock_text"]
    begins = [lane["begin_us"] for lane in answer["lanes"]]
    truth = [job.rows[rank, STEP]["started"] / 1e3 for rank in range(4)]
    assert np.ptp(np.array(begins) - np.array(truth)) < 200
    assert answer["answer"]["ranks"] == [3]
    ends = {row["rank"]: row["end_us"] for row in rows_of(answer, "flights")}
    assert max(ends.values()) - min(ends.values()) < 200


def test_a_slow_rank_does_not_shift_the_clock_of_its_host(sender: Sender) -> None:
    """Bounds by starts and ends leave half of its lateness open; its ends do not."""
    sent(sender, Job(hosts=2, always={(3, "backward"): 60.0}))
    ahead = [lane["clock_ahead_ms"] for lane in sender.get(f"/steps/{STEP}")["lanes"]]
    assert np.ptp(ahead) < 0.2


def test_a_process_whose_clock_jumped_is_brought_back(sender: Sender) -> None:
    job = Job(more={(3, "backward"): 40.0})
    sender.send(*job.records())
    jumped = Job(more={(3, "backward"): 40.0}, ahead_ms=(700.0,))
    ranks = {0: job, 1: job, 2: jumped, 3: job}
    sender.send(
        chunks=[one for rank, of in ranks.items() for one in of.chunks() if one.rank == rank]
    )
    answer = sender.get(f"/steps/{STEP}")
    assert "The clock of rank 2 is up to 700 ms off" in answer["clock_text"]
    begins = [lane["begin_us"] for lane in answer["lanes"]]
    truth = [job.rows[rank, STEP]["started"] / 1e3 for rank in range(4)]
    assert np.ptp(np.array(begins) - np.array(truth)) < 200
    assert answer["answer"]["ranks"] == [3]


def test_without_a_common_operation_clocks_are_not_known(sender: Sender) -> None:
    choices = {"hosts": 2, "ahead_ms": (0.0, 5_000.0), "operation": "broadcast"}
    sent(sender, Job(**choices, more={(3, "backward"): 40.0}))
    answer = sender.get(f"/steps/{STEP}")
    assert not answer["is_clock_sure"]
    assert "is not known" in answer["clock_text"]
    assert [lane["clock_band_ms"] for lane in answer["lanes"]] == [None] * 4
    assert answer["answer"]["ranks"] == [3], "self time needs no clock"
    assert not any(part["is_sure"] for part in answer["path"] if part["call"] >= 0)


# --- a pipeline --------------------------------------------------------------------------------


def test_a_slow_link_of_a_pipeline_is_named_by_its_ends(sender: Sender) -> None:
    pipeline(sender, steps=14, slow_step=10, slow_ms=25.0)
    answer = sender.get("/steps/10")["answer"]
    assert (answer["is_slow"], answer["cause"], answer["ranks"]) == (True, "communication", [])
    words = "send of 4.0 KiB from rank 1 to rank 2: 26.0 ms, 1.0 ms in the steps around"
    assert words in answer["what"]
    assert sender.get("/steps/12")["answer"]["is_slow"] is False


def test_a_pipeline_has_microbatches_bubbles_and_arrows(sender: Sender) -> None:
    pipeline(sender)
    answer = sender.get("/steps/1")
    assert [lane["stage"] for lane in answer["lanes"]] == [0, 1, 2]
    rows = rows_of(answer)
    for rank in (0, 1):
        own = [
            row for row in rows if row["rank"] == rank and row["kind"] in ("forward", "backward")
        ]
        forward = [row for row in own if row["kind"] == "forward"]
        assert [row["microbatch"] for row in forward if row["length_us"] >= 9_000] == [0, 1, 2]
        backward = [row for row in own if row["kind"] == "backward" and row["length_us"] >= 19_000]
        assert [row["microbatch"] for row in backward][:3] == [0, 1, 2]
    found = lengths(answer)
    assert found[2, "forward"] + found[2, "backward"] == pytest.approx(90_000, abs=3_000)
    assert found[1, "bubble"] > 10_000, "it waits for the first microbatch"
    assert found[1, "waiting"] == 0
    sends = [call for call in answer["calls"] if call["source"] is not None]
    assert sorted({(call["source"], call["target"]) for call in sends}) == [
        (0, 1), (1, 0), (1, 2), (2, 1),
    ]  # fmt: skip
    assert all(call["num_recorded"] == 2 for call in sends)
    assert {part["rank"] for part in answer["path"]} == {0, 1, 2}


# --- which ranks, and what is not there --------------------------------------------------------


def check_folded(answer: Any) -> None:
    """Every rank without a lane is in a row of its host, that of the longest self time first."""
    found = answer["folded"]
    ranks = [rank for row in found for rank in parse_ranks(row["ranks"], 40)]
    assert sorted([*ranks, *(lane["rank"] for lane in answer["lanes"])]) == list(range(40))
    assert [row["most_ms"] for row in found] == sorted(
        (row["most_ms"] for row in found), reverse=True
    )
    for row in found:
        own = parse_ranks(row["ranks"], 40)
        assert {f"node-{rank // 10}" for rank in own} == {row["host"]}
        assert (row["num_ranks"], row["num_known"]) == (len(own), len(own))
        assert row["worst_rank"] in own
        assert 0 < row["least_ms"] <= row["median_ms"] <= row["most_ms"]
        assert row["blocked_ms"] > 0


def test_what_is_folded_is_not_known_where_nothing_is() -> None:
    own, blocked = np.array([5.0, np.nan, 7.0, 6.0, np.nan]), np.array([1.0, np.nan, 3.0, 2.0, 0.0])
    found = folded(["a", "b", "a", "a", ""], own, blocked, [2])
    assert [(row.host, row.ranks, row.num_known, row.worst_rank) for row in found] == [
        ("a", "0,3", 2, 3), ("b", "1", 0, None), ("", "4", 0, None),
    ]  # fmt: skip
    assert (found[0].least_ms, found[0].median_ms, found[0].most_ms) == (5.0, 5.5, 6.0)
    assert (found[0].blocked_ms, found[1].most_ms, found[1].blocked_ms) == (1.5, None, None)
    assert folded(["a"], own[:1], blocked[:1], [0]) == []


def test_many_ranks_show_the_worst_first_and_say_so(sender: Sender) -> None:
    sent(sender, Job(ranks=40, hosts=4, more={(33, "forward"): 40.0}, missing=((7, STEP),)))
    answer = sender.get(f"/steps/{STEP}", lanes=10, also=12)
    lanes = {lane["rank"]: lane for lane in answer["lanes"]}
    assert list(lanes)[:2] == [12, 33]
    assert (lanes[12]["why"], lanes[33]["why"]) == ("selected", "named above")
    assert lanes[7]["state"] == "no data"
    assert {lane["host"] for lane in answer["lanes"]} == {f"node-{n}" for n in range(4)}
    assert answer["lanes_capped"] == {"shown": 10, "total": 40}
    check_folded(answer)
    asked = sender.get(f"/steps/{STEP}", ranks="5,38-90")
    assert [lane["rank"] for lane in asked["lanes"]] == [5, 38, 39]
    assert "39 of 40 ranks" in " ".join(asked["notes"])


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/steps/999", 404, "step"),
        ("/steps/0", 422, "step"),
        (f"/steps/{STEP}?ranks=x", 422, "ranks"),
        (f"/steps/{STEP}?ranks=90", 422, "ranks"),
        (f"/steps/{STEP}/trace?to=999", 422, "to"),
        (f"/steps/{STEP}/trace?to=3", 422, "to"),
        ("/steps/999/trace", 404, "step"),
    ],
)
def test_what_is_not_there_is_said(sender: Sender, path: str, status: int, field: str) -> None:
    sent(sender, Job())
    reply = sender.client.get(f"/api/v1/runs/run{path}")
    assert reply.status_code == status
    assert reply.json()["error"]["field"] == field


def test_a_step_that_was_run_again_is_counted_once(sender: Sender) -> None:
    job = sent(sender, Job())
    later = [
        schema.Chunk(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "attempt": 1})
        for one in Job(more={(1, "forward"): 40.0}).chunks()
    ]
    registered = [
        schema.RankRegistered(
            attempt=1, rank=rank, time_ns=BEGIN_NS, world_size=4, local_rank=rank,
            local_world_size=4, node_rank=0, host="node-0", pid=rank + 9, backend="gloo",
        )
        for rank in range(4)
    ]  # fmt: skip
    sender.send(*registered)
    sender.send(chunks=later)
    answer = sender.get(f"/steps/{STEP}")
    assert answer["attempt"] == 1
    assert answer["answer"]["ranks"] == [1]
    assert len(answer["calls"]) == 1
    assert answer["calls"][0]["num_recorded"] == 4
    (left_out,) = answer["left_out"]
    assert left_out["count"] == job.ranks


def test_the_kinds_of_slices_are_those_of_the_schema(sender: Sender) -> None:
    sent(sender, Job())
    assert tuple(sender.get(f"/steps/{STEP}")["kinds"]) == SliceKind.__args__


# --- the trace ---------------------------------------------------------------------------------


def trace_of(sender: Sender, path: str) -> dict[str, Any]:
    reply = sender.client.get(f"/api/v1/runs/run{path}")
    assert reply.status_code == 200
    assert reply.headers["content-disposition"].endswith('.trace.json"')
    trace: dict[str, Any] = json.loads(reply.text)
    return trace


def check_shape(trace: dict[str, Any]) -> None:
    """Fail unless it is a Chrome trace whose slices nest and whose arrows have two ends."""
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
        else:
            assert event["ph"] == "M"
            named.add((event["pid"], event["name"]))
    for (process, _), spans in slices.items():
        assert (process, "process_name") in named
        spans.sort(key=lambda one: (one[0], -one[1]))
        for (_, end), (begin, until) in itertools.pairwise(spans):
            assert begin >= end - 0.001 or until <= end + 0.001, "one after another, or inside"
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"]
        for one in (begin, end):
            spans = slices[one["pid"], one["tid"]]
            assert any(low - 0.001 <= one["ts"] <= high + 0.001 for low, high in spans)


def test_the_trace_of_some_steps_opens_in_perfetto(sender: Sender) -> None:
    sent(sender, Job(more={(2, "backward"): 40.0}))
    trace = trace_of(sender, f"/steps/{STEP}/trace?to={STEP + 2}")
    check_shape(trace)
    events = trace["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {STEP, STEP + 1, STEP + 2}
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == 3 * 3, "from the last to the three others, in three steps"
    assert [e["pid"] - 1 for e in arrows[:3]] == [2] * 3
    waits = [e for e in events if e["ph"] == "X" and e["name"] == "waiting"]
    assert {e["args"]["last_to_arrive"] for e in waits if e["args"]["step"] == STEP} == {2}
    some = trace_of(sender, f"/steps/{STEP}/trace?ranks=1-2")
    check_shape(some)
    names = {e["args"]["name"] for e in some["traceEvents"] if e["name"] == "process_name"}
    assert names == {"critical path", "rank 1 on node-0", "rank 2 on node-0"}


def test_the_trace_of_a_pipeline_has_an_arrow_for_each_send(sender: Sender) -> None:
    pipeline(sender)
    trace = trace_of(sender, "/steps/1/trace")
    check_shape(trace)
    arrows = [e for e in trace["traceEvents"] if e["ph"] == "s"]
    assert len(arrows) == 3 * 4  # microbatches by two borders, there and back
    assert {e["name"] for e in arrows} == {"send to receive"}
