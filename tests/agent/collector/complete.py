"""Whether all that was recorded arrived."""

from __future__ import annotations

from rankscope.wire import schema
from tests.agent.collector.receiver import Receiver

Sequences = dict[int, list[int]]


def sequences(receiver: Receiver) -> Sequences:
    """Return the sequences of all collectives that arrived, by rank, in order of arrival."""
    found: Sequences = {}
    for rank, sequence in receiver.rows("collectives", "sequence"):
        found.setdefault(rank, []).append(sequence)
    return {rank: sorted(numbers) for rank, numbers in found.items()}


def assert_complete(receiver: Receiver, ranks: int, count: int) -> None:
    """Everything that the fake ranks wrote is there, once."""
    assert sequences(receiver) == {rank: list(range(1, count + 1)) for rank in range(ranks)}
    steps = receiver.rows("steps", "step")
    assert sorted(steps) == [(r, s) for r in range(ranks) for s in range(1, count // 10 + 1)]
    lines = [line.message for line in receiver.records(schema.LogLine)]
    expected = [f"rank {r} line {n}" for r in range(ranks) for n in range(count // 10)]
    assert sorted(lines) == sorted(expected)
    assert not receiver.losses()
