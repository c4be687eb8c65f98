"""What one request becomes: records and chunks by run and host, and what was not understood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rankscope.wire import schema
from rankscope.wire.redaction import clean
from rankscope_server.otlp.attributes import Origin, fields_of, origin_of, values_of
from rankscope_server.otlp.book import Book, Key
from rankscope_server.otlp.steps import Kept

NO_RUN = (
    "without a run: set the resource attribute rankscope.run, or service.name "
    "(OTEL_RESOURCE_ATTRIBUTES=rankscope.run=NAME)"
)
NO_RANK = (
    "without a rank, kept as lines of the run: set the resource attribute rank "
    "(OTEL_RESOURCE_ATTRIBUTES=rank=$RANK)"
)
MAX_NS = 1 << 62
_RUNS_AT_ONCE = 1_024


@dataclass(slots=True)
class Resource:
    """What came of one resource: its scopes, each with its items."""

    origin: Origin
    fields: dict[str, Any]
    scopes: list[Any]


@dataclass(slots=True)
class Said:
    """What is said to the sender beside that all is well."""

    refused: Counter[str] = field(default_factory=Counter)  # by reason
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def num_refused(self) -> int:
        """Return how many items were not stored."""
        return self.refused.total()

    def text(self, what: str) -> str:
        """Return it in one line."""
        both = [*self.refused.items(), *self.notes.items()]
        return "; ".join(f"{count:,} {what} {reason}" for reason, count in both)[:2_000]


@dataclass(slots=True)
class Part:
    """What a request holds of one run and host."""

    run_id: str
    host: str
    said: Said
    records: list[schema.Record] = field(default_factory=list)
    chunks: list[schema.Chunk] = field(default_factory=list)
    kept: dict[Key, Kept] = field(default_factory=dict)  # to keep once it is stored

    def of(self, book: Book, attempt: int, rank: int) -> Kept:
        """Return what is kept of a rank, to be changed."""
        key = (self.run_id, attempt, rank)
        if key not in self.kept:
            self.kept[key] = book.get(key)
        return self.kept[key]

    def line(
        self, origin: Origin, rank: int, time_ns: int, level: int, message: str, logger: str,
        values: dict[str, Any], step: int = 0,
    ) -> None:  # fmt: skip
        """Add a line of the run."""
        self.records.append(
            schema.LogLine(
                attempt=origin.attempt, rank=rank, time_ns=time_ns, level=level, step=max(0, step),
                message=clean(message), logger=logger[:256], fields=fields_of(values),
            )
        )  # fmt: skip


def split(
    resources: Iterable[Any], scopes_of: str, said: Said, num_items: Any
) -> dict[tuple[str, str], list[Resource]]:
    """Return the resources of a request by run and host; those without a run are refused."""
    found: dict[tuple[str, str], list[Resource]] = {}
    for one in resources:
        values = values_of(one.resource.attributes)
        scopes = list(getattr(one, scopes_of))
        origin = origin_of(values)
        if not origin.run_id:
            said.refused[NO_RUN] += sum(map(num_items, scopes))
            continue
        found.setdefault((origin.run_id, origin.host), []).append(Resource(origin, values, scopes))
    if len(found) > _RUNS_AT_ONCE:
        raise ValueError(f"the request holds {len(found):,} runs and hosts; send smaller ones")
    return found


def started(origin: Origin, time_ns: int) -> schema.RunStarted:
    """Return what makes the run known; the first of a run counts."""
    return schema.RunStarted(
        attempt=origin.attempt, rank=schema.NODE_RANK, time_ns=time_ns, name=origin.name,
        launcher=schema.SPANS, world_size=origin.world_size,
    )  # fmt: skip


def is_time(time_ns: int) -> bool:
    """Return whether a number can be a time."""
    return 0 < time_ns < MAX_NS


def items(resource: Resource, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what the scopes of a resource hold, each with the name of its scope."""
    for scope in resource.scopes:
        for one in getattr(scope, name):
            yield scope.scope.name, one
