"""What a finding looks like, from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rankscope_server.answers import json_object
from rankscope_server.api.pictures.registry import PICTURES, PLAIN
from rankscope_server.api.pictures.schema import (
    FindingBars,
    FindingChart,
    FindingLanes,
    FindingPicture,
    FindingTable,
    Part,
)
from rankscope_server.api.pictures.subject import MAX_LINES, Source, Subject
from rankscope_server.api.runs.queries import RANK_HEAD, rank_rows, role_of
from rankscope_server.api.storage.removed import removed
from rankscope_server.findings.finding import Level
from rankscope_server.findings.kinds import KINDS
from rankscope_server.problems import not_found
from rankscope_server.store import tables

# of a finding that a server of another version stored
_OF_OLD = Source(lambda *_: (), "this version of the server does not know its kind")


def picture(connection: sa.Connection, run: sa.Row[Any], finding_id: int) -> FindingPicture:
    """Return what is drawn of a finding. Raises Problem 404."""
    subject = subject_of(connection, run, finding_id)
    is_known = any(kind.id == subject.kind for kind in KINDS)
    sources = PICTURES.get(subject.kind, PLAIN if is_known else (_OF_OLD,))
    made = [(source, source.make(connection, subject)) for source in sources]
    parts = [part for _, some in made for part in some]
    missing = _missing(connection, subject, [source for source, some in made if not some])
    return FindingPicture(
        charts=[part for part in parts if isinstance(part, FindingChart)],
        bars=[part for part in parts if isinstance(part, FindingBars)],
        lanes=[part for part in parts if isinstance(part, FindingLanes)],
        tables=[part for part in parts if isinstance(part, FindingTable)],
        notes=[text for is_removed, text in missing if is_removed and parts],
        reason="" if parts else "; ".join(dict.fromkeys(text for _, text in missing)),
    )


def rows_of(picture: FindingPicture) -> Sequence[Part]:
    """Return everything that a picture holds."""
    return [*picture.lanes, *picture.charts, *picture.bars, *picture.tables]


def subject_of(connection: sa.Connection, run: sa.Row[Any], finding_id: int) -> Subject:
    """Return whom a finding is about, and when it began. Raises Problem 404."""
    table = tables.finding.c
    row = connection.execute(
        sa.select(table.key, table.body, table.attempt)
        .where(table.run_id == run.run_id, table.id == finding_id)
    ).first()  # fmt: skip
    if row is None:
        raise not_found(
            f"no finding {finding_id} in run {run.run_id}",
            f"see /api/v1/runs/{run.run_id}/findings", "id",
        )  # fmt: skip
    body = json_object(row.body)
    ranks = rank_rows(connection, run.run_id, row.attempt, RANK_HEAD)
    onset_ms = body.get("onset_ms")
    facts = [one["text"] for one in body.get("evidence", []) if isinstance(one, dict)]
    return Subject(
        run=run,
        attempt=row.attempt,
        kind=body["kind"],
        name=row.key.split("/", 2)[-1],
        ranks=tuple(body.get("ranks", ())[:MAX_LINES]),
        hosts=tuple(body.get("hosts", ())[:MAX_LINES]),
        group=body.get("group"),
        onset_step=body.get("onset_step"),
        onset_ns=None if onset_ms is None else int(onset_ms * 1e6),
        last_step=run.step,
        last_ns=max(run.last_seen_ns, run.ended_ns or 0),
        host_of={rank.rank: rank.host for rank in ranks},
        role_of={rank.rank: role_of(rank) for rank in ranks},
        levels=tuple(Level(**one) for one in body.get("levels", [])),
        what=body.get("what", ""),
        words=" ".join([body.get("what", ""), body.get("why", ""), *facts]),
    )


def _missing(
    connection: sa.Connection, subject: Subject, sources: Sequence[Source]
) -> list[tuple[bool, str]]:
    """Return of sources that made nothing whether retention may be why, and what is not stored."""
    gone = {row.kind: row.text for row in removed(connection, subject.run_id)} if sources else {}
    return [
        (source.kind in gone, f"{source.lacks}: {gone[source.kind]}")
        if source.kind is not None and source.kind in gone
        else (False, source.lacks)
        for source in sources
    ]
