"""Requests of OpenTelemetry as batches of the store: each body once, stored when it is answered.

A sender of OpenTelemetry numbers nothing, so this server is the producer: it numbers what it makes
of bodies, and remembers the newest bodies by their digest, as a sender that got no answer in time
sends the same again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from starlette.concurrency import run_in_threadpool

from rankscope.wire import schema
from rankscope_server.batch_log.interface import Appended, Head, Log, Origin, unavailable
from rankscope_server.otlp.bodies import Signal
from rankscope_server.otlp.book import Book, Key, read_kept
from rankscope_server.otlp.lines import take_lines
from rankscope_server.otlp.numbers import take_numbers
from rankscope_server.otlp.parts import Part, Resource, Said
from rankscope_server.otlp.spans import take_spans
from rankscope_server.otlp.steps import Kept
from rankscope_server.problems import Problem
from rankscope_server.store.watermarks import watermark_of

_RECORDS, _CHUNKS = 50_000, 256  # of a batch
_STORED = 0  # in place of the number of a batch
_Parts: TypeAlias = tuple[list[schema.Record], list[schema.Chunk]]
_MOST_BODIES = 20_000  # whose digests are remembered
_DURABLE_SECONDS, _PAUSE_SECONDS = 8.0, 0.1  # an exporter waits ten seconds


class _Numbers:
    """Numbers of the batches of a run; one whose batch was refused is given again."""

    def __init__(self) -> None:
        self._last = 0
        self._free: list[int] = []

    def take(self) -> int:
        """Return the next number."""
        if self._free:
            return self._free.pop()
        self._last += 1
        return self._last

    def give_back(self, number: int) -> None:
        """Let a number be used again: a gap would say that a batch is missing."""
        self._free.append(number)


class Taking:
    """Takes what resources of one run and host sent."""

    def __init__(self, reader: sa.Engine, log: Log) -> None:
        self._reader, self._log = reader, log
        self._book = Book(self._read)
        self._producer = f"otlp-{secrets.token_hex(8)}"
        self._numbers: defaultdict[str, _Numbers] = defaultdict(_Numbers)  # by run
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._done: OrderedDict[bytes, Said] = OrderedDict()  # by digest: bodies that are stored
        # numbers of the batches that were made of bodies that are not yet
        self._made: dict[bytes, list[int]] = {}

    async def take(
        self, signal: Signal, where: tuple[str, str], resources: Sequence[Resource], body: bytes,
        origin: Origin,
    ) -> tuple[Said, list[Head]]:  # fmt: skip
        """Store what came of one run and host; return what is said of it, and the new batches.

        Raises Problem, StoreUnavailableError.
        """
        lock = self._locks.setdefault(where, asyncio.Lock())
        digest = hashlib.blake2b(f"{signal} {where}\0".encode() + body).digest()
        heads: list[Head] = []
        async with lock:  # what is kept of a rank changes with each request
            if digest in self._done:
                return self._done[digest], heads
            part = Part(*where, Said())
            await run_in_threadpool(self._convert, signal, resources, part)
            made, numbers = self._made.setdefault(digest, []), self._numbers[where[0]]
            if len(self._made) > _MOST_BODIES:
                del self._made[next(iter(self._made))]
            for index, batch in enumerate(_batches(part)):
                if index == len(made):
                    made.append(numbers.take())
                if made[index] == _STORED:
                    continue
                try:
                    head, appended = await self._append(where, batch, origin, made[index])
                except Problem:  # for good; else it may be stored, and comes again with its number
                    numbers.give_back(made.pop(index))
                    raise
                heads += [head] * (not appended.duplicate)
                if appended.is_durable:
                    made[index] = _STORED
                for one in appended.refused:
                    part.said.refused[f"({one.field}: {one.reason})"] += 1
            await self._durable(where[0], [number for number in made if number != _STORED])
            for key, kept in part.kept.items():
                self._book.put(key, kept)
            self._is_done(digest, part.said)
        return part.said, heads

    def _is_done(self, digest: bytes, said: Said) -> None:
        self._made.pop(digest, None)
        self._done[digest] = said
        if len(self._done) > _MOST_BODIES:
            self._done.popitem(last=False)

    def _convert(self, signal: Signal, resources: Sequence[Resource], part: Part) -> None:
        if signal == "traces":
            take_spans(resources, part, self._book)
        elif signal == "logs":
            take_lines(resources, part, self._book, time.time_ns())
        else:
            take_numbers(resources, part, self._book)

    async def _append(
        self, where: tuple[str, str], parts: _Parts, origin: Origin, number: int
    ) -> tuple[Head, Appended]:
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=where[0], producer=self._producer,
            sequence=number, host=where[1], sent_ns=time.time_ns(),
            records=[msgspec.Raw(schema.encode(record)) for record in parts[0]], chunks=parts[1],
        )  # fmt: skip
        read = await self._log.read(schema.encode(batch), "", takes_commands=False)
        return read.head, await self._log.append(read, origin)

    async def _durable(self, run_id: str, numbers: Sequence[int]) -> None:
        """Return once batches are in the store. Raises StoreUnavailableError if that takes long."""

        def are_stored() -> bool:
            with self._reader.connect() as connection:
                return all(
                    watermark_of(connection, run_id, self._producer, number).durable >= number
                    for number in numbers
                )

        until = time.monotonic() + _DURABLE_SECONDS
        while numbers and not await run_in_threadpool(are_stored):
            if time.monotonic() > until:
                raise unavailable("what was sent is in the log, and not yet in the store")
            await asyncio.sleep(_PAUSE_SECONDS)

    def _read(self, key: Key) -> Kept:
        with self._reader.connect() as connection:
            return read_kept(connection, key)


def _batches(part: Part) -> list[_Parts]:
    """Return what is stored together: one batch, but for the largest of requests."""
    records, chunks = part.records, part.chunks
    num = max(-(-len(records) // _RECORDS), -(-len(chunks) // _CHUNKS))
    return [
        (
            records[at * _RECORDS : (at + 1) * _RECORDS],
            chunks[at * _CHUNKS : (at + 1) * _CHUNKS],
        )
        for at in range(num)
    ]
