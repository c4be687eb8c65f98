"""Every count and sum that the API gives is that of the raw events, or it says what it leaves out.

A run is drawn, cut into chunks and batches at random places, and sent in any order, some batches
twice; steps are run again by later attempts and within one; collectives stay open.
"""

from __future__ import annotations

import base64
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.wire import schema, thinning
from rankscope.wire.chunk import decode_chunk, encode_chunk
from rankscope.wire.schema import STEP_WAITS_UNKNOWN
from rankscope_server.api.app import create_app
from rankscope_server.api.ranks import chunks as chunk_queries
from rankscope_server.api.ranks import thinned as thinned_steps
from rankscope_server.findings.text import percent_text
from rankscope_server.settings import Settings
from tests.server.conftest import DATABASES, Sender, TestClient, url_of
from tests.server.raw_run import (
    MS,
    Collective,
    RawRun,
    Step,
    collective_chunk,
    step_chunk,
    sums_of,
)
from tests.server.raw_sent import EXAMPLES, Asked, questions, raw_runs, send

LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR"}
# bins of percentiles, eight to a doubling
ROUNDED_MS = 6e-4  # an answer shows microseconds
BIN = 2 ** (1 / 8)


runs = itertools.count()


@pytest.fixture(scope="module", params=DATABASES)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    """A server in this process to which many runs are sent."""
    folder = str(tmp_path_factory.mktemp("data"))
    chosen = Settings(data_dir=folder, database_url=url_of(request), look_seconds=3600.0)
    with TestClient(create_app(chosen), base_url="http://127.0.0.1:8787") as client:
        yield client


@given(question=questions())
@EXAMPLES
def test_every_number_is_that_of_the_raw_events(
    server: TestClient, question: tuple[RawRun, Asked]
) -> None:
    run, asked = question
    sent = send(server, run, asked.seed)
    check_all_collectives(sent, run)
    check_collectives(sent, run, (asked.lo, asked.hi), asked.rank, asked.attempt)
    check_collectives(sent, run, (None, asked.hi), asked.rank, asked.attempt)
    check_records(sent, run, asked.limit, (asked.lo, asked.hi), asked.rank)
    check_ranks(sent, run)
    check_first_page(sent, run)
    check_step_times(sent, run, (max(asked.lo, 1), max(asked.hi, 1)), asked.width)
    check_map(sent, run)
    check_cells(sent, run)
    check_budget(sent, run)
    check_errors(sent, run)
    check_logs(sent, run)
    check_series(sent, run)
    check_samples(sent, run, asked.width)
    check_report(sent)


def check_all_collectives(sent: Sender, run: RawRun) -> None:
    answer = sent.get("/collectives")
    own = [one for one in run.collectives if one.attempt == run.attempt]
    assert answer["attempts"] == [run.attempt]
    lo, hi = run.spans[-1]
    check_rows(answer, own, run, hi - lo + 1, 0)
    others = Counter(one.attempt for one in run.collectives if one.attempt != run.attempt)
    assert answer["left_out"] == [
        {"what": f"operations of attempt {number}", "count": count}
        for number, count in sorted(others.items())
    ]


def check_collectives(
    sent: Sender,
    run: RawRun,
    between: tuple[int | None, int],
    rank: int | None,
    attempt: int | None,
) -> None:
    lo, hi = between
    asked = {"from": lo, "to": hi, "rank": rank, "attempt": attempt}
    answer = sent.get("/collectives", **{k: v for k, v in asked.items() if v is not None})
    counted, num_again = run.counted(lo, hi, rank, attempt)
    spans = run.spans if attempt is None else [run.spans[attempt]]
    first = max(min(lo for lo, _ in spans), lo or 1)
    last = min(max(hi for _, hi in spans), hi)
    assert (answer["step_lo"], answer["step_hi"]) == (first, last)
    assert answer["attempts"] == sorted({one.attempt for one in counted})
    check_rows(answer, counted, run, max(last - first + 1, 1), 1 if rank is not None else 0)
    again = "operations of steps that a later attempt ran again"
    assert answer["left_out"] == ([{"what": again, "count": num_again}] if num_again else [])


