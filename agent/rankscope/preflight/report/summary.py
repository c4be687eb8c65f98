"""What every report shows of a verdict, worked out once: heading, families, counts, exit code."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.preflight.checks.base import Run, listed
from rankscope.preflight.model import (
    EXIT_FAIL,
    EXIT_INCOMPLETE,
    CheckFinding,
    Fix,
    LaunchVerdict,
    Result,
    Status,
)
from rankscope.preflight.plan import UNNAMED
from rankscope.preflight.report.matrix import Matrix, build
from rankscope.preflight.report.nodes import compress
from rankscope.preflight.report.words import clean, count, joined, most_common_first, seconds_text
from rankscope.preflight.verdict.engine import exit_code, open_questions

_WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "unknown", "ok", "skipped")
_LAUNCHERS = {"hand": "started by hand", "env": "environment", "mpi": "MPI", "slurm": "Slurm",
              "horovod": "horovodrun", "kubernetes": "Kubernetes"}  # fmt: skip
_MOST_REASONS = 3
_SMALL = 8  # rows of a matrix that leaves room for the findings


@dataclass(frozen=True)
class Family:
    """All checks of one family as one word."""

    name: str
    status: Status  # of its worst check; skipped only if all of them are
    reason: str = ""  # of a family that gave no answer


@dataclass(frozen=True)
class Summary:
    """A verdict with what was worked out from it."""

    verdict: LaunchVerdict
    run: Run
    heading: tuple[str, ...]
    families: tuple[Family, ...]
    findings: tuple[CheckFinding, ...]  # fail before warn, otherwise as the engine ordered them
    unknown: tuple[CheckFinding, ...]  # one per check and reason: tried, no answer
    counts: str  # "62 checks passed, 17 skipped (...)"
    outcome: str  # "2 failures, 1 warning, exit 2"
    exit_code: int
    matrix: Matrix | None  # of all nodes, where they are few enough
    small_matrix: Matrix | None  # only the nodes with bad paths, the others as one
    url: str = ""


def summarise(
    verdict: LaunchVerdict,
    run: Run,
    fail_on: str = "fail",
    url: str = "",
    is_interrupted: bool = False,
) -> Summary:
    """Return what the reports show of `verdict`, which rests on `run`."""
    code = exit_code(verdict, fail_on)
    if is_interrupted and code != EXIT_FAIL:
        code = EXIT_INCOMPLETE  # what the rest would have shown is not known
    findings = sorted(verdict.findings, key=lambda finding: _WORST_FIRST.index(finding.status))
    return Summary(
        verdict=verdict,
        run=run,
        heading=_heading(verdict, run, is_interrupted),
        families=_families(verdict.results),
        findings=tuple(findings),
        unknown=(*_unknown(verdict), *_troubles(run)),
        counts=_counts(verdict.results),
        outcome=_outcome(verdict, code),
        exit_code=code,
        matrix=build(verdict, run),
        small_matrix=build(verdict, run, most_nodes=_SMALL),
        url=clean(url),
    )


def nodes_text(names: tuple[str, ...]) -> str:
    """Return nodes in the short form of Slurm, as people paste it: "node[1-3], gpu-7"."""
    return clean(compress(names).replace("],", "], "))


def fixes(finding: CheckFinding) -> list[tuple[str, str, str]]:
    """Return (nodes, owner, command) of each repair; equal ones of several nodes are one."""
    together: dict[tuple[str, str], list[Fix]] = {}
    for fix in finding.fix:
        together.setdefault((fix.owner, fix.command), []).append(fix)
    rows = []
    for (owner, command), same in together.items():
        named = tuple(fix.node for fix in same if fix.node)
        everywhere = len(named) < len(same)
        rows.append(("every node" if everywhere else nodes_text(named), owner, command))
    return rows


def _heading(verdict: LaunchVerdict, run: Run, is_interrupted: bool) -> tuple[str, ...]:
    num, wanted = len(verdict.reported), max(len(verdict.expected), len(verdict.reported))
    nodes = count(num, "node") if num == wanted else f"{num:,} of {count(wanted, 'node')}"
    launcher = next((one.launcher for one in run.launches.values()), None)
    launch = "" if launcher is None else _LAUNCHERS.get(launcher, launcher)
    if launcher not in (None, "hand"):
        launch += f", {run.mode}"
    took = seconds_text(verdict.elapsed_ms) if verdict.elapsed_ms else ""
    is_cut = verdict.is_partial and num == wanted
    partial = "interrupted" if is_interrupted else "partial" if is_cut else ""
    named = "" if verdict.run_id == UNNAMED else f"run {clean(verdict.run_id)}"
    parts = (named, nodes, run.backend, launch, took, partial)
    return tuple(part for part in parts if part)


def _families(results: tuple[Result, ...]) -> tuple[Family, ...]:
    members: dict[str, list[Result]] = {}
    for result in results:
        members.setdefault(result.family, []).append(result)
    families = []
    for name, those in members.items():
        status: Status = min((one.status for one in those), key=_WORST_FIRST.index)
        reasons = [one.reason for one in those if one.status == status and one.reason]
        reason = _bare(most_common_first(reasons)[0][0]) if reasons else ""
        families.append(Family(name, status, reason))
    return tuple(families)


def _unknown(verdict: LaunchVerdict) -> tuple[CheckFinding, ...]:
    """Return what was tried without an answer: of findings, and of checks that gave no answer."""
    found = {(one.id, one.title): one for one in verdict.notes if one.status == "unknown"}
    known = {one.id for one in found.values()}
    for result in verdict.results:
        if result.status == "unknown" and result.id not in known:
            title = result.reason or "no answer"
            found[result.id, title] = CheckFinding(id=result.id, status="unknown", title=title)
    return tuple(found.values())


def _troubles(run: Run) -> tuple[CheckFinding, ...]:
    """Return what could not be measured or carried, each reason with the nodes that met it."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for report in run.present:
        for trouble in report.troubles:
            if trouble.status == "unknown":
                nodes.setdefault((trouble.part, trouble.reason), []).append(report.node)
    return tuple(
        CheckFinding(id=part, status="unknown", title=f"{nodes_text(tuple(names))}: {reason}")
        for (part, reason), names in nodes.items()
    )


