"""Answers about communication: kinds of calls, who arrives last, links between nodes."""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope_server.answers import Capped, LeftOut, Schema


class LastArrival(Schema, frozen=True):
    """A rank that arrived last: in which share of the calls, and how long the first one waited."""

    rank: int
    host: str
    count: int
    share: float
    waited_ms_per_step: float


class CommunicationRow(Schema, frozen=True):
    """Calls of one group, operation and size class (from `size_lo` on, below `size_hi`)."""

    group: str
    group_text: str
    operation: str
    num_ranks: int | None
    num_nodes: int | None
    size_lo: int
    size_hi: int
    size_least: int
    size_largest: int
    count: int
    open: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    exposed_ms_per_step: float | None
    overlapped_ms_per_step: float | None
    num_matched: int  # collectives of which every member's call is known
    algbw_bytes_per_second: float | None
    busbw_bytes_per_second: float | None
    busbw_best_bytes_per_second: float | None
    expected_bytes_per_second: float | None
    expected_text: str
    spread_p50_ms: float | None
    spread_p95_ms: float | None
    last: list[LastArrival]
    num_last_unknown: int  # of the matched ones, where clocks and durations name different ranks
    last_capped: Capped | None = None


class LinkCell(Schema, frozen=True):
    """The way from one node to another; null where it was not measured."""

    bytes_per_second: float | None
    source: Literal["messages", "preflight", ""]
    count: int
    size_bytes: int
    is_at_least: bool  # a part of the time may be waiting: it may be faster


class LinkNode(Schema, frozen=True):
    """A node by the slowest measured way between it and another; `median` is of all its ways."""

    node: str
    start: str
    end: str
    bytes_per_second: float
    is_at_least: bool
    median_bytes_per_second: float
    num_measured: int  # of `num_ways`, in both directions
    num_ways: int


class Links(Schema, frozen=True):
    """Nodes by nodes, from row to column: of messages of the run, and of a preflight.

    Where the matrix is cut, all nodes are listed too, that with the slowest way first.
    """

    nodes: list[str]
    messages: list[list[LinkCell]]
    preflight: list[list[LinkCell]]
    num_messages: int  # ways that messages measured
    num_preflight: int
    text: str
    messages_by_node: list[LinkNode]
    preflight_by_node: list[LinkNode]
    capped: Capped | None = None
    by_node_capped: Capped | None = None


class Communication(Schema, frozen=True):
    """What was communicated in some steps of an attempt, what steps wait for most first."""

    text: str
    attempt: int
    step_lo: int
    step_hi: int
    step_ms: float | None  # median, of the slowest rank
    count: int  # of all rows, those that were cut included
    rows: list[CommunicationRow]
    last: list[LastArrival]  # over all kinds
    links: Links
    notes: list[str]
    capped: Capped | None = None
    last_capped: Capped | None = None
    left_out: list[LeftOut] = msgspec.field(default_factory=list)
