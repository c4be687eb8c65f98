"""Metrics as numbers of training: a value for each step of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rankscope.wire import schema
from rankscope_server.otlp.attributes import (
    RANK,
    STEP,
    WORLD_SIZE,
    bare,
    number_of,
    rank_of,
    text_of,
    values_of,
)
from rankscope_server.otlp.book import Book
from rankscope_server.otlp.parts import Part, Resource, is_time, items, started

NO_STEP = "without a step: give the attribute step, or send spans of steps of the same rank"
_BAD_TIME = "at no time"
_EMPTY = "without a value"
_MEANS = "of distributions, of which count and mean are kept"
# what programs call the numbers that detectors look at
_ALIASES = {
    "loss": "loss", "train_loss": "loss", "lm_loss": "loss", "learning_rate": "learning_rate",
    "lr": "learning_rate", "grad_norm": "gradient_norm", "gradient_norm": "gradient_norm",
    "tokens": "tokens", "tokens_per_second": "tokens_per_second", "samples": "samples",
    "samples_per_second": "samples_per_second",
}  # fmt: skip
_NO_SERIES = frozenset({*RANK, *STEP, *WORLD_SIZE, "local_rank", "node_rank", "local_world_size"})


def take_numbers(resources: Sequence[Resource], part: Part, book: Book) -> None:
    """Add what data points are to a part."""
    values_by_step: dict[tuple[int, int, int], tuple[int, dict[str, float]]] = {}
    for resource in resources:
        origin = resource.origin
        for _, metric in items(resource, "metrics"):
            for point, values in _points(metric, part):
                time_ns = int(point.time_unix_nano)
                if not is_time(time_ns):
                    part.said.refused[_BAD_TIME] += 1
                    continue
                attributes = values_of(point.attributes)
                rank = rank_of(attributes)
                rank = rank if rank >= 0 else origin.rank
                rank = rank if rank >= 0 else book.rank_of(part.run_id, origin.instance)
                step = number_of(attributes, STEP)
                if step < 0 and rank >= 0:
                    step = part.of(book, origin.attempt, rank).step or -1
                if step < 0:
                    part.said.refused[NO_STEP] += 1
                    continue
                if not part.records:
                    part.records.append(started(origin, time_ns))
                key = (origin.attempt, rank, step)
                newest, found = values_by_step.setdefault(key, (time_ns, {}))
                name = _name(metric.name, attributes)
                found |= {f"{name}{suffix}": value for suffix, value in values.items()}
                values_by_step[key] = (max(newest, time_ns), found)
    part.records += [
        schema.Metrics(attempt=attempt, rank=rank, step=step, time_ns=time_ns, values=values)
        for (attempt, rank, step), (time_ns, values) in values_by_step.items()
    ]


def _points(metric: Any, part: Part) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield the points of a metric, each with its values by what follows the name."""
    kind = metric.WhichOneof("data")
    for point in getattr(metric, kind).data_points if kind else ():
        if kind in ("gauge", "sum"):
            value = point.WhichOneof("value")
            if value is None:
                part.said.refused[_EMPTY] += 1
            else:
                yield point, {"": float(getattr(point, value))}
            continue
        part.said.notes[_MEANS] += 1
        mean = {".mean": point.sum / point.count} if point.count else {}
        yield point, {".count": float(point.count), **mean}


def numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """Return the attributes of a step that are numbers of training."""
    return {
        _name(name, {}): float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and bare(name) not in _NO_SERIES
    }


def _name(name: str, attributes: dict[str, Any]) -> str:
    """Return what a number is called: with the attributes that distinguish its series."""
    called = _ALIASES.get(bare(name).replace(".", "_"), name)
    rest = sorted(
        f"{key}={text_of(value)}"
        for key, value in attributes.items()
        if bare(key) not in _NO_SERIES
    )
    return (f"{called}{{{','.join(rest)}}}" if rest else called)[:240]