def check_rows(
    answer: dict[str, Any], counted: list[Any], run: RawRun, num_steps: int, num_ranks: int
) -> None:
    expected = sums_of(counted)
    rows = {(row["operation"], row["group"], row["size_bytes"]): row for row in answer["rows"]}
    assert rows.keys() == expected.keys()
    assert answer["count"] == len(counted)
    assert answer["capped"] is None
    for key, sums in expected.items():
        row, took = rows[key], sums["took_ns"]
        assert (row["count"], row["open"]) == (sums["count"], sums["open"])
        exposed = sums["blocked_ns"] / MS / num_steps / (num_ranks or run.ranks)
        assert row["exposed_ms_per_step"] == pytest.approx(exposed)
        assert row["max_ms"] == (took[-1] / MS if took else None)
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
            if not took:
                assert row[name] is None
                continue
            true = max(took[math.ceil(share * len(took)) - 1], 1_000) / MS
            assert min(true, took[-1] / MS) <= row[name] * 1.000001
            assert row[name] <= max(true * BIN, took[0] / MS) * 1.000001


def check_records(
    sent: Sender, run: RawRun, limit: int, between: tuple[int, int], rank: int | None
) -> None:
    lo, hi = between
    chosen = {} if rank is None else {"rank": rank}
    for asked, events in (
        (chosen, run.collectives),
        (chosen | {"from": lo, "to": hi}, [e for e in run.collectives if lo <= e.step <= hi]),
    ):
        mine = [e for e in events if rank is None or e.rank == rank]
        mine.sort(key=lambda event: -event.arrived_ns)
        answer = sent.get("/collectives/records", limit=limit, **asked)
        assert [row["arrived_ms"] for row in answer["rows"]] == [
            event.arrived_ns / 1e6 for event in mine[:limit]
        ]
        for row, event in zip(answer["rows"], mine, strict=False):
            assert (row["attempt"], row["rank"], row["step"]) == event[:3]
            assert (row["operation"], row["group"], row["size_bytes"]) == event[3:6]
            ended = None if event.duration_ns < 0 else event.duration_ns / 1e6
            assert row["duration_ms"] == ended
        shown = len(answer["rows"])
        is_cut = len(mine) > shown
        assert answer["capped"] == ({"shown": shown, "total": len(mine)} if is_cut else None)
        assert answer["left_out"] == []


def check_ranks(sent: Sender, run: RawRun) -> None:
    for attempt in range(len(run.spans)):
        rows = sent.get("/ranks", attempt=attempt)["ranks"]
        assert [row["rank"] for row in rows] == list(range(run.ranks))
        for row in rows:
            seen = [
                event.step
                for events in (run.collectives, run.steps, run.logs, run.errors, run.metrics)
                for event in events
                if (event.attempt, event.rank) == (attempt, row["rank"])
            ]
            assert row["step"] == max(seen, default=0)
    own = [e for e in run.collectives if (e.attempt, e.rank) == (run.attempt, 0)]
    own.sort(key=lambda event: -event.arrived_ns)
    shown = [row["arrived_ms"] for row in sent.get("/ranks/0")["collectives"]]
    assert shown == [event.arrived_ns / 1e6 for event in own[:50]]


def check_first_page(sent: Sender, run: RawRun) -> None:
    page = sent.get("")
    assert page["run"]["step"] == run.last_step
    assert page["run"]["attempt"] == run.attempt
    assert page["run"]["world_size"] == run.ranks
    coverage, counts = page["coverage"], page["counts"]
    assert (coverage["expected"], coverage["registered"]) == (run.ranks, run.ranks)
    assert coverage["lost"] == sum(loss.count for loss in run.losses)
    assert sum(row["count"] for row in coverage["losses"]) == coverage["lost"]
    assert coverage["missing_batches"] == coverage["refused"] == 0
    assert counts["errors"] == len(run.errors)
    assert counts["log_lines"] == len(run.logs) + len(run.errors)  # an error is a line, too
    # torch differs from two ranks on; that machines have other names is no difference
    assert counts["environment_differences"] == (1 if run.ranks > 1 else 0)
    spans = [(row["step_lo"], row["step_hi"]) for row in page["attempts"]]
    assert spans == run.spans
    typical = typical_ms(run)
    numbers = {row["key"]: row for row in page["numbers"]}
    assert numbers["step_time"]["value"] == pytest.approx(typical, abs=ROUNDED_MS)
    assert ("loss" in numbers) is bool(run.metrics)
    if run.metrics:
        newest = max(run.metrics, key=lambda one: (one.step, one.attempt, -one.rank))
        assert numbers["loss"]["value"] == finite(newest.values["loss"])


