"""Traces of PyTorch's profiler: a real one of this PyTorch, and made ones of several ranks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope_server.importers.profiler_trace import TraceError, read_trace
from rankscope_server.importers.recordings import RecordingError, look_at, read_recordings
from rankscope_server.verdict.answers import Look

BASE_NS = 1_790_857_026_000_000_000
STEPS = 80
RANKS = 4
TRANSFER_US, FORWARD_US, BACKWARD_US = 10_000, 100_000, 200_000
DATA_US, OPTIMIZER_US = 20_000, 30_000


def span(name: str, category: str, start: float, duration: float, tid: int = 7, **args: Any) -> Any:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": tid, "ts": start,
            "dur": duration, "args": args}  # fmt: skip


def events_of(
    rank: int, slow: dict[int, float], *, is_device: bool, steps: range, clock_us: float = 0.0
) -> list[Any]:
    """Return a data-parallel rank: the last one to finish backward lets the others go."""
    rng = np.random.default_rng(5)
    own = BACKWARD_US * rng.lognormal(0, 0.01, (len(steps) + 100, RANKS))
    for who, factor in slow.items():
        own[:, who] *= factor
    at = clock_us * rank
    found = [{"ph": "M", "name": "process_name", "pid": 7, "ts": at, "args": {"name": "python"}}]
    for step in steps:
        mine, last = own[step, rank], own[step].max()
        forward = at + DATA_US
        backward = forward + FORWARD_US
        arrived, ended = backward + mine, backward + last + TRANSFER_US
        end = ended + OPTIMIZER_US
        op = "aten::mm"
        found += [
            span(f"ProfilerStep#{step}", "user_annotation", at, end - at),
            span("enumerate(DataLoader)#_Iter.__next__", "user_annotation", at, DATA_US),
            span("DistributedDataParallel.forward", "user_annotation", forward, FORWARD_US),
            span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", backward, mine, 8),
            span("Optimizer.step#SGD.step", "user_annotation", ended, OPTIMIZER_US),
            span(op, "kernel" if is_device else "cpu_op", forward, FORWARD_US + mine),
        ]
        if is_device:
            args = {
                "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20,
                "Group size": RANKS, "dtype": "Float", "Process Group Name": "0",
                "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, 3]",
            }  # fmt: skip
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            found.append(span(name, "kernel", arrived, ended - arrived, 20, **args))
        else:
            args = {"Input Dims": [[1 << 20]], "Input type": ["float"]}
            name = "gloo:all_reduce"
            found.append(span(name, "user_annotation", arrived, ended - arrived, 9, **args))
        at = end
    return found


def write(
    folder: Path, rank: int, events: list[Any], *, packed: bool = False, distributed: bool = True
) -> Path:
    info = {
        "backend": "nccl", "rank": rank, "world_size": RANKS, "nccl_version": "2.27.3",
        "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": RANKS,
                       "ranks": list(range(RANKS))}],
    }  # fmt: skip
    document: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}]}
    if distributed:
        document |= {"distributedInfo": info, "host_name": f"node-{rank}"}
    document |= {"baseTimeNanoseconds": BASE_NS, "traceEvents": events, "traceName": "x.json"}
    text = json.dumps(document, indent=1).encode()
    path = folder / f"rank{rank}.pt.trace.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text, 1) if packed else text)
    return path


def look_of(
    folder: Path, slow: dict[int, float], *, is_device: bool, clock_us: float = 0.0
) -> Look:
    for rank in range(RANKS):
        events = events_of(rank, slow, is_device=is_device, steps=range(STEPS), clock_us=clock_us)
        write(folder, rank, events, packed=rank % 2 == 1)
    recording = read_recordings([folder])
    assert recording.formats == {"profiler": RANKS}
    return look_at(recording)


@pytest.mark.parametrize("is_device", [True, False], ids=["nccl", "gloo"])
def test_the_slow_rank_of_a_profile_is_named(tmp_path: Path, is_device: bool) -> None:
    look = look_of(tmp_path, {2: 1.5}, is_device=is_device)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == ("slow_compute", (2,))
    accused = {rank for finding in look.findings for rank in finding.ranks
               if finding.severity != "info"}  # fmt: skip
    assert accused == {2}
    # a step takes 360 ms without, 460 ms with the fault
    assert look.verdict.cost_throughput_ratio == pytest.approx(100 / 460, abs=0.03)


def test_a_healthy_profile_accuses_nobody(tmp_path: Path) -> None:
    look = look_of(tmp_path, {}, is_device=True)
    assert look.verdict is None
    assert [finding for finding in look.findings if finding.severity != "info"] == []


def test_clocks_that_do_not_agree_are_told_and_change_nothing_else(tmp_path: Path) -> None:
    look = look_of(tmp_path, {2: 1.5}, is_device=True, clock_us=5e6)
    slow = [finding for finding in look.findings if finding.detector == "straggler"]
    assert [one.ranks for one in slow] == [(2,)]
    others = {
        finding.kind
        for finding in look.findings
        if finding.severity != "info" and finding not in slow
    }
    assert others == {"clock_offset"}


def test_phases_and_collectives_add_up(tmp_path: Path) -> None:
    look_of(tmp_path, {2: 2.0}, is_device=True)
    found = read_recordings([tmp_path]).found
    chunks = {(chunk.kind, chunk.rank): decode_chunk(chunk.data) for chunk in found.chunks}
    parts = ("data", "forward", "backward", "optimizer", "other")
    for rank in range(RANKS):
        steps = {name: np.asarray(values) for name, values in chunks["steps", rank].items()}
        total = sum(steps[f"{name}_ns"] for name in parts)
        assert (total == steps["duration_ns"]).all()
        waited = np.median(steps["backward_blocked_ns"]) / 1e3
        assert waited == pytest.approx(0 if rank == 2 else BACKWARD_US, rel=0.05, abs=10)
        assert np.median(steps["forward_ns"]) / 1e3 == pytest.approx(FORWARD_US, rel=0.01)
        calls = chunks["collectives", rank]
        assert list(calls["sequence"]) == list(range(1, STEPS + 1))
        assert set(calls["operation"]) == {"all_reduce"}
        assert set(calls["size_bytes"]) == {4 << 20}
        assert set(calls["group"]) == {"0"}
    facts = [record.facts for record in found.records if isinstance(record, schema.Environment)]
    assert facts[0] == {"nccl.version": "2.27.3", "gpu.model": "H100"}


def test_ranks_that_profiled_other_steps_are_matched_where_they_meet(tmp_path: Path) -> None:
    for rank in range(RANKS):
        write(tmp_path, rank, events_of(rank, {}, is_device=True, steps=range(rank, 25)))
    found = read_recordings([tmp_path]).found
    steps = [
        set(decode_chunk(chunk.data)["step"]) for chunk in found.chunks if chunk.kind == "steps"
    ]
    assert steps == [set(range(3, 25))] * RANKS


def test_steps_of_a_profile_that_counts_from_zero_count_from_one(tmp_path: Path) -> None:
    for rank in range(RANKS):
        write(tmp_path, rank, events_of(rank, {}, is_device=False, steps=range(4)))
    found = read_recordings([tmp_path]).found
    kinds = {chunk.kind for chunk in found.chunks}
    numbers = {kind: set[int]() for kind in kinds & {"steps", "collectives"}}
    for chunk in found.chunks:
        if chunk.kind in numbers:
            numbers[chunk.kind] |= set(decode_chunk(chunk.data)["step"].tolist())
    assert numbers == {"steps": {1, 2, 3, 4}, "collectives": {1, 2, 3, 4}}


def test_a_trace_that_lost_events_is_no_desync(tmp_path: Path) -> None:
    for rank in range(RANKS):
        events = events_of(rank, {}, is_device=True, steps=range(STEPS))
        if rank == 1:
            lost = [e for e in events if "nccl" in e["name"]][10:14]
            events = [event for event in events if event not in lost]
        write(tmp_path, rank, events)
    look = look_at(read_recordings([tmp_path]))
    assert [finding for finding in look.findings if finding.severity != "info"] == []


def test_what_is_no_sound_trace_is_named_with_a_remedy(tmp_path: Path) -> None:
    good = write(tmp_path, 0, events_of(0, {}, is_device=True, steps=range(3)))
    text = good.read_bytes()
    torn = tmp_path / "rank1.json"
    torn.write_bytes(text[: len(text) // 2])
    packed = tmp_path / "rank2.json.gz"
    packed.write_bytes(gzip.compress(text)[:-500])
    recording = read_recordings([tmp_path])
    told = "\n".join(recording.left_out)
    assert f"{torn}: is cut short" in told
    assert f"{packed}: its gzip is damaged or cut short; export it again" in told
    nameless = write(tmp_path, 3, events_of(3, {}, is_device=True, steps=range(3)),
                     distributed=False)  # fmt: skip
    assert read_trace(nameless).rank == 3  # by its name
    nobody = nameless.rename(tmp_path / "trace.json")
    with pytest.raises(TraceError, match=r"call it rank3\.json"):
        read_trace(nobody)
    empty = tmp_path / "rank9.json"
    empty.write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(RecordingError, match="no step in it"):
        read_recordings([empty])


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Ten times the events of no use take no more memory."""
    peaks = []
    for number, times in enumerate((20_000, 200_000)):
        filler = [span("cudaLaunchKernel", "cuda_runtime", i, 1, correlation=i)
                  for i in range(times)]  # fmt: skip
        path = write(tmp_path, number, [*events_of(0, {}, is_device=True, steps=range(3)), *filler])
        del filler
        tracemalloc.start()
        read_trace(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (24 << 20)
    assert path.stat().st_size > 30 << 20


REAL = """
import os, sys, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=8)
schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
write = lambda p: p.export_chrome_trace(sys.argv[1])
options = dict(schedule=schedule, on_trace_ready=write, record_shapes=True)
with torch.profiler.profile(**options) as profiler:
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
dist.destroy_process_group()
"""


@pytest.mark.multiproc
def test_a_real_trace_of_this_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a real trace needs torch")
    path = tmp_path / "trace.json.gz"
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(path)], capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trace = read_trace(path)
    assert (trace.rank, [number for number, _ in trace.steps]) == (0, [2, 3, 4])
    found = read_recordings([path]).found
    chunks = {chunk.kind: decode_chunk(chunk.data) for chunk in found.chunks}
    steps = {name: np.asarray(values) for name, values in chunks["steps"].items()}
    for phase in ("data", "forward", "backward", "optimizer"):
        assert (steps[f"{phase}_ns"] > 0).all(), phase
    assert set(chunks["collectives"]["operation"]) == {"all_reduce"}
    assert set(chunks["collectives"]["size_bytes"]) == {(8 * 8 + 8) * 4}


