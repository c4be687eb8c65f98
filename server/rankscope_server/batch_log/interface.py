"""What ingest knows of the way into the store, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rankscope.wire.schema import Command
from rankscope_server.ingest.records import Refused
from rankscope_server.store.engine import StoreUnavailableError


class Head(NamedTuple):
    """What is known of a batch when it is read; numbers are of what can be accepted of it."""

    run_id: str
    producer: str
    sequence: int
    sent_ns: int  # when it was made, by its collector's clock
    num_records: int
    num_chunks: int
    num_events: int


class ReadBatch(Protocol):
    """A body that is a batch; the rest is known to the log that read it."""

    @property
    def head(self) -> Head:
        """Return what it is."""


class Origin(NamedTuple):
    """What the request of a batch says beside it."""

    project: str | None = None  # to which a new run belongs, and no run of another one
    clock_ns: int = 0  # of its collector, when it sent it; 0: not known
    is_urgent: bool = False  # where ranks are and how they ended: it may go past bulk


@dataclass(frozen=True, slots=True)
class Appended:
    """What came of a batch that was accepted."""

    duplicate: bool
    is_durable: bool = True  # in the store; else how far its producer is says its watermark
    refused: list[Refused] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


class Log(Protocol):
    """Takes batches, each of which is in the store once in the end, in order within a run."""

    async def read(
        self, body: bytes, encoding: str, *, takes_commands: bool, is_urgent: bool = False
    ) -> ReadBatch:
        """Return a body as a batch. Raises Problem where it is none, StoreUnavailableError."""

    async def append(self, batch: ReadBatch, origin: Origin) -> Appended:
        """Accept a batch that this log has read; what is accepted outlives this process.

        Raises Problem where it is refused for good, StoreUnavailableError where it can be sent
        again.
        """

    def failure(self) -> str:
        """Return why it takes no batches now; empty where it does."""


def unavailable(why: object) -> StoreUnavailableError:
    """Return the answer to a batch that the log does not take now."""
    return StoreUnavailableError(
        f"the log takes no batches now: {why}", "send again later", cause="log"
    )
