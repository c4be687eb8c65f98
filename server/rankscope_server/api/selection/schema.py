"""Answers about some ranks in some steps."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, Schema

Reference: TypeAlias = Literal["others", "other roles", "peers", "own"]
Kind: TypeAlias = Literal["finding", "error", "host", "stage", "group", "local_rank", "fact"]


class Shared(Schema, frozen=True):
    """Something that every selected rank has of which it is known."""

    kind: Kind
    name: str
    value: str
    text: str
    num_selected: int  # that have it
    num_unknown: int  # selected ones of which it is not known
    num_others: int  # ranks that are not selected and have it too
    num_others_known: int
    num_others_unknown: int


class PhaseDeviation(Schema, frozen=True):
    """A phase of the selected ranks beside that of the others, without waiting for peers."""

    phase: str
    self_ms: float
    others_ms: float
    extra_ms: float


class SlowRanks(Schema, frozen=True):
    """Selected ranks that are slower than usual in these steps."""

    ranks: str  # as the parameter of that name
    text: str
    count: int
    ratio: float  # of the slowest


class WorstCell(Schema, frozen=True):
    """The selected rank and step with the largest ratio, of those that were read."""

    rank: int
    step: int
    ratio: float
    z: float | None


class SelectedFinding(Schema, frozen=True):
    """A finding that names a selected rank and holds in a selected step."""

    id: int
    what: str
    severity: str
    state: str
    num_named: int  # of the selected ranks


class SelectedError(Schema, frozen=True):
    """Errors of one kind that selected ranks raised in these steps."""

    type: str
    message: str
    count: int
    num_ranks: int


class Selection(Schema, frozen=True):
    """Some ranks in some steps, beside the other ranks in the same steps."""

    text: str
    ranks: str  # as the parameter, in its shortest form
    ranks_text: str
    num_ranks: int
    world_size: int
    step_lo: int
    step_hi: int
    hosts: list[str]
    hosts_capped: Capped | None
    stages: list[int]
    reference: Reference | None  # None: no ratio is known
    reference_text: str
    ratio: float | None  # median of the ranks' medians over steps
    z: float | None
    is_usual: bool | None  # None: no ratio is known
    before_ratio: float | None  # self time over that of the same ranks in the steps before
    self_ms: float | None
    others_ms: float | None
    slow: SlowRanks | None
    worst: WorstCell | None
    phases: list[PhaseDeviation]  # the largest excess first
    common: list[Shared]  # what separates all selected ranks from the others
    not_known: list[Shared]  # the same where it is known, and it is not known of all
    notes: list[str]  # what could not be compared
    findings: list[SelectedFinding]
    findings_capped: Capped | None
    errors: list[SelectedError]
    errors_capped: Capped | None
    num_lines: int | None  # at warning or worse; None: the times of the steps are not known
    lines_are_at_least: bool
    from_ms: float | None  # from the first start to the last end of these steps
    to_ms: float | None
    num_ranks_read: int
    num_steps_read: int  # of those that are selected
