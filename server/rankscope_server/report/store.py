"""An embedded server without its HTTP side: batches go in as at ingest, a report comes out."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.analysis.stored_findings import Outcome, store_look
from rankscope_server.api.report.parts import Origin
from rankscope_server.api.report.queries import report
from rankscope_server.api.report.schema import Report
from rankscope_server.api.runs.queries import list_runs
from rankscope_server.api.service import Service, open_service
from rankscope_server.ingest.batch import validate_batch
from rankscope_server.problems import Problem
from rankscope_server.report.errors import ReportError
from rankscope_server.settings import Settings
from rankscope_server.store.batches import Stored, pack_journal, store_batch
from rankscope_server.store.unit import Unit
from rankscope_server.verdict.answers import Look

DATABASE = "rankscope.db"
_NEVER_SECONDS = 1e9  # the one look is ours, at the time of the record
_UNLIMITED = 1 << 40  # what is on this disk already needs no guard against its sender
_MAX_LISTED = 8
_Answer = TypeVar("_Answer")
# What is wanted of a run: the store, its id, seconds after which it counts as silent, its source.
View: TypeAlias = Callable[[sa.Connection, str, float, Origin], _Answer]


def report_view(
    connection: sa.Connection, run_id: str, silent_after_seconds: float, origin: Origin
) -> Report:
    """Return the report of a run."""
    return report(connection, run_id, time.time_ns(), silent_after_seconds, origin)


def view_of_batches(
    run_id: str,
    batches: Iterable[schema.Batch],
    now_ns: Callable[[], int],
    origin: Callable[[], Origin],
    view: View[_Answer],
) -> _Answer:
    """Store batches in a temporary database, look once, and return what is seen of the run.

    `now_ns` and `origin` are asked when all batches have been read.
    """
    with _service() as service:
        state, refused = RunState(run_id), 0
        for batch in batches:
            refused += _take(service, state, batch)
        look = state.look(now_ns())
        service.writer.run(lambda unit: _keep(unit, run_id, look))
        source = origin()
        if refused:
            notes = (*source.notes, f"{refused:,} records could not be read")
            source = dataclasses.replace(source, notes=notes)
        with service.read() as connection:
            silent_after = 0.0 if source.is_open_ended else _NEVER_SECONDS
            return view(connection, run_id, silent_after, source)


def view_of_database(
    folder: Path, run_id: str, silent_after_seconds: float, view: View[_Answer]
) -> _Answer:
    """Return what is seen of a run in a server's data folder, which is only read.

    Without `run_id` it is the newest run.
    """
    path = (folder / DATABASE).absolute()
    engine = sa.create_engine(
        f"sqlite:///file:{str(path).replace('%', '%25').replace('?', '%3f')}?mode=ro&uri=true"
    )
    try:
        with engine.connect() as connection:
            known = list_runs(connection, None, "", "", _MAX_LISTED, 0)
            if not known.runs:
                raise ReportError(f"{folder}: its database holds no run")
            chosen = run_id or known.runs[0].run_id
            notes = []
            if not run_id and known.total > 1:
                others = ", ".join(run.run_id for run in known.runs[1:])
                notes.append(f"the newest of {known.total} runs; --run takes another: {others}")
            origin = Origin(f"data folder {folder}", tuple(notes))
            return view(connection, chosen, silent_after_seconds, origin)
    except Problem as problem:
        runs = ", ".join(run.run_id for run in known.runs)
        raise ReportError(f"{folder}: {problem.what}; its newest runs: {runs}") from problem
    except sa.exc.SQLAlchemyError as error:
        reason = str(getattr(error, "orig", error))
        raise ReportError(
            f"{path}: {reason}; if another version wrote it, start it once: "
            f"rankscope serve --data-dir {folder}"
        ) from error
    finally:
        engine.dispose()


@contextmanager
def _service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="rankscope-report-") as folder:
        settings = Settings(
            data_dir=folder, look_seconds=_NEVER_SECONDS, max_unpacked_bytes=_UNLIMITED,
            disk_low_bytes=0, disk_reserve_bytes=0,
        )  # fmt: skip
        with open_service(settings) as service:
            yield service


def _take(service: Service, state: RunState, batch: schema.Batch) -> int:
    """Store a batch as ingest does, give it to the analysis; return how much was refused."""
    validated = validate_batch(schema.encode(batch), "", service.settings.max_unpacked_bytes)

    def work(unit: Unit) -> Stored:
        return store_batch(unit, validated, pack_journal(validated.records))

    if not service.writer.run(work).duplicate:
        for record in validated.records:
            state.apply_record(record)
        for chunk in validated.chunks:
            state.apply_chunk(chunk.chunk, chunk.columns)
    return len(validated.refused)


def _keep(unit: Unit, run_id: str, look: Look) -> Outcome:
    return store_look(unit, run_id, look, Outcome())
