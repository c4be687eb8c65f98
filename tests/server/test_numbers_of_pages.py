"""What pages derive of the raw events (communication, resources, comparisons, the mesh, timelines,
costs, the worst cell) against a plain count of the same events, over random runs and questions.

The oracle here is written from what an answer says that it is, and uses none of our code.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given

from rankscope.wire import schema
from tests.server import raw_run
from tests.server.conftest import DATABASES, Sender, TestClient, serving, url_of
from tests.server.raw_run import MS, Collective, RawRun, Step, make_run
from tests.server.raw_sent import EXAMPLES, Asked, questions, send

ROUNDED_MS = 6e-4  # an answer shows microseconds
FOUR_DIGITS = 6e-4  # relative: what numbers of the mesh are rounded to


@pytest.fixture(scope="module", params=DATABASES)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("pages"), url_of(request)) as client:
        yield client


@given(question=questions())
@EXAMPLES
def test_every_number_of_a_page_is_that_of_the_raw_events(
    server: TestClient, question: tuple[RawRun, Asked]
) -> None:
    run, asked = question
    sent = send(server, run, asked.seed)
    check_communication(sent, run, asked)
    check_worst(sent, run, asked)
    check_beside_peers(sent, run, asked)
    check_steps(sent, run, asked)
    check_timeline(sent, run, asked)
    check_resources(sent, run)
    check_mesh(sent, run)
    check_comparison(sent, run)
    check_lists(sent, run)


def newest_in(run: RawRun, attempt: int, rank: int, step: int) -> Step | None:
    """Return the step of a rank in an attempt, the last one where it was run twice."""
    found = [one for one in run.steps if one[:3] == (attempt, rank, step)]
    return max(found, key=lambda one: one.started_ns, default=None)


def slowest_in(run: RawRun, attempt: int) -> dict[int, float]:
    """Return the time of the slowest rank in each step of an attempt, in ms."""
    lo, hi = run.spans[attempt]
    found: dict[int, float] = {}
    for step in range(lo, hi + 1):
        times = [
            one.duration_ns / MS
            for rank in range(run.ranks)
            if (one := newest_in(run, attempt, rank, step))
        ]
        if times:
            found[step] = max(times)
    return found


# --- communication -------------------------------------------------------------------------------


def check_communication(sent: Sender, run: RawRun, asked: Asked) -> None:
    attempt = run.attempt if asked.attempt is None else asked.attempt
    begin, end = run.spans[attempt]
    lo, hi = max(asked.lo, begin), min(asked.hi, end)
    answer = sent.get("/communication", **{"from": asked.lo, "to": asked.hi, "attempt": attempt})
    inside = [one for one in run.collectives if one.attempt == attempt and lo <= one.step <= hi]
    assert answer["count"] == len(inside)
    assert (answer["capped"], answer["left_out"]) == (None, [])
    if lo <= hi:
        assert (answer["step_lo"], answer["step_hi"]) == (lo, hi)
    of_row: dict[tuple[str, str, int], list[Collective]] = defaultdict(list)
    for one in inside:
        of_row[one.group, one.operation, one.size.bit_length() - 1].append(one)
    rows = {(row["group"], row["operation"], row["size_lo"]): row for row in answer["rows"]}
    assert rows.keys() == {(group, name, 1 << octave) for group, name, octave in of_row}
    for (group, name, octave), calls in of_row.items():
        row = rows[group, name, 1 << octave]
        took = sorted(one.duration_ns / MS for one in calls if one.duration_ns >= 0)
        assert (row["count"], row["open"]) == (
            len(calls), sum(one.state in (schema.ISSUED, schema.RETURNED) for one in calls),
        )  # fmt: skip
        sizes = [one.size for one in calls]
        assert (row["size_least"], row["size_largest"]) == (min(sizes), max(sizes))
        for key, percent in (("p50_ms", 50), ("p95_ms", 95), ("p99_ms", 99)):
            assert row[key] == near(percentile(took, percent))
        blocked = sum(max(one.blocked_ns, 0) for one in calls) / MS
        if row["exposed_ms_per_step"] is not None:
            per_rank = (hi - lo + 1) * run.ranks
            assert row["exposed_ms_per_step"] == pytest.approx(blocked / per_rank, abs=ROUNDED_MS)
        assert row["num_ranks"] == (run.ranks if group == "world" else None)


def percentile(ordered: list[float], percent: int) -> float | None:
    """Return a percentile between the two values beside it."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def near(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=1e-6, abs=ROUNDED_MS)


# --- steps ---------------------------------------------------------------------------------------