def as_of_2021(events: list[Any]) -> list[Any]:
    """Return the events as PyTorch 1.8 to 1.11 wrote them: annotations are operators."""
    changed = {"user_annotation": "Operator", "cpu_op": "Operator", "kernel": "Kernel"}
    return [event | {"cat": changed[event["cat"]]} if "cat" in event else event for event in events]


def old_trace(path: Path, rank: int, steps: range, slow: dict[int, float]) -> None:
    """Write one window of a profile as `tensorboard_trace_handler(worker_name=...)` did."""
    events = as_of_2021(events_of(rank, slow, is_device=False, steps=range(40)))
    begun = {f"ProfilerStep#{step}" for step in steps}
    (first, *_, last) = [event for event in events if event["name"] in begun]
    inside = [
        event for event in events
        if event["ph"] == "X" and first["ts"] <= event["ts"] < last["ts"] + last["dur"]
    ]  # fmt: skip
    head = {"schemaVersion": 1, "deviceProperties": []}
    path.write_bytes(gzip.compress(json.dumps(head | {"traceEvents": inside}).encode()))


def test_traces_of_2021_load_with_all_windows_of_each_worker(tmp_path: Path) -> None:
    for rank in range(RANKS):
        for at, steps in ((1623143089861, range(5, 11)), (1623143566756, range(16, 36))):
            name = f"worker{rank}.{at}.pt.trace.json.gz"
            old_trace(tmp_path / name, rank, steps, slow={2: 2.0})
    recording = read_recordings([tmp_path])
    assert recording.left_out == []
    assert recording.num_ranks == RANKS
    chunks = [chunk for chunk in recording.found.chunks if chunk.kind == "steps"]
    steps = {chunk.rank: decode_chunk(chunk.data)["step"] for chunk in chunks}
    assert {rank: list(map(int, found)) for rank, found in steps.items()} == {
        rank: [*range(5, 11), *range(16, 36)] for rank in range(RANKS)
    }
    look = look_at(recording)
    assert "not known" not in look.answer.text + look.answer.detail
    slow = [finding for finding in look.findings if finding.detector == "straggler"]
    assert [one.ranks for one in slow] == [(2,)]


