"""One preflight that is under way: its members, their newest reports, who waits for news.

Lives in the event loop; nothing here locks. Every stored report gets the next number of the
sequence, and a reader names the last number it has. What came is shown at once to all after a
pause that grows with the nodes, so that a delta that a thousand ask for is packed once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts.edges import Bandwidth, EdgeFacts
from rankscope.preflight.model import LaunchVerdict, NodeReport, encode
from rankscope_server.store.tables import DEFAULT_PROJECT

FULL_UP_TO_NODES = (
    64  # beyond, agents get each other's reports without facts: the server evaluates them
)
LEAST_PAUSE_S = 0.1  # between two deltas
NODES_PER_PAUSE_SECOND = 500  # 1,000 nodes: a delta each 2 s, 1,500 requests a second at most
CALM_S = 60.0  # without a report for so long, the verdict is made of what is there


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node that joined, and what it declared."""

    node: str
    observed: str  # the address from which it came
    node_rank: int = -1
    addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    joined_ns: int = 0
    hello_token: str = ""  # what the node's listeners want to hear; never stored
    is_proxied: bool = False  # `observed` is only what a header said

    @property
    def proven(self) -> str:
        """Return the address from which it came for certain, or nothing."""
        return "" if self.is_proxied else self.observed


@dataclass(frozen=True)
class Stored:
    """The newest report of a node."""

    report: NodeReport
    full: bytes
    brief: bytes  # without facts and paths: what other agents need to go on
    number: int


