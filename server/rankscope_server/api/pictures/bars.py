"""Amounts beside each other: parts of a step, stages, shards, where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa

from rankscope_server.answers import json_object
from rankscope_server.api.pictures.chart import amount_text, known_values
from rankscope_server.api.pictures.numbers import versions_of
from rankscope_server.api.pictures.schema import FindingBars, PictureBar, PictureLimit
from rankscope_server.api.pictures.steps import SOURCE
from rankscope_server.api.pictures.subject import Subject
from rankscope_server.api.runs.queries import SERVERS
from rankscope_server.api.steps.budget import budget_around
from rankscope_server.api.steps.queries import Array, load_range, quiet, typical_range
from rankscope_server.store import tables
from rankscope_server.text import plural

_STEPS = 50
_WORK = ("forward", "backward")
_METRICS = ("own_work", "blocked", *_WORK, *(f"{name}_blocked" for name in _WORK))
_PARTS = ("forward", "backward", "other", "blocked")
_MOST_BARS = 32


def shares(connection: sa.Connection, subject: Subject) -> list[FindingBars]:
    """Draw what a step consists of, before the onset where there is one, and now."""
    if subject.run.attempt != subject.attempt:  # the newest alone is kept so
        return []
    found = budget_around(connection, subject.run, _STEPS, subject.onset_step, list(subject.ranks))
    if not found.rows:
        return []
    used = [part for part in found.parts if any(row.parts.get(part) for row in found.rows)]
    bars = [
        PictureBar(
            label=row.label, is_named=row.rank in subject.ranks,
            values=[row.parts.get(part) for part in used],
        )
        for row in found.rows
    ]  # fmt: skip
    return [
        FindingBars(
            key="parts", title="Where a step goes", unit="ms", text=found.text, source=SOURCE,
            parts=used, bars=bars, limits=[],
        )
    ]  # fmt: skip


def by_role(connection: sa.Connection, subject: Subject) -> list[FindingBars]:
    """Draw what stages, or servers and workers, do and wait in a usual step."""
    last = min(subject.last_step, subject.steps()[1]) if subject.onset_step else subject.last_step
    first, last = typical_range(connection, subject.run_id, last, _STEPS, None)
    planes = load_range(connection, subject.run_id, _METRICS, first, last, subject.attempt)
    roles: dict[int, list[int]] = defaultdict(list)
    for rank, role in subject.role_of.items():
        if rank < len(planes["own_work"]):
            roles[role].append(rank)
    bars, own = [], []
    for role, ranks in sorted(roles.items(), key=lambda item: (item[0] == SERVERS, item[0])):
        usual = {name: _usual(planes[name][ranks]) for name in _METRICS}
        works = [usual[name] - np.nan_to_num(usual[f"{name}_blocked"]) for name in _WORK]
        values = [*works, usual["own_work"] - sum(np.nan_to_num(works)), usual["blocked"]]
        named = bool(set(ranks) & set(subject.ranks)) or subject.name == f"{subject.kind}/{role}"
        label = _role_text(role, many=SERVERS in roles)
        bars.append(PictureBar(label=label, is_named=named, values=known_values(np.array(values))))
        own.append(usual["own_work"])
    if len(bars) < 2 or np.isnan(own).all():
        return []
    mean = float(np.nanmean(own))
    even = [PictureLimit(label="self time of even stages", value=mean)]
    text = ", ".join(
        f"{bar.label} works {amount_text(ms, 'ms')}" for bar, ms in zip(bars, own, strict=True)
        if ms == ms
    )  # fmt: skip
    return [
        FindingBars(
            key="roles", title=f"A usual step, of steps {first:,} to {last:,}", unit="ms",
            text=text[:1].upper() + text[1:], source=SOURCE, parts=list(_PARTS),
            bars=bars[:_MOST_BARS], limits=even if subject.kind == "stage_imbalance" else [],
        )
    ]  # fmt: skip


def _usual(values: Array) -> float:
    """Return the median over steps of the median of ranks."""
    return float(quiet(np.nanmedian, quiet(np.nanmedian, values, axis=0)))


def _role_text(role: int, *, many: bool) -> str:
    if role == SERVERS:
        return "servers"
    return "workers" if many or role < 0 else f"stage {role}"


def ledger(connection: sa.Connection, subject: Subject) -> list[FindingBars]:
    """Draw where the time of all ranks went, as shares of it."""
    cost = json_object(subject.run.cost)
    wall = cost["wall_seconds"] if cost is not None else 0.0
    if not wall > 0:
        return []
    parts = {name: seconds / wall for name, seconds in cost["parts"].items() if seconds > 0}
    ordered = sorted(parts, key=lambda name: (name != "productive", -parts[name]))
    return [
        FindingBars(
            key="ledger", title="Where the time of the ranks went", unit="ratio",
            text=", ".join(f"{name} {amount_text(parts[name], 'ratio')}" for name in ordered),
            source="steps, starts and ends of all ranks, each by its own clock", parts=["share"],
            bars=[
                PictureBar(label=name, is_named=False, values=[parts[name]])
                for name in ordered
            ],
            limits=[],
        )
    ]  # fmt: skip


_SHARDS = ("requests", "bytes", "queue_seconds")
_SHARD_TITLES = {
    "requests": ("Requests of each parameter shard", ""),
    "bytes": ("Bytes that each parameter shard moves", "bytes"),
    "queue_seconds": ("Time that requests wait in the queue of each shard", "s"),
}


def shards(connection: sa.Connection, subject: Subject) -> list[FindingBars]:
    """Draw how much each parameter shard does, beside its fair share."""
    table = versions_of(
        connection, subject, _shard_names(connection, subject), (0, subject.last_step)
    )
    found = []
    for what in _SHARDS:
        totals = {
            number: total for number, shard in sorted(table.shards.items())
            if (total := shard.total(what)) is not None
        }  # fmt: skip
        if len(totals) > 1 and sum(totals.values()) > 0:
            found.append(_shard_bars(subject, what, totals))
    return found


def _shard_bars(subject: Subject, what: str, totals: dict[int, float]) -> FindingBars:
    title, unit = _SHARD_TITLES[what]
    shown = sorted(totals, key=lambda number: -totals[number])[:_MOST_BARS]
    fair, first = sum(totals.values()) / len(totals), shown[0]
    share = totals[first] / sum(totals.values())
    return FindingBars(
        key=what, title=title, unit=unit,
        text=f"Shard {first} has {amount_text(share, 'ratio')} of all; "
        f"{amount_text(1 / len(totals), 'ratio')} would be the share of each of "
        f"{plural(len(totals), 'shard')}",
        source="totals that the servers recorded", parts=["amount"],
        bars=[
            PictureBar(label=f"shard {number}", is_named=subject.name == f"shard/{number}",
                       values=[totals[number]])
            for number in sorted(shown)
        ],
        limits=[PictureLimit(label="a fair share", value=fair)],
    )  # fmt: skip


def _shard_names(connection: sa.Connection, subject: Subject) -> Sequence[str]:
    metric = tables.metric.c
    return connection.scalars(
        sa.select(metric.name)
        .where(metric.run_id == subject.run_id, metric.name.like("shard_%"))
        .distinct()
    ).all()
