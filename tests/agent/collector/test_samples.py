from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rankscope import schema
from rankscope.chunk import decode_chunk
from rankscope.collector.gpu import GpuSampler, GpuUnavailable
from rankscope.collector.samples import HostSampler, ProcessSampler, SampleThread
from rankscope.collector.sampling import Sampling

# `head -1 /proc/stat`, `cat /proc/meminfo` and so on of one host, cut to what is read
PROC = {
    "stat": "cpu  1000 50 300 8000 200 10 40 400 0 0\ncpu0 1 1 1\n",
    "meminfo": "MemTotal: 16000 kB\nMemFree: 1 kB\nMemAvailable: 12000 kB\nBuffers: 1 kB\n"
    "Cached: 1 kB\nShmem: 1 kB\nActive: 1 kB\nInactive: 1 kB\nSlab: 1 kB\n"
    "SwapTotal: 1000 kB\nSwapFree: 400 kB\nHugePages_Total: 0\n",
    "loadavg": "1.50 0.75 0.25 3/512 12345\n",
    "vmstat": "pgfault 1\npgmajfault 77\npswpin 0\npswpout 0\n",
    "net/dev": "Inter-| Receive | Transmit\n face |bytes\n"
    "    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n"
    "  eth0: 500 1 0 0 0 0 0 0 300 1 0 0 0 0 0 0\n"
    "  ib0:40 1 0 0 0 0 0 0 60 1 0 0 0 0 0 0\n",
}


@pytest.fixture
def proc(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "net").mkdir()
    for name, text in PROC.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    psutil.PROCFS_PATH = "/proc"


def test_a_host_sample(proc: Path, tmp_path: Path) -> None:
    sampler = HostSampler(tmp_path, proc, wall_ns=lambda: 123)
    (proc / "stat").write_text("cpu  1060 50 300 8020 210 10 40 410 0 0\n")  # 100 ticks later
    row = dict(zip(schema.HOST_COLUMNS, sampler.sample(), strict=True))
    assert row.pop("disk_free_bytes") > 0
    assert row == pytest.approx({
        "time_ns": 123, "cpu_ratio": 0.6, "steal_ratio": 0.1, "iowait_ratio": 0.1,
        "load_1m": 1.5, "runnable": 3, "memory_used_bytes": 4000 * 1024,
        "memory_total_bytes": 16000 * 1024, "swap_used_bytes": 600 * 1024,
        "net_sent_bytes": 360, "net_received_bytes": 540, "major_faults": 77,
    })  # fmt: skip


def test_what_a_host_does_not_tell_is_not_known(proc: Path, tmp_path: Path) -> None:
    row = HostSampler(tmp_path / "gone", tmp_path / "gone", wall_ns=lambda: 123).sample()
    assert row[0] == 123
    assert set(row[1:]) == {-1}


def test_a_process() -> None:
    cpu_seconds, rss_bytes = ProcessSampler().sample(os.getpid())
    assert 0 < cpu_seconds < time.process_time() + 1
    assert rss_bytes > 1 << 20
    assert ProcessSampler().sample(2**22 + 1) == (0.0, 0)  # above the kernel's highest pid


class FakeNvml:
    """Two GPUs; the second does not tell its power, and has no ECC."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def nvmlInit(self) -> None:
        if self.count < 0:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=5, total=80)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 350_500

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 60

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 0


def test_gpu_samples() -> None:
    rows = GpuSampler(FakeNvml(), wall_ns=lambda: 9).sample()
    assert rows[0] == (9, 0, 0.5, 5, 80, 1980, 350.5, 60, 4, 0)
    assert rows[1] == (9, 1, 0.5, 5, 80, 1980, -1, 60, 4, -1)


@pytest.mark.parametrize(("count", "why"), [(-1, "Driver Not Loaded"), (0, "no GPU")])
def test_no_gpu_says_why(count: int, why: str) -> None:
    with pytest.raises(GpuUnavailable, match=why):
        GpuSampler(FakeNvml(count))


def taken(sampling: Sampling, kinds: int) -> list[schema.Chunk]:
    deadline = time.monotonic() + 10
    chunks: list[schema.Chunk] = []
    while len({chunk.kind for chunk in chunks}) < kinds:
        assert time.monotonic() < deadline
        chunks += sampling.take_chunks("node-1")
        time.sleep(0.02)
    return chunks


def test_samples_become_chunks(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, 0.05, lambda: GpuSampler(FakeNvml()))
    sampling.start()
    for chunk in taken(sampling, 2):
        assert (chunk.rank, chunk.host) == (schema.NODE_RANK, "node-1")
        assert set(decode_chunk(chunk.data)) == set(schema.CHUNK_COLUMNS[chunk.kind])
    assert sampling.news() == []


def test_sampling_that_cannot_is_news_once(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, 0.05, lambda: GpuSampler(FakeNvml(0)))
    sampling.start()
    taken(sampling, 1)
    assert sampling.news() == [("gpu samples skipped", {"reason": "NVML finds no GPU"})]
    assert sampling.news() == []


def test_a_sampler_that_fails_says_why() -> None:
    def fail() -> list[tuple[float, ...]]:
        raise ValueError("strange /proc")

    thread = SampleThread("test", fail, 0.01)
    thread.start()
    thread.join(10)
    assert thread.failure == "ValueError: strange /proc"
    assert thread.take_rows() == []
