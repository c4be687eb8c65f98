"""Samples of this node: the sources' threads, their chunks, and what they report."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rankscope.node.columns import sample_chunk
from rankscope.node.sources import SOURCES
from rankscope.node.sources.base import News, RankProcess
from rankscope.node.sources.machine import Machine, SampleSource
from rankscope.node.sources.samples import LaneThread, Slot
from rankscope.wire import schema

CHUNK_SECONDS = 5.0  # rows wait so long to share the header of a chunk
RECENT_SECONDS = 60.0  # so long news of a pid belong to the rank that had it
START_SECONDS = 10.0  # by then each source has answered, or is reported as starting
_MAX_NEWS = 1000  # waiting
_LANES = ("kernel", "driver")


class Sampling:
    """Runs the sources. News and chunks are taken by the collector's main thread."""

    def __init__(
        self,
        run_directory: Path,
        seconds: float,
        host: str,
        machine: Machine | None = None,
        sources: Sequence[type[SampleSource]] = SOURCES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._monotonic = monotonic
        self._news: queue.Queue[News] = queue.Queue(_MAX_NEWS)
        self._ranks: tuple[RankProcess, ...] = ()
        self._seen: dict[RankProcess, float] = {}  # when last alive, monotonic
        self._began = self._last_chunks = monotonic()
        machine = replace(
            machine or Machine(run_directory=run_directory),
            report=self._report,
            ranks=lambda: self._ranks,
            recent=lambda: tuple(self._seen),
        )
        slots = [
            Slot(source(machine), seconds * source.every, machine.wall_ns) for source in sources
        ]
        self._slots = [(slot.source.kind, slot) for slot in slots]
        self._states: dict[str, str] = {}  # as last reported
        self._threads = [
            LaneThread(lane, mine)
            for lane in _LANES
            if (mine := [slot for slot in slots if slot.source.lane == lane])
        ]

    def start(self) -> None:
        """Begin to sample."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.stop()

    def watch(self, ranks: Iterable[RankProcess]) -> None:
        """Say which training processes live here now and can be seen."""
        now = self._monotonic()
        self._ranks = tuple(ranks)
        recent = {rank: at for rank, at in self._seen.items() if now - at < RECENT_SECONDS}
        self._seen = recent | dict.fromkeys(self._ranks, now)

    def take_chunks(self, *, all_of_them: bool = True) -> list[schema.Chunk]:
        """Return the samples since the last call, one chunk of each kind.

        Without `all_of_them` nothing, as long as more rows may share the chunks.
        """
        now = self._monotonic()
        if not all_of_them and now - self._last_chunks < CHUNK_SECONDS:
            return []
        self._last_chunks = now
        return [
            sample_chunk(kind, rows, self._host)
            for kind, slot in self._slots
            if kind is not None and (rows := slot.take_rows())
        ]

    def take_dropped(self) -> int:
        """Return how many rows were dropped since the last call for lack of a reader."""
        return sum(slot.take_dropped() for _, slot in self._slots)

    def news(self) -> list[News]:
        """Return what became known since the last call, for example why there are no samples."""
        reported = []
        while not self._news.empty():
            news = self._news.get()
            reported.append(replace(news, fields={"host": self._host, **news.fields}))
        if (states := self._new_states()) is not None:
            reported.append(News("machine sources", {"host": self._host, **states}, time.time_ns()))
        return reported

    def _new_states(self) -> dict[str, str] | None:
        """Return the state of every source, None where nothing changed."""
        for thread in self._threads:
            thread.look()
        states = {f"source.{slot.source.name}": slot.state for _, slot in self._slots}
        is_young = self._monotonic() - self._began < START_SECONDS
        if states == self._states or (is_young and "starting" in states.values()):
            return None
        self._states = states
        return states

    def _report(self, news: News) -> None:
        with contextlib.suppress(queue.Full):  # a thousand of them wait already
            self._news.put_nowait(news if news.time_ns else replace(news, time_ns=time.time_ns()))
