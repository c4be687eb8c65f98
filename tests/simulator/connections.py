"""TCP connections between ranks as collectors sample them, and what is wrong with some of them.

Which connections a job has and how busy they are is given, not derived from its collectives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.wire.chunk import Column, encode_chunk
from rankscope.wire.schema import CHUNK_COLUMNS, Chunk
from tests.simulator.told import START_NS, Item

START_S = START_NS / 1e9
ONSET_S = 40.0  # after the start
END_S = 100.0
MB = 1_000_000
Pair = tuple[int, int]


@dataclass
class Traffic:
    """What one rank sends to another, each second."""

    num_bytes: float = 4.0 * MB
    busy: float = 0.05  # seconds in each second
    limited: float = 0.0
    segments: float = 200.0
    lost: float = 0.0  # share of the segments
    needless: float = 0.0002  # share sent again that had arrived
    dropped: float = 0.002  # of what comes, at the receiver
    waits: float = 0.0  # share of the samples in which data waits at the sender
    flying: int = 4
    is_stuck: bool = False


@dataclass
class Net:
    """Ranks, who sends to whom, and what is wrong from the onset on."""

    ranks: int = 4
    pairs: list[Pair] = field(default_factory=list)
    per_host: int = 4
    bad: dict[Pair, Traffic] = field(default_factory=dict)
    seed: int = 0
    lost_samples: float = 0.0
    silent: frozenset[int] = frozenset()  # ranks that are not sampled
    address: Callable[[int, int, bool], str] | None = None
    small: frozenset[Pair] = frozenset()  # pairs that carry little
    start_s: float = START_S
    onset_s: float = ONSET_S
    end_s: float = END_S

    def host(self, rank: int) -> str:
        return f"node{rank // self.per_host}"

    def _address(self, rank: int, peer: int, is_remote: bool) -> str:
        if self.address is not None:
            return self.address(rank, peer, is_remote)
        return f"10.0.0.{rank // self.per_host}:{1000 + rank * 100 + peer}"

    def usual(self, pair: Pair) -> Traffic:
        if pair in self.small:
            return Traffic(num_bytes=4000.0, busy=0.04, segments=80.0)
        return Traffic()

    def chunks(self) -> Iterable[tuple[str, dict[str, Column]]]:
        """Yield (host, columns) of each node, a chunk in six seconds."""
        chance = random.Random(self.seed)
        both = sorted({*self.pairs, *((b, a) for a, b in self.pairs)})
        totals = {pair: np.zeros(7) for pair in both}
        rows: dict[str, list[dict[str, Any]]] = {}
        for second in np.arange(2.0, self.end_s, 2.0):
            for pair in both:
                known = self.usual(pair) if pair in self.pairs else Traffic(0, 0, 0, 0)
                if second > self.onset_s:
                    known = self.bad.get(pair, known)
                totals[pair] += self._rise(known, pair, second, chance)
                if pair[0] in self.silent or chance.random() < self.lost_samples:
                    continue
                row = self._row(pair, known, second, totals[pair], chance)
                rows.setdefault(self.host(pair[0]), []).append(row)
            if second % 6 == 0 or second >= self.end_s - 2:
                for host, mine in rows.items():
                    yield host, _columns(mine)
                rows = {}

    def _rise(
        self, known: Traffic, pair: Pair, second: float, chance: random.Random
    ) -> np.ndarray[Any, Any]:
        """Return how the totals of an end rise in two seconds; the last is what it dropped."""
        noise = 2 * chance.lognormvariate(0, 0.2)
        back = self.usual((pair[1], pair[0]))
        if second > self.onset_s:
            back = self.bad.get((pair[1], pair[0]), back)
        carried = 0.0 if known.is_stuck else known.num_bytes
        return np.array([
            carried * noise, min(known.busy * noise, 2) * 1e6, known.limited * 2e6,
            known.segments * noise, known.segments * (known.lost + known.needless) * noise,
            known.segments * known.needless * noise, back.segments * back.dropped * noise,
        ])  # fmt: skip

    def _row(
        self, pair: Pair, known: Traffic, second: float, total: np.ndarray[Any, Any],
        chance: random.Random,
    ) -> dict[str, Any]:  # fmt: skip
        waits = chance.random() < known.waits
        stuck_s = second - self.onset_s
        backoff = int(np.log2(stuck_s / 0.2)) if known.is_stuck and stuck_s > 0.4 else 0
        names = (
            "acknowledged_bytes_total", "busy_us_total", "receiver_limited_us_total",
            "sent_segments_total", "retransmitted_segments_total", "needless_segments_total",
            "dropped_segments_total",
        )  # fmt: skip
        return {
            "time_ns": int((self.start_s + second) * 1e9), "rank": pair[0],
            "local": self._address(*pair, False),
            "remote": self._address(pair[1], pair[0], True),
            **dict(zip(names, total.astype(np.int64).tolist(), strict=True)),
            "unsent_bytes": 200_000 if waits else 0,
            "in_flight_segments": known.flying if waits or known.is_stuck else 0,
            "window_segments": 12, "backoff": backoff,
        }  # fmt: skip

    def items(self) -> Iterator[Item]:
        """Yield the chunks by arrival."""
        for host, columns in self.chunks():
            chunk = _chunk(host, columns)
            yield chunk.time_hi_ns, (chunk, columns)


def _columns(rows: list[dict[str, Any]]) -> dict[str, Column]:
    words = ("local", "remote")
    return {
        name: [row[name] for row in rows]
        if name in words
        else np.array([row.get(name, -1) for row in rows])
        for name in CHUNK_COLUMNS["connections"]
    }


def _chunk(host: str, columns: dict[str, Column]) -> Chunk:
    times = np.asarray(columns["time_ns"])
    return Chunk(
        kind="connections", attempt=0, rank=-1, host=host, count=len(times),
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=encode_chunk(columns),
    )  # fmt: skip


def ring(n: int) -> list[Pair]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def everybody(n: int) -> list[Pair]:
    return [(a, b) for a in range(n) for b in range(n) if a != b]


SLOW = Traffic(num_bytes=2.0 * MB, busy=0.8, waits=0.9, flying=11)  # the way is full
HELD = replace(SLOW, flying=0)  # at the sender
LOSSY = Traffic(busy=0.5, lost=0.08, dropped=0.002)
STUCK = Traffic(num_bytes=0.0, busy=1.0, is_stuck=True, segments=0.2)