@dataclass(kw_only=True)
class Live:
    """A preflight; `expected` grows with those who join beyond what was announced."""

    id: str
    token: str
    created_ns: int
    expires_ns: int
    run_id: str = ""
    key: str = ""
    coordinated: str = "server"
    project: str = DEFAULT_PROJECT
    nodes: tuple[str, ...] = ()  # announced by name
    num_nodes: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    number: int = 0
    shown: int = 0  # the newest number that readers get
    num_bytes: int = 0
    verdict: LaunchVerdict | None = None
    evaluated_number: int = -1
    next_verdict_s: float = 0.0  # not before, unless all have ended
    has_failed: bool = False  # to make the verdict: not tried again before a client asks
    finished_ns: int = 0
    unsaved: set[str] = field(default_factory=set)  # nodes
    is_unsaved: bool = True  # anything at all
    last_news_s: float = field(default_factory=time.monotonic)
    evaluating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _has_news: bool = False
    _woken_s: float = 0.0
    _packed: dict[object, bytes] = field(default_factory=dict)

    @property
    def expected(self) -> tuple[str, ...]:
        """Return all names, node rank 0 first; "node-rank-2" for one without a name."""
        by_rank = [(_order_of(member.node_rank), member.node) for member in self.members.values()]
        if self.nodes:
            joined = (name for _, name in sorted(by_rank) if name not in self.nodes)
            return self.nodes + tuple(joined)
        ranks = {member.node_rank for member in self.members.values()}
        missing = max(0, self.num_nodes - len(by_rank))
        free = [rank for rank in range(self.num_nodes) if rank not in ranks]
        absent = free[len(free) - missing :] if missing else []
        is_ranked = any(rank >= 0 for rank in ranks)
        by_rank += [(rank if is_ranked else math.inf, f"node-rank-{rank}") for rank in absent]
        return tuple(name for _, name in sorted(by_rank))

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """Return who has not ended yet."""
        return tuple(name for name in self.expected if not self._has_ended(name))

    @property
    def is_settled(self) -> bool:
        """Return whether all who joined have ended: they waited for the others, or gave them up."""
        return bool(self.stored) and all(self._has_ended(name) for name in self.members)

    @property
    def is_calm(self) -> bool:
        """Return whether nothing was heard for so long that nothing is to be expected."""
        return time.monotonic() - self.last_news_s > CALM_S

    @property
    def is_brief(self) -> bool:
        """Return whether agents get brief reports of each other."""
        return max(self.num_nodes, len(self.nodes), len(self.members)) > FULL_UP_TO_NODES

    @property
    def pause_s(self) -> float:
        """Return how long news are collected before they are sent."""
        return max(LEAST_PAUSE_S, len(self.members) / NODES_PER_PAUSE_SECOND)

    def join(self, member: Member) -> None:
        """Take a member; the one of the same name that was there is gone."""
        self.members[member.node] = member
        self._news(member.node)

    def put(self, report: NodeReport, full: bytes) -> bool:
        """Store a report unless a newer one is there; return whether it was stored."""
        before = self.stored.get(report.node)
        if before is not None:
            old = (before.report.started_unix_s, before.report.version)
            if old >= (report.started_unix_s, report.version):
                return False
            self.num_bytes -= len(before.full)
        self.num_bytes += len(full)
        self.number += 1
        self.stored[report.node] = Stored(report, full, encode(brief(report)), self.number)
        self._news(report.node)
        return True

    def delta(self, since: int, is_full: bool) -> bytes:
        """Return the shown reports newer than number `since` as JSON, gzipped."""

        def make() -> bytes:
            newer = [
                stored for stored in self.stored.values() if since < stored.number <= self.shown
            ]
            parts = b",".join(report.full if is_full else report.brief for report in newer)
            head = {"number": self.shown, "pause_ms": self.pause_s * 1e3, "is_brief": not is_full}
            return msgspec.json.encode(head)[:-1] + b',"reports":[' + parts + b"]}"

        return self.packed((since, is_full), make)

    def packed(self, key: object, make: Callable[[], bytes]) -> bytes:
        """Return what `make` makes, gzipped; made once until there are news."""
        if key not in self._packed:
            self._packed[key] = gzip.compress(make(), 3)
        return self._packed[key]

    async def wait(self, is_met: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_met`, looking whenever there are news."""
        end = time.monotonic() + limit_s
        while not is_met() and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)

    def wake(self, now_s: float, is_ending: bool = False) -> bool:
        """Wake those who wait, if there are news and the pause is over; return whether."""
        if not is_ending and (not self._has_news or now_s - self._woken_s < self.pause_s):
            return False
        self._has_news, self._woken_s, self.shown = False, now_s, self.number
        self._packed.clear()
        self._wake.set()
        self._wake = asyncio.Event()
        return True

    def as_run(self) -> Run:
        """Return what the checks evaluate."""
        reports = {node: stored.report for node, stored in self.stored.items()}
        return run_of(self.id, self.expected, reports)

    def evaluated(self, verdict: LaunchVerdict, number: int) -> None:
        """Take the verdict over the reports up to `number`."""
        self.verdict, self.evaluated_number, self.has_failed = verdict, number, False
        if (self.is_settled or self.is_calm) and not self.finished_ns:
            self.finished_ns = time.time_ns()
        self.is_unsaved = self._has_news = True
        self.unsaved |= set(self.members)

    def _has_ended(self, node: str) -> bool:
        one = self.stored.get(node)
        return one is not None and (one.report.stage == "done" or one.report.is_leaving)

    def _news(self, node: str) -> None:
        self._has_news = self.is_unsaved = True
        self.unsaved.add(node)
        self.last_news_s = time.monotonic()


def _order_of(node_rank: int) -> float:
    return node_rank if node_rank >= 0 else math.inf


def run_of(id: str, expected: tuple[str, ...], reports: dict[str, NodeReport]) -> Run:
    """Return the run that the checks evaluate; its options are those of the first node."""
    first = next((reports[name] for name in expected if name in reports), None)
    run = Run(id, expected, reports)
    return run if first is None else Run(id, expected, reports, first.options)


def brief(report: NodeReport) -> NodeReport:
    """Return a report without facts, and of its paths the bandwidth: the next rounds need it."""
    speeds = {
        peer: EdgeFacts(bandwidth=Bandwidth(mbit_per_s=edge.bandwidth.mbit_per_s))
        for peer, edge in report.edges.items()
        if edge.bandwidth is not None
    }
    return NodeReport(
        node=report.node, version=report.version, schema_version=report.schema_version,
        node_rank=report.node_rank, started_unix_s=report.started_unix_s, stage=report.stage,
        is_leaving=report.is_leaving, addresses=report.addresses, listening=report.listening,
        nodes=report.nodes, edges=speeds, delay_p90_ms=report.delay_p90_ms,
    )  # fmt: skip