def check_worst(sent: Sender, run: RawRun, asked: Asked) -> None:
    lo, hi = max(asked.lo, 1), max(asked.hi, 1)
    ranks = range(run.ranks) if asked.rank is None else [asked.rank]
    cells = [
        one for rank in ranks for step in range(lo, min(hi, run.last_step) + 1)
        if (one := run.newest_of(rank, step))
    ]  # fmt: skip
    text = ",".join(map(str, ranks))
    path = f"/api/v1/runs/{sent.run_id}/cell/worst"
    params: dict[str, Any] = {"metric": "step", "ranks": text, "from": lo, "to": hi}
    reply = sent.client.get(path, params=params)
    if not cells:
        assert reply.status_code == 404
        return
    worst = max(cells, key=lambda one: one.duration_ns)
    answer = reply.json()
    assert answer["step_ms"] == near(worst.duration_ns / MS)
    assert answer["blocked_ms"] == near(worst.blocked_ns / MS)
    others = [one.duration_ns for one in cells if one is not worst]
    if worst.duration_ns - max(others, default=0) > 1_000:  # beyond the store's precision
        assert (answer["rank"], answer["step"]) == (worst.rank, worst.step)


def check_beside_peers(sent: Sender, run: RawRun, asked: Asked) -> None:
    rank = asked.rank or 0
    answer = sent.get(
        f"/ranks/{rank}/steps",
        **{"metric": "step", "from": max(asked.lo, 1), "to": max(asked.hi, 1), "width": 1_000},
    )
    assert (answer["bin"], answer["num_peers"]) == (1, run.ranks - 1)
    last = min(max(asked.hi, 1), run.last_step)
    assert answer["step"] == list(range(max(asked.lo, 1), last + 1))
    for place, step in enumerate(answer["step"]):
        own = run.newest_of(rank, step)
        value = None if own is None else own.duration_ns / MS
        assert answer["value_ms"][place] == near(value)
        assert answer["worst_ms"][place] == near(value)
        peers = [
            one.duration_ns / MS
            for other in range(run.ranks)
            if other != rank and (one := run.newest_of(other, step))
        ]
        for name, function in (
            ("peers_lo_ms", min), ("peers_median_ms", statistics.median), ("peers_hi_ms", max),
        ):  # fmt: skip
            assert answer[name][place] == near(function(peers) if peers else None)


def check_steps(sent: Sender, run: RawRun, asked: Asked) -> None:
    lo, hi = max(asked.lo, 1), min(max(asked.hi, 1), run.last_step)
    answer = sent.get("/steps", **{"from": lo, "to": max(asked.hi, 1)})
    assert (answer["num_expected"], answer["next_step"]) == (run.ranks, None)
    rows = {row["step"]: row for row in answer["steps"]}
    for step in range(lo, hi + 1):
        ranks = [found for rank in range(run.ranks) if (found := run.newest_of(rank, step))]
        if not ranks:
            assert step not in rows
            continue
        row = rows.pop(step)
        assert row["num_ranks"] == len(ranks)
        assert row["step_ms"] == near(max(one.duration_ns for one in ranks) / MS)
        assert row["time_ms"] == pytest.approx(min(one.started_ns for one in ranks) / 1e6)
        if step > lo:
            continue  # a cell is a request for each rank
        cells = [sent.get("/cell", rank=one.rank, step=step)["ratio"] for one in ranks]
        largest = max((ratio for ratio in cells if ratio is not None), default=None)
        assert row["slowest_ratio"] == largest
        if largest is None:
            assert row["slowest_rank"] is None
        else:
            assert (row["slowest_rank"], largest) in zip(
                (o.rank for o in ranks), cells, strict=True
            )
    assert not rows


def check_timeline(sent: Sender, run: RawRun, asked: Asked) -> None:
    step = min(max(asked.hi, run.spans[0][0]), run.last_step)
    answer = sent.get(f"/steps/{step}", ranks=f"0-{run.ranks - 1}", lanes=8)
    newest = max((one.attempt for one in run.steps if one.step == step), default=run.attempt)
    assert answer["attempt"] == newest
    assert [lane["rank"] for lane in answer["lanes"]] == list(range(run.ranks))
    for lane in answer["lanes"]:
        one = newest_in(run, newest, lane["rank"], step)
        if one is None:
            assert lane["begin_us"] is None
            continue
        took_us = lane["end_us"] - lane["begin_us"]
        assert took_us == pytest.approx(one.duration_ns / 1_000, abs=2)
        assert lane["data_ms"] == near(one.phases_ns[0] / MS)
    slowest = {row["step"]: row["step_ms"] for row in answer["slowest"]}
    for at, step_ms in slowest.items():
        times = [
            found.duration_ns / MS for rank in range(run.ranks)
            if (found := run.newest_of(rank, at))
        ]  # fmt: skip
        assert step_ms == near(max(times))


