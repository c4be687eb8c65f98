"""Memory of a rank: how much it holds, once a second, and what filled it when there is no more."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.steps import EndedStep

_EVERY_SECONDS = 1.0
_TOP = 10  # sizes that a summary names
_MAX_CHILDREN = 64
_MAX_OBJECTS = 2_000_000  # that are looked through for tensors


class Memory:
    """Resident memory and what CUDA's caching allocator holds, at most once a second."""

    name: ClassVar[str] = "memory"
    needs: ClassVar[str] = "torch"

    def install(self, context: Context) -> str:
        """Listen to steps."""
        import torch

        self._context, self._cuda = context, torch.cuda
        self._next = 0.0
        context.listen("step", self._step, sampled=True)
        return "/proc/self/status, getrusage, torch.cuda.memory_stats where CUDA is used"

    def _step(self, ended: EndedStep) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        metrics = self._context.metrics
        own = resident()
        metrics.put("rss_bytes", own.all_bytes)
        metrics.put("rss_file_bytes", own.file_bytes)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        metrics.put("rss_peak_bytes", peak_kib * 1024)
        workers = resident_of_children()
        if workers.all_bytes:
            metrics.put("workers_rss_bytes", workers.all_bytes)
            metrics.put("workers_rss_file_bytes", workers.file_bytes)
        if self._cuda.is_initialized():
            for name, value in cuda_numbers(self._cuda.memory_stats()).items():
                metrics.put(name, value)
            host_stats = getattr(self._cuda, "host_memory_stats", None)
            if host_stats is not None:
                pinned = host_stats().get("allocated_bytes.current")
                if pinned is not None:
                    metrics.put("pinned_bytes", pinned)


class OutOfMemory:
    """What filled the memory when an allocation fails: the largest pieces, and the totals."""

    name: ClassVar[str] = "out-of-memory"
    needs: ClassVar[str] = "torch"

    def install(self, context: Context) -> str:
        """Look at exceptions that leave a backward pass or the script; ask CUDA's allocator."""
        import torch

        self._context = context
        self._seen = 0  # id of the last exception, which passes several times
        self._observed = False
        original = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            keep(error)
            original(kind, error, trace)

        keep = guarded(self._keep)
        context.patch(sys, "excepthook", excepthook)
        context.listen("failure", self._keep)
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is None:
            return "exceptions of backward passes and of the script"

        def observe(ended: EndedStep) -> None:
            if not self._observed and torch.cuda.is_initialized():
                self._observed = True
                attach(guarded(self._of_cuda))

        context.listen("step", observe)
        return "CUDA's allocator, exceptions of backward passes and of the script"

    def _keep(self, error: BaseException) -> None:
        if not is_memory_error(error) or id(error) == self._seen or self._context.is_off:
            return
        self._seen = id(error)
        facts = {"message": str(error)[:1000], "kind": type(error).__name__} | host_facts()
        self._context.event("out of memory", facts | {"largest_tensors": largest_tensors()})

    def _of_cuda(self, device: int, wanted: int, total: int, free: int) -> None:
        import torch

        if self._context.is_off:
            return
        facts = {
            "kind": "cuda", "device": str(device), "wanted_bytes": str(wanted),
            "device_bytes": str(total), "device_free_bytes": str(free),
        }  # fmt: skip
        numbers = cuda_numbers(torch.cuda.memory_stats(device))
        facts |= {name: str(value) for name, value in numbers.items()}
        self._context.event("out of memory", facts | snapshot_facts(torch.cuda.memory_snapshot()))


def is_memory_error(error: BaseException) -> bool:
    """Return whether an exception says that there was no memory, on whatever device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class Resident(NamedTuple):
    """Resident memory, and the part that shows files, which the kernel takes back at need."""

    all_bytes: int
    file_bytes: int


def resident(process: str = "self") -> Resident:
    """Return the resident memory of a process, as /proc/PID/status says."""
    with open(f"/proc/{process}/status", "rb") as file:
        text = file.read()
    return Resident(_kib_of(text, b"\nVmRSS:") * 1024, _kib_of(text, b"\nRssFile:") * 1024)


def _kib_of(status: bytes, name: bytes) -> int:
    """Return a number of a status file; 0 where it is not there, as in a process that ended."""
    _, found, rest = status.partition(name)
    return int(rest.split(None, 1)[0]) if found else 0


def resident_of_children() -> Resident:
    """Return the resident memory of this process's children, of at most `_MAX_CHILDREN` of them.

    Pages that a fork shares with this process count as well.
    """
    children = [Resident(0, 0)]
    for pid in _children()[:_MAX_CHILDREN]:
        with contextlib.suppress(OSError):  # it ended just now
            children.append(resident(pid))
    return Resident(
        sum(child.all_bytes for child in children), sum(child.file_bytes for child in children)
    )


def _children() -> list[str]:
    """Return the processes that the main thread started, as loaders do."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return file.read().decode().split()
    except OSError:  # not every kernel lists them
        return []


def cuda_numbers(stats: dict[str, int]) -> dict[str, int]:
    """Return our numbers from those of torch.cuda.memory_stats."""
    allocated = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    return {
        "cuda_allocated_bytes": allocated,
        "cuda_reserved_bytes": reserved,
        "cuda_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
        "cuda_fragmentation_bytes": reserved - allocated,
        "cuda_alloc_retries": stats.get("num_alloc_retries", 0),
        "cuda_ooms": stats.get("num_ooms", 0),
    }


def snapshot_facts(segments: list[dict[str, Any]]) -> dict[str, str]:
    """Summarise a snapshot of CUDA's allocator: the sizes that take most, the largest hole."""
    sizes: Counter[int] = Counter()
    hole = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[block["size"]] += 1
            elif block["state"] == "inactive":
                hole = max(hole, block["size"])
    return {
        "segments": str(len(segments)),
        "largest_free_block_bytes": str(hole),
        "largest_blocks": _top(sizes),
    }


def host_facts() -> dict[str, str]:
    """Return what the host and this process say of their memory."""
    facts = {"rss_bytes": str(resident().all_bytes)}
    for line in Path("/proc/meminfo").read_text().splitlines()[:3]:
        name, _, value = line.partition(":")
        facts[f"host_{name}"] = value.strip()
    return facts


def largest_tensors() -> str:
    """Return the sizes of tensors on the CPU that take most, as `count x bytes`."""
    import gc

    import torch

    sizes: Counter[int] = Counter()
    seen: set[int] = set()
    for thing in gc.get_objects()[:_MAX_OBJECTS]:
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            storage = thing.untyped_storage()
            if storage.device.type != "cpu" or storage._cdata in seen:
                continue  # that of a fake tensor is nowhere
            seen.add(storage._cdata)
            sizes[storage.nbytes()] += 1
        except (RuntimeError, AttributeError):
            continue  # of a subclass without memory of its own
    return _top(sizes)


def _top(sizes: Counter[int]) -> str:
    largest = sorted(sizes.items(), key=lambda item: item[0] * item[1], reverse=True)[:_TOP]
    return ", ".join(f"{count} x {size}" for size, count in largest)
