"""Samples of machines around an onset: GPUs, processors, connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
import sqlalchemy as sa

from rankscope_server.api.machines.samples import Reader, missed, rates
from rankscope_server.api.pictures.chart import WIDTH, chart_of
from rankscope_server.api.pictures.schema import FindingChart, PictureLimit
from rankscope_server.api.pictures.subject import (
    MAX_LINES,
    Maker,
    Subject,
    evenly,
    others_text,
)
from rankscope_server.api.resources.grid import Grid, on_grid
from rankscope_server.api.resources.quantities import QUANTITIES, Quantity
from rankscope_server.api.resources.reading import Read, Series, Thing, read_samples
from rankscope_server.api.steps.queries import Array
from rankscope_server.findings.policy import POLICY
from rankscope_server.store import tables

S = 10**9
_OF_HOST = "; times by the host's clock"
# beside those of the page of resources
_MORE = (
    Quantity("waits_for_processor", "Ready to run, without a processor", "utilisation", "rank",
             "process", ("run_delay_us_total",), "ratio", "high", "the kernel's scheduler"),
    Quantity("held_by_limit", "Kept from running by a limit on processor time", "utilisation",
             "rank", "process", ("throttled_us_total",), "ratio", "high", "the control group"),
    Quantity("processors_allowed", "Processors that the training thread may use", "utilisation",
             "rank", "process", ("cpus_allowed",), "processors", "low", "affinity and cpuset"),
    Quantity("ecc_corrected", "Corrected memory errors since the driver was loaded", "memory",
             "gpu", "gpu_health", ("ecc_corrected",), "errors", "high", "NVML"),
    Quantity("ecc_uncorrected", "Uncorrectable memory errors since the driver was loaded",
             "memory", "gpu", "gpu_health", ("ecc_uncorrected",), "errors", "high", "NVML"),
    Quantity("rows_waiting", "Bad memory rows that wait for a reset", "memory", "gpu",
             "gpu_health", ("remap_pending",), "", "high", "NVML"),
)  # fmt: skip
_BY_KEY = {one.key: one for one in (*QUANTITIES, *_MORE)}
_LOW_ACTIVITY = PictureLimit(label="little to do", value=POLICY.low_activity_ratio)


def samples(*keys: str) -> Maker:
    """Return what draws these quantities of the machines that a finding names."""

    def make(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
        read = Read()
        wanted = [_BY_KEY[key] for key in keys]
        hosts = evenly(sorted(set(subject.host_of.values()) - set(subject.hosts)))
        hosts += [*subject.hosts, *(subject.host_of.get(rank, "") for rank in subject.ranks)]
        read_samples(connection, subject.run_id, wanted, subject.between(), read, hosts)
        gpus = _gpus_of(connection, subject) if any(one.scope == "gpu" for one in wanted) else set()
        charts = [_sampled(subject, one, read.series.get(one.key, {}), gpus) for one in wanted]
        return [chart for chart in charts if chart is not None]

    return make


def _sampled(
    subject: Subject, quantity: Quantity, series: Series, gpus: Set[Thing]
) -> FindingChart | None:
    """Return the chart of one quantity; None where nothing of the named was sampled.

    Where a finding names nothing, as all are meant, the busiest is drawn over the others.
    """

    def is_named(thing: Thing) -> bool:
        if quantity.scope == "gpu" and gpus:
            return thing in gpus
        if quantity.scope == "rank" and subject.ranks:
            return thing.number in subject.ranks
        return thing.host in subject.hosts

    known = {thing: one for thing, one in series.items() if not np.isnan(one[1]).all()}
    named = sorted(thing for thing in known if is_named(thing))[:MAX_LINES]
    if known and not (subject.ranks or subject.hosts):
        named = [max(known, key=lambda thing: float(np.nanmean(known[thing][1])))]
    others = evenly(sorted(thing for thing in known if thing not in named and not is_named(thing)))
    labels = [_thing_text(quantity, thing) for thing in named]
    return _on_time(
        quantity.key, quantity.title, quantity.unit, subject, [known[one] for one in named],
        [known[one] for one in others], labels,
        others_text(len(others), len(known) - len(named), _NOUNS[quantity.scope]),
        quantity.source + _OF_HOST,
        [_LOW_ACTIVITY] if subject.kind == "gpu_underuse" else subject.limits(quantity.key),
    )  # fmt: skip


def _gpus_of(connection: sa.Connection, subject: Subject) -> set[Thing]:
    """Return the GPUs of the named ranks: where their processes were seen, else by local rank."""
    hosts = sorted({subject.host_of[rank] for rank in subject.ranks if rank in subject.host_of})
    if not hosts:
        return set()
    reader = Reader(connection, subject.run_id, "gpu_process", hosts, (0, subject.last_ns))
    seen = {
        Thing(host, int(key[0]))
        for (host, key), part in reader.read(["rank"])
        if set(part["rank"].tolist()) & set(subject.ranks)
    }
    return seen or _by_local_rank(connection, subject)


def _by_local_rank(connection: sa.Connection, subject: Subject) -> set[Thing]:
    """Return the GPUs as detectors give them to ranks where no process is known."""
    table = tables.rank.c
    rows = connection.execute(
        sa.select(table.host, table.local_rank).where(
            table.run_id == subject.run_id, table.attempt == subject.attempt,
            table.rank.in_(subject.ranks), table.local_rank.is_not(None),
        )
    )  # fmt: skip
    return {Thing(host, int(local_rank)) for host, local_rank in rows}


_NOUNS = {"rank": "rank", "gpu": "GPU", "node": "node", "job": "job"}


def _thing_text(quantity: Quantity, thing: Thing) -> str:
    if quantity.scope == "rank":
        return f"rank {thing.number}"
    return f"GPU {thing.number} of {thing.host}" if thing.number >= 0 else thing.host


def links(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw how fast connections of ranks carry data while they have some, and what is resent."""
    others = subject.others()
    hosts = sorted({subject.host_of[rank] for rank in (*subject.ranks, *others)
                    if rank in subject.host_of} | set(subject.hosts))  # fmt: skip
    reader = Reader(connection, subject.run_id, "connections", hosts, subject.between())
    names = ["acknowledged_bytes_total", "busy_us_total", "sent_segments_total",
             "retransmitted_segments_total"]  # fmt: skip
    by_rank: dict[int, list[dict[str, Array]]] = {}
    for (_, one), part in reader.read(names):
        by_rank.setdefault(int(one[0]), []).append(part)
    named = list(subject.ranks) or [
        rank for rank in by_rank if subject.host_of.get(rank) in subject.hosts
    ]
    named = [rank for rank in named if rank in by_rank][:MAX_LINES]
    others = [rank for rank in others if rank in by_rank and rank not in named]
    text = others_text(len(others), len(by_rank) - len(named), "rank")
    charts = []
    for key, title, unit, of in (
        ("sending", "Bytes a second of a rank's connections, while they have data to send",
         "bytes/s", (names[0], names[1], 1e6)),
        ("again", "Segments sent again", "ratio", (names[3], names[2], 1.0)),
    ):  # fmt: skip
        series = {rank: _ratio_of(by_rank[rank], *of) for rank in (*named, *others)}
        chart = _on_time(key, title, unit, subject, [series[rank] for rank in named],
                         [series[rank] for rank in others], [f"rank {rank}" for rank in named],
                         text, "the kernel's counters of TCP" + _OF_HOST)  # fmt: skip
        if chart is not None:
            charts.append(chart)
    return charts


