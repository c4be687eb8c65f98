"""The gate before a launch: checks what is about to start, and returns whether it may."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Literal, TextIO

from rankscope.preflight.checks.base import listed
from rankscope.preflight.exchange.discover import Asked
from rankscope.preflight.model import EXIT_INCOMPLETE
from rankscope.preflight.options import Options, Tier
from rankscope.preflight.persist import persist
from rankscope.preflight.plan import Request, StandsAside, UsageError
from rankscope.preflight.report import screen
from rankscope.preflight.report.progress import Live
from rankscope.preflight.report.summary import Summary, summarise
from rankscope.preflight.report.words import clean, count
from rankscope.preflight.runner import PART_LIMIT_S
from rankscope.preflight.start import look_up, plan_of, run
from rankscope.preflight.system import System
from rankscope.preflight.verdict.engine import exit_code, open_questions

RefuseOn = Literal["fail", "warn", "never"]
# A launch must not dial the agent that node 0 is just ending: it would take it for a broken store.
SETTLE_S = PART_LIMIT_S + 0.5  # node 0 listens at most so much longer than the others
EXIT_REFUSED = 78  # EX_CONFIG of sysexits.h: no launcher of training and no Python error uses it


def check(
    command: Sequence[str],
    tier: Tier,
    refuse_on: RefuseOn,
    nodes: tuple[str, ...] = (),
    server: str = "",
    stream: TextIO | None = None,
) -> str:
    """Run the preflight of `command` and print its report on `stream`, which is stderr.

    Returns why the launch is refused; an empty text if it may start. All ports are free again.
    Raises UsageError if the preflight itself cannot be asked so.
    """
    request = Request(who=Asked(nodes=nodes), options=Options(tier=tier), command=command)
    system, stream = System(), stream or sys.stderr
    try:
        plan = plan_of(request, system, look_up(request, system))
    except StandsAside:
        return ""  # another process of this node does it
    with Live(stream) as progress:
        ended = run(plan, progress)
    outcome = ended.outcome
    fail_on = "warn" if refuse_on == "warn" else "fail"
    stored = persist(plan, outcome, os.environ, server)
    if stored.error:
        stream.write(f"rankscope preflight: {stored.error}\n")
    summary = summarise(outcome.verdict, outcome.run, fail_on, stored.url)
    screen.show(summary, screen.console_of(stream))
    if ended.is_interrupted:
        return "the preflight was interrupted"
    reason = "" if refuse_on == "never" else _reason(summary, refuse_on)
    if not reason and len(outcome.run.expected) > 1 and outcome.run.master != plan.who.me:
        time.sleep(SETTLE_S)
    return reason


def _reason(summary: Summary, refuse_on: RefuseOn) -> str:
    """Return why not; that a machine was too busy to time its paths is shown, and no reason."""
    are_times_wanted = refuse_on == "warn"
    code = exit_code(summary.verdict, refuse_on, are_times_wanted=are_times_wanted)
    if not code:
        return ""
    if summary.findings and summary.findings[0].status == "fail":
        num_more = len(summary.findings) - 1
        more = f" (and {count(num_more, 'finding')} more)" if num_more else ""
        return f"{clean(summary.findings[0].title)}{more}"
    if open_ones := open_questions(summary.verdict, are_times_wanted):
        return f"no answer to {listed(open_ones)}, and unknown is not healthy"
    if code == EXIT_INCOMPLETE:
        return "nothing could be evaluated, and unknown is not healthy"
    return f"{clean(summary.findings[0].title)}; --preflight-on fail launches in spite of warnings"


__all__ = ["EXIT_REFUSED", "RefuseOn", "UsageError", "check"]
