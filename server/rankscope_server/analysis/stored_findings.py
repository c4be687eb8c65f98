"""Brings findings, verdict and answer of a run in the store up to what the last look found.

A finding is known by its key within its attempt. It opens, changes, recovers and may open again;
each of these is a row of its history. Nothing is ever deleted. That it opens, recovers or opens
again is a line among those of the run too, so that a search finds it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.schema import NODE_RANK
from rankscope_server.observe.stage_table import Place
from rankscope_server.store import tables
from rankscope_server.store.lines import Line
from rankscope_server.store.ranks import store_places
from rankscope_server.store.unit import Unit
from rankscope_server.verdict.answers import Look

UPDATE_PAUSE_NS = 2_000_000_000  # a cost that wobbles is written at most so often
NOTE_PAUSE_NS = 30_000_000_000  # words with a number in them change with every look
_FACTS = ("severity", "ranks", "ended_step")  # a change of these is history at once
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(slots=True)
class StoredFinding:
    """What the store holds of a finding."""

    id: int
    state: str
    body: dict[str, Any]
    updated_ns: int
    noted_ns: int = 0  # the last time that its words went into the history


@dataclass(slots=True)
class Outcome:
    """What the last look left in the store."""

    known: dict[tuple[int, str], StoredFinding] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    places: tuple[int, Mapping[int, Place]] | None = None  # of which attempt, by rank
    changed: frozenset[str] = frozenset()


def store_look(unit: Unit, run_id: str, look: Look, before: Outcome) -> Outcome:
    """Bring the store to what a look saw; return what it holds now.

    `before` is left as it is: a transaction that fails must not leave half a memory.
    """
    known = _load(unit.connection, run_id) if before.known is None else dict(before.known)
    changed: set[str] = set()
    present: set[tuple[int, str]] = set()
    for finding in look.findings:
        body = plain(finding)
        key = (int(body.get("attempt") or 0), str(body["key"]))
        present.add(key)
        if _store_finding(unit, run_id, key, body, known):
            changed |= {"findings", "logs"}
    for key, stored in list(known.items()):
        if key not in present and stored.state != "recovered":
            _recover(unit, run_id, key, stored, known, "it no longer shows")
            changed |= {"findings", "logs"}
    columns = _run_columns(unit, run_id, look)
    if columns != before.columns:
        table = tables.run
        unit.connection.execute(
            sa.update(table)
            .where(table.c.run_id == run_id)
            .values(**columns, version=table.c.version + 1)
        )
        changed.add("verdict")
        if columns["status"] != before.status:
            changed.add("run")
    places = (look.attempt, look.places)
    if look.places and places != before.places:
        store_places(unit.connection, run_id, *places)
        changed.add("ranks")
    return Outcome(known, columns, columns["status"], places, frozenset(changed))


def store_failure(unit: Unit, run_id: str, reason: str) -> None:
    """Store that the analysis of a run failed; its last findings stay."""
    answer = {
        "state": "unknown",
        "text": "The analysis of this run failed",
        "detail": f"{reason[:500]}. The data is stored; the server's log holds the traceback.",
    }
    table = tables.run
    unit.connection.execute(
        sa.update(table)
        .where(table.c.run_id == run_id)
        .values(answer=_encode(answer).decode(), version=table.c.version + 1)
    )


def acknowledge(unit: Unit, run_id: str, finding_id: int) -> bool:
    """Mark an open finding as seen by a person; return whether it exists."""
    table = tables.finding
    state = unit.connection.scalar(
        sa.select(table.c.state).where(table.c.id == finding_id, table.c.run_id == run_id)
    )
    if state == "open":
        unit.connection.execute(
            sa.update(table)
            .where(table.c.id == finding_id)
            .values(state="acknowledged", updated_ns=unit.now_ns)
        )
        _history(unit, finding_id, "acknowledged", "a person has seen it")
        _bump(unit, run_id)
    return state is not None


def plain(value: Any) -> dict[str, Any]:
    """Return a dataclass or struct as a dictionary that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    decoded: dict[str, Any] = msgspec.json.decode(_encode(value))
    return decoded


def _load(connection: sa.Connection, run_id: str) -> dict[tuple[int, str], StoredFinding]:
    table = tables.finding
    rows = connection.execute(sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id))
    return {
        (row.attempt, row.key): StoredFinding(
            row.id, row.state, msgspec.json.decode(row.body), row.updated_ns
        )
        for row in rows
    }


def _store_finding(
    unit: Unit,
    run_id: str,
    key: tuple[int, str],
    body: dict[str, Any],
    known: dict[tuple[int, str], StoredFinding],
) -> bool:
    """Open, change, recover or reopen one finding; return whether the store changed."""
    stored = known.get(key)
    over = body.get("state") == "recovered"
    if stored is None:
        known[key] = _open(unit, run_id, key, body)
        if over:
            _recover(unit, run_id, key, known[key], known, "it was over when it was found")
        return True
    current = _current_state(unit, stored)
    if over:
        if current != "recovered":
            _write(unit, key, dataclasses.replace(stored, body=body), known)
            _recover(unit, run_id, key, known[key], known, "it is over")
            return True
    elif current == "recovered":
        _write(unit, key, dataclasses.replace(stored, body=body, state="open"), known)
        _history(unit, stored.id, "reopened", str(body.get("what", "")))
        _say(unit, run_id, known[key], "shows again: ")
        return True
    if body == stored.body:
        return False
    facts = any(body.get(name) != stored.body.get(name) for name in _FACTS)
    words = body.get("what") != stored.body.get("what")
    if not (facts or words) and unit.now_ns - stored.updated_ns < UPDATE_PAUSE_NS:
        return False
    note = facts or (words and unit.now_ns - stored.noted_ns > NOTE_PAUSE_NS)
    noted_ns = unit.now_ns if note else stored.noted_ns
    changed = dataclasses.replace(stored, body=body, state=current, noted_ns=noted_ns)
    _write(unit, key, changed, known)
    if note:
        _history(unit, stored.id, "changed", str(body.get("what", "")))
    return True


