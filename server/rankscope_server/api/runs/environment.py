"""What differs between the environments of the ranks."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from rankscope_server.api.runs.schema import EnvironmentAnswer, Fact, FactDifference, FactValue
from rankscope_server.findings.finding import Severity
from rankscope_server.observe.environment_rules import is_unknown, severity_of
from rankscope_server.store import tables
from rankscope_server.store.packing import unpack
from rankscope_server.text import plural, rank_list

_decode_facts = msgspec.json.Decoder(dict[str, str]).decode
_ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}


def environment(
    connection: sa.Connection, run_id: str, attempt: int, world_size: int
) -> EnvironmentAnswer:
    """Return which facts differ between the ranks of an attempt and which they share."""
    facts = facts_of(connection, run_id, attempt)
    ranks = sorted(facts)
    shared = set[tuple[str, str]]()
    for place, rank in enumerate(ranks):
        items = facts[rank].items()
        shared = set(items) if place == 0 else shared.intersection(items)
    names = set[str]().union(*facts.values()) - {name for name, _ in shared}
    uneven = [_difference(name, facts, ranks) for name in names]
    differences = [one for one in uneven if not _is_in_part(one)]
    in_part = sorted((one for one in uneven if _is_in_part(one)), key=lambda one: one.fact)
    differences.sort(key=lambda difference: (_ORDER[difference.severity], difference.fact))
    common = [Fact(fact=name, value=value) for name, value in sorted(shared)]
    missing = [rank for rank in range(world_size) if rank not in facts]
    return EnvironmentAnswer(
        text=_text(ranks, missing, differences, common),
        ranks=ranks,
        missing=missing,
        differences=differences,
        not_known=in_part,
        common=common,
    )


def _difference(name: str, facts: dict[int, dict[str, str]], ranks: list[int]) -> FactDifference:
    values: dict[str, list[int]] = {}
    for rank in ranks:
        values.setdefault(facts[rank].get(name, ""), []).append(rank)
    return FactDifference(
        fact=name,
        severity=severity_of(name, values),
        values=[
            FactValue(value=value, ranks=members)
            for value, members in sorted(values.items(), key=lambda item: len(item[1]))
        ],
    )


def _is_in_part(difference: FactDifference) -> bool:
    """Return whether ranks differ only in whether they could read a fact: that says nothing."""
    known = [one for one in difference.values if not is_unknown(difference.fact, one.value)]
    return len(known) < min(len(difference.values), 2)


# (store, run, attempt) -> what was stored when it was counted, and the number
_counted: dict[tuple[str, str, int], tuple[tuple[int, ...], int]] = {}
_MAX_COUNTED = 256


def num_differences(connection: sa.Connection, run_id: str, attempt: int) -> int:
    """Return on how many facts ranks differ that should agree.

    Facts come once when a rank starts, and pages ask each second: the number is remembered for
    as long as no rank sends others.
    """
    key = (str(connection.engine.url), run_id, attempt)
    version = stored_facts(connection, run_id, attempt)
    before = _counted.get(key)
    if before is None or before[0] != version:
        found = environment(connection, run_id, attempt, 0).differences
        before = version, sum(difference.severity != "info" for difference in found)
        if len(_counted) >= _MAX_COUNTED:
            _counted.clear()
        _counted[key] = before
    return before[1]


def stored_facts(connection: sa.Connection, run_id: str, attempt: int) -> tuple[int, int, int]:
    """Return how many ranks of an attempt sent facts, and two numbers that change with them."""
    table = tables.environment.c
    sent_at = table.time_ns % (1 << 31)  # of which the sum of all ranks fits a number
    count, newest, total = connection.execute(
        sa.select(sa.func.count(), sa.func.max(table.time_ns), sa.func.sum(sent_at)).where(
            table.run_id == run_id, table.attempt == attempt, table.rank >= 0
        )
    ).one()
    return int(count), int(newest or 0), int(total or 0)


def facts_of(
    connection: sa.Connection, run_id: str, attempt: int, rank: int | None = None
) -> dict[int, dict[str, str]]:
    """Return the facts of each rank of an attempt, or of one."""
    table = tables.environment.c
    where = table.rank >= 0 if rank is None else table.rank == rank
    rows = connection.execute(
        sa.select(table.rank, table.facts).where(
            table.run_id == run_id, table.attempt == attempt, where
        )
    )
    return {rank: _decode_facts(unpack(facts)) for rank, facts in rows}


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
        text = f"All {len(ranks)} ranks agree on {plural(len(common), 'fact')}"
        if differences:
            text += f"; {len(differences)} more differ" + "s" * (len(differences) == 1)
            text += ", as they may" if len(differences) > 1 else ", as it may"
        text += "."
    if missing:
        text += f" {rank_list(missing).capitalize()} sent none."
    return text
