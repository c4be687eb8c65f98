"""Servers of parameters that all workers wait for: how much, why, and what would be less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import exchange_ratio
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import bytes_text, ms_text, percent_text, ranks_text
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.version_table import Shard

_MANY_SERVERS = 4  # times as many as there are, of which is said what they would give


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Workers and their servers over the newest steps."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    step_ms: float
    wait_ms: float  # that no worker is spared: the one that comes last waits for servers alone

    @property
    def share(self) -> float:
        """Return which share of a step it is."""
        return self.wait_ms / self.step_ms


def served_of(window: Window) -> Served | None:
    """Return who serves whom; None where no rank reports a shard, or too few steps are known."""
    table, policy = window.steps, window.policy
    servers = tuple(sorted(window.facts.versions.servers))
    workers = tuple(rank for rank in table.ranks if rank not in servers)
    columns = np.flatnonzero(usual_steps(table, policy))[-policy.recent_steps :]
    if not servers or not workers or len(columns) < policy.min_steps:
        return None
    if any(window.runs_on_device(rank) for rank in workers):
        return None  # hosts only enqueue there: what they wait for is not known
    rows = [table.row_of[rank] for rank in workers]
    waits = np.fmin.reduce(table.get("blocked")[rows][:, columns], axis=0)
    step_ms = float(np.nanmedian(median(table.get("duration")[rows][:, columns], 0)))
    if np.isnan(waits).all() or not step_ms > 0:
        return None
    return Served(
        servers=servers, workers=workers, step_ms=step_ms, wait_ms=float(np.nanmedian(waits))
    )


def bottleneck_finding(window: Window) -> Finding | None:
    """Return the advice where the servers hold up all workers; None where they do not."""
    served = served_of(window)
    if served is None or served.share < window.policy.exposed_ratio:
        return None
    workers, servers = len(served.workers), len(served.servers)
    who = f"{servers} parameter server{'s' * (servers > 1)}"
    together = "its turn" if servers == 1 else "their turn"
    return window.finding(
        "server_bottleneck",
        "server_bottleneck",
        cost=served.share,
        what=f"Workers wait {percent_text(served.share)} of each step for {who}",
        why=f"{workers} workers send their gradients to {ranks_text(served.servers)} and take "
        f"weights back, each when it is {together}: also the worker that comes last, which waits "
        f"for no other, is held up for {ms_text(served.wait_ms)} of {ms_text(served.step_ms)}",
        next=_advice(window, served),
        confidence=(0.8, "waits are measured; what more servers give follows from the bytes"),
        evidence=_load_texts(window, served),
        ruled_out=(
            "A slow worker: that which others wait for is not in this share",
            "Backup workers: they help where one worker is late, here all wait",
        ),
        disproof="The wait stays as long with twice the servers: then workers' own links, or "
        "processors that ranks share, hold it up",
    )


def _advice(window: Window, served: Served) -> str:
    """Return what would shorten the wait, and to how much: by the bytes of the fullest link."""
    workers, servers = len(served.workers), len(served.servers)
    uneven = _largest_share(window.facts.versions.shards) * servers
    texts = []
    if uneven > window.policy.uneven_shards_ratio:
        texts.append(f"Even shards: {_reached(served, 1 / uneven)}")
    for count in (2 * servers, _MANY_SERVERS * servers):
        if count <= workers:
            ratio = exchange_ratio(workers, count) / exchange_ratio(workers, servers)
            texts.append(f"{count} servers with even shards: {_reached(served, ratio / uneven)}")
    ratio = exchange_ratio(workers + servers) / exchange_ratio(workers, servers) / uneven
    texts.append(f"all_reduce of all {workers + servers} ranks in place of servers (DDP): "
                 f"{_reached(served, min(1.0, ratio))}")  # fmt: skip
    return "; ".join(texts) + ". Smaller or rarer gradients shorten it as well"


def _reached(served: Served, ratio: float) -> str:
    wait_ms = served.wait_ms * ratio
    step_ms = served.step_ms - served.wait_ms + wait_ms
    return f"a wait of {ms_text(wait_ms)}, a step of {ms_text(step_ms)}"


def _largest_share(shards: Mapping[int, Shard]) -> float:
    """Return the share of all bytes that the largest shard moves; a fair one if it is not known."""
    sizes = [shard.total("bytes") or 0.0 for shard in shards.values()]
    return max(sizes) / sum(sizes) if sum(sizes) else 1 / len(sizes)


def _load_texts(window: Window, served: Served) -> tuple[str, ...]:
    """Return what each of the first shards reports of its load."""
    texts = [
        f"{len(served.workers)} workers, {len(served.servers)} servers; a step of "
        f"{ms_text(served.step_ms)}, of which {ms_text(served.wait_ms)} no worker is spared"
    ]
    for number, shard in sorted(window.facts.versions.shards.items())[:4]:
        requests, queue = shard.total("requests"), shard.total("queue_seconds")
        moved, busy = shard.total("bytes"), shard.total("busy_seconds")
        facts = []
        if requests and moved:
            facts.append(f"{bytes_text(moved / requests)} for each gradient and its answer")
        if requests and queue is not None:
            facts.append(f"gradients wait {ms_text(1e3 * queue / requests)} until it takes them")
        if requests and busy is not None:
            steps = requests / len(served.workers)
            share = min(1.0, 1e3 * busy / steps / served.step_ms)
            facts.append(f"it is busy {percent_text(share)} of the time")
        if facts:
            texts.append(f"Shard {number}: {', '.join(facts)}")
    return tuple(texts)
