"""Two runs beside each other: numbers against the raw steps, and no difference where none is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from rankscope_server.api.compare import drift, sentence
from rankscope_server.api.compare.noise import Change, change_of, window_of
from rankscope_server.api.compare.parts import STEP, course, distribution, series_of
from rankscope_server.verdict.budget import PARTS
from tests.server.conftest import DATABASES, Sender, TestClient, poster, serving, url_of
from tests.server.raw_run import batches_of, make_run
from tests.server.runs_sent import send_run
from tests.server.seed import MS, Plan, Steps, make_steps, seed_with

STEPS, SLOW_FROM, RANKS = 200, 101, 8
PLANS = {
    "before": Plan(run_id="before", ranks=RANKS, steps=STEPS, fault="none", seed=3),
    "after": Plan(
        run_id="after", ranks=RANKS, steps=STEPS, fault="slow_compute", slow_rank=5,
        slow_from=SLOW_FROM, slow_factor=1.4, seed=4,
    ),
    "again": Plan(run_id="again", ranks=RANKS, steps=STEPS, fault="none", seed=9),
    "small": Plan(run_id="small", ranks=4, steps=STEPS, fault="none", seed=5),
    "short": Plan(run_id="short", ranks=RANKS, steps=12, fault="none", seed=6, end=False),
}  # fmt: skip


@pytest.fixture(scope="module", params=DATABASES)
def client(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("compare"), url_of(request)) as client:
        for name, plan in PLANS.items():
            seed_with(poster(client), **vars(plan))
            assert name == plan.run_id
        yield client


def compare(client: TestClient, after: str, **asked: Any) -> dict[str, Any]:
    reply = client.get(f"/api/v1/runs/{after}/compare", params=asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def truth_of(steps: Steps, lo: int, hi: int) -> Mapping[str, Any]:
    """Return the parts of the rank that worked longest in each step, from the raw times in ms."""
    inside = slice(lo - 1, hi)
    duration, blocked = (
        values[:, inside] / MS for values in (steps.duration, steps.backward_blocked)
    )
    row = np.argmax(duration - blocked, axis=0)
    at = np.arange(duration.shape[1])
    parts = {name: steps.phases[name][:, inside][row, at] / MS
             for name in ("data", "forward", "backward", "optimizer")}  # fmt: skip
    shared = blocked.min(axis=0)
    return parts | {
        "step": duration.max(axis=0),
        "communication": shared,
        "waiting": blocked[row, at] - shared,
    }


# --- numbers ---------------------------------------------------------------------------------


def test_medians_and_percentiles_are_those_of_the_raw_steps(client: TestClient) -> None:
    lo, hi = 11, 190
    answer = compare(
        client, "after", before="before", before_from=lo, before_to=hi, **{"from": lo, "to": hi}
    )
    rows = {row["part"]: row for row in (answer["step"], *answer["parts"])}
    assert set(rows) == {STEP, *PARTS}
    for side in ("before", "after"):
        for part, values in truth_of(make_steps(PLANS[side]), lo, hi).items():
            median, p95 = np.percentile(values, (50, 95))
            shown = rows[part]
            assert shown[f"{side}_median_ms"] == pytest.approx(median, rel=2e-3, abs=2e-3), part
            assert shown[f"{side}_p95_ms"] == pytest.approx(p95, rel=2e-3, abs=2e-3), part
    took = {side: make_steps(PLANS[side]).duration.max(axis=0)[lo - 1 : hi] / MS
            for side in ("before", "after")}  # fmt: skip
    rate = next(row for row in answer["rates"] if row["name"] == "steps_per_second")
    assert rate["before"] == pytest.approx(1e3 / took["before"].mean(), rel=1e-3)
    assert rate["after"] == pytest.approx(1e3 / took["after"].mean(), rel=1e-3)
    line = answer["course"]
    assert (line["bin"], line["before_step"][0], line["after_step"][-1]) == (1, lo, hi)
    assert line["before_median_ms"] == pytest.approx(took["before"], abs=2e-3)
    assert line["after_max_ms"] == pytest.approx(took["after"], abs=2e-3)
    times = answer["times"]
    for side, values in took.items():
        assert sum(times[side]) + times[f"{side}_beyond"] == len(values)
        beyond = int((values > times["edges_ms"][-1]).sum())
        assert times[f"{side}_beyond"] == pytest.approx(beyond, abs=1)


def test_the_part_that_became_longer_is_named_first(client: TestClient) -> None:
    lo = SLOW_FROM
    answer = compare(client, "after", before="before", **{"from": lo})
    assert answer["step"]["state"] == "longer"
    ratio = answer["step"]["after_median_ms"] / answer["step"]["before_median_ms"]
    assert answer["text"].startswith(f"Steps are {ratio:.2f}\N{MULTIPLICATION SIGN} slower than in")
    states = {row["part"]: row["state"] for row in answer["parts"]}
    assert (states["forward"], states["backward"]) == ("longer", "longer")
    assert {states[name] for name in ("data", "optimizer", "communication")} == {"same"}
    backward = next(row for row in answer["parts"] if row["part"] == "backward")
    share = backward["difference_ms"] / answer["step"]["difference_ms"]
    assert f"{100 * share:.0f} % of it is backward (+" in answer["text"]


def test_distributions_are_those_of_the_raw_steps(client: TestClient) -> None:
    lo = SLOW_FROM
    answer = compare(client, "after", before="before", before_from=lo, **{"from": lo})
    spreads = {row["part"]: row for row in answer["spreads"]}
    raw = {side: make_steps(PLANS[side]) for side in ("before", "after")}
    for side, steps in raw.items():
        for part, values in truth_of(steps, lo, STEPS).items():
            expected = np.percentile(values, (5, 25, 50, 75, 95))
            if part == "waiting":  # who works longest waits for nobody
                assert not expected.any()
                continue
            shown = spreads[part][f"{side}_ms"]
            assert shown == pytest.approx(expected, rel=2e-3, abs=2e-3), part
    assert not {"waiting", "checkpoint"} & set(spreads), "they take no time"
    every, slow, *others = answer["rank_spreads"]
    assert (slow["rank"], slow["state"]) == (5, "longer")
    assert [row["state"] for row in (every, *others)] == ["same"] * RANKS
    assert sorted([slow["rank"], *(row["rank"] for row in others)]) == list(range(RANKS))
    for side, steps in raw.items():
        own = (steps.duration - steps.backward_blocked)[:, lo - 1 :] / MS
        middles = np.percentile(np.median(own, axis=1), (5, 25, 50, 75, 95))
        assert every[f"{side}_ms"] == pytest.approx(middles, rel=2e-3)
        mine = np.percentile(own[5], (5, 25, 50, 75, 95))
        assert slow[f"{side}_ms"] == pytest.approx(mine, rel=2e-3)
    assert answer["spread_text"].startswith("Backward moved as a whole: nine in ten steps took ")
    assert "; the self time of rank 5 changed most, by +" in answer["spread_text"]


def test_two_healthy_runs_differ_by_noise_alone(client: TestClient) -> None:
    answer = compare(client, "again", before="before")
    assert "no difference beyond noise" in answer["text"]
    assert {row["state"] for row in (answer["step"], *answer["parts"])} == {"same"}
    assert answer["findings"] == []
    assert answer["spread_text"].startswith(
        "No part of the step is distributed otherwise, beyond noise; no rank's self time differs"
    )
    assert {row["state"] for row in (*answer["spreads"], *answer["rank_spreads"])} == {"same"}


def test_steps_of_one_run_beside_others_of_it(client: TestClient) -> None:
    answer = compare(
        client, "after", before="after", before_from=11, before_to=SLOW_FROM - 1,
        **{"from": SLOW_FROM},
    )  # fmt: skip
    assert answer["text"].startswith(f"Steps {SLOW_FROM} to {STEPS} are 1.")
    assert f"slower than steps 11 to {SLOW_FROM - 1}" in answer["text"]
    assert answer["facts"] == []


def test_two_attempts_are_apart_where_they_ran_the_same_steps(client: TestClient) -> None:
    run = make_run(seed=3, ranks=2, spans=[(1, 60), (20, 90)], per_step=1, repeats=0)
    sender = Sender(client, "twice", "p-twice")
    for records, chunks in batches_of(run, 5):
        sender.send(*records, chunks=chunks)
    answer = compare(
        client, "twice", before="twice", before_attempt=0, before_from=30, before_to=59, attempt=1,
        **{"from": 30, "to": 59},
    )  # fmt: skip
    assert (answer["before"]["label"], answer["after"]["label"]) == ("attempt 0", "attempt 1")
    assert answer["after"]["attempts"] == [0, 1]
    for side, attempt in (("before", 0), ("after", 1)):
        took = [
            max(one.duration_ns for one in run.steps if (one.attempt, one.step) == (attempt, step))
            for step in range(30, 60)
        ]
        assert answer["step"][f"{side}_median_ms"] == pytest.approx(np.median(took) / MS, rel=1e-3)


# --- what cannot be compared -----------------------------------------------------------------


def test_unequal_sizes_live_and_short_runs_say_so(client: TestClient) -> None:
    small = compare(client, "small", before="before")
    assert small["rank_spreads"] == []
    assert small["spread_text"].endswith("not compared one by one: there are 8 and 4")
    notes = " ".join(small["not_comparable"])
    assert "8 ranks" in notes
    assert "4: a step is not the same work" in notes
    answer = compare(client, "short", before="before")
    notes = " ".join(answer["not_comparable"])
    assert "is still" in notes
    assert "noise is not known" in notes
    assert "too few steps to distinguish that from noise" in answer["text"]
    assert {row["state"] for row in (answer["step"], *answer["parts"])} == {"unknown"}


def test_steps_that_are_not_there_are_not_zero(client: TestClient) -> None:
    answer = compare(client, "after", before="before", **{"from": 900, "to": 950})
    assert answer["text"].startswith("No steps to compare: ")
    assert answer["step"]["after_median_ms"] is None
    assert answer["step"]["difference_ms"] is None
    assert answer["times"] is None
    assert all(row["after_ms"] is None for row in answer["spreads"])
    assert answer["rank_spreads"] == []
    assert any("it has 1 to 200" in note for note in answer["not_comparable"])


def test_a_run_without_steps_and_facts_says_what_is_missing(client: TestClient) -> None:
    from rankscope.wire import schema

    sender = Sender(client, "empty", "p-empty")
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=1, name="empty", world_size=2))
    answer = compare(client, "empty", before="before")
    notes = " ".join(answer["not_comparable"])
    assert "empty has no step yet" in notes
    assert "empty sent no facts" in notes
    assert answer["facts"] == []  # what is not known is no difference


def test_the_run_before_of_the_same_name_is_the_default(client: TestClient) -> None:
    for number, (name, step_ms, nccl) in enumerate(
        (("mon", 100.0, "2.26"), ("tue", 100.1, "2.26"), ("wed", 131.0, "2.27"))
    ):
        send_run(client, name, number, step_ms, "train.py", nccl)
    answer = compare(client, "wed")
    assert answer["before"]["run_id"] == "tue"
    assert answer["text"].startswith("Steps are 1.31\N{MULTIPLICATION SIGN} slower than in tue: ")
    assert "nccl 2.26 \N{RIGHTWARDS ARROW} 2.27" in answer["text"]
    assert [(one["fact"], one["severity"]) for one in answer["facts"]] == [("nccl", "critical")]
    alone = compare(client, "mon")
    assert alone["before"] is None
    assert "choose one" in alone["text"]
    assert "no difference beyond noise" in compare(client, "tue")["text"]


def test_what_is_not_there_is_404(client: TestClient) -> None:
    for path, field in (
        ("after/compare?before=no-such", "run"), ("no-such/compare?before=after", "run"),
        ("after/compare?before=before&attempt=7", "attempt"),
    ):  # fmt: skip
        reply = client.get(f"/api/v1/runs/{path}")
        assert (reply.status_code, reply.json()["error"]["field"]) == (404, field)


def test_rows_come_as_csv(client: TestClient) -> None:
    reply = client.get("/api/v1/runs/after/compare?before=before&format=csv")
    lines = reply.text.splitlines()
    assert lines[0].startswith("part,label,before_median_ms")
    assert len(lines) == 1 + len(PARTS)


# --- noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [30, 60, 300])
def test_windows_of_equal_steps_seldom_differ_and_shifted_ones_do(count: int) -> None:
    chance = np.random.default_rng(1)
    pairs = [chance.lognormal(4.6, 0.05, (2, count)) for _ in range(400)]
    # without the least ratio, so that the share of pairs alone decides
    states = [change_of(window_of(a), window_of(b), 0.0).state for a, b in pairs]
    assert sum(state != "same" for state in states) <= 0.02 * len(pairs)
    shifted = [change_of(window_of(a), window_of(1.1 * b), 0.05).state for a, b in pairs]
    assert shifted.count("longer") >= 0.97 * len(pairs)
    back = [change_of(window_of(1.1 * a), window_of(b), 0.05).state for a, b in pairs]
    assert back.count("shorter") >= 0.97 * len(pairs)


def test_one_burst_of_load_on_a_side_hides_nothing_and_makes_nothing() -> None:
    chance = np.random.default_rng(2)
    quiet, burst = chance.normal(100, 2, 100), chance.normal(100, 2, 100)
    burst[20:30] = 400
    assert change_of(window_of(quiet), window_of(burst), 0.0).state == "same"
    assert change_of(window_of(burst), window_of(quiet + 30), 0.05).state == "longer"


def test_a_small_lasting_difference_is_no_difference() -> None:
    quiet = np.full(100, 100.0) + np.linspace(0, 0.01, 100)
    assert change_of(window_of(quiet), window_of(quiet * 1.04), 0.05).state == "same"
    assert change_of(window_of(quiet), window_of(quiet * 1.04), 0.03).state == "longer"


def test_too_few_steps_are_unknown_and_missing_ones_do_not_count() -> None:
    values = np.full(40, np.nan)
    values[:20] = 5.0
    few = window_of(values)
    assert (few.count, few.median) == (20, 5.0)
    assert change_of(few, window_of(np.full(40, 9.0)), 0.0).state == "unknown"
    nothing = window_of(np.full(40, np.nan))
    assert nothing.count == 0
    assert np.isnan(nothing.median)


# --- parts -----------------------------------------------------------------------------------


def planes_of(**given: Any) -> dict[str, Any]:
    names = ("step", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation",
             "blocked", "forward_blocked", "backward_blocked", "optimizer_blocked")  # fmt: skip
    zero = np.zeros_like(np.asarray(given["step"], float))
    return {name: np.asarray(given.get(name, zero), float) for name in names}


def test_parts_are_those_of_the_rank_that_all_wait_for_and_add_up() -> None:
    # rank 1 works 90 ms; rank 0 works 40 ms and waits 50 of its 60 blocked for it
    planes = planes_of(
        step=[[100.0], [100.0]], forward=[[10.0], [20.0]], backward=[[90.0], [80.0]],
        backward_blocked=[[60.0], [10.0]], blocked=[[60.0], [10.0]],
    )  # fmt: skip
    parts = series_of(planes, (-1, -1))
    assert parts["step"].tolist() == [100.0]
    assert (parts["forward"][0], parts["backward"][0]) == (20.0, 70.0)
    assert (parts["communication"][0], parts["waiting"][0]) == (10.0, 0.0)
    assert sum(parts[name][0] for name in PARTS) == pytest.approx(100.0)


def test_without_waits_steps_are_known_and_parts_are_not() -> None:
    planes = planes_of(step=[[100.0, 90.0]], blocked=[[np.nan, np.nan]])
    parts = series_of(planes, (-1,))
    assert parts["step"].tolist() == [100.0, 90.0]
    assert all(np.isnan(parts[name]).all() for name in PARTS)


def test_bins_hold_every_step_of_both() -> None:
    chance = np.random.default_rng(3)
    one, two = chance.lognormal(4, 0.5, 500), chance.lognormal(5, 0.2, 300)
    found = distribution(one, np.append(two, np.nan))
    assert found.before.sum() + found.before_beyond == 500
    assert found.after.sum() + found.after_beyond == 300
    assert len(distribution(one, np.full(3, np.nan)).edges_ms) == 0
    assert distribution(np.full(9, 7.0), np.full(9, 7.0)).before.sum() == 9


def test_windows_are_laid_side_by_side_from_their_first_steps() -> None:
    found = course(np.array([1.0, 3.0, 2.0, 9.0, np.nan]), np.array([5.0, 7.0]), 2)
    assert np.isnan(found.before[:, 2]).all()
    assert found.before[:, :2].tolist() == [[1.0, 2.0], [2.0, 5.5], [3.0, 9.0]]
    assert found.after[:, 0].tolist() == [5.0, 6.0, 7.0]
    assert np.isnan(found.after[:, 1:]).all()


# --- drift -----------------------------------------------------------------------------------


def facts(**values: str) -> dict[str, frozenset[str]]:
    return {name.replace("__", "."): frozenset(text.split("|")) for name, text in values.items()}


def test_unknown_facts_are_no_difference_and_unset_variables_are() -> None:
    old = facts(nccl="2.26", torch="2.13", code__dirty="unknown", env__NCCL_ALGO="Ring")
    new = facts(nccl="2.27", cudnn="9.1", code__dirty="yes", env__OMP_NUM_THREADS="1")
    found = drift.facts_drift(old, new)
    shown = {row.fact: (row.before, row.after) for row in found.rows}
    assert shown == {
        "nccl": (("2.26",), ("2.27",)),
        "env.NCCL_ALGO": (("Ring",), (drift.NOT_SET,)),
        "env.OMP_NUM_THREADS": ((drift.NOT_SET,), ("1",)),
    }
    assert found.unknown == ("code.dirty", "cudnn", "torch")
    assert found.rows[0].fact == "nccl", "what may matter most is first"
    assert drift.facts_drift({}, new).rows == ()


def test_what_is_of_one_process_or_run_is_not_compared() -> None:
    old = facts(pid="1", env__TORCHELASTIC_RUN_ID="a", env__SLURM_JOB_ID="7", env__RANK="0|1")
    new = facts(pid="2", env__TORCHELASTIC_RUN_ID="b", env__SLURM_JOB_ID="8", env__RANK="0|1|2")
    assert drift.facts_drift(old, new) == drift.Drifts()


def test_amounts_that_machines_alike_differ_by_are_alike() -> None:
    near = drift.facts_drift(facts(host__memory_bytes="1000"), facts(host__memory_bytes="1005"))
    far = drift.facts_drift(facts(host__memory_bytes="1000"), facts(host__memory_bytes="2000"))
    assert (len(near.rows), len(far.rows)) == (0, 1)


def test_options_of_commands_are_compared_by_name() -> None:
    old = ["torchrun", "--nproc-per-node=4", "train.py", "--lr", "-0.1", "--amp", "--batch", "8"]
    new = ["torchrun", "--nproc-per-node", "4", "train.py", "--lr", "-0.1", "--batch", "16"]
    shown = {row.fact: (row.before, row.after) for row in drift.command_drift(old, new)}
    assert shown == {"--amp": (("set",), ()), "--batch": (("8",), ("16",))}
    assert drift.command_drift([], new) == ()
    (row,) = drift.command_drift(["train.py", "0"], ["train.py", "10"])
    assert (row.fact, row.before, row.after) == ("argument 2", ("0",), ("10",))


def test_nodes_are_new_or_gone() -> None:
    found = [(row.fact, sentence.drift_text(row)) for row in drift.nodes_drift("ab", "bc")]
    assert found == [("c", "c is new"), ("a", "a is gone")]
    assert drift.nodes_drift((), "ab") == ()


def test_what_may_matter_most_comes_first() -> None:
    rows = drift.facts_drift(
        {"nccl.version": frozenset({"2.21.5"}), "cpu.model": frozenset({"a"})},
        {"nccl.version": frozenset({"2.23.4"}), "cpu.model": frozenset({"b"})},
    ).rows
    found = drift.by_weight(*drift.nodes_drift("ab", "bc"), *rows)
    weights = [("critical", "warning", "info").index(row.severity) for row in found]
    assert weights == sorted(weights)
    assert found[0].fact == "nccl.version"
    assert [row.fact for row in found if row.kind == drift.NODE] == ["c", "a"]


# --- the sentence ----------------------------------------------------------------------------


def side(name: str, ms: float, tokens: float | None = None) -> sentence.Side:
    return sentence.Side(name, window_of(np.full(100, ms)), tokens)


def test_the_sentence_says_what_how_much_and_why() -> None:
    step = Change(92.0, 80.0, 100.0, "longer")
    parts = {"communication": Change(77.0, 70, 80, "longer"), "data": Change(5.0, 0, 9, "same")}
    around = (
        *drift.facts_drift(facts(nccl="2.26"), facts(nccl="2.27")).rows,
        *drift.nodes_drift(["node-a"], ["node-a", "node-b"]),
    )
    text = sentence.what_changed(side("x", 300.0), side("y", 392.0), step, parts, around)
    assert text == (
        "Steps are 1.31\N{MULTIPLICATION SIGN} slower than in x: 84 % of it is exposed "
        "communication (+77.0 ms a step); nccl 2.26 \N{RIGHTWARDS ARROW} 2.27 and node-b is new."
    )
    none = {name: Change(10.0, 1, 20, "longer") for name in PARTS}
    assert "no single part" in sentence.what_changed(
        side("x", 300.0), side("y", 392.0), step, none, ()
    )
    unknown = {name: Change(np.nan, np.nan, np.nan, "unknown") for name in PARTS}
    assert "where in the step is not known" in sentence.what_changed(
        side("x", 300.0), side("y", 392.0), step, unknown, ()
    )


def test_steps_that_do_more_are_not_called_slower() -> None:
    step = Change(150.0, 140.0, 160.0, "longer")
    text = sentence.what_changed(side("x", 300.0, 1000.0), side("y", 450.0, 2000.0), step, {}, ())
    assert text == (
        "Steps are 1.50\N{MULTIPLICATION SIGN} longer than in x, with 2\N{MULTIPLICATION SIGN} the "
        "tokens of a step: 1.33\N{MULTIPLICATION SIGN} the tokens a second."
    )
    fewer = sentence.Side("y", window_of(np.full(100, 450.0)), world_size=4)
    more = sentence.Side("x", window_of(np.full(100, 300.0)), world_size=8)
    text = sentence.what_changed(more, fewer, step, {}, (), 9)
    assert "longer than in x, on 4 ranks instead of 8: a step is not the same work" in text
    assert "slower" not in text


def test_only_of_what_is_alike_it_is_said_that_nothing_differs() -> None:
    step = Change(150.0, 140.0, 160.0, "longer")
    words = "nothing else that is known of them differs"
    assert words in sentence.what_changed(side("x", 300.0), side("y", 450.0), step, {}, (), 9)
    assert words not in sentence.what_changed(side("x", 300.0), side("y", 450.0), step, {}, ())
