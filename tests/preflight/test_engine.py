"""The engine owns needs, limits, exceptions and the exit code; checks own nothing of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import ClassVar

import msgspec
import pytest

from rankscope.preflight import collect, launch_gate
from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.model import CheckFinding, LaunchVerdict, Result, Scope, Status
from rankscope.preflight.options import Options, Tier
from rankscope.preflight.report.summary import summarise
from rankscope.preflight.system import System
from rankscope.preflight.verdict import engine
from tests.preflight.synthetic import Cluster


class Foreign:
    """A check of another package, which says what a test wants."""

    id: ClassVar[str] = "site.badge"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Say nothing: ok."""
        return ()


class Crashing(Foreign):
    """Raises after its first finding."""

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Fail half way."""
        yield CheckFinding(id=self.id, status="fail", title="half a finding", nodes=("node0",))
        raise KeyError("badge")


class Hanging(Foreign):
    """Never ends."""

    released = threading.Event()

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Wait for the test's end."""
        self.released.wait(60)
        return ()


def cluster(num: int = 3, **options: object) -> Run:
    names = tuple(f"node{number}" for number in range(num))
    return Cluster(names, options=Options(**options)).run()  # type: ignore[arg-type]


def result(verdict: LaunchVerdict, id: str) -> tuple[Status, str]:
    return next((r.status, r.reason) for r in verdict.results if r.id == id)


def test_a_check_that_crashes_is_unknown_and_the_others_are_judged() -> None:
    verdict = engine.evaluate(cluster(), (Crashing(),))
    status, reason = result(verdict, "site.badge")
    assert status == "unknown"
    assert "KeyError" in reason
    assert verdict.findings == ()  # half a verdict is none
    assert result(verdict, "port.ephemeral") == ("ok", "")


def test_a_check_that_hangs_costs_its_limit() -> None:
    started = time.monotonic()
    verdict = engine.evaluate(cluster(), (Hanging(),), limit_s=0.2)
    Hanging.released.set()
    assert result(verdict, "site.badge") == ("unknown", "the check did not end in 0.2 s")
    assert time.monotonic() - started < 30  # it sleeps for 60


