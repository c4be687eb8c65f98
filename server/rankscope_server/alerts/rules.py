"""Rules as data: about what, from which level on, of which runs, to which channels."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

import msgspec

from rankscope_server.alerts.seen import SeenRun
from rankscope_server.findings.finding import Severity
from rankscope_server.findings.kinds import KINDS

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=1, le=30 * 86_400)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
Pattern: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class When(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="about"
):
    """What a rule watches; `about` says which kind it is."""


class OnFinding(When, tag="finding", frozen=True, kw_only=True):
    """A finding that no other one explains. No kinds: all of them."""

    kinds: list[Annotated[str, msgspec.Meta(max_length=64)]] = []
    min_severity: Severity = "warning"
    min_confidence: Ratio = 0.0
    # Since it was found; within some seconds it shows whether another one explains it.
    lasts_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 5.0


class OnStall(When, tag="stall", frozen=True, kw_only=True):
    """A run whose ranks report, and that is stuck, or ends no step for so long."""

    seconds: Seconds = 1_800.0


class OnSilence(When, tag="silence", frozen=True, kw_only=True):
    """Nothing is heard of ranks, of a node's collector, or of a whole run."""

    seconds: Seconds = 120.0
    is_whole_run: bool = False  # True: only where nothing is heard of any rank


class OnThroughput(When, tag="throughput", frozen=True, kw_only=True):
    """What the costliest open finding loses: a share, or rank-hours a day. 0: not looked at."""

    share_ratio: Ratio = 0.1
    rank_hours_per_day: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class OnLoss(When, tag="loss", frozen=True, kw_only=True):
    """So much of a run is lost or was refused: an agent that reports, and is blind."""

    records: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1  # lost, refused, batches that lack


class OnBudget(When, tag="budget", frozen=True, kw_only=True):
    """A live run has spent so much, in the currency of the server's prices or in rank-hours.

    0: not looked at.
    """

    money: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    rank_hours: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0


class OnLag(When, tag="lag", frozen=True, kw_only=True):
    """What was sent waits to be stored, or stored data for the analysis, for so long."""

    seconds: Seconds = 120.0


class OnQueue(When, tag="queue", frozen=True, kw_only=True):
    """The queue of the store is so full."""

    used_ratio: Ratio = 0.8


class OnDisk(When, tag="disk", frozen=True, kw_only=True):
    """Less than so much is free on the disk of the store, or its database is so large.

    0: not looked at. The disk is seen where the store is a file of this machine.
    """

    free_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 5 << 30
    database_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0


AnyWhen: TypeAlias = (
    OnFinding | OnStall | OnSilence | OnThroughput | OnLoss | OnBudget | OnLag | OnQueue | OnDisk
)
OF_SERVER = (OnLag, OnQueue, OnDisk)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. Patterns are those of a shell: `*`, `?`, `[ab]`."""

    when: AnyWhen
    runs: Pattern = ""  # of a run's name or id; empty: all
    project: Pattern = ""  # of a run; empty: all
    tags: dict[str, Pattern] = {}  # all of them must match
    channels: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]] = []  # none: every channel
    is_enabled: bool = True


class RefusedError(ValueError):
    """A channel or a rule cannot be like this; `field` is which part, `remedy` what to say."""

    def __init__(self, field: str, what: str, remedy: str, status: int = 422) -> None:
        super().__init__(what)
        self.field, self.remedy, self.status = field, remedy, status


def check(rule: Rule) -> None:
    """Raise RefusedError where a rule names a kind of finding that there is not."""
    unknown = set(getattr(rule.when, "kinds", [])) - {kind.id for kind in KINDS}
    if unknown:
        raise RefusedError(
            "when.kinds", f"{min(unknown)[:64]!r} is no kind of finding",
            "see docs/detectors.md for the kinds",
        )  # fmt: skip


def matches(rule: Rule, run: SeenRun) -> bool:
    """Return whether a run is one that the rule is about."""
    if rule.runs and not any(fnmatchcase(name, rule.runs) for name in (run.run_id, run.name)):
        return False
    if rule.project and not fnmatchcase(run.project, rule.project):
        return False
    return all(
        fnmatchcase(run.tags.get(key, ""), pattern) and key in run.tags
        for key, pattern in rule.tags.items()
    )
