"""Which parts of the server are ready, each tried as it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout

import sqlalchemy as sa

from rankscope_server.alerts.store import probe
from rankscope_server.api.operations.schema import ReadyPart
from rankscope_server.api.service import Service
from rankscope_server.problems import Problem
from rankscope_server.store.engine import StoreUnavailableError, explain

_PATIENCE_SECONDS = 5.0


def parts_of(service: Service) -> list[ReadyPart]:
    """Return every part with the reason where it is not ready."""
    return [
        ReadyPart(part=name, ready=not reason, reason=reason) for name, reason in _look(service)
    ]


def check(parts: list[ReadyPart]) -> None:
    """Raise Problem 503 that names each part that is not ready."""
    missing = [f"{part.part}: {part.reason}" for part in parts if not part.ready]
    if missing:
        raise Problem(
            503, f"not ready: {'; '.join(missing)}", None, "see the server's log; it tries again"
        )


def _look(service: Service) -> Iterator[tuple[str, str]]:
    yield "disk", service.disk.full()
    yield "reading", _tried(lambda: _read(service))
    yield "writing", _tried(lambda: _write(service))
    yield "blobs", service.blobs.unready()
    if service.settings.nats_url:
        yield "log", service.log.failure()
    if service.followers is not None and not service.followers.is_alive:
        yield "partitions", "a thread of them has ended; restart the server"
    for name, work in (
        ("analysis", service.analysis), ("retention", service.retention), ("alerts", service.alerts)
    ):  # fmt: skip
        yield name, "" if work.is_alive else "its thread has ended; restart the server"


def _read(service: Service) -> None:
    with service.read() as connection:
        connection.execute(sa.text("SELECT count(*) FROM alembic_version")).scalar()


def _write(service: Service) -> None:
    # A database elsewhere may be full, or a standby that only reads: a row shows it. Where the
    # embedded one has no space is a part of its own, "disk".
    service.writer.submit(probe, frees_space=True).result(_PATIENCE_SECONDS)


def _tried(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except StoreUnavailableError as error:
        return str(error)
    except (FutureTimeout, TimeoutError):
        return f"no answer within {_PATIENCE_SECONDS:.0f} s"
    except (sa.exc.SQLAlchemyError, OSError) as error:
        return str(explain(error) or type(error).__name__)
    return ""