def typical_ms(run: RawRun) -> float:
    """Return the median over the steps behind the warm-up of the slowest rank's time."""
    first, last = min(lo for lo, _ in run.spans), run.last_step
    # begins where the newest attempt that has steps began
    first = run.spans[-1][0]
    begin = first + min(5, (last - first + 1) // 2)
    slowest = [
        time for step in range(max(begin, last - 49), last + 1) if (time := slowest_ms(run, step))
    ]
    return statistics.median(slowest)


def slowest_ms(run: RawRun, step: int) -> float | None:
    found = [one for rank in range(run.ranks) if (one := run.newest_of(rank, step))]
    return max((one.duration_ns / MS for one in found), default=None)


def check_step_times(sent: Sender, run: RawRun, between: tuple[int, int], width: int) -> None:
    lo, hi = between
    answer = sent.get("/throughput", **{"from": lo, "to": hi, "width": width})
    last = min(hi, run.last_step)
    size = answer["bin"]
    assert size == 1 or -(-(last - lo + 1) // (size // 2)) > width
    assert answer["step"] == list(range(lo, last + 1, size))
    for place, first in enumerate(answer["step"]):
        steps = range(first, min(first + size, last + 1))
        times = [time for step in steps if (time := slowest_ms(run, step)) is not None]
        for name, function in (("min", min), ("median", statistics.median), ("max", max)):
            value = answer[f"step_{name}_ms"][place]
            assert value == (pytest.approx(function(times), abs=ROUNDED_MS) if times else None)


def check_map(sent: Sender, run: RawRun) -> None:
    answer = sent.get("/map", metric="step", width=1_000)
    assert (answer["bin"], answer["rank_bin"]) == (1, 1)
    shape = (run.ranks, answer["columns"])
    cells = np.frombuffer(base64.b64decode(answer["cells"]), np.uint8).reshape(shape)
    missing = np.frombuffer(base64.b64decode(answer["missing"]), np.uint8).reshape(shape)
    high = answer["value_hi"]
    for rank, step in itertools.product(range(run.ranks), range(1, run.last_step + 1)):
        one = run.newest_of(rank, step)
        at = (rank, step - answer["step_lo"])
        assert missing[at] == (255 if one is None else 0)
        if one is None:
            assert cells[at] == 255
        else:
            shown = cells[at] / 254 * high
            assert shown == pytest.approx(min(one.duration_ns / MS, high), abs=high / 250)


def check_cells(sent: Sender, run: RawRun) -> None:
    for step in {span[0] for span in run.spans} | {run.last_step}:
        for rank in range(run.ranks):
            answer, one = sent.get("/cell", rank=rank, step=step), run.newest_of(rank, step)
            assert answer["step_ms"] == approximate(one and one.duration_ns)
            assert answer["blocked_ms"] == approximate(one and one.blocked_ns)
            assert answer["time_ms"] == (one and one.started_ns / 1e6)
            own = one and one.duration_ns - one.blocked_ns
            assert answer["own_work_ms"] == approximate(own)


def approximate(ns: int | None) -> Any:
    return None if ns is None else pytest.approx(ns / MS, rel=1e-5, abs=1e-5)


def check_budget(sent: Sender, run: RawRun) -> None:
    answer = sent.get("/budget")
    steps = range(answer["step_lo"], answer["step_hi"] + 1)
    means = []
    for rank in range(run.ranks):
        mine = [one for step in steps if (one := run.newest_of(rank, step))]
        if mine:
            means.append(statistics.fmean(one.duration_ns for one in mine) / MS)
    for row in answer["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["total_ms"], abs=0.01)
        assert any(row["total_ms"] == pytest.approx(mean, abs=0.01) for mean in means)


def check_errors(sent: Sender, run: RawRun) -> None:
    groups = sent.get("/errors")["groups"]
    by_type: dict[str, list[Any]] = defaultdict(list)
    for error in sorted(run.errors, key=lambda one: one.time_ns):
        by_type[error.type].append(error)
    assert [group["type"] for group in groups] == list(by_type)
    for group in groups:
        mine = by_type[group["type"]]
        assert group["count"] == len(mine)
        assert group["ranks"] == sorted({error.rank for error in mine})
        assert group["first_ms"] == mine[0].time_ns / 1e6
        assert group["last_ms"] == mine[-1].time_ns / 1e6


def check_logs(sent: Sender, run: RawRun) -> None:
    answer = sent.get("/logs", limit=1)
    levels = Counter(line.level for line in run.logs)
    levels[40] += len(run.errors)
    expected = {LEVELS[level]: count for level, count in levels.items() if count}
    assert answer["total"] == sum(expected.values())
    assert dict(answer["facets"]["level"]) == expected
    ranks = Counter(one.rank for one in (*run.logs, *run.errors))
    assert {rank: count for rank, count in answer["facets"]["rank"]} == dict(ranks)
    if answer["histogram"] is not None:
        drawn = {name: sum(counts) for name, counts in answer["histogram"]["levels"].items()}
        assert drawn == expected
    for level, name in LEVELS.items():
        assert sent.get("/logs", level=name, limit=1)["total"] == levels[level]


def check_series(sent: Sender, run: RawRun) -> None:
    points: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)
    for one in run.metrics:
        before = points[one.rank].get(one.step, (-1, 0.0))
        points[one.rank][one.step] = max(
            before, (one.attempt, one.values["loss"]), key=lambda p: p[0]
        )
    series = sent.get("/metrics", width=1_000)["series"]
    assert [one["rank"] for one in series] == sorted(points)
    for one in series:
        mine = {step: finite(value) for step, (_, value) in sorted(points[one["rank"]].items())}
        assert dict(zip(one["step"], one["value"], strict=True)) == mine
        assert one["min"] == one["max"] == one["value"]
    if run.metrics:
        (merged,) = sent.get("/metrics", width=1_000, merged=True)["series"]
        for step, value in zip(merged["step"], merged["value"], strict=True):
            of_step = [one for one in run.metrics if one.step == step]
            newest = max(one.attempt for one in of_step)
            values = [one.values["loss"] for one in of_step if one.attempt == newest]
            known = [value for value in values if not math.isnan(value)]
            assert value == (pytest.approx(statistics.fmean(known)) if known else None)


def finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def check_samples(sent: Sender, run: RawRun, width: int) -> None:
    names = "memory_used_bytes,cpu_user_us_total"
    answer = sent.get("/samples", kind="host", names=names, width=width)
    assert answer["capped"] is None
    for series in answer["series"]:
        mine = sorted(one for one in run.samples if one.host == series["host"])
        lows = [value for value in series["min"] if value is not None]
        highs = [value for value in series["max"] if value is not None]
        if series["name"] == "memory_used_bytes":
            values = [float(one.memory_bytes) for one in mine]
        else:
            values = [
                (b.cpu_us - a.cpu_us) / 1e6
                for a, b in itertools.pairwise(mine)
                if b.cpu_us >= a.cpu_us
            ]
        assert min(lows, default=None) == (pytest.approx(min(values)) if values else None)
        assert max(highs, default=None) == (pytest.approx(max(values)) if values else None)
    machines = {one["host"]: one for one in sent.get("/machines")["machines"]}
    for host in {one.host for one in run.samples}:
        times = [one.time_ns for one in run.samples if one.host == host]
        assert machines[host]["first_ms"] == min(times) / 1e6
        assert machines[host]["last_ms"] == max(times) / 1e6


def check_report(sent: Sender) -> None:
    report, page = sent.get("/report"), sent.get("")
    assert report["coverage"]["lost"] == page["coverage"]["lost"]
    assert report["attempts"] == page["attempts"]
    assert sum(group["count"] for group in report["errors"]) == page["counts"]["errors"]
    cut = report["lines_capped"]
    lines = sum(line["count"] for line in report["lines"])
    assert (cut["total"] if cut else lines) == page["counts"]["log_lines"]


@given(
    run=raw_runs(),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 60)),
    seed=st.integers(0, 1 << 20),
)
@EXAMPLES
def test_a_range_that_is_too_much_says_which_steps_are_counted(
    server: TestClient, run: RawRun, limits: tuple[int, int], seed: int
) -> None:
    sent = send(server, run, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk_queries, "MAX_CHUNKS", limits[0])
        patched.setattr(chunk_queries, "MAX_EVENTS", limits[1])
        answer = sent.get("/collectives", **{"from": 1, "to": run.last_step})
    cut = [one for one in answer["left_out"] if one["count"] is None]
    counted, _ = run.counted(1, run.last_step, None, None)
    if not cut:
        assert answer["count"] == len(counted)
    elif cut[0]["what"].startswith("steps before"):
        lo = answer["step_lo"]
        assert cut[0]["what"].startswith(f"steps before {lo:,}")
        whole, _ = run.counted(lo, run.last_step, None, None)
        check_rows(answer, whole, run, run.last_step - lo + 1, 0)
    else:
        assert cut[0]["what"].startswith("some ranks")
        assert answer["count"] <= len(counted)


