"""Host and GPU samples of this node: their threads, and what they have to tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankscope import schema
from rankscope.collector.columns import sample_chunk
from rankscope.collector.gpu import GpuSampler, GpuUnavailable
from rankscope.collector.samples import HostSampler, SampleThread

News = tuple[str, dict[str, str]]  # name and fields of an event


class Sampling:
    """Runs the samplers; `make_gpu` may raise GpuUnavailable."""

    def __init__(
        self, disk: Path, seconds: float, make_gpu: Callable[[], GpuSampler] = GpuSampler
    ) -> None:
        host = HostSampler(disk)
        self._seconds = seconds
        self._make_gpu = make_gpu
        self._news: list[News] = []
        self._threads: dict[schema.ChunkKind, SampleThread] = {
            "host": SampleThread("host-samples", lambda: [host.sample()], seconds)
        }

    def start(self) -> None:
        """Begin to sample."""
        try:
            self._threads["gpu"] = SampleThread(
                "gpu-samples", self._make_gpu().sample, self._seconds
            )
        except GpuUnavailable as error:
            self._news.append(("gpu samples skipped", {"reason": str(error)}))
        for thread in self._threads.values():
            thread.start()

    def take_chunks(self, host: str) -> list[schema.Chunk]:
        """Return the samples since the last call, one chunk of each kind."""
        rows = {kind: thread.take_rows() for kind, thread in self._threads.items()}
        return [sample_chunk(kind, taken, host) for kind, taken in rows.items() if taken]

    def news(self) -> list[News]:
        """Return what became known since the last call, for example why there are no samples."""
        for kind, thread in self._threads.items():
            if thread.failure:
                self._news.append((f"{kind} samples stopped", {"reason": thread.failure}))
        news, self._news = self._news, []
        return news
