"""Slow adapters, hosts and leaves through the whole analysis: the right part or none."""

from __future__ import annotations

import dataclasses

import pytest

from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from tests.score.outcome import mean_step_ms
from tests.simulator.delivery import apply, deliver
from tests.simulator.job import Fault, Job, Noise
from tests.simulator.records import START_NS, Recording

# 16 hosts of 4 ranks on 8 leaves; each stage on four hosts, two leaves.
JOB = Job(
    data=8, tensor=2, pipeline=4, steps=44, ranks_per_host=4, hosts_per_leaf=2, forward_ms=200.0,
    transfer_ms=20.0, microbatches=2, noise=Noise(hiccup_share=0.0005, clock_offset_ms=50.0),
)  # fmt: skip


def look(job: Job, seed: int | None = None) -> RunState:
    recording = Recording(job)
    items = list(recording.items())
    state = RunState("links")
    apply(state, items if seed is None else deliver(items, seed, lost=0.005))
    at_ms = recording.stopped_ms() + 1
    apply(state, recording.states(at_ms))
    return state


def slow_links(job: Job, seed: int | None = None) -> list[Finding]:
    found = look(job, seed).look(START_NS + 10**12).findings
    return [finding for finding in found if finding.detector == "slow-link"]


def with_fault(fault: Fault, seed: int = 0) -> Job:
    return dataclasses.replace(JOB, faults=(fault,), seed=seed)


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        (Fault("slow_link", rank=21, start=16), {21}),
        (Fault("slow_link", host=9, start=16), {36, 37, 38, 39}),
        (Fault("slow_link", leaf=3, start=16), set(range(24, 32))),
    ],
)
def test_the_part_is_named_and_no_other_and_its_cost(fault: Fault, ranks: set[int]) -> None:
    job = with_fault(dataclasses.replace(fault, size=1.0), seed=3)
    (finding,) = slow_links(job, seed=3)
    assert set(finding.ranks) == ranks
    assert finding.severity == "warning"
    assert "2.0 times" in finding.why
    truth = 1 - mean_step_ms(job.without_faults(), 16) / mean_step_ms(job, 16)
    assert finding.cost_throughput_ratio == pytest.approx(truth, abs=0.02)
    assert finding.onset_step is not None
    assert abs(finding.onset_step - 16) <= 4


def test_a_slowness_of_a_third_is_placed_too() -> None:
    (finding,) = slow_links(with_fault(Fault("slow_link", host=2, start=16, size=0.35)), seed=4)
    assert set(finding.ranks) == {8, 9, 10, 11}


@pytest.mark.parametrize("seed", range(2))
def test_healthy_networks_are_silent(seed: int) -> None:
    noise = Noise(transfer_sigma=0.15 if seed else 0.05)
    assert slow_links(dataclasses.replace(JOB, seed=seed, noise=noise), seed) == []


def test_a_slow_rank_is_no_slow_link() -> None:
    assert slow_links(with_fault(Fault("slow_compute", rank=21, start=16, size=0.5))) == []


def test_what_costs_nothing_is_not_told() -> None:
    job = with_fault(Fault("slow_link", rank=21, start=16, size=1.0))
    assert slow_links(dataclasses.replace(job, transfer_ms=0.1)) == []


def test_one_group_alone_is_skipped_with_what_would_tell() -> None:
    state = look(dataclasses.replace(JOB, data=8, tensor=1, pipeline=1))
    (status,) = [
        detector
        for detector in state.look(START_NS + 10**12).detectors
        if detector.name == "slow-link"
    ]
    assert status.state == "skipped"
    assert "sendrecv_perf" in status.remedy


def test_slow_groups_without_a_common_part_name_nobody() -> None:
    (finding,) = slow_links(with_fault(Fault("slow_link", group="dp-0-0", start=16, size=1.0)))
    assert (finding.severity, finding.ranks) == ("info", ())
    assert "place is not known" in finding.what