@given(
    steps=st.integers(1, 400), level=st.integers(2, 4), begin=st.integers(1, 400),
    between=st.tuples(st.integers(1, 420), st.integers(1, 420)), most=st.sampled_from((2, 4, 512)),
)  # fmt: skip
@EXAMPLES
def test_what_thinned_steps_leave_out_is_counted(
    server: TestClient,
    steps: int,
    level: int,
    begin: int,
    between: tuple[int, int],
    most: int,
) -> None:
    """Ranks send all steps, and single collectives of whole ones alone."""

    def is_thinned(step: int) -> bool:
        return step >= begin and thinning.is_thinned(step, level)

    sent = Sender(server, f"thinned-{next(runs)}")
    for rank in (0, 1):
        own = [Step(0, rank, n, 10**18 + n * MS, (1, 1, MS, 1, 1), 0) for n in range(1, steps + 1)]
        chunk = step_chunk((0, rank), own)
        columns = decode_chunk(chunk.data)
        flags = [schema.STEP_THINNED * is_thinned(one.step) for one in own]
        columns |= {"flags": np.array(flags), "num_collectives": np.full(steps, 3)}
        whole = [
            Collective(0, rank, one.step, "all_reduce", "world", 8, one.started_ns, MS, MS, 3)
            for one in own for _ in range(3) if not is_thinned(one.step)
        ]  # fmt: skip
        sent.send(chunks=[msgspec.structs.replace(chunk, data=encode_chunk(columns)),
                          *([collective_chunk((0, rank), whole)] if whole else [])])  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(thinned_steps, "MAX_TILES", most)
        lo, hi = sorted(between)
        for asked, first, last in (({}, 1, steps), ({"from": lo, "to": hi}, lo, min(hi, steps))):
            numbers = range(first, last + 1)
            left_out = sum(is_thinned(n) for n in numbers)
            answer = sent.get("/collectives", **asked)
            assert answer["count"] == 2 * 3 * (len(numbers) - left_out)
            is_all = most == 512 or last // 64 - first // 64 < most // 2
            if is_all and left_out:
                (said,) = answer["left_out"]
                assert said["count"] == 2 * 3 * left_out
                share = percent_text(left_out / len(numbers))
                assert said["what"] == f"operations of thinned steps ({share} of the steps)"
                for row in answer["rows"]:  # of two ranks, in each step that was recorded whole
                    assert row["exposed_ms_per_step"] == pytest.approx(6)
            elif is_all:
                assert answer["left_out"] == []
            else:
                assert all(said["count"] is None for said in answer["left_out"])
            records = sent.get("/collectives/records", **asked)
            expected = bool(asked) and left_out > 0
            assert is_all <= (bool(records["left_out"]) == expected)


