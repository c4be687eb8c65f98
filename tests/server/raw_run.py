"""Random runs as plain events, how they are sent, and what follows from the events alone.

Nothing here uses the server's code: every number is computed in plain Python from all events, to
be compared with what the server answers.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk, encode_ranks

BEGIN_NS = 1_700_000_000 * 10**9
US, MS = 1_000, 1_000_000
OPERATIONS, GROUPS, SIZES = ("all_reduce", "all_gather"), ("world", "pair"), (8, 1_024, 4 << 20)
PHASES = ("data", "forward", "backward", "optimizer", "other")
HOSTS = ("node-a", "node-b")


class Collective(NamedTuple):
    """One collective of one rank; -1: not known."""

    attempt: int
    rank: int
    step: int
    operation: str
    group: str
    size: int
    arrived_ns: int
    duration_ns: int
    blocked_ns: int
    state: int


class Step(NamedTuple):
    """One step of one rank."""

    attempt: int
    rank: int
    step: int
    started_ns: int
    phases_ns: tuple[int, ...]
    blocked_ns: int

    @property
    def duration_ns(self) -> int:
        return sum(self.phases_ns)


class Sample(NamedTuple):
    """One row of a machine."""

    host: str
    time_ns: int
    memory_bytes: int
    cpu_us: int


@dataclass
class RawRun:
    """All events of a run, whatever way they are sent."""

    seed: int
    ranks: int
    spans: list[tuple[int, int]]  # by attempt, its first and last step
    collectives: list[Collective] = field(default_factory=list, repr=False)
    steps: list[Step] = field(default_factory=list, repr=False)
    samples: list[Sample] = field(default_factory=list, repr=False)
    logs: list[schema.LogLine] = field(default_factory=list, repr=False)
    errors: list[schema.ErrorRaised] = field(default_factory=list, repr=False)
    metrics: list[schema.Metrics] = field(default_factory=list, repr=False)
    losses: list[schema.Loss] = field(default_factory=list, repr=False)
    first_records: list[Any] = field(default_factory=list, repr=False)

    @property
    def attempt(self) -> int:
        return len(self.spans) - 1

    @property
    def last_step(self) -> int:
        return max(hi for _, hi in self.spans)

    def newest_of(self, rank: int, step: int) -> Step | None:
        """Return the step of a rank that counts: of the newest attempt, there the last one run."""
        found = [one for one in self.steps if (one.rank, one.step) == (rank, step)]
        return max(found, key=lambda one: (one.attempt, one.started_ns), default=None)

    def counted(
        self, lo: int | None, hi: int | None, rank: int | None, attempt: int | None
    ) -> tuple[list[Collective], int]:
        """Return the collectives of a range that count, and how many were run again."""
        kept, num_again = [], 0
        for one in self.collectives:
            outside = one.step < (lo or 0) or (hi is not None and one.step > hi)
            if outside or (rank is not None and one.rank != rank):
                continue
            later = self.spans[one.attempt + 1 :]
            if attempt is None and any(first <= one.step <= last for first, last in later):
                num_again += 1
            elif attempt in (None, one.attempt):
                kept.append(one)
        return kept, num_again


def make_run(
    seed: int, ranks: int, spans: list[tuple[int, int]], per_step: int, repeats: int
) -> RawRun:
    """Return a run of `spans`; `repeats` times a rank runs some steps of an attempt again."""
    rng = random.Random(seed)
    run = RawRun(seed, ranks, spans)
    ticks = itertools.count(1)  # no two events have one time, in microseconds

    def now() -> int:
        return BEGIN_NS + next(ticks) * 10 * MS + rng.randrange(1_000) * US

    for attempt, (lo, hi) in enumerate(spans):
        run.first_records += _first_records(attempt, ranks, now())
        for step in range(lo, hi + 1):
            for rank in range(ranks):
                run.steps.append(_step(rng, attempt, rank, step, now()))
                run.collectives += [
                    _collective(rng, attempt, rank, step, now())
                    for _ in range(rng.randint(0, per_step))
                ]
        for _ in range(repeats):
            step, rank = rng.randint(lo, hi), rng.randrange(ranks)
            run.steps.append(_step(rng, attempt, rank, step, now()))
            run.collectives.append(_collective(rng, attempt, rank, step, now()))
        run.collectives.append(_collective(rng, attempt, 0, 0, now()))  # before the first step
        run.collectives.append(_collective(rng, attempt, 0, hi, now(), is_open=True))
        _add_records(rng, run, attempt, (lo, hi), now)
    for second, host in itertools.product(range(rng.randint(1, 30)), HOSTS):
        at = BEGIN_NS + second * 10**9
        memory, cpu = rng.randrange(1 << 30), second * 1_000 * rng.randint(1, 3)
        run.samples.append(Sample(host, at, memory, cpu))
    return run


def _first_records(attempt: int, ranks: int, at: int) -> list[Any]:
    found: list[Any] = [
        schema.RunStarted(
            attempt=attempt, rank=-1, time_ns=at, name="raw", command=[], world_size=ranks
        ),
        schema.GroupDefined(
            attempt=attempt, rank=0, time_ns=at, group="world", ranks=list(range(ranks)),
            backend="gloo",
        ),
    ]  # fmt: skip
    for rank in range(ranks):
        found.append(
            schema.RankRegistered(
                attempt=attempt, rank=rank, time_ns=at, world_size=ranks, local_rank=rank,
                local_world_size=ranks, node_rank=0, host=HOSTS[rank % 2], pid=rank + 1,
            )
        )  # fmt: skip
        facts = {"torch": "2.13" if rank else "2.12", "hostname": HOSTS[rank % 2]}
        found.append(schema.Environment(attempt=attempt, rank=rank, time_ns=at, facts=facts))
    return found


def _step(rng: random.Random, attempt: int, rank: int, step: int, at: int) -> Step:
    phases = tuple(rng.randrange(1, 40_000) * US for _ in PHASES)
    return Step(attempt, rank, step, at, phases, rng.randrange(phases[2] // US + 1) * US)


def _collective(
    rng: random.Random, attempt: int, rank: int, step: int, at: int, *, is_open: bool = False
) -> Collective:
    is_open = is_open or rng.random() < 0.1
    state = rng.choice((schema.ISSUED, schema.RETURNED) if is_open else (schema.ENDED,))
    return Collective(
        attempt, rank, step, rng.choice(OPERATIONS), rng.choice(GROUPS), rng.choice(SIZES), at,
        -1 if is_open else rng.randrange(2_000_000) * US, rng.choice((-1, 0, 7 * US, 3 * MS)),
        state,
    )  # fmt: skip


def _add_records(
    rng: random.Random, run: RawRun, attempt: int, span: tuple[int, int], now: Callable[[], int]
) -> None:
    lo, hi = span
    for _ in range(rng.randint(0, 20)):
        run.logs.append(
            schema.LogLine(
                attempt=attempt, rank=rng.randrange(run.ranks), time_ns=now(),
                level=rng.choice((10, 20, 30, 40)), message=f"line {rng.randrange(9)}",
                step=rng.randint(lo, hi),
            )
        )  # fmt: skip
    for _ in range(rng.randint(0, 6)):
        run.errors.append(
            schema.ErrorRaised(
                attempt=attempt, rank=rng.randrange(run.ranks), time_ns=now(), step=hi,
                type=rng.choice(("ValueError", "KeyError")), message="bad", where="main",
            )
        )  # fmt: skip
    for step, rank in itertools.product(range(lo, hi + 1), range(run.ranks)):
        if rng.random() < 0.5:
            value = rng.choice((rng.random(), float("nan")))
            run.metrics.append(
                schema.Metrics(
                    attempt=attempt, rank=rank, time_ns=now(), step=step, values={"loss": value}
                )
            )
    run.losses.append(
        schema.Loss(
            attempt=attempt, rank=rng.randrange(run.ranks), time_ns=now(), source="collectives",
            reason=f"ring full in attempt {attempt}", count=rng.randint(1, 50),
        )
    )  # fmt: skip


# --- how it is sent --------------------------------------------------------------------------


def batches_of(run: RawRun, seed: int) -> list[tuple[list[Any], list[schema.Chunk]]]:
    """Return (records, chunks) of batches: cut at random places, in random order.

    Of the ranks of a host some are put into one chunk.
    """
    rng = random.Random(seed)
    parts: list[tuple[list[Any], list[schema.Chunk]]] = []
    for events, kind in ((run.collectives, "collectives"), (run.steps, "steps")):
        for (attempt, _), mine in _by(events, lambda one: (one.attempt, one.rank % 2)).items():
            cuts = []
            for rank, of_rank in _by(mine, lambda one: one.rank).items():
                rng.shuffle(of_rank)  # a chunk may hold any steps
                cuts += [(rank, cut) for cut in _cuts(rng, of_rank)]
            rng.shuffle(cuts)
            parts += [([], [_chunk_of(kind, attempt, some)]) for some in _together(rng, cuts)]
    for host, rows in _by(run.samples, lambda one: one.host).items():
        parts += [([], [sample_chunk(host, cut)]) for cut in _cuts(rng, rows)]
    records = [*run.logs, *run.errors, *run.metrics, *run.losses]
    rng.shuffle(records)
    parts += [(list(cut), []) for cut in _cuts(rng, records)]
    rng.shuffle(parts)
    batches: list[tuple[list[Any], list[schema.Chunk]]] = [(run.first_records, [])]
    while parts:
        taken = [parts.pop() for _ in range(min(len(parts), rng.randint(1, 6)))]
        batches.append(([one for part in taken for one in part[0]],
                        [one for part in taken for one in part[1]]))  # fmt: skip
    rng.shuffle(batches)
    return batches


def _by(events: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        found[key(event)].append(event)
    return found


def _cuts(rng: random.Random, events: list[Any]) -> list[list[Any]]:
    places = sorted(rng.randint(0, len(events)) for _ in range(rng.randint(0, 4)))
    bounds = [0, *places, len(events)]
    return [events[lo:hi] for lo, hi in itertools.pairwise(bounds) if hi > lo]


def _together(rng: random.Random, cuts: list[tuple[int, list[Any]]]) -> list[dict[int, list[Any]]]:
    """Return events by rank, as they are put into chunks: of each rank once."""
    found: list[dict[int, list[Any]]] = []
    for rank, events in cuts:
        fitting = [one for one in found if rank not in one]
        if fitting and rng.random() < 0.6:
            rng.choice(fitting)[rank] = events
        else:
            found.append({rank: events})
    return found


def _chunk_of(kind: str, attempt: int, of_ranks: dict[int, list[Any]]) -> schema.Chunk:
    make = collective_chunk if kind == "collectives" else step_chunk
    if len(of_ranks) == 1:
        ((rank, events),) = of_ranks.items()
        return make((attempt, rank), events)
    columns = _collective_columns if kind == "collectives" else _step_columns
    by_rank = {rank: columns(of_ranks[rank]) for rank in sorted(of_ranks)}
    first = min(of_ranks)
    one = make((attempt, first), [event for events in of_ranks.values() for event in events])
    return msgspec.structs.replace(one, data=encode_ranks(by_rank))


def collective_chunk(key: tuple[int, int], events: list[Collective]) -> schema.Chunk:
    columns = _collective_columns(events)
    return _chunk("collectives", key, HOSTS[key[1] % 2], "arrived_ns", columns)


def _collective_columns(events: list[Collective]) -> dict[str, Column]:
    fill = np.zeros(len(events), np.int64)
    columns: dict[str, Column] = {name: fill - 1 for name in schema.COLLECTIVE_COLUMNS}
    columns |= {
        "arrived_ns": _column(events, "arrived_ns"), "duration_ns": _column(events, "duration_ns"),
        "blocked_ns": _column(events, "blocked_ns"), "step": _column(events, "step"),
        "size_bytes": _column(events, "size"), "state": _column(events, "state"),
        "sequence": fill, "num_tensors": fill + 1, "flags": fill,
        "operation": [one.operation for one in events], "group": [one.group for one in events],
        **{name: ["x"] * len(events) for name in
           ("dtype", "reduce_op", "call_site", "issued_by", "ended_by")},
    }  # fmt: skip
    return columns


def step_chunk(key: tuple[int, int], events: list[Step]) -> schema.Chunk:
    return _chunk("steps", key, HOSTS[key[1] % 2], "started_ns", _step_columns(events))


def _step_columns(events: list[Step]) -> dict[str, Column]:
    columns: dict[str, Column] = {
        name: np.zeros(len(events), np.int64) for name in schema.STEP_COLUMNS
    }
    for place, phase in enumerate(PHASES):
        columns[f"{phase}_ns"] = np.array([one.phases_ns[place] for one in events])
    columns |= {
        "step": _column(events, "step"), "started_ns": _column(events, "started_ns"),
        "duration_ns": _column(events, "duration_ns"),
        "backward_blocked_ns": _column(events, "blocked_ns"),
        "num_collectives": np.ones(len(events), np.int64),
    }  # fmt: skip
    return columns


def sample_chunk(host: str, rows: list[Sample]) -> schema.Chunk:
    columns: dict[str, Column] = {}
    for name in schema.CHUNK_COLUMNS["host"]:
        kind = np.float32 if name in schema.FLOAT_COLUMNS else np.int64
        columns[name] = np.full(len(rows), -1, kind)
    columns |= {
        "time_ns": _column(rows, "time_ns"), "interval_ns": np.full(len(rows), 10**9),
        "memory_used_bytes": _column(rows, "memory_bytes"),
        "cpu_user_us_total": _column(rows, "cpu_us"),
    }  # fmt: skip
    return _chunk("host", (0, schema.NODE_RANK), host, "time_ns", columns)


def _column(events: list[Any], name: str) -> np.ndarray[Any, Any]:
    return np.array([getattr(event, name) for event in events], np.int64)


def _chunk(
    kind: Any, key: tuple[int, int], host: str, time_column: str, columns: dict[str, Column]
) -> schema.Chunk:
    at, steps = np.asarray(columns[time_column]), np.asarray(columns.get("step", [0]))
    return schema.Chunk(
        kind=kind, attempt=key[0], rank=key[1], host=host, count=len(at),
        time_lo_ns=int(at.min()), time_hi_ns=int(at.max()), step_lo=int(steps.min()),
        step_hi=int(steps.max()), data=encode_chunk(columns),
    )  # fmt: skip


# --- what follows from it -------------------------------------------------------------------


def sums_of(events: list[Collective]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return count, open, blocked time and durations by (operation, group, size)."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for key, part in _by(events, lambda one: (one.operation, one.group, one.size)).items():
        found[key] = {
            "count": len(part),
            "open": sum(one.state in (schema.ISSUED, schema.RETURNED) for one in part),
            "blocked_ns": sum(max(one.blocked_ns, 0) for one in part),
            "took_ns": sorted(one.duration_ns for one in part if one.duration_ns >= 0),
        }
    return found


def levels_of(lines: Iterable[schema.LogLine]) -> Counter[int]:
    """Return how many lines each level has."""
    return Counter(line.level for line in lines)
