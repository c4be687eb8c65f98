"""The planner on a recorded run: of now it says what was measured, and what it does not know."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.planning.errors import PlanError
from rankscope_server.what_if.answers import Change, answer, check, offered
from rankscope_server.what_if.engine import SHARD, CannotAnswer, engine_of
from rankscope_server.what_if.recorded import Recorded, Sent, sent_of

ROOT = Path(__file__).parents[2]
WEIGHTS = 40_000_000.0
WHOLE = 4 * WEIGHTS  # bytes, fp32
LAYERS, OF_LAYER = 8, 4_500_000.0
PARTS = {
    "data": 4.0, "forward": 60.0, "backward": 120.0, "communication": 20.0, "waiting": 10.0,
    "optimizer": 12.0, "checkpoint": 0.0, "other": 3.0,
}  # fmt: skip


def reduced(buckets: int = 8, ms_of_mb: float = 1.0, operation: str = "all_reduce") -> Sent:
    size = int(WHOLE / buckets)
    ms = ms_of_mb * size / 1e6
    return Sent(operation, size, float(buckets), (0.8 * ms, ms, 1.3 * ms))


def run(**changes: Any) -> Recorded:
    """A run of DDP on two nodes of four devices."""
    fields: dict[str, Any] = {
        "ranks": 8, "nodes": 2, "step_lo": 11, "step_hi": 60, "num_steps": 25,
        "step_ms": sum(PARTS.values()), "parts": PARTS, "sent": (reduced(),), "microbatches": 2,
        "parameters": WEIGHTS, "parameter_bytes": WHOLE, "optimizer_bytes": 2 * WHOLE + 400,
        "layers": LAYERS, "layer_parameters": OF_LAYER, "memory_bytes": 9e9,
        "memory_source": "measured",
    }  # fmt: skip
    return Recorded(**fields | changes)


def fsdp(**changes: Any) -> Recorded:
    """The same as FSDP: weights are gathered twice for each microbatch and reduced once."""
    sent = (reduced(9, 0.5, "reduce_scatter_tensor"),
            replace(reduced(9, 0.5, "all_gather_into_tensor"), per_step=36.0))  # fmt: skip
    local = {"parameter_bytes": WHOLE / 8, "optimizer_bytes": 2 * WHOLE / 8, "layers": 0,
             "layer_parameters": 0.0}  # fmt: skip
    return run(**{"sent": sent, **local} | changes)


def pipeline(**changes: Any) -> Recorded:
    fields: dict[str, Any] = {
        "nodes": 1, "ranks": 4, "stages": 4, "schedule": "1f1b", "microbatches": 8,
        "stage_ms": 180.0, "sent": (),
    }  # fmt: skip
    return run(**fields | changes)


# --- calibration ------------------------------------------------------------------------------

TIMES = st.floats(0.0, 500.0, allow_nan=False)


@given(
    st.fixed_dictionaries({name: TIMES for name in PARTS}),
    st.sampled_from([run, fsdp, pipeline]),
    st.floats(0.01, 20.0),
)
def test_nothing_changed_is_what_was_measured(
    parts: dict[str, float], make: Any, ms_of_mb: float
) -> None:
    parts |= {"forward": parts["forward"] + 1.0}
    sent = tuple(
        replace(one, transfer_ms=tuple(ms_of_mb * ms for ms in one.transfer_ms))
        for one in make().sent
    )
    total = sum(parts.values())
    recorded = make(parts=parts, step_ms=total, sent=sent)
    if recorded.stages > 1:
        longest = parts["forward"] + parts["backward"]
        recorded = replace(recorded, stage_ms=longest)
    found = answer(recorded, Change())
    assert found.step_ms == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert found.low_ms <= found.step_ms <= found.high_ms
    assert found.memory_bytes == (None if recorded.stages > 1 else recorded.memory_bytes)


def test_one_rank_is_calibrated_too() -> None:
    alone = run(ranks=1, nodes=1, sent=())
    assert answer(alone, Change()).step_ms == pytest.approx(alone.step_ms)


# --- what the messages show ------------------------------------------------------------------


def test_the_strategy_is_read_from_the_messages() -> None:
    scattered = reduced(8, 0.5, "reduce_scatter_tensor")
    gathered = reduced(8, 0.5, "all_gather_into_tensor")
    assert run().strategy == "ddp"
    assert fsdp().strategy == "fsdp"
    assert run(sent=(scattered, gathered)).strategy == "zero1"
    assert run(sent=(gathered,)).strategy == ""
    assert run().num_reductions == 1
    assert run(sent=(replace(reduced(), per_step=16.0),)).num_reductions == 2
    assert fsdp().num_layers == 8
    assert fsdp().weights_of_layer == pytest.approx(WEIGHTS / 9, rel=1e-6)
    assert run().item_bytes == fsdp().item_bytes == 4


def test_losses_are_no_messages_of_gradients_and_sizes_separate_latency() -> None:
    sizes = np.array([4, 4, 1 << 20, 1 << 20, 4 << 20, 4 << 20, 5 << 20])
    times = np.array([0.1, 0.1, 3.0, 3.0, 9.0, np.nan, 20.0])
    # two ranks, three steps; the last one is of one rank in one step
    sizes, times = (
        np.append(np.tile(sizes[:6], 3), sizes[6]),
        np.append(np.tile(times[:6], 3), 20.0),
    )
    sent = sent_of(["all_reduce"] * 19, sizes, times, ranks=2, num_steps=3.0)
    assert [(one.size_bytes, one.per_step) for one in sent] == [(1 << 20, 1.0), (4 << 20, 1.0)]
    unknown = sent_of(["all_reduce"] * 6, sizes[:6], np.full(6, np.nan), ranks=2, num_steps=1.0)
    assert [one.transfer_ms for one in unknown] == [(), ()]
    assert run(sent=unknown).link() is None
    link = run(ranks=2, nodes=1, sent=sent).link()
    assert link is not None
    assert link.is_split
    # 6 ms for 3 MiB more, of which each of two ranks sends all; 1 ms is left for two hops
    assert link.bytes_per_second == pytest.approx((3 << 20) / 6e-3)
    assert link.latency_seconds == pytest.approx(1e-3 / 2)


# --- changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [run, fsdp])
def test_a_faster_link_never_makes_a_step_longer(make: Any) -> None:
    recorded = make()
    steps = [answer(recorded, Change(link_times=x)).step_ms for x in (0.5, 1.0, 1.1, 2.0, 9.0, 1e9)]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] == pytest.approx(recorded.step_ms)
    # only what was exposed can be saved
    assert steps[-1] == pytest.approx(recorded.step_ms - PARTS["communication"])


def test_more_nodes_keep_the_work_of_a_rank() -> None:
    for recorded in (run(), fsdp()):
        more = answer(recorded, Change(add_nodes=2))
        assert more.ranks == 16
        assert more.parts["computing"] == pytest.approx(180.0)
        assert more.parts["exposed communication"] >= PARTS["communication"] - 1e-9


def test_memory_of_cut_weights_is_what_their_paper_says() -> None:
    """16 bytes of a weight with Adam in fp32, and DDP's copy of the gradients; a fsdp rank has its
    eighth of 12, whole gradients until the last microbatch, and three groups of weights."""
    now = WEIGHTS * (4 + 4 + 8) + WHOLE
    largest = max(OF_LAYER, WEIGHTS - LAYERS * OF_LAYER)
    then = WEIGHTS * (4 + 8) / 8 + WHOLE + 3 * 4 * largest
    found = answer(run(), Change(strategy="fsdp"))
    assert found.memory_bytes == pytest.approx(9e9 + then - now)
    zero = answer(run(), Change(strategy="zero1")).memory_bytes
    assert zero is not None
    assert found.memory_bytes is not None
    assert found.memory_bytes < zero < 9e9


def test_ranks_beyond_the_processors_share_them() -> None:
    here = run(ranks=2, nodes=1, processors=2)
    assert answer(here, Change(ranks_per_node=4)).parts["computing"] == pytest.approx(360.0)
    asleep = replace(here, processor_share=0.25)
    assert answer(asleep, Change(ranks_per_node=4)).parts["computing"] == pytest.approx(225.0)
    devices = replace(here, processors=0)
    assert answer(devices, Change(ranks_per_node=4)).parts["computing"] == pytest.approx(180.0)


def test_more_microbatches_idle_less_in_a_pipeline() -> None:
    recorded = pipeline(step_ms=180.0 + 12.0 + 7.0 + 67.5)  # 3/8 of 180 ms idle, as the formula
    assert engine_of(recorded).idle == pytest.approx(1.0)
    found = answer(recorded, Change(microbatches=24))
    assert found.step_ms == pytest.approx(recorded.step_ms - 67.5 + 180.0 * 3 / 24)
    assert found.memory_bytes is None
    assert "activations" in found.no_memory


def test_what_a_replay_saves_is_saved_with_other_changes_too() -> None:
    faster, saved = (answer(run(), Change(link_times=2.0), ratio) for ratio in (1.0, 0.9))
    assert saved.step_ms == pytest.approx(0.9 * faster.step_ms)
    assert sum(saved.parts.values()) == pytest.approx(saved.step_ms)
    assert any("the replay saves" in text for text in saved.assumptions)


# --- what is not known -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "change", "reason"),
    [
        (run(sent=()), Change(link_times=2.0), "no sizes of messages are recorded"),
        (run(parts={}), Change(), "how long they waited"),
        (run(layers=0), Change(strategy="fsdp"), "how many layers"),
        (run(parameters=0.0), Change(strategy="fsdp"), "how many weights"),
        (run(microbatches=0), Change(microbatches=4), "microbatches a step has now"),
        (run(nodes=1), Change(add_nodes=1), "the run was on one node"),
        (run(nodes=3), Change(), "spread unevenly"),
        (run(why_no_layout="several axes"), Change(), "several axes"),
        (pipeline(schedule=""), Change(microbatches=16), "schedule"),
        (run(ranks=1, nodes=1, sent=()), Change(link_times=2.0), "one rank sends nothing"),
    ],
)
def test_what_is_not_recorded_is_not_answered(
    recorded: Recorded, change: Change, reason: str
) -> None:
    with pytest.raises(CannotAnswer, match=reason):
        answer(recorded, change)


def test_what_is_said_is_answered() -> None:
    assert answer(run(nodes=1), Change(add_nodes=1, between_bytes_per_second=1e9)).ranks == 16
    unknown = answer(run(optimizer_bytes=0.0), Change(strategy="zero1"))
    assert unknown.memory_bytes is None
    assert "optimizer" in unknown.no_memory
    assert answer(run(memory_bytes=0.0), Change(strategy="zero1")).no_memory


@pytest.mark.parametrize(
    ("recorded", "change", "field"),
    [
        (run(), Change(add_nodes=-2), "add_nodes"),
        (pipeline(), Change(strategy="fsdp"), "strategy"),
        (pipeline(), Change(link_times=2.0), "link_times"),
        (fsdp(), Change(bucket_bytes=1e6), "bucket_mib"),
        (run(), Change(strategy="fsdp", bucket_bytes=1e6), "bucket_mib"),
    ],
)
def test_what_cannot_be_names_its_field(recorded: Recorded, change: Change, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(change, recorded)
    assert caught.value.field == field
    assert caught.value.remedy


def test_what_is_offered_can_be_asked_for() -> None:
    for recorded in (run(), fsdp(), pipeline(), run(ranks=1, nodes=1, sent=())):
        found = offered(recorded)
        assert found
        for one in found:
            check(one, recorded)
            assert len(one.kinds) == 1
    assert {one.strategy for one in offered(run())} == {*SHARD, ""} - {"ddp"}
    assert {one.kinds for one in offered(run(why_no_layout="several axes"))} == {
        ("link",), ("ranks",)
    }  # fmt: skip


# --- how near it was -------------------------------------------------------------------------


def test_the_document_has_the_table_of_what_was_measured() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/what_if.py", "--table", "--label", "any"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = (ROOT / "docs" / "plan.md").read_text()
    made = re.search(r"made by benchmarks/what_if.py -->\n(.*?)<!-- end of recorded", text, re.S)
    assert made is not None
    assert made[1].strip() == done.stdout.strip()
    said = re.search(r"Steps, (\d+) changes: .*?; (\d+) within their band", made[1])
    assert said is not None
    assert int(said[1]) >= 12
    assert said[1] == said[2], "bands hold all that was measured"
