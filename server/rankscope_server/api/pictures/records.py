"""What was recorded once in a while: checkpoints as a chart; settings and checksums as tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import sqlalchemy as sa

from rankscope.wire.chunk import RANK
from rankscope.wire.schema import LOSS_SCALE, Event
from rankscope_server.answers import json_object
from rankscope_server.api.pictures.chart import chart_of
from rankscope_server.api.pictures.schema import FindingChart, FindingTable
from rankscope_server.api.pictures.subject import MAX_LINES, Subject, evenly, others_text
from rankscope_server.api.ranks.chunks import Wanted, choose, read
from rankscope_server.api.runs.environment import environment
from rankscope_server.findings.text import bytes_text
from rankscope_server.observe.data_passes import PASS, DataPass, DataPasses
from rankscope_server.store import tables
from rankscope_server.text import plural, rank_list

SAVE = "checkpoint"
_MOST_EVENTS = 20_000
_MOST_ROWS = 16
_CHECKSUM = "replica_checksum"
_CALL = re.compile(r"#([\d,]+)")
_CALL_WORDS = ("operation", "dtype", "call_site")
_CALL_COLUMNS = frozenset({"sequence", "size_bytes", "group", *_CALL_WORDS})


def saves(connection: sa.Connection, subject: Subject) -> list[FindingChart]:
    """Draw how long each checkpoint held the ranks, and how far checkpoints are apart."""
    took: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # step, rank
    ended_ns: dict[int, int] = {}
    for row in _events(connection, subject, SAVE):
        try:
            seconds = float((json_object(row.fields) or {}).get("seconds", "nan"))
        except ValueError:
            continue
        if seconds == seconds and row.rank >= 0:
            took[row.step][row.rank] += seconds
            ended_ns[row.step] = max(ended_ns.get(row.step, 0), row.time_ns)
    steps = sorted(took)
    if len(steps) < 2:
        return []
    ranks = sorted({rank for by_rank in took.values() for rank in by_rank})
    named = [rank for rank in subject.ranks if rank in ranks][:MAX_LINES]
    others = evenly([rank for rank in ranks if rank not in named])
    rows = [[took[step].get(rank, np.nan) for step in steps] for rank in (*named, *others)]
    labels = [f"rank {rank}" for rank in named]
    if not named:
        rows.insert(0, [max(took[step].values()) for step in steps])
        labels = ["the slowest rank"]
    whom = others_text(len(others), len(ranks) - len(named), "rank")
    x, onset = np.array(steps, float), subject.onset_step
    source = "the calls that save, timed on each rank"
    apart = np.concatenate([[np.nan], np.diff([ended_ns[step] for step in steps]) / 1e9])
    return [
        chart_of("saves", "How long the calls that save took", "s", "step", x, np.array(rows),
                 labels, onset, whom if named else whom.replace(" other", ""), source=source,
                 limits=subject.limits("saves")),
        chart_of("apart", "Time since the checkpoint before", "s", "step", x, apart[None],
                 ["the job"], onset, "", source=source, limits=subject.limits("apart")),
    ]  # fmt: skip


def _events(connection: sa.Connection, subject: Subject, name: str) -> Iterable[sa.Row[Any]]:
    table = tables.event.c
    return connection.execute(
        sa.select(tables.event)
        .where(
            table.run_id == subject.run_id, table.attempt == subject.attempt, table.name == name
        )
        .order_by(table.id)
        .limit(_MOST_EVENTS)
    ).all()  # fmt: skip


def facts(connection: sa.Connection, subject: Subject) -> list[FindingTable]:
    """Show the facts that a finding names: which value on which ranks."""
    known = environment(connection, subject.run_id, subject.attempt, len(subject.host_of))
    named = [
        one for one in known.differences if one.fact.removeprefix("env.") in subject.words
    ][:_MOST_ROWS]  # fmt: skip
    rows = [
        [one.fact, each.value or "not set", rank_list(each.ranks)]
        for one in named for each in one.values[:_MOST_ROWS]
    ]  # fmt: skip
    if not rows:
        return []
    return [
        FindingTable(
            key="facts", title="Which value is on which ranks",
            text=f"{plural(len(named), 'fact')} with several values, the rarest first",
            source="what each process found of itself when it started",
            columns=["Fact", "Value", "Ranks"], rows=rows,
        )
    ]  # fmt: skip


def calls(connection: sa.Connection, subject: Subject) -> list[FindingTable]:
    """Show what each rank called at the place in its group where ranks differ, and beside it."""
    number = _CALL.search(subject.what)
    if number is None or subject.group is None:
        return []
    place = int(number[1].replace(",", ""))
    step = subject.onset_step
    wanted = Wanted(subject.run_id, subject.attempt, None, step and step - 1, step and step + 1)
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for part in read(connection, choose(connection, wanted).ids, _CALL_COLUMNS):
        columns, words = part.numbers, part.words
        near = np.abs(columns["sequence"] - place) <= 1
        group = words["group"]
        mine = np.array([word == subject.group for word in group.words])[group.codes]
        for row in np.flatnonzero(near & mine).tolist():
            said = [words[name].words[int(words[name].codes[row])] for name in _CALL_WORDS]
            size = bytes_text(float(columns["size_bytes"][row]))
            ranks[f"{int(columns['sequence'][row]):,}", said[0], size, *said[1:]].append(
                int(columns[RANK][row])
            )
    rows = [
        [*key, rank_list(sorted(set(ranks[key])))]
        for key in sorted(ranks, key=lambda key: (int(key[0].replace(",", "")), len(ranks[key])))
    ][:_MOST_ROWS]
    if not rows:
        return []
    at = sum(key[0] == f"{place:,}" for key in ranks)
    return [
        FindingTable(
            key="calls", title=f"Calls of group {subject.group}, by number",
            text=f"{plural(at, 'different call')} with number {place:,}",
            source="the calls as each rank made them, numbered by itself",
            columns=["Number", "Operation", "Size", "Type", "Called at", "Ranks"], rows=rows,
        )
    ]  # fmt: skip


def checksums(connection: sa.Connection, subject: Subject) -> list[FindingTable]:
    """Show which ranks had which sum over the bits of their parameters, check by check."""
    table = tables.metric.c
    by_step: dict[int, dict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, step, value in connection.execute(
        sa.select(table.rank, table.step, table.value)
        .where(
            table.run_id == subject.run_id, table.name == _CHECKSUM,
            table.attempt == subject.attempt, table.step.between(*subject.steps()),
            table.value.is_not(None),
        )
        .order_by(table.step, table.rank)
        .limit(_MOST_EVENTS)
    ):  # fmt: skip
        by_step[step][value].append(rank)
    roles = {rank: role for rank, role in subject.role_of.items()}
    wanted = {roles[rank] for rank in subject.ranks if rank in roles}
    onset = subject.onset_step or 0
    before = [step for step in by_step if step < onset][-2:]
    since = [step for step in by_step if step >= onset][:3]
    rows = [
        [f"{step:,}", f"{int(value):x}", rank_list(ranks)]
        for step in (*before, *since)
        for value, ranks in sorted(by_step[step].items(), key=lambda item: len(item[1]))
        if not wanted or wanted & {roles.get(rank) for rank in ranks}
    ][:_MOST_ROWS]  # fmt: skip
    if not since:
        return []
    num_sums = len(by_step[since[0]])
    return [
        FindingTable(
            key="checksums", title="Sums over the bits of all parameters",
            text=f"{plural(num_sums, 'sum')} in step {since[0]:,}"
            + (f", {plural(len(by_step[before[-1]]), 'sum')} in step {before[-1]:,} before it"
               if before else ""),
            source="each rank's own parameters; equal replicas have equal sums",
            columns=["Step", "Sum", "Ranks"], rows=rows,
        )
    ]  # fmt: skip


def loss_scale(connection: sa.Connection, subject: Subject) -> list[FindingTable]:
    """Show by what the loss of the passes of a step is divided, on which ranks."""
    newest = {row.rank: row for row in _events(connection, subject, LOSS_SCALE)}
    ranks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, row in sorted(newest.items()):
        said: Mapping[str, str] = json_object(row.fields) or {}
        factors = said.get("factors", "").split()
        ranks[
            said.get("passes", "?"), said.get("local", "?"),
            " and ".join(reversed(factors)) or "nothing", said.get("reduction") or "not known",
        ].append(rank)  # fmt: skip
    if not ranks:
        return []
    first = next(iter(ranks))
    return [
        FindingTable(
            key="loss_scale", title="What the loss of each pass is divided by",
            text=f"{first[0]} passes make one step; the loss of each is divided by {first[2]}",
            source="the graph of each backward pass",
            columns=["Passes of a step", "Without reduction (no_sync)", "Divided by",
                     "Loss is a", "Ranks"],
            rows=[[*said, rank_list(who)] for said, who in ranks.items()][:_MOST_ROWS],
        )
    ]  # fmt: skip


def passes(connection: sa.Connection, subject: Subject) -> list[FindingTable]:
    """Show with which batches each pass over a data loader began, on which ranks."""
    table = DataPasses()
    for row in _events(connection, subject, PASS):
        table.take(
            Event(attempt=row.attempt, rank=row.rank, time_ns=row.time_ns, name=row.name,
                  step=row.step, fields=json_object(row.fields) or {})
        )  # fmt: skip
    wanted = subject.name.rpartition(" ")[2]
    loaders = [int(wanted)] if wanted.isdecimal() else list(table.by_loader)
    rows = [
        row
        for loader in loaders
        for number in sorted(table.by_loader.get(loader, {}))
        for row in _pass_rows(number, table.by_loader[loader][number])
    ]
    if not rows:
        return []
    return [
        FindingTable(
            key="passes", title="How each pass over the data began",
            text=f"{plural(len(rows), 'beginning')} of a pass, by what was drawn first",
            source="checksums of the first batches, and the sampler's own epoch",
            columns=["Pass", "In step", "Sampler", "Its epoch", "First batches", "Ranks"],
            rows=rows[:_MOST_ROWS],
        )
    ]  # fmt: skip


def _pass_rows(number: int, ranks: Mapping[int, DataPass]) -> list[list[str]]:
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, one in sorted(ranks.items()):
        batches = " ".join(batch[:8] for batch in one.batches[:3]) or "not known"
        alike[
            f"{one.step:,}", one.sampler or "not known", one.epoch.partition(" ")[0] or "none",
            batches,
        ].append(rank)  # fmt: skip
    return [[str(number), *said, rank_list(who)] for said, who in alike.items()]
