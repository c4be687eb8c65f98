"""gloo's own word on its address, against what was worked out from its rules."""

from __future__ import annotations

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.interfaces import Choice


def gloo_truth(run: Run, node: str) -> tuple[Choice, ...]:
    """Return what gloo itself chose on `node`, one for each of its devices; () if not asked."""
    report = run.reports.get(node)
    smoke = report.facts.smoke if report is not None else None
    return smoke.gloo if smoke is not None else ()


def difference(run: Run, node: str) -> str:
    """Return how gloo's choice differs from the emulated one; "" if it does not, or is unknown.

    Where they differ gloo is right, and the sentence is evidence.
    """
    truth = gloo_truth(run, node)
    report = run.reports.get(node)
    interfaces = report.facts.interfaces if report is not None else None
    guess = interfaces.gloo if interfaces is not None else ()
    if not truth or not guess or [_what(c) for c in truth] == [_what(c) for c in guess]:
        return ""
    return f"{node}: gloo itself takes {_told(truth)}; its rules suggest {_told(guess)}"


def _what(choice: Choice) -> str:
    """Return what decides: the address, or that there is none."""
    return "" if choice.problem else choice.address


def _told(choices: tuple[Choice, ...]) -> str:
    return ", ".join(choice.address or f"nothing ({choice.problem})" for choice in choices)
