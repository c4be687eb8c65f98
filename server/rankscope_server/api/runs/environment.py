"""What differs between the environments of the ranks."""

from __future__ import annotations

import json
from collections import defaultdict

import sqlalchemy as sa

from rankscope_server.api.runs.schema import EnvironmentAnswer, Fact, FactDifference, FactValue
from rankscope_server.findings.finding import Severity
from rankscope_server.observe.environment_rules import severity_of
from rankscope_server.store import tables
from rankscope_server.store.packing import unpack
from rankscope_server.text import plural, rank_list

_ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}


def environment(
    connection: sa.Connection, run_id: str, attempt: int, world_size: int
) -> EnvironmentAnswer:
    """Return which facts differ between the ranks of an attempt and which they share."""
    facts = _facts(connection, run_id, attempt)
    ranks = sorted(facts)
    by_fact: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    names = {name for values in facts.values() for name in values}
    for rank in ranks:
        for name in names:
            by_fact[name][facts[rank].get(name, "")].append(rank)
    differences = [
        FactDifference(
            fact=name,
            severity=severity_of(name, values),
            values=[
                FactValue(value=value, ranks=members)
                for value, members in sorted(values.items(), key=lambda item: len(item[1]))
            ],
        )
        for name, values in by_fact.items()
        if len(values) > 1
    ]
    differences.sort(key=lambda difference: (_ORDER[difference.severity], difference.fact))
    common = [
        Fact(fact=name, value=next(iter(values)))
        for name, values in sorted(by_fact.items())
        if len(values) == 1
    ]
    missing = [rank for rank in range(world_size) if rank not in facts]
    return EnvironmentAnswer(
        text=_text(ranks, missing, differences, common),
        ranks=ranks,
        missing=missing,
        differences=differences,
        common=common,
    )


def num_differences(connection: sa.Connection, run_id: str, attempt: int) -> int:
    """Return on how many facts ranks differ that should agree."""
    answer = environment(connection, run_id, attempt, 0)
    return sum(difference.severity != "info" for difference in answer.differences)


def _facts(connection: sa.Connection, run_id: str, attempt: int) -> dict[int, dict[str, str]]:
    table = tables.environment.c
    rows = connection.execute(
        sa.select(table.rank, table.facts).where(
            table.run_id == run_id, table.attempt == attempt, table.rank >= 0
        )
    )
    return {rank: json.loads(unpack(facts)) for rank, facts in rows}


def _text(
    ranks: list[int], missing: list[int], differences: list[FactDifference], common: list[Fact]
) -> str:
    if not ranks:
        return "No rank has sent its environment yet."
    notable = [difference for difference in differences if difference.severity != "info"]
    if notable:
        first = notable[0]
        odd = first.values[0]
        text = f"{plural(len(notable), 'fact')} differ" + ("s" if len(notable) == 1 else "")
        value = odd.value or "not set"
        text += f" that should agree: {first.fact} is {value} on {rank_list(odd.ranks)}."
    elif len(ranks) == 1:
        text = f"One rank, {plural(len(common), 'fact')}."
    else:
        text = f"All {len(ranks)} ranks agree on {plural(len(common), 'fact')}."
    if missing:
        text += f" {rank_list(missing).capitalize()} sent none."
    return text