def test_batches_that_did_not_come_are_missing_whichever_came_first(sender: Sender) -> None:
    bodies = [sender.body() for _ in range(9)]

    def missing(*places: int) -> int:
        for place in places:
            assert sender.client.post("/api/v1/ingest", content=bodies[place]).status_code == 200
        count: int = sender.get("")["coverage"]["missing_batches"]
        return count

    assert missing(4) == 0
    assert missing(0) == 3
    assert missing(8) == 6
    assert missing(8, 1, 2, 3) == 3
    assert missing(5, 6, 7) == 0


def test_of_a_step_that_was_run_twice_no_metric_is_mixed(sender: Sender) -> None:
    """A newest attempt that does not know its waits must not get those of an older one."""

    known = step_chunk((0, 0), [Step(0, 0, 7, 10**18, (1, 1, 40 * MS, 1, 1), 30 * MS)])
    again = step_chunk((1, 0), [Step(1, 0, 7, 10**18 + 10**9, (1, 1, 20 * MS, 1, 1), 0)])
    columns = decode_chunk(again.data)
    columns["flags"] = np.array([STEP_WAITS_UNKNOWN])
    again = msgspec.structs.replace(again, data=encode_chunk(columns))
    for chunk in (again, known):
        sender.send(chunks=[chunk])
    cell = sender.get("/cell", rank=0, step=7)
    assert cell["step_ms"] == pytest.approx(20, abs=0.01)
    assert cell["blocked_ms"] is None
    assert cell["own_work_ms"] is None