# --- over all ranks ------------------------------------------------------------------------------


def check_resources(sent: Sender, run: RawRun) -> None:
    times = [one.time_ns for one in run.samples] + [one.time_ns for one in run.metrics]
    answer = sent.get(
        "/resources", from_ms=min(times) // 10**6 - 1, to_ms=max(times) // 10**6 + 1, width=50
    )
    charts = {chart["key"]: chart for chart in answer["charts"]}
    used = [one.memory_bytes for one in run.samples]
    memory = charts["node_memory"]
    assert memory["num"] == len({one.host for one in run.samples})
    assert least(memory["low"]) == pytest.approx(min(used), rel=1e-5)
    assert largest(memory["high"]) == pytest.approx(max(used), rel=1e-5)
    # of all attempts: what is asked for is a time
    finite = [one for one in run.metrics if one.values["loss"] == one.values["loss"]]
    assert ("loss" in charts) is bool(finite)
    if finite:
        loss = charts["loss"]
        values = [one.values["loss"] for one in finite]
        assert loss["num"] == len({one.rank for one in finite})
        assert least(loss["low"]) == pytest.approx(min(values), rel=1e-3)
        assert largest(loss["high"]) == pytest.approx(max(values), rel=1e-3)
    assert answer["left_out"] == []


def least(values: list[float | None]) -> float:
    return min(value for value in values if value is not None)


def largest(values: list[float | None]) -> float:
    return max(value for value in values if value is not None)


def check_mesh(sent: Sender, run: RawRun) -> None:
    answer = sent.get("/parallelism")
    assert (answer["attempt"], answer["world_size"]) == (run.attempt, run.ranks)
    steps = range(answer["step_lo"], answer["step_hi"] + 1)
    shown = {value["key"]: value["values"] for value in answer["mesh"]["values"]}
    for rank in range(run.ranks):
        mine = [one for step in steps if (one := newest_in(run, run.attempt, rank, step))]
        if not mine:
            assert shown["step_ms"][rank] is None
            continue
        times = [one.duration_ns / MS for one in mine]
        own = [(one.duration_ns - one.blocked_ns) / MS for one in mine]
        blocked = sum(one.blocked_ns for one in mine) / MS
        assert shown["step_ms"][rank] == rounded(statistics.median(times))
        assert shown["own_ms"][rank] == rounded(statistics.median(own))
        assert shown["blocked_ratio"][rank] == rounded(blocked / sum(times))
        if run.ranks == 1:  # no rank to wait for
            continue
        parts = shown["waiting_ratio"][rank] + shown["communication_ratio"][rank]
        assert parts == pytest.approx(shown["blocked_ratio"][rank], rel=2e-3, abs=1e-3)
    num_calls = Counter(one.group for one in run.collectives if one.attempt == run.attempt)
    families = answer["families"]
    assert sum(family["num_calls"] for family in families) == (
        num_calls["world"] if families else 0
    )
    assert sum(family["num_groups"] for family in families) in (0, 1)


def rounded(value: float) -> Any:
    return pytest.approx(value, rel=FOUR_DIGITS, abs=1e-5)


def check_comparison(sent: Sender, run: RawRun) -> None:
    old, new = 0, run.attempt
    (before_lo, before_hi), (lo, hi) = run.spans[old], run.spans[new]
    answer = sent.get(
        "/compare",
        **{
            "before": sent.run_id, "before_attempt": old, "before_from": before_lo,
            "before_to": before_hi, "attempt": new, "from": lo, "to": hi,
        },
    )  # fmt: skip
    step, times = answer["step"], answer["times"]
    for side, attempt in (("before", old), ("after", new)):
        slowest = slowest_in(run, attempt)
        assert answer[side]["num_steps"] == len(slowest)
        assert (answer[side]["step_lo"], answer[side]["step_hi"]) == run.spans[attempt]
        if not slowest:
            continue
        assert step[f"{side}_median_ms"] == near(statistics.median(slowest.values()))
        if times is not None:
            assert sum(times[side]) + times[f"{side}_beyond"] == len(slowest)
    assert answer["left_out"] == []


# --- lists and sums ------------------------------------------------------------------------------


