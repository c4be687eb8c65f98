"""Profiles that PyTorch itself writes of two ranks over gloo, one of them slow or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankscope.wire.chunk import decode_chunk
from rankscope_server.importers.recordings import look_at, read_recordings
from rankscope_server.verdict.answers import Look
from tests.ports import free_port

RANKS = 2
SLOW_MS = 300  # far beyond what a busy machine does to a step of some ms
JOB = """
import os, sys, time, torch, torch.distributed as dist
folder, fault, steps, windows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
model = torch.nn.parallel.DistributedDataParallel(net)  # two buckets
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def pause(name):
    if rank == 1 and fault == name:
        time.sleep(SLOW)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, number):
        if number % 16 == 0:
            pause("data")
        return torch.randn(256), number % 10

net.register_forward_pre_hook(lambda module, inputs: pause("forward"))
schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=windows)
names = dict(worker_name=f"worker{rank}", use_gzip=rank == 1)
write = torch.profiler.tensorboard_trace_handler(folder, **names)
cpu = [torch.profiler.ProfilerActivity.CPU]
options = dict(activities=cpu, schedule=schedule, on_trace_ready=write, record_shapes=True)
loader = iter(torch.utils.data.DataLoader(Data(), batch_size=16))
with torch.profiler.profile(**options) as profiler:
    for _ in range((steps + 2) * windows + 1):
        inputs, labels = next(loader)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        profiler.step()
dist.destroy_process_group()
os._exit(0)  # threads of the profiler may abort a process that takes its leave
""".replace("SLOW", str(SLOW_MS / 1e3))

pytestmark = pytest.mark.multiproc


def profile(folder: Path, fault: str, steps: int, windows: int = 1) -> Look:
    pytest.importorskip("torch", reason="a real profile needs torch")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-c", JOB, str(folder), fault, str(steps), str(windows)]
    jobs = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)},
                         stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]  # fmt: skip
    told = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * RANKS, told
    recording = read_recordings([folder])
    assert (recording.left_out, recording.num_ranks) == ([], RANKS)
    return look_at(recording)


@pytest.mark.parametrize(("fault", "kind"), [("forward", "slow_compute"), ("data", "slow_data")])
def test_six_steps_of_two_ranks_name_the_slow_one(fault: str, kind: str, tmp_path: Path) -> None:
    look = profile(tmp_path, fault, 6)
    assert look.verdict is not None
    assert (look.verdict.kind, look.verdict.ranks) == (kind, (1,))
    assert look.verdict.severity == "critical"
    assert (look.verdict.cost_throughput_ratio or 0.0) > 0.3


def test_windows_of_a_schedule_are_one_recording(tmp_path: Path) -> None:
    look = profile(tmp_path, "forward", 6, windows=2)
    assert "of the 12 steps recorded" in look.answer.text
    assert look.verdict is not None
    assert look.verdict.ranks == (1,)


def test_threads_of_gloo_make_no_mismatch_and_waits_fit_into_their_steps(tmp_path: Path) -> None:
    """Whether a rank is held up in a healthy job is the machine's to say, not this test's."""
    look = profile(tmp_path, "none", 40)
    assert [finding for finding in look.findings if finding.detector == "desync"] == []
    shares = []
    for chunk in read_recordings([tmp_path]).found.chunks:
        if chunk.kind == "steps":
            steps = {name: np.asarray(values) for name, values in decode_chunk(chunk.data).items()}
            phases = ("data", "forward", "backward", "optimizer", "other")
            total = sum(steps[f"{phase}_ns"] for phase in phases)
            # a trace counts in microseconds: each phase may lose one
            assert np.all(np.abs(total - steps["duration_ns"]) <= 1000 * len(phases))
            waited = sum(steps[f"{phase}_blocked_ns"] for phase in phases[1:])
            # one rank waits for the other: never are both of them in most of a step
            shares.append(np.median(waited / steps["duration_ns"]))
    assert len(shares) == RANKS
    assert sum(shares) < 1.0
