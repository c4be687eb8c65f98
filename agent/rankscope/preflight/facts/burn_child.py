"""Loads every GPU for half a second: run by path with the number of GPUs, prints JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SIZE, SECONDS = 4096, 0.5  # 137 GFLOP a product: enough to fill an H100, 100 MB of memory
COPY_BYTES = 256 << 20


def load(torch: Any, index: int) -> dict[str, Any]:
    """Multiply matrices for half a second; what NVML says is asked while they run."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    generator = torch.Generator(device=device).manual_seed(1)
    left, right = (
        torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device, generator=generator)
        for _ in range(2)
    )
    first = left @ right  # also the warm-up
    for _ in range(10):
        left @ right
    torch.cuda.synchronize(device)
    count, started = 0, time.monotonic()
    state: dict[str, Any] = {}
    while time.monotonic() - started < SECONDS:
        for _ in range(20):
            last = left @ right
        count += 20
        if not state and time.monotonic() - started > SECONDS / 2:
            state = bus(torch, index)
        torch.cuda.synchronize(device)
    elapsed = time.monotonic() - started
    tflops = 2 * SIZE**3 * count / elapsed / 1e12
    same = bool(torch.equal(first, last))
    return {
        "index": index,
        "bf16_tflops": tflops,
        "is_correct": same,
        **state,
        **copy(torch, device),
    }


def copy(torch: Any, device: Any) -> dict[str, Any]:
    """Return how fast pinned memory is copied to the GPU."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    started = time.monotonic()
    for _ in range(4):
        target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    return {"copy_gb_per_s": 4 * COPY_BYTES / (time.monotonic() - started) / 1e9}


def bus(torch: Any, index: int) -> dict[str, Any]:
    """Return what NVML says of the GPU while it works."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        return {
            "uuid": uuid,
            "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "clock_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
    except (ImportError, AttributeError, pynvml.NVMLError):
        return {}


def main(count: int) -> None:
    """Load one GPU after the other: together they would share the host's memory and power."""
    import torch

    for index in range(count):
        try:
            answer = load(torch, index)
        except RuntimeError as error:  # of CUDA: out of memory, a fault of the device
            answer = {"index": index, "error": str(error).splitlines()[0][:300]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