def test_a_window_that_shows_the_same_steps_counts_once(tmp_path: Path) -> None:
    for at in (1623143089861, 1623143566756):
        old_trace(tmp_path / f"worker0.{at}.pt.trace.json.gz", 0, range(5, 11), slow={})
    (text,) = read_recordings([tmp_path]).left_out
    assert "a second trace of steps of rank 0" in text


@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("slow", [{}, {2: 1.5}])
def test_six_steps_tell_who_holds_them_up(
    slow: dict[int, float], is_device: bool, tmp_path: Path
) -> None:
    for rank in range(RANKS):
        write(tmp_path, rank, events_of(rank, slow, is_device=is_device, steps=range(6)))
    look = look_at(read_recordings([tmp_path]))
    found = [one for one in look.findings if one.detector == "straggler"]
    assert [one.ranks for one in found] == [(rank,) for rank in slow]
    if not slow:
        assert look.answer.text == "No verdict: the recording ends after 6 steps, 20 are needed"
        return
    (finding,) = found
    whole_us = DATA_US + FORWARD_US + 1.5 * BACKWARD_US + TRANSFER_US + OPTIMIZER_US
    assert finding.cost_throughput_ratio == pytest.approx(0.5 * BACKWARD_US / whole_us, abs=0.02)
    assert (finding.severity, finding.kind) == ("critical", "slow_compute")
    assert "6 steps" in finding.confidence_text
    assert look.answer.state == "culprit"


def test_a_recording_is_over_and_waits_for_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, events_of(rank, {}, is_device=False, steps=range(6)))
    look = look_at(read_recordings([tmp_path]))
    assert (look.status, look.status_text) == ("ended", "a recording of 6 steps")
    assert look.coverage.silent == ()
    assert look.coverage.text == "2 of 4 ranks recorded; ranks 2 and 3 not among them"
    assert "import them together" in " ".join(look.answer.deciding)
