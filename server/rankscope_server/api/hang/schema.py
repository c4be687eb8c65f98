"""Answers about hangs: who waits for whom, where each member of a group is, stacks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, Schema

# Of a member of a group, and of a rank. `missing` has not entered what others are in, `behind` has
# entered it but is still in something earlier, `left` went on or ended well without it, `differs`
# called something else.
Standing: TypeAlias = Literal[
    "missing", "behind", "differs", "left", "gone", "silent", "unknown", "waiting", "elsewhere",
    "moving", "failed", "finished",
]  # fmt: skip


class RankSet(Schema, frozen=True):
    """Some ranks: how many, where, and as text ("0-16, 18-31"); `some` are the first ones."""

    count: int
    text: str
    some: list[int]
    hosts: list[str]  # the first ones
    num_hosts: int


class HangFinding(Schema, frozen=True):
    """A finding about ranks that wait or that called different collectives."""

    id: int
    kind: str
    what: str
    why: str
    severity: str
    state: str
    ranks: list[int]
    num_victims: int
    onset_step: int | None
    onset_ms: float | None


class WaitNode(Schema, frozen=True):
    """Ranks in the same place: those that others wait for have depth 0."""

    id: int
    depth: int
    standing: Standing
    is_root: bool
    is_transfer: bool  # no rank: an operation that all have entered and that does not end
    ranks: RankSet
    text: str  # what they are in, or have not entered
    operation: str
    num_groups: int  # in which they wait
    waited_seconds: float | None  # the longest, up to the last record


class WaitEdge(Schema, frozen=True):
    """The ranks of `source` wait for those of `target`."""

    source: int
    target: int
    text: str


class WaitGraphAnswer(Schema, frozen=True):
    """Who waits for whom, equal ranks folded; roots first."""

    nodes: list[WaitNode]
    edges: list[WaitEdge]
    num_waiting: int
    num_waited_for: int
    is_of_finding: bool  # the last records show it no more: what the finding says
    capped: Capped | None = None


class PlaceRow(Schema, frozen=True):
    """Members of a group that are in the same place; sequences count its collectives from 1."""

    standing: Standing
    ranks: RankSet
    began: int | None  # last collective entered
    ended: int | None  # last one that ended
    operation: str  # the last one entered
    open_sequence: int | None  # the oldest that is open
    open_operation: str
    since_ms: float | None  # when the first of them entered it
    waited_seconds: float | None
    call_site: str
    exchange: str  # an open send or receive
    exchanges: int  # sends and receives issued, the most of any of them


class GroupPlaces(Schema, frozen=True):
    """Where the members of one process group are, those that others wait for first."""

    group: str
    text: str
    backend: str
    num_ranks: int
    num_waiting: int
    most_began: int | None
    rows: list[PlaceRow]
    capped: Capped | None = None


class Frame(Schema, frozen=True):
    """One frame of a Python stack."""

    function: str
    file: str
    line: int


class RankStack(Schema, frozen=True):
    """The stack of the thread that trains, outermost frame first, and the whole dump."""

    rank: int
    host: str
    standing: Standing
    is_root: bool
    time_ms: float | None  # null: none was taken
    reason: str
    frames: list[Frame]
    num_shared: int  # frames, from the outermost on, in which all stacks shown are alike
    text: str
    note: str


class IcicleNode(Schema, frozen=True):
    """A frame of stacks merged over ranks: `start` and `count` are places among `num_ranks`."""

    depth: int
    start: int
    count: int
    function: str
    file: str
    lines: list[int]
    ranks: RankSet
    num_roots: int  # of the ranks that others wait for


class Icicle(Schema, frozen=True):
    """Stacks merged over ranks, outermost frame at the top; where roots part from those that wait.

    `parts_at` is the last frame that all share, in `nodes`; -1 where they share none, or nothing is
    to be compared.
    """

    num_ranks: int
    num_depths: int
    nodes: list[IcicleNode]
    parts_at: int
    text: str
    oldest_ms: float | None
    newest_ms: float | None
    capped: Capped | None = None  # ranks whose stacks were merged
    nodes_capped: Capped | None = None


class HangAnswer(Schema, frozen=True):
    """Which rank waits for which in an attempt, and what they were doing."""

    text: str
    detail: str
    state: Literal["hang", "desync", "waiting", "over", "none", "unknown"]
    attempt: int
    is_over: bool  # the attempt has ended: all of this is how it was at its end
    last_ms: float | None  # of the newest record of any rank
    findings: list[HangFinding]
    graph: WaitGraphAnswer
    groups: list[GroupPlaces]
    num_groups: int
    num_quiet_groups: int  # of them, no member waits in or was waited for
    stacks: list[RankStack]
    merged: Icicle
    suggested: list[int]  # ranks whose stacks say most: waited for, and one that waits
    notes: list[str]
    groups_capped: Capped | None = None


class HangRow(Schema, frozen=True):
    """One row of the table twin: members of a group in one place."""

    group: str
    standing: Standing
    count: int
    ranks: str
    began: int | None
    ended: int | None
    operation: str
    waited_seconds: float | None


EMPTY_ICICLE = Icicle(
    num_ranks=0, num_depths=0, nodes=[], parts_at=-1, text="", oldest_ms=None, newest_ms=None
)


def plain_rows(groups: list[GroupPlaces]) -> list[HangRow]:
    """Return the rows of all groups, for CSV."""
    return [
        HangRow(
            group=group.group, standing=row.standing, count=row.ranks.count, ranks=row.ranks.text,
            began=row.began, ended=row.ended, operation=row.operation,
            waited_seconds=row.waited_seconds,
        )
        for group in groups for row in group.rows
    ]  # fmt: skip
