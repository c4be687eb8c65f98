"""A state that is written half-way and read again goes on as one that was never interrupted."""

from __future__ import annotations

import os
import pickle
import random
from collections import OrderedDict

import pytest

from rankscope.wire import zstd
from rankscope_server.analysis import kept
from rankscope_server.analysis.state import RunState
from tests.score.cases import DIAGNOSES, case_of
from tests.score.outcome import SILENCE_MS
from tests.simulator.delivery import apply
from tests.simulator.job import Fault, Job
from tests.simulator.records import MS, START_NS, Item, Recording

SEED = 1


def again(state: RunState) -> RunState:
    """Return what a process that starts anew knows of a state."""
    written = kept.write(state)
    parts = written.packed(())
    assert parts.keys() == set(written.digests)
    return kept.read(written.data, [parts[digest] for digest in written.digests])


def a_recording(job: Job) -> tuple[list[Item], float]:
    recording = Recording(job, collectives=True)
    items = list(recording.items(per_chunk=10))
    at_ms = recording.stopped_ms() + SILENCE_MS
    return [*items, *recording.states(at_ms)], at_ms


@pytest.mark.parametrize("name", [diagnosis.name for diagnosis in DIAGNOSES])
@pytest.mark.parametrize("is_looked_at", [False, True], ids=["unseen", "seen"])
def test_what_is_found_is_the_same(name: str, is_looked_at: bool) -> None:
    diagnosis = next(one for one in DIAGNOSES if one.name == name)
    items, at_ms = a_recording(case_of(diagnosis, diagnosis.smallest, SEED).job)
    plain, cut = RunState("run"), random.Random(name).randrange(len(items))
    apply(plain, items[:cut])
    if is_looked_at:
        plain.look(START_NS + int(at_ms / 2 * MS))
    state = again(plain)
    for one in (plain, state):
        apply(one, items[cut:])
    now_ns = START_NS + int(at_ms * MS)
    expected, found = plain.look(now_ns), state.look(now_ns)
    assert found.findings == expected.findings
    assert found.verdict == expected.verdict
    assert found.answer == expected.answer
    assert found.cost == expected.cost


def test_more_steps_than_the_table_holds() -> None:
    """Its first steps, and the time of those that left, are still known."""
    job = Job(data=4, steps=5_000, faults=(Fault("slow_compute", 1, 4_700,
                                                                    size=0.5),))  # fmt: skip
    items, at_ms = a_recording_of_steps(job)
    plain = RunState("run")
    apply(plain, items[: len(items) * 9 // 10])
    state = again(plain)
    for one in (plain, state):
        apply(one, items[len(items) * 9 // 10 :])
    now_ns = START_NS + int(at_ms * MS)
    expected, found = plain.look(now_ns), state.look(now_ns)
    assert found.findings == expected.findings
    assert any(finding.ranks == (1,) for finding in found.findings)


def a_recording_of_steps(job: Job) -> tuple[list[Item], float]:
    recording = Recording(job, collectives=False)
    return list(recording.items(per_chunk=50)), recording.stopped_ms()


def test_most_of_a_state_is_not_written_again() -> None:
    """Steps that came before are in the same parts, whatever comes after them."""
    items, at_ms = a_recording(Job(data=64, steps=400))
    state = RunState("run")
    apply(state, items[: len(items) // 2])
    state.look(START_NS + int(at_ms * MS))
    before = kept.write(state)
    apply(state, items[len(items) // 2 : len(items) * 11 // 20])
    state.look(START_NS + int(at_ms * MS))
    after = kept.write(state)
    sizes = {digest: part.nbytes for digest, part in after.parts.items()}
    news = sum(sizes[digest] for digest in sizes.keys() - before.parts.keys())
    assert 0 < news < sum(sizes.values()) / 2


class Evil:
    """What a pickle could do."""

    def __reduce__(self) -> object:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no frame",
        zstd.pack(b"no pickle"),
        zstd.pack(pickle.dumps(Evil())),
        zstd.pack(pickle.dumps(os.getcwd)),
        zstd.pack(pickle.dumps(kept.code_digest)),  # a function of ours
        zstd.pack(pickle.dumps(OrderedDict(a=1))),  # readable, and no state
        zstd.pack(b"crankscope_server.analysis.kept\nio.open\n."),
        zstd.pack(b"crankscope_server.analysis.kept\npickle\n."),
    ],
)
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(kept.NotKeptError):
        kept.read(data, [])


def test_a_part_that_is_missing_or_damaged_is_refused() -> None:
    items, at_ms = a_recording(Job(data=64, steps=100))
    state = RunState("run")
    apply(state, items)
    state.look(START_NS + int(at_ms * MS))
    written = kept.write(state)
    parts = [written.packed(())[digest] for digest in written.digests]
    for damaged in (parts[:-1], [part[:-1] for part in parts], [b"", *parts[1:]]):
        with pytest.raises(kept.NotKeptError):
            kept.read(written.data, damaged)


def test_what_cannot_be_written_says_so() -> None:
    state = RunState("run")
    state.earlier = (lambda: None,)  # type: ignore[assignment]
    with pytest.raises(kept.NotKeptError):
        kept.write(state)