def _counts(results: tuple[Result, ...]) -> str:
    num = {status: sum(one.status == status for one in results) for status in _WORST_FIRST}
    parts = [f"{count(num['ok'], 'check')} passed"]
    if num["unknown"]:
        parts.append(f"{num['unknown']} unknown")
    if num["skipped"]:
        reasons = most_common_first(one.reason for one in results if one.status == "skipped")
        texts = [f"{_bare(reason)}: {times}" for reason, times in reasons[:_MOST_REASONS]]
        left = sum(times for _, times in reasons[_MOST_REASONS:])
        texts += [f"other reasons: {left}"] if left else []
        parts.append(f"{num['skipped']} skipped ({'; '.join(texts)})")
    return ", ".join(parts)


def _bare(reason: str) -> str:
    return clean(reason).removeprefix("skipped: ")


def _outcome(verdict: LaunchVerdict, code: int) -> str:
    statuses = [finding.status for finding in verdict.findings]
    missing = len(set(verdict.expected) - set(verdict.reported))
    parts = []
    if statuses.count("fail"):
        parts.append(count(statuses.count("fail"), "failure"))
    if statuses.count("warn"):
        parts.append(count(statuses.count("warn"), "warning"))
    if missing:
        parts.append(f"{count(missing, 'node')} not evaluated")
    open_ones = open_questions(verdict)
    if open_ones and code == EXIT_INCOMPLETE:
        parts.append(f"no answer to {listed(open_ones)}")
    if not parts:
        parts.append("not everything was evaluated" if code == EXIT_INCOMPLETE else "passed")
    return f"{joined(parts, ', ')}, exit {code}"
