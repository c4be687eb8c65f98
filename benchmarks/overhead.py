"""What the agent costs a DDP run: paired blocks of steps with and without it, in one process.

    python benchmarks/overhead.py [--json] [--blocks 24] [--ranks 2]

Each rank trains the same model in alternating blocks of steps. In half of the blocks all hooks
are installed and record to a ring, in the other half they are taken out, kernels included. What
is compared is the CPU time of the main thread and of the whole process per step (the machine's
other load does not enter it), and the wall time beside it, which on shared cores is noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS_PER_BLOCK = 8
WARM_UP_STEPS = 10


def worker(arguments: argparse.Namespace) -> None:
    """Train in blocks on one rank and print the figures on rank 0."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import rankscope
    from rankscope.attach import start

    rankscope.init(collector=False)
    agent = start.agent()
    assert agent is not None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(arguments.layers)]
    model = nn.Sequential(*layers)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    bucket_mib = parameter_bytes / arguments.collectives / (1 << 20)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    batch = torch.randn(arguments.batch, 512)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        ddp(batch).square().mean().backward()
        optimizer.step()

    timed(step, WARM_UP_STEPS, agent)
    blocks: dict[str, list[tuple[float, float, float, int]]] = {"with": [], "without": []}
    for block in range(arguments.blocks):
        # ABBA: drift of the machine falls on both alike
        is_with = block % 4 in (0, 3)
        if is_with and not agent.undo:
            agent.install_hooks()
        elif not is_with and agent.undo:
            agent.remove_hooks()
        step()
        blocks["with" if is_with else "without"].append(timed(step, STEPS_PER_BLOCK, agent))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(blocks) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], None], number: int, agent: Any) -> tuple[float, float, float, int]:
    """Return wall, main-thread CPU and process CPU seconds, and collectives, per step."""
    before = agent.recorder.num_collectives if agent.recorder else 0
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(number):
        step()
    after = agent.recorder.num_collectives if agent.recorder else 0
    return (
        (time.perf_counter() - wall) / number,
        (time.thread_time() - thread) / number,
        (time.process_time() - process) / number,
        (after - before) // number,
    )


def summarise(blocks: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return medians and their spread over the pairs of blocks."""
    pairs = list(zip(blocks["with"], blocks["without"], strict=True))
    collectives = int(statistics.median(pair[0][3] for pair in pairs))

    def ratio(column: int) -> dict[str, float]:
        values = [a[column] / b[column] for a, b in pairs]
        quarters = statistics.quantiles(values, n=4)
        return {"median": statistics.median(values), "low": quarters[0], "high": quarters[2]}

    extra = [(a[1] - b[1]) * 1e6 / max(collectives, 1) for a, b in pairs]
    quarters = statistics.quantiles(extra, n=4)
    return {
        "collectives_per_step": collectives,
        "step_ms": statistics.median(b[0] for _, b in pairs) * 1e3,
        "main_thread_us_per_collective": {
            "median": statistics.median(extra), "low": quarters[0], "high": quarters[2],
        },
        "main_thread_cpu_ratio": ratio(1),
        "process_cpu_ratio": ratio(2),
        "wall_ratio": ratio(0),
        "pairs": len(pairs),
    }  # fmt: skip


def measure(arguments: argparse.Namespace, collectives: int) -> dict[str, Any]:
    """Run one configuration under torchrun."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", str(arguments.ranks), __file__, "--worker",
             "--collectives", str(collectives), "--blocks", str(arguments.blocks),
             "--layers", str(arguments.layers), "--batch", str(arguments.batch)],
            env=os.environ | {"RANKSCOPE_DIR": directory, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return summarise(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Measure each number of collectives and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of steps, half of them with")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--collectives", type=int, help="buckets per step (worker)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    import torch

    rows = [measure(arguments, collectives) for collectives in (3, 10, 40)]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine()}
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return
    print(f"{machine['cores']} cores, {arguments.ranks} ranks, torch {machine['torch']}")
    print("collectives  step ms   us/collective (quartiles)   main CPU ratio   process CPU   wall")
    for row in rows:
        cost, cpu = row["main_thread_us_per_collective"], row["main_thread_cpu_ratio"]
        print(
            f"{row['collectives_per_step']:>11}  {row['step_ms']:>7.1f}"
            f"   {cost['median']:>8.0f} ({cost['low']:.0f} to {cost['high']:.0f})"
            f"   {cpu['median']:>8.3f} ({cpu['low']:.3f} to {cpu['high']:.3f})"
            f"   {row['process_cpu_ratio']['median']:.3f}   {row['wall_ratio']['median']:.3f}"
        )


if __name__ == "__main__":
    main()
