"""One preflight as people read it: the sentence, checks by family with the worst first, nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache

from rankscope.preflight.model import EXIT_FAIL, LaunchVerdict, Result
from rankscope.preflight.report.catalogue import rows as catalogue
from rankscope.preflight.report.nodes import compress
from rankscope.preflight.verdict.engine import ABSENCES, exit_code, open_questions
from rankscope_server.answers import capped, to_ms
from rankscope_server.api.preflight.matrix import finding_answer
from rankscope_server.api.preflight.queries import may_launch, summary
from rankscope_server.api.preflight.schema import (
    PreflightCheck,
    PreflightNode,
    PreflightSummary,
    PreflightView,
)
from rankscope_server.preflight.live import Live
from rankscope_server.preflight.store import findings_by_node
from rankscope_server.text import plural

MAX_NODES = 256
_WORST_FIRST = ("fail", "warn", "unknown", "skipped", "ok")
_NODES_WORST_FIRST = ("fail", "warn", "missing", "unknown", "ok")
_NAMES_WRITTEN_OUT = 8  # more nodes are written as ranges


def view(live: Live, last_good: PreflightSummary | None, is_here: bool) -> PreflightView:
    """Return a preflight for its page; `is_here`: this server is the one that coordinates it."""
    verdict = live.verdict
    nodes = sorted(_nodes(live), key=lambda one: _NODES_WORST_FIRST.index(one.status))
    is_open = is_going_on(live)
    findings = verdict.findings if verdict is not None else ()
    return PreflightView(
        summary=summary(live),
        text=sentence(live),
        is_settled=live.is_settled or not is_open,
        is_under_way=is_here and is_open,
        waiting_for=list(live.waiting_for) if is_open else [],
        coverage=verdict.coverage if verdict is not None else "",
        command=command(live),
        findings=[
            finding_answer(one)
            for one in sorted(findings, key=lambda one: _WORST_FIRST.index(one.status))
        ],
        checks=checks(verdict.results if verdict is not None else ()),
        nodes=nodes[:MAX_NODES],
        last_good=last_good,
        capped=capped(min(len(nodes), MAX_NODES), len(nodes)),
    )


def is_going_on(live: Live) -> bool:
    """Return whether anything is still to come: none of its nodes may be heard any more."""
    is_open = not live.finished_ns and time.time_ns() < live.expires_ns
    return is_open and not (live.stored and live.is_calm)


def sentence(live: Live) -> str:
    """Return the answer: may this be launched, and the first reason if not."""
    if is_going_on(live) and not (live.is_settled and live.evaluated_number == live.number):
        num_ended = len(live.expected) - len(live.waiting_for)
        return f"Still under way: {num_ended} of {plural(len(live.expected), 'node')} ended"
    return verdict_sentence(live.verdict)


def verdict_sentence(verdict: LaunchVerdict | None) -> str:
    """Return what a verdict says of a launch."""
    if verdict is None:
        return "Not known whether it would launch: nothing was evaluated"
    failing = [one for one in verdict.findings if one.status == "fail"]
    failing.sort(key=lambda one: one.id in ABSENCES)  # who is missing breaks no launch of others
    failures = [one.title for one in failing]
    warnings = [one.title for one in verdict.findings if one.status == "warn"]
    if exit_code(verdict) == EXIT_FAIL:
        return f"Do not launch yet: {failures[0]}{_others(len(failures) - 1, 'failure')}"
    if not may_launch(verdict):
        return f"Not known whether it would launch: {_gap(verdict, failures)}"
    if warnings:
        return f"Would launch, with a warning: {warnings[0]}{_others(len(warnings) - 1, 'warning')}"
    passed = sum(result.status == "ok" for result in verdict.results)
    return f"Ready to launch: {plural(passed, 'check')} passed on {_on(verdict)}"


def checks(results: Iterable[Result]) -> list[PreflightCheck]:
    """Return the checks by family: the family with the worst first, in it the worst first."""
    given = list(results)
    worst: dict[str, int] = {}
    for result in given:
        place = _WORST_FIRST.index(result.status)
        worst[result.family] = min(worst.get(result.family, place), place)
    families = list(worst)  # in the order of the catalogue
    given.sort(
        key=lambda one: (
            worst[one.family], families.index(one.family), _WORST_FIRST.index(one.status),
        )
    )  # fmt: skip
    return [
        PreflightCheck(
            id=one.id, family=one.family, what=_sentences().get(one.id, ""), status=one.status,
            reason=one.reason,
        )
        for one in given
    ]  # fmt: skip


def command(live: Live) -> str:
    """Return what repeats it on each of its nodes; empty where not all names are known."""
    names = [name for name in live.expected if name in live.members or name in live.nodes]
    if len(names) < len(live.expected) or not names:
        return ""
    if len(names) == 1:
        return "rankscope preflight"
    listed = ",".join(names) if len(names) <= _NAMES_WRITTEN_OUT else compress(names)
    return f"rankscope preflight --nodes {listed}"


def _gap(verdict: LaunchVerdict, failures: list[str]) -> str:
    if failures:
        return f"{failures[0]}{_others(len(failures) - 1, 'failure')}"
    missing = [name for name in verdict.expected if name not in verdict.reported]
    if missing:
        return f"{missing[0]} has not reported{_others(len(missing) - 1, 'node')}"
    questions = open_questions(verdict)
    if questions:
        reason = next((one.reason for one in verdict.results if one.id == questions[0]), "")
        return f"no answer to {', '.join(questions)}" + (f" ({reason})" if reason else "")
    if verdict.is_partial:
        return "some of its nodes had not ended"
    return "no check could be evaluated"


def _others(num: int, noun: str) -> str:
    return f", and {plural(num, f'more {noun}')}" if num > 0 else ""


def _on(verdict: LaunchVerdict) -> str:
    return plural(len(verdict.reported), "node")


def _nodes(live: Live) -> Iterable[PreflightNode]:
    named = findings_by_node(live.verdict)
    for name in live.expected:
        member, stored = live.members.get(name), live.stored.get(name)
        host = stored.report.facts.host if stored is not None else None
        mine = named.get(name, [])
        status = "missing" if stored is None else "unknown" if live.verdict is None else "ok"
        if mine:
            status = "fail" if any(one.status == "fail" for one in mine) else "warn"
        rank = member.node_rank if member is not None else -1
        yield PreflightNode(
            node=name,
            status=status,
            host=host.hostname if host is not None else "",
            node_rank=rank if rank >= 0 else None,
            stage=stored.report.stage if stored is not None else "",
            observed=member.observed if member is not None else "",
            addresses=list(member.addresses) if member is not None else [],
            ports=list(member.ports) if member is not None else [],
            joined_ms=to_ms(member.joined_ns) if member is not None else None,
            findings=[one.id for one in mine],
        )


@cache
def _sentences() -> dict[str, str]:
    return {row.id: row.sentence for row in catalogue()}
