"""Runs the checks over the merged reports: needs, limits, exceptions, exit code."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence
from typing import get_args

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import BUSY_MS, Check, Run
from rankscope.preflight.model import (
    EXIT_FAIL,
    EXIT_INCOMPLETE,
    EXIT_OK,
    EXIT_WARN,
    SCHEMA_VERSION,
    CheckFinding,
    LaunchVerdict,
    Result,
    Status,
)
from rankscope.preflight.options import Tier
from rankscope.preflight.verdict.cause import group

LIMIT_S = 5.0  # of one check; the slowest needs 0.2 s over the reports of 1,000 nodes
_WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "unknown", "skipped", "ok")
ABSENCES = ("node.absent", "node.secret")  # they say that nodes are missing, not that a job fails
_TRIED = "not evaluated"  # begins the reasons that leave a question open
# Without an answer to these it is not known that the launch works.
MUST_ANSWER = frozenset((
    "port.master.free", "port.master.reach", "port.master.identity", "port.ephemeral",
    "port.oneway", "port.intercepted", "net.mtu.path", "coll.rdzv", "coll.gloo", "coll.nccl",
))  # fmt: skip


def evaluate(run: Run, foreign: Sequence[Check] = (), limit_s: float = LIMIT_S) -> LaunchVerdict:
    """Run every check over `run` and group what one cause explains."""
    families = {**FAMILIES, "elsewhere": tuple(foreign)}
    found: list[CheckFinding] = []
    results: list[Result] = []
    for family, checks in families.items():
        for check in checks:
            reason = _left_out(check, family, run) or _missing(check, run)
            if reason:
                status: Status = "unknown" if reason.startswith(_TRIED) else "skipped"
                results.append(Result(id=check.id, family=family, status=status, reason=reason))
                continue
            started = time.monotonic()
            findings = _evaluated(check, run, limit_s)
            elapsed_ms = (time.monotonic() - started) * 1e3
            found += findings
            results.append(_result(check.id, family, findings, elapsed_ms))
    loud = group([f for f in found if f.status in ("fail", "warn")], run)
    quiet = [f for f in found if f.status in ("skipped", "unknown")]
    return LaunchVerdict(
        schema_version=SCHEMA_VERSION,
        run_id=run.run_id,
        expected=run.expected,
        reported=tuple(report.node for report in run.present),
        findings=tuple(loud),
        results=tuple(results),
        notes=tuple(quiet),
        is_partial=bool(run.absent) or any(r.stage != "done" for r in run.present),
    )


def exit_code(
    verdict: LaunchVerdict, fail_on: str = "fail", *, are_times_wanted: bool = True
) -> int:
    """Return the documented exit code of a verdict; without times, busy machines pass."""
    statuses = {f.status for f in verdict.findings if f.id not in ABSENCES}
    if "fail" in statuses:
        return EXIT_FAIL
    has_answers = any(r.status in ("ok", "warn") for r in verdict.results)
    is_absent = any(finding.id == "node.absent" for finding in verdict.findings)
    is_whole = not is_absent and len(verdict.reported) >= len(verdict.expected)
    if not is_whole or not has_answers or open_questions(verdict, are_times_wanted):
        return EXIT_INCOMPLETE
    return EXIT_WARN if "warn" in statuses and fail_on == "warn" else EXIT_OK


def open_questions(verdict: LaunchVerdict, are_times_wanted: bool = True) -> tuple[str, ...]:
    """Return the checks that a launch rests on and that found no answer.

    Those are `MUST_ANSWER`, and whatever a machine was too busy for: what that would have shown
    is not known. Other unknowns are shown, and count as neither passed nor failed.
    """
    return tuple(
        result.id
        for result in verdict.results
        if result.status == "unknown"
        and (result.id in MUST_ANSWER or (are_times_wanted and result.reason.startswith(_TRIED)))
    )


def sentence(check: Check) -> str:
    """Return the sentence of a check."""
    return (inspect.cleandoc(check.__doc__ or "")).splitlines()[0]


def _left_out(check: Check, family: str, run: Run) -> str:
    options, tiers = run.options, get_args(Tier)
    if reason := options.left_out(check.id, family):
        return reason
    if tiers.index(check.tier) > tiers.index(options.tier):
        return f"needs --{check.tier}" if check.tier == "deep" else "left out by --quick"
    return ""


def _missing(check: Check, run: Run) -> str:
    """Return why `check` does not apply to this run; "" if it does."""
    is_about_paths = check.scope == "pair" and "peers" in check.needs and len(run.expected) > 1
    if is_about_paths and not any(report.edges for report in run.present):
        return "no path was tried: the reports came without a network between the nodes"
    for need in sorted(check.needs, key=lambda one: (one == "cpu-pace", one)):
        reason = _UNMET[need](run)
        if reason:
            return reason
    return ""


def _no_gpu(run: Run) -> str:
    have = [r for r in run.present if r.facts.gpu is not None and r.facts.gpu.num_gpus > 0]
    return "" if have else "no GPU on any node"


def _no_torch(run: Run) -> str:
    have = [r for r in run.present if r.facts.software is not None and r.facts.software.has_torch]
    return "" if have else "torch is not installed on any node"


def _no_rdma(run: Run) -> str:
    have = [r for r in run.present if r.facts.rdma is not None and r.facts.rdma.ports]
    return "" if have else "no InfiniBand or RoCE port on any node"


def _no_pace(run: Run) -> str:
    if run.gone:
        return f"not evaluated: {', '.join(run.gone)} went away while paths were timed"
    late = {r.node: r.delay_p90_ms for r in run.present if r.delay_p90_ms > BUSY_MS}
    if not late:
        return ""
    node, worst = max(late.items(), key=lambda item: item[1])
    busy = f"{node} was too busy to time a path (a 20 ms sleep took {worst:.0f} ms more)"
    return f"not evaluated: {busy}"


def _no_smoke(run: Run) -> str:
    smokes = [r.facts.smoke for r in run.present if r.facts.smoke is not None]
    if any(smoke.skipped == "" for smoke in smokes):
        return ""
    reasons = sorted({smoke.skipped for smoke in smokes})
    return reasons[0] if reasons else "the collective smoke test was not started"


_UNMET = {
    "peers": lambda run: "" if len(run.expected) > 1 else "one node has no peers",
    "torch": _no_torch,
    "gpu": _no_gpu,
    "rdma": _no_rdma,
    "cpu-pace": _no_pace,
    "checkpoint-dir": lambda run: "" if run.options.checkpoint_dir else "no --checkpoint-dir",
    "script": lambda run: "" if run.options.script else "no --script",
    "loader": lambda run: "" if run.options.num_loader_workers else "no --loader-workers",
    "smoke": _no_smoke,
}


def _evaluated(check: Check, run: Run, limit_s: float) -> list[CheckFinding]:
    """Run one check in a thread of its own: neither its exception nor its hang is ours."""
    found: list[CheckFinding] = []

    def work() -> None:
        try:
            found.extend(list(check.evaluate(run)))
        except Exception as error:  # noqa: BLE001 - a broken check is a result
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(CheckFinding(id=check.id, status="unknown", title=text))

    thread = threading.Thread(target=work, name=f"preflight-{check.id}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        text = f"the check did not end in {limit_s:g} s"
        return [CheckFinding(id=check.id, status="unknown", title=text)]
    return found


def _result(id: str, family: str, findings: list[CheckFinding], elapsed_ms: float) -> Result:
    statuses: list[Status] = [finding.status for finding in findings]
    worst: Status = min(statuses, key=_WORST_FIRST.index, default="ok")
    quiet = worst in ("unknown", "skipped")
    reason = next((f.title for f in findings if f.status == worst), "") if quiet else ""
    return Result(id=id, family=family, status=worst, reason=reason, elapsed_ms=elapsed_ms)
