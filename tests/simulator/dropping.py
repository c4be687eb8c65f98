"""Records that never came: what is left of a recording without some ranks, sources and spans.

Unlike `delivery`, which loses chunks evenly, this leaves ranks unequally recorded: a source that
was not installed on one rank, that stopped at some step, or that was thinned in steps of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from tests.simulator.told import Item

Source: TypeAlias = Literal[
    "calls",  # rows of collectives
    "waits",  # the source of collectives: no rows, nothing counted, no wait seen, states say so
    "unhooked",  # the same, but states say nothing of it: it was never installed
    "whole",  # thinned: no rows, steps marked
    "seen",  # thinned and not watched at all: no wait is known either
    "steps", "states", "registrations", "groups", "ends", "errors", "numbers", "samples",
    "everything",
]  # fmt: skip
SOURCES: tuple[Source, ...] = get_args(Source)
BLIND = frozenset({"waits", "unhooked"})
_NO_CALLS = BLIND | {"calls", "whole", "seen"}
_WAITS = ("forward_blocked_ns", "backward_blocked_ns", "optimizer_blocked_ns", "other_blocked_ns")
Span: TypeAlias = Literal["all", "from", "until", "middle", "some", "every"]
SPANS: tuple[Span, ...] = get_args(Span)


@dataclass(frozen=True)
class Drop:
    """One source of some ranks is gone in some steps; in `whole_run` also what has no step."""

    source: Source
    ranks: frozenset[int]
    span: Span
    steps: frozenset[int]

    @property
    def whole_run(self) -> bool:
        """Return whether nothing of the source is left."""
        return self.span == "all"

    def covers(self, rank: int, step: int) -> bool:
        """Return whether a record of a rank in a step is gone."""
        return rank in self.ranks and (self.whole_run or step in self.steps)

    def __str__(self) -> str:
        steps = sorted(self.steps)
        where = f"{self.span} {steps[0]}-{steps[-1]} ({len(steps)})" if steps else self.span
        return f"{self.source} of {sorted(self.ranks)}, {where}"


def draw(chance: random.Random, num_ranks: int, num_steps: int) -> list[Drop]:
    """Return one to three drops, mostly of few ranks."""
    found = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        most = chance.choice((1, 1, 2, num_ranks // 2, num_ranks - 1, num_ranks))
        ranks = frozenset(chance.sample(range(num_ranks), chance.randint(1, max(1, most))))
        span = chance.choice(SPANS)
        source = chance.choice(SOURCES)
        found.append(Drop(source, ranks, span, frozenset(_steps(chance, span, num_steps))))
    return found


def _steps(chance: random.Random, span: Span, num_steps: int) -> Iterable[int]:
    every = range(1, num_steps + 1)
    at, to = sorted(chance.sample(every, 2))
    if span == "every":
        distance = chance.choice((2, 4, 8))
        return [step for step in every if step >= at // 2 and step % distance]
    if span == "some":
        share = chance.uniform(0.05, 0.95)
        return [step for step in every if chance.random() < share]
    return {"all": every, "from": every[at:], "until": every[:at], "middle": every[at:to]}[span]


def left_of(items: Iterable[Item], drops: Sequence[Drop]) -> list[Item]:
    """Return what came all the same."""
    found = list(items)
    for drop in drops:
        hosts = {
            what.host for _, what in found
            if isinstance(what, schema.RankRegistered) and what.rank in drop.ranks
        }  # fmt: skip
        kept: list[Item] = []
        for arrival, what in found:
            if isinstance(what, tuple):
                chunk = _chunk_left(what, drop, hosts)
                kept += [] if chunk is None else [(arrival, chunk)]
            else:
                record = _record_left(what, drop)
                kept += [] if record is None else [(arrival, record)]
        found = kept
    return found


_RECORDS: tuple[tuple[Source, tuple[type[schema.Record], ...]], ...] = (
    ("registrations", (schema.RankRegistered,)),
    ("groups", (schema.GroupDefined,)),
    ("ends", (schema.RankEnded,)),
    ("errors", (schema.ErrorRaised,)),
    ("numbers", (schema.Metrics,)),
    ("states", (schema.RankState,)),
)


def _record_left(record: schema.AnyRecord, drop: Drop) -> schema.AnyRecord | None:
    if record.rank not in drop.ranks:
        return record
    step = int(getattr(record, "step", 0))
    kinds = next((kinds for source, kinds in _RECORDS if source == drop.source), ())
    if isinstance(record, kinds) or drop.source == "everything":
        return None if drop.covers(record.rank, step) else record
    if drop.source in BLIND and isinstance(record, schema.RankState):
        if drop.covers(record.rank, step):
            is_recording = drop.source == "unhooked"
            return msgspec.structs.replace(record, is_recording=is_recording, groups=[])
    return record


def _chunk_left(
    what: tuple[schema.Chunk, dict[str, Column]], drop: Drop, hosts: set[str]
) -> tuple[schema.Chunk, dict[str, Column]] | None:
    chunk, columns = what
    if chunk.kind not in ("steps", "collectives"):
        gone = drop.source == "samples" and drop.whole_run and chunk.host in hosts
        return None if gone else what
    if chunk.rank not in drop.ranks:
        return what
    rows = np.array([drop.covers(chunk.rank, int(step)) for step in columns["step"]], bool)
    if not rows.any():
        return what
    if drop.source in ("everything", chunk.kind) or (
        chunk.kind == "collectives" and drop.source in _NO_CALLS
    ):
        return None if rows.all() else _only(chunk, columns, ~rows)
    if chunk.kind == "steps" and drop.source in BLIND:
        names = (*_WAITS, "num_collectives")
        blank = {name: np.where(rows, 0, np.asarray(columns[name])) for name in names}
        return chunk, columns | blank
    if chunk.kind == "steps" and drop.source == "whole":
        flags = np.asarray(columns["flags"])
        return chunk, columns | {"flags": np.where(rows, flags | schema.STEP_THINNED, flags)}
    if chunk.kind == "steps" and drop.source == "seen":
        flags = np.asarray(columns["flags"])
        unseen = flags | schema.STEP_THINNED | schema.STEP_WAITS_UNKNOWN
        blank = {name: np.where(rows, 0, np.asarray(columns[name])) for name in _WAITS}
        return chunk, columns | blank | {"flags": np.where(rows, unseen, flags)}
    return what


def _only(
    chunk: schema.Chunk, columns: dict[str, Column], rows: np.ndarray
) -> tuple[schema.Chunk, dict[str, Column]]:
    places = np.flatnonzero(rows)
    left = {
        name: values[rows] if isinstance(values, np.ndarray) else [values[at] for at in places]
        for name, values in columns.items()
    }  # fmt: skip
    data = encode_chunk(left) if chunk.kind == "collectives" else chunk.data
    return msgspec.structs.replace(chunk, data=data), left