def _current_state(unit: Unit, stored: StoredFinding) -> str:
    # A person may have acknowledged it since the last look.
    if stored.state != "open":
        return stored.state
    table = tables.finding.c
    return str(unit.connection.scalar(sa.select(table.state).where(table.id == stored.id)))


def _open(unit: Unit, run_id: str, key: tuple[int, str], body: dict[str, Any]) -> StoredFinding:
    inserted = unit.connection.execute(
        sa.insert(tables.finding).values(
            run_id=run_id, attempt=key[0], key=key[1], state="open", opened_ns=unit.now_ns,
            updated_ns=unit.now_ns, body=_encode(body).decode(),
        )
    )  # fmt: skip
    finding_id = int(inserted.inserted_primary_key[0])  # type: ignore[index]
    _history(unit, finding_id, "opened", str(body.get("what", "")))
    stored = StoredFinding(finding_id, "open", body, unit.now_ns)
    _say(unit, run_id, stored)
    return stored


def _write(
    unit: Unit,
    key: tuple[int, str],
    new: StoredFinding,
    known: dict[tuple[int, str], StoredFinding],
) -> None:
    known[key] = dataclasses.replace(new, updated_ns=unit.now_ns)
    values: dict[str, Any] = {
        "state": new.state, "updated_ns": unit.now_ns, "body": _encode(new.body).decode()
    }  # fmt: skip
    if new.state != "recovered":
        values["recovered_ns"] = None
    unit.connection.execute(
        sa.update(tables.finding).where(tables.finding.c.id == new.id).values(values)
    )


def _recover(
    unit: Unit,
    run_id: str,
    key: tuple[int, str],
    stored: StoredFinding,
    known: dict[tuple[int, str], StoredFinding],
    why: str,
) -> None:
    known[key] = dataclasses.replace(stored, state="recovered", updated_ns=unit.now_ns)
    unit.connection.execute(
        sa.update(tables.finding)
        .where(tables.finding.c.id == stored.id)
        .values(state="recovered", recovered_ns=unit.now_ns, updated_ns=unit.now_ns)
    )
    _history(unit, stored.id, "recovered", why)
    _say(unit, run_id, stored, f"{why}: ")


def _say(unit: Unit, run_id: str, stored: StoredFinding, before: str = "") -> None:
    """Add a line about a finding to those of the run."""
    body = stored.body
    ranks, hosts = body.get("ranks") or [], body.get("hosts") or []
    texts = [body.get("what"), *([] if before else [body.get("why"), body.get("next")])]
    host = str(hosts[0]) if len(hosts) == 1 else ""
    line = Line(
        time_ns=unit.now_ns,
        level=_LEVELS.get(str(body.get("severity")), logging.INFO) if not before else logging.INFO,
        attempt=int(body.get("attempt") or 0),
        rank=int(ranks[0]) if len(ranks) == 1 else NODE_RANK,
        step=int(body.get("onset_step") or 0),
        host=host,
        logger="rankscope",
        stream="finding",
        message=before + "\n".join(str(text) for text in texts if text),
        fields={"kind": str(body.get("kind", "")), "finding": str(stored.id)},
    )
    unit.lines.add(run_id, host, [line])
    table = tables.run
    unit.connection.execute(
        sa.update(table).where(table.c.run_id == run_id).values(log_lines=table.c.log_lines + 1)
    )


def _history(unit: Unit, finding_id: int, event: str, text: str) -> None:
    unit.connection.execute(
        sa.insert(tables.finding_event).values(
            finding_id=finding_id, time_ns=unit.now_ns, event=event, text=text
        )
    )


def _bump(unit: Unit, run_id: str) -> None:
    table = tables.run
    unit.connection.execute(
        sa.update(table).where(table.c.run_id == run_id).values(version=table.c.version + 1)
    )


def _run_columns(unit: Unit, run_id: str, look: Look) -> dict[str, Any]:
    ended_ns = None
    if look.status in {"ended", "failed"}:
        ranks = tables.rank.c
        ended_ns = unit.connection.scalar(
            sa.select(sa.func.max(ranks.ended_ns)).where(ranks.run_id == run_id)
        )
    return {
        "status": look.status,
        "status_text": look.status_text,
        "answer": _encode(plain(look.answer)).decode(),
        "verdict": None if look.verdict is None else _encode(plain(look.verdict)).decode(),
        "detectors": _encode([plain(detector) for detector in look.detectors]).decode(),
        "ended_ns": ended_ns,
        "cost": None if look.cost is None else _encode(plain(look.cost)).decode(),
    }