def _ratio_of(
    parts: Sequence[Mapping[str, Array]], over: str, under: str, factor: float
) -> tuple[Array, Array]:
    """Return times and, over the connections of a rank, the rate of one counter over another's."""
    sums: dict[int, list[float]] = {}
    for part in parts:
        times = part["time_ns"]
        gaps = missed(times, part["interval_ns"])
        above, below = (
            rates(times, np.where(part[name] < 0, np.nan, part[name].astype(float)), gaps)
            for name in (over, under)
        )
        for time_ns, a, b in zip(times.tolist(), above.tolist(), below.tolist(), strict=True):
            if a == a and b == b:
                total = sums.setdefault(time_ns // S, [0.0, 0.0])
                total[0] += a
                total[1] += b
    times = np.array(sorted(sums), np.int64)
    values = [
        factor * sums[time][0] / sums[time][1] if sums[time][1] > 0 else np.nan
        for time in times.tolist()
    ]
    return times * S, np.array(values, float)


def _on_time(
    key: str, title: str, unit: str, subject: Subject, named: Sequence[tuple[Array, Array]],
    others: Sequence[tuple[Array, Array]], labels: Sequence[str], others_text: str, source: str,
    limits: Sequence[PictureLimit] = (),
) -> FindingChart | None:  # fmt: skip
    edges = [(int(times[0]), int(times[-1])) for times, _ in (*named, *others) if len(times)]
    if not edges or not named:
        return None
    begin, end = min(edge[0] for edge in edges), max(edge[1] for edge in edges)
    bin_ns = max((end - begin) // WIDTH + 1, S)
    grid = Grid(begin, bin_ns, int((end - begin) // bin_ns) + 1)
    lines = on_grid(grid, [*named, *others]).last
    if np.isnan(lines[: len(named)]).all():
        return None
    x = (grid.begin_ns + np.arange(grid.count) * grid.bin_ns) / 1e6
    onset = None if subject.onset_ns is None else subject.onset_ns / 1e6
    return chart_of(key, title, unit, "time", x, lines, labels, onset, others_text, source=source,
                    limits=limits)  # fmt: skip