def test_a_collector_that_hangs_or_crashes_is_told_with_its_reason() -> None:
    import asyncio

    released = threading.Event()
    hang = collect.Part("site.badge", lambda: released.wait(60), 0.2)
    crash = collect.Part("gpu", lambda: 1 // 0, 5.0)
    _, hung = asyncio.run(collect.measure(hang))
    _, crashed = asyncio.run(collect.measure(crash))
    released.set()
    assert hung is not None
    assert crashed is not None
    assert (hung.part, hung.reason) == ("site.badge", "not measured: no answer in 0.2 s")
    assert "ZeroDivisionError" in crashed.reason


def test_names_that_are_no_text_can_be_sent() -> None:
    import asyncio

    facts = LaunchFacts(environment={"NCCL_DEBUG_FILE": "/tmp/\udcff"})
    found, trouble = asyncio.run(collect.measure(collect.Part("launch", lambda: facts, 5.0)))
    assert trouble is None
    assert found == LaunchFacts(environment={"NCCL_DEBUG_FILE": "/tmp/?"})


def test_a_check_from_elsewhere_may_bring_its_own_facts() -> None:
    class Collecting(Foreign):
        """Has facts."""

        def collect(self, system: System) -> dict[str, str]:
            """Return the host's name."""
            return {"host": system.hostname()}

    (part,) = collect.foreign_parts((Foreign(), Collecting()), System())
    assert part.collect() == {"host": System().hostname()}


@pytest.mark.parametrize(
    ("options", "id", "reason"),
    [
        ({"only": ("clock",)}, "port.ephemeral", "not among --only"),
        ({"skip": ("ports",)}, "port.ephemeral", "left out by --skip"),
        ({"skip": ("port.ephemeral",)}, "port.ephemeral", "left out by --skip"),
        ({"tier": "quick"}, "net.bandwidth", "left out by --quick"),
        ({}, "net.idle", "needs --deep"),
        ({}, "gpu.ecc", "no GPU on any node"),
        ({}, "ib.port", "no InfiniBand or RoCE port on any node"),
        ({}, "fs.shared", "no --checkpoint-dir"),
        ({}, "sw.script", "no --script"),
    ],
)
def test_what_does_not_apply_is_skipped_with_its_reason(
    options: dict[str, object], id: str, reason: str
) -> None:
    assert result(engine.evaluate(cluster(**options)), id) == ("skipped", reason)


def test_on_a_busy_node_paths_are_not_judged_and_not_called_healthy() -> None:
    run = cluster()
    late = msgspec.structs.replace(run.reports["node1"], delay_p90_ms=80.0)
    run = Run(run.run_id, run.expected, {**run.reports, "node1": late}, run.options)
    status, reason = result(engine.evaluate(run), "net.bandwidth")
    assert status == "unknown"
    assert reason.startswith("not evaluated: node1 was too busy")


def test_a_busy_machine_is_incomplete_and_says_what_for() -> None:
    run = cluster()
    late = msgspec.structs.replace(run.reports["node1"], delay_p90_ms=80.0)
    run = Run(run.run_id, run.expected, {**run.reports, "node1": late}, run.options)
    verdict = engine.evaluate(run)
    assert set(engine.open_questions(verdict)) == {
        "net.latency", "net.jitter", "net.loss", "net.bandwidth"
    }  # fmt: skip
    assert engine.exit_code(verdict) == 3
    assert "no answer to net.latency" in summarise(verdict, run).outcome
    left_out = Run(run.run_id, run.expected, run.reports, Options(skip=("paths",)))
    assert engine.exit_code(engine.evaluate(left_out)) == 0


def test_a_busy_machine_may_launch_unless_warnings_are_no_pass() -> None:
    some = Cluster(("node0", "node1", "node2"))
    some.report("node1", delay_p90_ms=400.0)
    run = some.run()
    summary = summarise(engine.evaluate(run), run)
    assert summary.exit_code == 3
    assert not launch_gate._reason(summary, "fail")
    assert "net.latency" in launch_gate._reason(summary, "warn")


def test_reports_that_used_no_network_leave_no_question_open() -> None:
    """`--emit` and `merge`: paths were not asked for, so they are skipped, not unknown."""
    run = cluster()
    bare = {name: msgspec.structs.replace(r, edges={}) for name, r in run.reports.items()}
    verdict = engine.evaluate(Run(run.run_id, run.expected, bare, run.options))
    status, reason = result(verdict, "port.ephemeral")
    assert (status, reason[:21]) == ("skipped", "no path was tried: th")
    assert not set(engine.open_questions(verdict)) & {"port.ephemeral", "net.mtu.path"}


@pytest.mark.parametrize("id", sorted(engine.MUST_ANSWER))
def test_what_a_launch_rests_on_must_be_answered(id: str) -> None:
    verdict = verdict_of()
    rows = [Result(id=id, family="x", status="unknown", reason="no answer")]
    verdict = msgspec.structs.replace(verdict, results=(*verdict.results, *rows))
    assert engine.exit_code(verdict) == 3


def test_another_unknown_is_told_and_does_not_count() -> None:
    rows = [Result(id="clock.sync", family="clock", status="unknown", reason="no answer")]
    verdict = msgspec.structs.replace(verdict_of(), results=(*verdict_of().results, *rows))
    assert engine.exit_code(verdict) == 0


def verdict_of(*statuses: Status, expected: int = 2, reported: int = 2) -> LaunchVerdict:
    names = tuple(f"node{number}" for number in range(expected))
    findings = tuple(CheckFinding(id="lim.nofile", status=s, title="x") for s in statuses)
    some = engine.evaluate(cluster(2))
    return msgspec.structs.replace(
        some, expected=names, reported=names[:reported], findings=findings
    )


@pytest.mark.parametrize(
    ("verdict", "fail_on", "code"),
    [
        (verdict_of(), "fail", 0),
        (verdict_of("warn"), "fail", 0),
        (verdict_of("warn"), "warn", 1),
        (verdict_of("warn", "fail"), "warn", 2),
        (verdict_of(reported=1), "fail", 3),
        (verdict_of("fail", reported=1), "fail", 2),
        (msgspec.structs.replace(verdict_of(), results=()), "fail", 3),
    ],
)
def test_exit_codes(verdict: LaunchVerdict, fail_on: str, code: int) -> None:
    assert engine.exit_code(verdict, fail_on) == code
