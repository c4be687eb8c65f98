"""Results of real ranks: what is kept of a run, which record counts, and what the tables count."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.score import real
from tests.score.real import EVERYBODY, CostPair, RealRun


def finding(kind: str, *ranks: int, severity: str = "critical") -> dict[str, Any]:
    return {
        "kind": kind, "severity": severity, "ranks": list(ranks), "what": f"{kind} {ranks}",
        "cost_throughput_ratio": 0.123456789, "state": "open", "explained_by": None,
    }  # fmt: skip


def run(fault: str, seed: int, *found: dict[str, Any], fired: bool = True, **other: Any) -> RealRun:
    one = RealRun(fault, "ddp", seed, 2, 4, fault, found=list(found), **other)
    one.fired = {"start_step": 5, "size": "1", "pid": 12} if fired else None
    one.judgement = real.judge(one)
    return one


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


RUNS = [
    run("hang", 1, finding("hang", 2), named_after_seconds=4.0),
    run("hang", 2, finding("hang", 2), finding("crash", severity="info"), named_after_seconds=6.0),
    run("hang", 3, finding("hang", 2), finding("slow_compute", 1)),
    run("hang", 4, finding("crash", 2)),
    run("hang", 5, finding("hang", 2, severity="info")),
    run("hang", 6, fired=False),
]


def test_what_a_run_is_judged() -> None:
    words = [one.judgement for one in RUNS]
    assert words[:2] == ["right", "right"]
    assert words[2] == "accuses healthy ranks [1]"
    assert words[3] == "other kind: crash [2]"
    assert words[4:] == ["said nothing", "the fault did not fire"]
    advice = run("few_microbatches", 1, finding("few_microbatches", severity="info"))
    advice.rank = EVERYBODY
    assert real.judge(advice) == "right"
    assert real.judge(run("none", 1, finding("drift", 1, severity="info"))) == "right"
    assert real.judge(run("none", 1, finding("drift", 1))) == "false alarm: drift drift (1,)"


def test_a_fault_is_named_when_a_finding_above_info_names_its_rank_and_not_before() -> None:
    slow = RealRun("slow_compute", "ddp", 1, 2, 4, "slow_compute")
    first = real.FirstNamed(slow)
    for second, found in (
        (10.0, []),
        (20.0, [finding("slow_compute", 2, severity="info")]),
        (30.0, [finding("slow_compute", 1)]),
    ):
        first.look(found, second)
        assert first.at_seconds is None
    for second in (40.0, 50.0):
        first.look([finding("slow_compute", 2, severity="warning")], second)
    assert first.at_seconds == 40.0


def test_rows_count_the_runs_and_a_fault_that_did_not_fire_counts_for_nothing() -> None:
    clean = [run("none", seed, *([finding("hang", 1)] * (seed == 3))) for seed in range(1, 5)]
    pairs = [CostPair("hang", "ddp", seed, 4, 100, 80, 100, 0.2, said)
             for seed, said in enumerate((0.21, 0.16, None))]  # fmt: skip
    rows = real.real_rows([*RUNS, *clean], pairs)
    assert cells(rows[2]) == [
        "hang", "ddp", "6", "40.0 % (2/5)", "1", "1", "1", "1", "5.0 (6.0)", "2.5 (4.0)",
    ]  # fmt: skip
    assert cells(rows[3])[0] == "all faults"
    assert cells(rows[3])[1:] == cells(rows[2])[1:]
    assert cells(rows[4])[:7] == ["none (clean)", "ddp", "4", "75.0 % (3/4)", "0", "0", "1"]
    assert len(real.miss_rows([*RUNS, *clean])) == 5
    assert [cells(row)[-1] for row in real.cost_rows(pairs)[2:]] == ["+1.0", "-4.0", "-"]
    pairs[1].drift = -0.06  # the machine was busy in one of the runs
    assert cells(real.real_rows(RUNS, pairs)[2])[-1] == "1.0 (1.0)"
    assert cells(real.cost_rows(pairs)[3])[-1] == "not comparable"


def test_a_table_of_many_runs_adds_up() -> None:
    chance = random.Random(3)
    said = [(), (finding("a", 2),), (finding("b", 1),)]
    every = [
        run(chance.choice("abc"), seed, *chance.choice(said),
            named_after_seconds=chance.uniform(1, 9))
        for seed in range(60)
    ]  # fmt: skip
    *rows, total = [cells(row) for row in real.real_rows(every, [])[2:]]
    for column in (2, 4, 5, 6, 7):
        assert sum(int(row[column]) for row in rows) == int(total[column])
    assert int(total[2]) == len(every)
    right = sum(one.judgement == "right" for one in every)
    assert total[3] == f"{100 * right / 60:.1f} % ({right}/60)"
    named = [one.named_after_seconds for one in every if one.named_after_seconds is not None]
    assert total[8] == f"{statistics.median(named):.1f} ({max(named):.1f})"


def test_a_later_record_stands_for_an_earlier_one_and_small_ones_are_judged_alike(
    tmp_path: Path,
) -> None:
    path = tmp_path / "real.jsonl"
    everything = [*RUNS, run("none", 1, finding("hang", 1))]
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in everything))  # unabridged
    again = run("hang", 4, finding("hang", 2), named_after_seconds=1.0)
    with path.open("a") as file:
        file.write(json.dumps(real.record_of(again)) + "\n")
    found = real.read(RealRun, path, tmp_path / "absent.jsonl")
    everything[3] = again
    assert [one.judgement for one in found] == [one.judgement for one in everything]
    real.write(path, reversed(found))
    text = path.read_text()
    assert len(text.splitlines()) == 7
    assert real.read(RealRun, path)[3].named_after_seconds == 1.0
    real.write(path, real.read(RealRun, path))
    assert path.read_text() == text  # stable
    kept = [json.loads(line) for line in text.splitlines()]
    assert [one["kind"] for one in kept[1]["found"]] == ["hang"]  # not what is info and another
    assert all("what" not in one for one in kept[0]["found"])
    assert kept[0]["fired"] == {"start_step": 5, "size": "1"}


def times(path: Path, step_ms: list[float], late_ms: float = 2.0) -> Path:
    """Write what two ranks tell, of which the second is late by as much in each step."""
    lines, now = [], 1.0
    for step, took in enumerate(step_ms, 1):
        for rank in range(2):
            began = now + rank * late_ms
            edges = {"began_ns": int(1e6 * began), "ended_ns": int(1e6 * (began + took - late_ms))}
            lines.append({"rank": rank, "restarts": 0, "step": step, "trained_ns": 0, **edges})
        now += took
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_cost_of_a_pair_is_that_of_the_trainers_clock(tmp_path: Path) -> None:
    one = run("hiccup", 1, finding("hiccup", 2), finding("hiccup", 1))
    one.fired = {"start_step": 21}
    calm = times(tmp_path / "calm", [500.0] * 4 + [100.0] * 96)
    slow = times(tmp_path / "slow", [900.0] * 4 + [104.0] * 16 + [100.0, 225.0] * 40)
    pair = real.pair_of(one, slow, calm)
    assert pair is not None
    assert (pair.steps, pair.without_ms, pair.with_ms) == (80, 100.0, 162.5)
    assert pair.truth == pytest.approx(1 - 100 / 162.5)
    assert pair.drift == pytest.approx(0.04)
    assert pair.said == 0.123456789  # not of the finding that names another rank
    assert pair.error_points == pytest.approx(100 * (0.123456789 - pair.truth))
    one.found = []
    silent = real.pair_of(one, slow, calm)
    assert silent is not None
    assert silent.said is None


def test_a_run_that_stopped_tells_no_cost(tmp_path: Path) -> None:
    one = run("hiccup", 1)
    one.fired = {"start_step": 21}
    calm = times(tmp_path / "calm", [100.0] * 100)
    assert real.pair_of(one, times(tmp_path / "slow", [100.0] * 22), calm) is None
    assert real.pair_of(one, tmp_path / "absent", calm) is None
    one.fired = None
    assert real.pair_of(one, calm, calm) is None


def test_costs_are_kept_alike(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    pair = CostPair("hiccup", "ddp", 1, 4, 100, 80.0, 100.0, 0.2, 0.21)
    real.write(path, [pair])
    assert real.read(CostPair, path) == [pair]
