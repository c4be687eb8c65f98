"""What was said with evidence is taken back with as much."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from rankscope_server.analysis.state import RunState
from rankscope_server.findings import steadiness
from rankscope_server.findings.finding import Finding, Severity
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.steadiness import Steadiness
from tests.simulator.delivery import apply
from tests.simulator.job import Fault, Job, Noise
from tests.simulator.records import Item, Recording

SECOND_NS = 10**9
HOLD_NS = int(POLICY.persistent_seconds * SECOND_NS)


def finding(severity: Severity = "critical", **changes: object) -> Finding:
    made = Finding(
        key="0/straggler/slow_compute/3", detector="straggler", kind="slow_compute",
        severity=severity, attempt=0, what="", why="", next="", confidence=0.9, ranks=(3,),
        confidence_text="", would_be_wrong_if="", policy_hash="", cost_throughput_ratio=0.5,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


class Looks:
    """Looks one after the other, each with what a detector finds and a time in seconds."""

    def __init__(self, detector: str = "straggler") -> None:
        self._steadiness, self._detector = Steadiness(), detector
        self._before: dict[str, Finding] = {}

    def at(self, seconds: float, *found: Finding) -> list[Finding]:
        said = list(
            self._steadiness.settle(
                self._detector, self._before, found, int(seconds * SECOND_NS), POLICY
            )
        )
        self._before = {one.key: one for one in said}
        return said


def test_worse_is_said_at_once() -> None:
    looks = Looks()
    assert looks.at(0, finding("info")) == [finding("info")]
    assert looks.at(1, finding("warning")) == [finding("warning")]
    assert looks.at(2, finding("critical")) == [finding("critical")]


@pytest.mark.parametrize(
    "milder",
    [(), (finding("info"),), (finding(state="recovered", ended_step=9),)],
    ids=["gone", "info", "recovered"],
)
def test_milder_is_said_when_it_has_been_so_for_as_long(milder: tuple[Finding, ...]) -> None:
    looks = Looks()
    looks.at(0, finding())
    for second in range(1, 16):
        assert looks.at(second, *milder) == [finding()], second
    assert looks.at(16, *milder) == list(milder)
    assert looks.at(17, *milder) == list(milder)


def test_the_time_begins_anew_where_it_shows_again() -> None:
    looks = Looks()
    looks.at(0, finding())
    for second in range(1, 100):
        assert looks.at(second, *(() if second % 10 else (finding(),))) == [finding()]


@pytest.mark.parametrize(("cost", "severity"), [(0.08, "critical"), (0.07, "warning")])
def test_a_cost_just_below_its_level_changes_nothing(cost: float, severity: Severity) -> None:
    looks = Looks()
    looks.at(0, finding(cost_throughput_ratio=0.11))
    for second in range(1, 40):
        (said,) = looks.at(second, finding("warning", cost_throughput_ratio=cost))
    assert (said.severity, said.cost_throughput_ratio) == (severity, cost)


def test_ranks_that_another_finding_names_are_not_named_twice() -> None:
    looks, both = Looks(), finding(key="0/straggler/slow_compute/2+3", ranks=(2, 3))
    looks.at(0, finding())
    assert looks.at(1, both) == [both]


def test_what_is_known_has_no_delay() -> None:
    looks, hang = Looks("hang"), finding(detector="hang", kind="hang")
    assert looks.at(0, hang) == [hang]
    assert looks.at(1) == []


def job_of(seed: int) -> Job:
    """Return four ranks of one host, one of them slow, with other work that comes and goes."""
    chance = random.Random(seed)
    slow = Fault("slow_compute", chance.randrange(4), start=80, size=chance.uniform(0.1, 0.4))
    bursts = [
        (chance.randrange(40, 250), chance.randrange(5, 40), chance.uniform(0.2, 0.8))
        for _ in range(4)
    ]
    others = [
        Fault("slow_compute", rank, start=start, steps=steps, size=size)
        for start, steps, size in bursts
        for rank in range(4)
        if chance.random() < 0.8
    ]
    return Job(
        data=4, ranks_per_host=4, steps=400, forward_ms=100.0, noise=Noise(sigma=0.06),
        seed=seed, faults=(slow, *others),
    )  # fmt: skip


def num_short_lived(items: Sequence[Item]) -> int:
    """Return how often an accusation of a rank is milder or gone within 14 s of looks.

    A rank's accusation is the worst open finding above info that names it.
    """
    state, waiting, last_ns = RunState("run"), list[Item](), 0
    since_ns: dict[int, tuple[int, int]] = {}  # how bad it is, and since when
    found = 0
    for at_ns, what in items:
        waiting.append((at_ns, what))
        if at_ns - last_ns < SECOND_NS:
            continue
        apply(state, waiting)
        waiting, last_ns = [], at_ns
        now: dict[int, int] = {}
        for other in state.look(at_ns).findings:
            if other.detector == "straggler" and other.state == "open" and other.severity != "info":
                for rank in other.ranks:
                    now[rank] = max(now.get(rank, 0), 2 if other.severity == "critical" else 1)
        for rank in since_ns.keys() | now.keys():
            bad, began_ns = since_ns.get(rank, (0, at_ns))
            if now.get(rank, 0) < bad:
                found += at_ns - began_ns < HOLD_NS - SECOND_NS
            if now.get(rank, 0) != bad:
                since_ns[rank] = (now.get(rank, 0), at_ns)
    return found


def test_no_accusation_is_short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [list(Recording(job_of(seed)).items()) for seed in range(6)]
    assert [num_short_lived(items) for items in jobs] == [0] * 6
    monkeypatch.setattr(steadiness, "ESTIMATES", frozenset())
    found = accumulate(num_short_lived(items) for items in jobs)
    assert any(number > 2 for number in found)  # or these jobs show nothing
