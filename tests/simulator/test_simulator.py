"""The simulator says what agents say: numbers match, faults are there, and seeds decide."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope_server.analysis.state import RunState
from rankscope_server.ingest.records import clean
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import say
from tests.simulator.delivery import apply, as_validated, deliver
from tests.simulator.engine import Engine
from tests.simulator.job import Fault, Job, Noise, job_of, manifest
from tests.simulator.records import MS, START_NS, Item, Recording

SMALL = Job(data=2, tensor=2, pipeline=2, steps=6, ranks_per_host=2)


def chunks(items: list[Item], kind: str) -> list[tuple[schema.Chunk, dict[str, object]]]:
    return [what for _, what in items if isinstance(what, tuple) and what[0].kind == kind]  # type: ignore[misc]


def look_at(recording: Recording, after_ms: float, seed: int | None = None) -> Look:
    items = list(recording.items())
    state = RunState("simulated")
    apply(state, items if seed is None else deliver(items, seed))
    at_ms = recording.stopped_ms() + after_ms
    apply(state, recording.states(at_ms))
    return state.look(START_NS + int((at_ms + 6_000) * MS))


def test_a_server_takes_every_chunk_and_record() -> None:
    recording = Recording(SMALL, encode=True)
    for _, what in [*recording.items(), *recording.states(recording.stopped_ms())]:
        if isinstance(what, tuple):
            judged = as_validated(what[0])
            for name in ("sequence", "step", "operation", "group", "flags"):
                if name in what[1]:
                    assert list(judged.columns[name]) == list(what[1][name])
            assert decode_chunk(what[0].data).keys() == what[1].keys()
        else:
            clean(what)


def test_all_members_count_alike_and_call_alike() -> None:
    seen: dict[tuple[str, int], set[tuple[str, int, str]]] = {}
    count: dict[tuple[str, int], int] = {}
    for chunk, columns in chunks(list(Recording(SMALL).items(3)), "collectives"):
        rows = zip(columns["group"], columns["sequence"], columns["operation"],  # type: ignore[call-overload]
                   columns["size_bytes"], columns["flags"], strict=True)  # fmt: skip
        for group, number, operation, size, flags in rows:
            if not flags & schema.FLAG_P2P:
                seen.setdefault((group, int(number)), set()).add((operation, int(size), ""))
                count[group, int(number)] = count.get((group, int(number)), 0) + 1
        assert chunk.count == len(columns["step"])  # type: ignore[arg-type]
    assert all(len(calls) == 1 for calls in seen.values())
    assert all(n == len(SMALL.groups[group]) for (group, _), n in count.items())


def test_a_receive_has_its_send_and_states_go_on_where_chunks_end() -> None:
    recording = Recording(SMALL)
    sends, receives = set(), set()
    highest: dict[tuple[int, str], int] = {}
    for chunk, columns in chunks(list(recording.items(2)), "collectives"):
        rows = zip(columns["operation"], columns["peer_rank"], columns["sequence"],  # type: ignore[call-overload]
                   columns["group"], strict=True)  # fmt: skip
        for operation, peer, number, group in rows:
            if operation == "send":
                sends.add((chunk.rank, int(peer), int(number)))
            elif operation == "recv":
                receives.add((int(peer), chunk.rank, int(number)))
            else:
                key = (chunk.rank, group)
                highest[key] = max(highest.get(key, 0), int(number))
    assert sends == receives
    assert sends
    for _, state in recording.states(recording.stopped_ms() + 1):
        assert isinstance(state, schema.RankState)
        for group in state.groups:
            if not group.group.startswith("pp"):
                assert group.issued == group.ended == highest[state.rank, group.group]


def test_steps_are_as_long_as_their_phases_and_a_slow_rank_is_waited_for() -> None:
    fault = Fault("slow_compute", rank=3, start=3, size=0.5)
    recording = Recording(dataclasses.replace(SMALL, data=8, pipeline=1, faults=(fault,)))
    parts = {chunk.rank: columns for chunk, columns in chunks(list(recording.items()), "steps")}
    for columns in parts.values():
        phases = sum(np.asarray(columns[f"{name}_ns"]) for name in
                     ("data", "forward", "backward", "optimizer"))  # fmt: skip
        assert np.allclose(phases, columns["duration_ns"], atol=2e5)  # type: ignore[arg-type]
    slow = np.asarray(parts[3]["backward_blocked_ns"])[2:].mean()
    assert slow < 0.5 * np.asarray(parts[4]["backward_blocked_ns"])[2:].mean()


def test_a_manifest_and_its_seed_are_the_whole_job() -> None:
    job = dataclasses.replace(
        SMALL, seed=5, noise=Noise(clock_offset_ms=20.0),
        faults=(Fault("hang", 1, 3), Fault("swap", 2)),
    )  # fmt: skip
    assert job_of(manifest(job)) == job
    first, second = (list(Recording(job_of(manifest(job))).items()) for _ in range(2))
    assert [str(item) for item in first] == [str(item) for item in second]
    other = list(Recording(dataclasses.replace(job, seed=6)).items())
    assert [str(item) for item in first] != [str(item) for item in other]


def test_a_hang_stops_everybody_and_only_the_root_never_comes() -> None:
    job = dataclasses.replace(SMALL, faults=(Fault("hang", 5, 4, point="gradients"),))
    steps = list(Engine(job).steps())
    assert steps[-1].number == 4
    assert np.isinf(steps[-1].ended).all()
    (bucket,) = [row for row in steps[-1].rows if row.kind == "dp"][:1]
    came = np.isfinite(bucket.issued).ravel()
    assert not came[5]
    assert came.sum() == 7


@pytest.mark.parametrize("seed", range(6))
def test_clean_jobs_have_no_finding_above_info(seed: int) -> None:
    shapes = [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2), (16, 2, 2), (2, 1, 4)]
    data, tensor, pipeline = shapes[seed]
    job = Job(data=data, tensor=tensor, pipeline=pipeline, steps=60, seed=seed,
              noise=Noise(clock_offset_ms=5.0, clock_drift_ppm=10.0))  # fmt: skip
    look = look_at(Recording(job), 1.0, seed)
    assert not [f for f in look.findings if f.severity != "info"], look.findings


def test_a_thousand_ranks_take_seconds() -> None:
    job = Job(data=16, tensor=8, pipeline=8, steps=10)
    began = time.process_time()
    recording = Recording(job)
    count = sum(what[0].count for _, what in recording.items() if isinstance(what, tuple))
    took = time.process_time() - began
    say(f"simulator: 1,024 ranks, 10 steps, {count:,} events in {took:.1f} s")
    assert count > 100_000
    assert took < 30
