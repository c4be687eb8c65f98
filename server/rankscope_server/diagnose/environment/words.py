"""What the drift detector says: one finding for all that the same ranks differ on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import SEVERITIES, Evidence, Finding
from rankscope_server.findings.text import capital, confidence_word, cut, place_text, ranks_text

if TYPE_CHECKING:
    from rankscope_server.diagnose.environment.drift import Difference

_MAX_EVIDENCE = 12
_COMMANDS = {
    "torch": 'python -c "import torch; print(torch.__version__, torch.__file__)"',
    "torch.git": 'python -c "import torch; print(torch.version.git_version, torch.__file__)"',
    "nccl": 'python -c "import torch; print(torch.cuda.nccl.version())"',
    "code.commit": "git log -1 --oneline; git status --short",
    "code.hash": "git diff --stat; sha256sum *.py",
    "torch.cuda": 'python -c "import torch; print(torch.version.cuda)"',
    "driver": "cat /proc/driver/nvidia/version",
    "kernel": "uname -r",
}


def finding_of(window: Window, story: Sequence[Difference], num_known: int) -> Finding:
    """Return the finding on facts that the same ranks differ on, the worst fact first."""
    facts = sorted(story, key=lambda one: (SEVERITIES.index(one.severity), one.fact))
    worst, ranks = facts[0], facts[0].ranks
    confidence, reason = _confidence(worst, num_known)
    tag = zlib.crc32(repr(ranks or worst.fact).encode())
    return Finding(
        key=f"{window.attempt}/drift/{tag:08x}",
        detector="drift",
        kind="version_drift" if worst.kind in ("version", "environment") else "drift",
        severity=worst.severity,
        attempt=window.attempt,
        ranks=ranks,
        hosts=window.hosts(ranks),
        what=_what(window, worst, len(facts)),
        why=_why(facts, num_known),
        next=_next(window, worst),
        next_command=_command(window, worst),
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reason}",
        evidence=tuple(Evidence(_fact_text(one)) for one in facts[:_MAX_EVIDENCE]),
        ruled_out=("Values that belong to one rank, host or local rank by design were left out",),
        would_be_wrong_if="The difference is intended, for example a test of a new version",
        policy_hash=window.policy.hash,
    )


def _name(fact: str) -> str:
    return fact.removeprefix("env.")


def _what(window: Window, one: Difference, count: int) -> str:
    more = f" and {count - 1} more facts" if count > 2 else " and one more fact" * (count == 2)
    others = one.values[0][0]
    if not one.ranks:
        sides = "; ".join(f"{ranks_text(ranks)}: {cut(value, 40)}" for value, ranks in
                          one.values[:3])  # fmt: skip
        return f"Ranks differ on {_name(one.fact)}{more}: {sides}"
    who = capital(place_text(one.ranks, window.hosts(one.ranks)))
    verb = "has" if len(one.ranks) == 1 else "have"
    values = [value for value, _ in one.values[1:]]
    shown = cut(values[0], 60) if len(values) == 1 else f"{len(values)} other values"
    return f"{who} {verb} {_name(one.fact)} {shown}{more}; the others {cut(others, 60)}"


def _why(facts: Sequence[Difference], num_known: int) -> str:
    worst = facts[0]
    text = f"{len(worst.values[0][1])} of {num_known} ranks agree on {_name(worst.fact)}"
    if len(facts) > 1:
        names = ", ".join(_name(one.fact) for one in facts[1:6])
        text += f"; the same ranks also differ on {names}"
        text += f" and {len(facts) - 6} more" * (len(facts) > 6)
    if worst.p_trouble is not None:
        p = "p < 0.001" if worst.p_trouble < 1e-3 else f"p = {worst.p_trouble:.3f}"
        text += f"; these are also the ranks that are slow or failed (Fisher {p})"
    return text


def _next(window: Window, one: Difference) -> str:
    hosts = window.hosts(one.ranks)
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts" if hosts else ""
    where = where or "on all ranks"
    name = _name(one.fact)
    if one.kind == "version":
        return f"Install the same {name} {where} before the next start, best from one image"
    if one.kind == "environment":
        return f"Set {name} alike {where} in the launch script before the next start"
    if one.kind == "job":
        return f"Start all ranks from the same {name}: stop, copy code and configuration, start"
    return f"Check the hardware and its settings {where}, or give such machines a job of their own"


def _command(window: Window, one: Difference) -> str:
    """Return what shows the fact where it differs; of a variable, as the process has it."""
    known = window.ranks.get(one.ranks[0] if one.ranks else one.values[-1][1][0])
    if known is not None and one.fact.startswith("env."):
        return f"tr '\\0' '\\n' < /proc/{known.pid}/environ | grep ^{_name(one.fact)}="
    if known is not None and one.fact == "command.hash":
        return f"tr '\\0' ' ' < /proc/{known.pid}/cmdline"
    return _COMMANDS.get(one.fact, "")


def _fact_text(one: Difference) -> str:
    sides = "; ".join(
        f"{cut(value, 80)} on {ranks_text(ranks)}" for value, ranks in reversed(one.values[:4])
    )
    return f"{_name(one.fact)} ({one.severity}): {sides}"


def _confidence(one: Difference, num_known: int) -> tuple[float, str]:
    """Return 0.6 for a tie, 0.8 for a majority, 0.95 for three quarters of at least four."""
    share = len(one.values[0][1]) / max(num_known, 1)
    if not one.ranks:
        return 0.6, "values are as the ranks loaded them, but no value has a majority"
    if share >= 0.75 and num_known >= 4:
        return 0.95, f"{100 * share:.0f} % of the ranks agree, as they themselves loaded it"
    return 0.8, "a majority agrees, as the ranks themselves loaded it"