def check_lists(sent: Sender, run: RawRun) -> None:
    answer = sent.client.get("/api/v1/runs", params={"q": sent.run_id}).json()
    (row,) = [one for one in answer["runs"] if one["run_id"] == sent.run_id]
    assert (row["step"], row["world_size"]) == (run.last_step, run.ranks)
    found = sent.client.get("/api/v1/search", params={"q": f"run:{sent.run_id}"}).json()
    num_lines = len(run.logs) + len(run.errors)
    assert (found["total"], found["is_at_least"]) == (num_lines, False)
    assert found["facets"]["run"] == ([[sent.run_id, num_lines]] if num_lines else [])
    ranks = Counter(line.rank for line in itertools.chain(run.logs, run.errors))
    assert dict(map(tuple, found["facets"]["rank"])) == ranks
    if found["histogram"]:
        counted = sum(sum(part) for part in found["histogram"]["levels"].values())
        assert counted == num_lines


@given(question=questions())
@EXAMPLES
def test_what_a_run_cost_is_the_time_of_its_steps(
    server: TestClient, question: tuple[RawRun, Asked]
) -> None:
    run, asked = question
    put_one_after_the_other(run)
    sent = send(server, run, asked.seed)
    app: Any = server.app
    app.state.service.analysis.look_now()
    answer = sent.get("/cost")
    assert (answer["num_attempts"], answer["num_ranks"]) == (len(run.spans), run.ranks)
    parts = {part["name"]: part for part in answer["parts"]}
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    total = sum(part["rank_hours"] for part in parts.values())
    assert total == pytest.approx(answer["rank_hours"])
    lost = [
        one for one in run.steps
        if any(first <= one.step for first, _ in run.spans[one.attempt + 1 :])
    ]  # fmt: skip
    assert answer["lost_steps"] == len({(one.attempt, one.step) for one in lost})
    again_hours = sum(one.duration_ns for one in lost) / 3.6e12
    shown_hours = parts.get("lost work", {"rank_hours": 0.0})["rank_hours"]
    assert shown_hours == pytest.approx(again_hours, rel=1e-3)


def put_one_after_the_other(run: RawRun) -> None:
    """Let each rank make each step once, one at a time, and attempts begin behind each other."""
    run.steps[:] = [one for one in run.steps if newest_in(run, *one[:3]) is one]
    begin_ns = max(one.time_ns for one in run.first_records)
    for attempt in range(len(run.spans)):
        ends = dict.fromkeys(range(run.ranks), begin_ns)
        for at, one in enumerate(run.steps):
            if one.attempt == attempt:
                run.steps[at] = one._replace(started_ns=ends[one.rank])
                ends[one.rank] += one.duration_ns
        begin_ns = max(ends.values()) + 10**9
    for events in (run.collectives, run.samples, run.logs, run.errors, run.metrics):
        events.clear()


def test_the_weeks_of_the_fleet_add_up_what_runs_cost(
    server: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = "/api/v1/fleet"
    before = {week["begin_ms"]: week for week in server.get(fleet).json()["weeks"]}
    now_ns = time.time_ns()
    expected: dict[float, list[float]] = defaultdict(list)
    for seed, age_days in enumerate((0, 1, 6, 8, 15, 20, 20)):
        begin_ns = now_ns - age_days * 86_400 * 10**9 - 3_600 * 10**9
        monkeypatch.setattr(raw_run, "BEGIN_NS", begin_ns)
        run = make_run(seed, 1 + seed % 3, [(1, 5 + seed), (4, 9)], 1, 0)
        put_one_after_the_other(run)
        sent = send(server, run, seed)
        app: Any = server.app
        app.state.service.analysis.look_now()
        begin = datetime.fromtimestamp(begin_ns / 1e9, UTC).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        monday = begin - timedelta(days=begin.weekday())
        expected[monday.timestamp() * 1e3].append(sent.get("/cost")["rank_hours"])
    answer = server.get(fleet).json()
    assert answer["weeks_capped"] is None
    weeks = {week["begin_ms"]: week for week in answer["weeks"]}
    for begin_ms, hours in expected.items():
        week, old = weeks[begin_ms], before.get(begin_ms, {"num_runs": 0, "rank_hours": 0.0})
        assert (week["num_runs"] - old["num_runs"], week["num_unknown"]) == (len(hours), 0)
        assert week["rank_hours"] - old["rank_hours"] == pytest.approx(sum(hours))
        parts = [week[f"{part}_rank_hours"] for part in ("kept", "lost", "other", "unknown")]
        assert sum(parts) == pytest.approx(week["rank_hours"])