def test_a_range_counts_the_chunks_of_all_ranks_however_many(sender: Sender) -> None:
    events = [
        Collective(0, rank, step, "all_reduce", "world", 8, 10**18 + rank * MS, MS, 0, 3)
        for rank, step in itertools.product(range(1_024), (1, 2))
    ]
    chunks = [collective_chunk((0, rank), events[2 * rank : 2 * rank + 2]) for rank in range(1_024)]
    sender.send(chunks=chunks)
    answer = sender.get("/collectives", **{"from": 2, "to": 2})
    assert (answer["count"], answer["left_out"]) == (1_024, [])
    assert sender.get("/collectives", **{"from": 1, "to": 2})["count"] == 2_048
    records = sender.get("/collectives/records", limit=7)
    assert records["capped"] == {"shown": 7, "total": 2_048}


def test_every_list_that_was_cut_says_of_how_many(sender: Sender) -> None:
    def base(place: int, rank: int = 0) -> dict[str, int]:
        return {"attempt": 0, "rank": rank, "time_ns": 10**18 + place}

    sender.send(
        *(schema.Loss(**base(n), source="steps", reason=f"why {n}", count=2) for n in range(205)),
        *(schema.ErrorRaised(**base(n), type=f"E{chr(65 + n // 26)}{chr(65 + n % 26)}", message="x",
                             where="main", step=1) for n in range(210) for _ in range(2)),
        *(schema.Stacks(**base(n), reason="asked", text="f()") for n in range(12)),
        schema.Metrics(**base(0), step=1, values={f"m{n:03}": 1.0 for n in range(300)}),
        *(schema.Event(**base(n), name="checkpoint", step=n + 1) for n in range(510)),
    )  # fmt: skip
    coverage = sender.get("")["coverage"]
    assert (coverage["lost"], coverage["losses_capped"]) == (410, {"shown": 200, "total": 205})
    assert sender.get("/agent")["losses_capped"] == {"shown": 200, "total": 205}
    assert "5 more reasons for which less was lost" in sender.get("/report")["not_measured"]
    errors = sender.get("/errors")
    assert errors["capped"] == {"shown": 200, "total": 210}
    assert {group["count"] for group in errors["groups"]} == {2}
    assert sender.get("/ranks/0")["stacks_capped"] == {"shown": 10, "total": 12}
    assert sender.get("/metrics")["capped"] == {"shown": 256, "total": 300}
    page = sender.get("/map", metric="step")
    assert page["marks_capped"] == {"shown": 501, "total": 511}  # and the first step
    assert page["marks"][-1]["step"] == 510
