"""What a recording of few steps shows: slow ranks, waiting for data, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import Column, decode_chunk, encode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look

NS_PER_MS = 1_000_000
BASE_NS = 1_790_857_026_000_000_000
TIMES = "\N{MULTIPLICATION SIGN}"


def look_at(
    own_ms: Any, data_ms: Any | None = None, *, workers: str | None = None, launcher: str = ""
) -> Look:
    """Return what is said of ranks x steps of self time: a step lasts until the slowest is done."""
    own = np.asarray(own_ms, float)
    data = np.zeros_like(own) if data_ms is None else np.asarray(data_ms, float)
    num_ranks, num_steps = own.shape
    state = RunState("recording")
    records: list[schema.AnyRecord] = [
        schema.RunStarted(
            attempt=0, rank=schema.NODE_RANK, time_ns=BASE_NS, name="x",
            launcher=launcher or schema.IMPORTED,
        )
    ]  # fmt: skip
    for rank in range(num_ranks):
        who: dict[str, Any] = {"attempt": 0, "rank": rank, "time_ns": BASE_NS}
        records.append(
            schema.RankRegistered(
                **who, world_size=num_ranks, local_rank=0, local_world_size=1, node_rank=-1,
                host=f"node-{rank}", pid=0,
            )
        )  # fmt: skip
        if workers is not None:
            fields = {"num_workers": workers}
            records.append(schema.Event(**who, name="data loader", fields=fields))
    for record in records:
        state.apply_record(record)
    duration = (own + data).max(axis=0)
    began = np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    for rank in range(num_ranks):
        columns = {name: np.zeros(num_steps, np.int64) for name in schema.STEP_COLUMNS}
        blocked = duration - own[rank] - data[rank]
        parts: Mapping[str, Any] = {
            "duration_ns": duration, "data_ns": data[rank], "forward_ns": own[rank],
            "backward_ns": blocked, "backward_blocked_ns": blocked,
        }  # fmt: skip
        for name, values in parts.items():
            columns[name] = (np.asarray(values) * NS_PER_MS).astype(np.int64)
        columns["started_ns"] = BASE_NS + (began * NS_PER_MS).astype(np.int64)
        columns["step"] = np.arange(5, 5 + num_steps)
        columns["num_collectives"][:] = columns["microbatches"][:] = 1
        apply(state, rank, dict(columns))
    return state.look(BASE_NS + int(duration.sum() * NS_PER_MS) + 10**9)


def apply(state: RunState, rank: int, columns: dict[str, Column]) -> None:
    times, data = np.asarray(columns["started_ns"]), encode_chunk(columns)
    chunk = schema.Chunk(
        kind="steps", attempt=0, rank=rank, host=f"node-{rank}", count=len(times),
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=data,
    )  # fmt: skip
    state.apply_chunk(chunk, decode_chunk(data))


def even(num_ranks: int, num_steps: int, seed: int = 1) -> Any:
    """Return self times of ranks that do the same, 100 ms with 3 % of scatter."""
    return 100.0 * np.random.default_rng(seed).lognormal(0, 0.03, (num_ranks, num_steps))


def slow(look: Look) -> list[Finding]:
    return [f for f in look.findings if f.detector == "straggler" and f.severity != "info"]


def test_two_ranks_and_six_steps_are_enough_for_a_rank_that_is_apart() -> None:
    own = even(2, 6)
    own[1] *= 1.5
    look = look_at(own)
    (finding,) = slow(look)
    assert finding.ranks == (1,)
    assert (
        finding.what
        == f"Rank 1 on node-1 is 1.5{TIMES} slower than its peer in each of the 6 steps recorded"
    )
    assert finding.severity == "critical"
    assert finding.cost_throughput_ratio == pytest.approx(1 / 3, abs=0.03)
    # of the orders of 12 times, 2 of 924 have all six of one rank in front
    assert "one in 462 recordings" in finding.confidence_text
    assert finding.onset_step is None
    assert look.answer.state == "culprit"


def test_four_steps_of_two_ranks_are_too_few() -> None:
    own = even(2, 4)
    own[1] *= 1.5
    assert slow(look_at(own)) == []


@pytest.mark.parametrize("num_steps", [6, 12, 40, 300])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_that_do_the_same_are_never_named(num_ranks: int, num_steps: int) -> None:
    for seed in range(8):
        look = look_at(even(num_ranks, num_steps, seed))
        assert slow(look) == [], seed
        assert look.verdict is None


def test_the_severity_is_that_of_the_cost_and_not_of_how_long_somebody_recorded() -> None:
    """40 steps in 6 s are no episode of 15 s, and a quarter of each is a quarter all the same."""
    own = even(4, 40)
    own[2] *= 1.33
    (finding,) = slow(look_at(own))
    assert (finding.ranks, finding.severity) == ((2,), "critical")
    assert 0.2 < (finding.cost_throughput_ratio or 0) < 0.27
    small = even(8, 40, seed=3)
    small[2] *= 1.12
    (finding,) = slow(look_at(small))
    assert (finding.ranks, finding.severity) == ((2,), "warning")
    assert 0.02 < (finding.cost_throughput_ratio or 0) < 0.1


def test_one_step_that_is_not_like_the_others_does_not_hide_the_rank() -> None:
    own = even(4, 12)
    own[3] *= 1.6
    own[0, 4] *= 3.0
    (finding,) = slow(look_at(own))
    assert finding.ranks == (3,)
    assert "in 11 of the 12 steps recorded" in finding.what


def test_two_slow_ranks_by_different_amounts_are_both_named() -> None:
    own = even(4, 8)
    own[1] *= 2.0
    own[3] *= 1.5
    look = look_at(own)
    assert {f.ranks for f in slow(look)} == {(1,), (3,)}
    cost = {f.ranks: f.cost_throughput_ratio or 0.0 for f in slow(look)}
    assert cost[1,] == pytest.approx(0.25, abs=0.05)  # the rest is hidden behind the other one
    assert sum(cost.values()) == pytest.approx(0.5, abs=0.05)


def test_two_ranks_that_are_slow_alike_are_named_together() -> None:
    own = even(6, 8)
    own[[1, 4]] *= 1.5
    (finding,) = slow(look_at(own))
    assert finding.ranks == (1, 4)
    assert finding.what.startswith(
        f"Ranks 1 and 4 on 2 hosts are 1.5{TIMES} slower than their 4 peers"
    )


def test_a_live_run_is_not_judged_by_so_few_steps() -> None:
    own = even(2, 6)
    own[1] *= 1.5
    look = look_at(own, launcher="torchrun")
    assert slow(look) == []
    assert look.answer.state == "waiting"


def test_a_recording_never_says_to_wait() -> None:
    for look in (look_at(even(2, 6)), look_at(even(2, 40)), look_at(even(1, 6))):
        texts = [look.answer.text, look.answer.detail, *look.answer.deciding, look.status_text]
        texts += [
            text for detector in look.detectors for text in (detector.reason, detector.remedy)
        ]
        assert [text for text in texts if text.startswith("wait") or " yet" in text] == []
        assert look.status == "ended"


def test_forty_steps_of_healthy_ranks_are_healthy() -> None:
    look = look_at(even(4, 40))
    assert look.answer.state == "healthy"
    assert look.answer.text.startswith("Healthy: 4 ranks, 40 steps")


# --- waiting for data -----------------------------------------------------------------------


def of_data(look: Look) -> Finding:
    (finding,) = [f for f in look.findings if f.detector == "data-loading"]
    return finding


def test_six_steps_tell_which_share_waits_for_data_and_how_far_steps_differ() -> None:
    data = np.tile([40.0, 45.0, 50.0, 55.0, 60.0, 50.0], (1, 1))
    look = look_at(np.full((1, 6), 100.0), data, workers="0")
    finding = of_data(look)
    assert finding.what == "The job waits for data: 33 % of each step"
    assert "29 % to 38 % of each of the 6 steps" in finding.why
    assert finding.next == "Give the DataLoader num_workers=2, as far as the cores allow"
    assert (finding.severity, finding.onset_step) == ("critical", None)
    assert "6 steps, since when and whether it lasts is not known" in finding.confidence_text
    assert finding.confidence < 0.85
    assert look.answer.state == "culprit"


def test_the_share_is_told_where_it_is_no_fault() -> None:
    look = look_at(even(4, 6), np.full((4, 6), 2.0))
    assert look.verdict is None
    assert "Of the 6 steps recorded, 1.9 % (1.9 % to 1.9 % a step) is waiting for data" in (
        look.answer.detail
    )


def test_without_a_loader_in_the_recording_nothing_is_said_of_data() -> None:
    own = even(4, 40)
    own[2] *= 2.0
    look = look_at(own)
    texts = [*look.answer.notes, *slow(look)[0].ruled_out, look.answer.detail]
    assert [text for text in texts if "data" in text.lower()] == []


@pytest.mark.parametrize("num_steps", [6, 60])
def test_of_two_ranks_the_one_that_waits_for_data_is_named(num_steps: int) -> None:
    data = np.zeros((2, num_steps))
    data[1] = 250.0
    look = look_at(even(2, num_steps), data)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("slow_data", (1,))
    assert [f for f in look.findings if f.detector == "data-loading" and not f.ranks] == []
