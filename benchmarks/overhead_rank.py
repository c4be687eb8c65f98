"""One rank of `benchmarks/overhead.py`: trains in blocks with a variant and without, and prints.

python benchmarks/overhead_rank.py worker|micro|step|memory --variant probe ...
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARAMETERS = 5_000_000
WARM_UP_STEPS = 6
SETTLING_STEPS = 12  # after a switch: what is done once for a run is not the cost of a step
BLOCK_STEPS = 11  # settling and these are a prime: what is due each 2^n steps is met as often
# name: (what it is, settings of the agent or None)
VARIANTS: dict[str, tuple[str, dict[str, str] | None]] = {
    "bare": ("nothing, against nothing", None),
    "agent": ("everything that is on by default", {}),
    "probe": ("collectives, native probe", {"hooks": "collectives", "collectives": "probe"}),
    "official": (
        "collectives, official hooks",
        {"hooks": "collectives", "collectives": "official"},
    ),
    "kernels": ("collectives, portable", {"hooks": "collectives", "collectives": "kernels"}),
    "floor": ("Python kernels that do nothing: what PyTorch takes to call ours", None),
    "profiler": ("torch.profiler, CPU", None),
    "traceml": ("TraceML, trace_step", None),
}
NO_GOVERNOR = {"overhead_percent": 100.0}  # what a source costs, not what is left of it


class Unavailable(Exception):
    """This variant cannot run here; the message says why."""


# --- the variants: a context manager that is in force during one block --------------------------


def switch_for(variant: str, model: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what puts the variant in for one block. Raises Unavailable."""
    settings = VARIANTS[variant][1]
    if settings is not None:
        return agent_switch(settings)
    if variant == "profiler":
        import torch

        return lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if variant == "traceml":
        return traceml_switch(model)
    if variant == "floor":
        return empty_kernels
    return contextlib.nullcontext


def agent_switch(settings: dict[str, str]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    from rankscope.rank.attach import start

    agent = start.agent()
    assert agent is not None
    agent.remove_hooks()

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        agent.install_hooks()
        if "skipped" in agent.context.sources.get("collectives", ""):
            raise Unavailable(agent.context.sources["collectives"])
        try:
            yield
        finally:
            agent.remove_hooks()

    return inside


@contextlib.contextmanager
def empty_kernels() -> Iterator[None]:
    """Register kernels where the source `kernels` does, which only pass the call on."""
    import torch

    from rankscope.rank.hooks.collectives.operators import OPERATORS

    after = torch._C.DispatchKey.BackendSelect
    library = torch.library.Library("c10d", "IMPL")
    for operator in OPERATORS:
        packet = getattr(torch.ops.c10d, operator.operator, None)
        if packet is None:
            continue  # this version of torch does not have it
        redispatch = packet.default.redispatch

        def kernel(keyset: Any, *args: Any, redispatch: Callable[..., Any] = redispatch) -> Any:
            return redispatch(keyset.remove(after), *args)

        library.impl(operator.operator, kernel, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def traceml_switch(model: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    try:
        import traceml_ai  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise Unavailable(f"{error}: pip install traceml-ai") from None
    # without an aggregator it would go on as if it recorded, and do nothing
    traceml_ai.init(mode="auto", on_missing_aggregator="raise")
    return lambda: traceml_ai.trace_step(model)  # of each step: see `timed`


# --- one rank of a job ---------------------------------------------------------------------------


def worker(arguments: argparse.Namespace) -> None:
    """Train in blocks on one rank and print the figures on rank 0."""
    import torch
    import torch.distributed as dist

    import rankscope

    settings = VARIANTS[arguments.variant][1]
    if settings is not None:
        rankscope.init(collector=False, **settings, **NO_GOVERNOR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model, step = make_step(arguments.collectives, arguments.batch, PARAMETERS)
    out: dict[str, Any] = {}
    try:
        switch = switch_for(arguments.variant, model)
        each_step = arguments.variant == "traceml"
        for _ in range(WARM_UP_STEPS):
            step()
        timed(step, BLOCK_STEPS, switch, each_step)  # lazy imports and first calls are not the cost
        pairs = []
        for pair in range(arguments.pairs):
            rows = {}
            for is_with in (True, False) if pair % 2 else (False, True):
                inside = switch if is_with else contextlib.nullcontext
                rows[is_with] = timed(step, BLOCK_STEPS, inside, each_step)
            pairs.append((rows[True], rows[False]))
        out = {"pairs": pairs, "num_collectives": num_collectives(step, settings, switch)}
    except Unavailable as reason:
        out = {"skipped": str(reason)}
    report(out)


def report(out: dict[str, Any]) -> None:
    """Print the figures on rank 0 and take the process group down."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(out) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def make_step(collectives: int, batch: int, num_parameters: int) -> tuple[Any, Callable[[], None]]:
    """Return a model of so many parameters under DDP, in as many buckets, and one step of it."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    width = round((num_parameters / collectives) ** 0.5)
    layers = [nn.Linear(width, width, bias=False) for _ in range(collectives)]
    per_bucket = layers[0].weight.nbytes / (1 << 20)
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=per_bucket / 2)
    inputs = torch.randn(batch, width)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return ddp, step


def timed(
    step: Callable[[], None],
    number: int,
    switch: Callable[[], contextlib.AbstractContextManager[Any]],
    each_step: bool,
) -> tuple[float, float, float]:
    """Return wall, main-thread CPU and process CPU seconds per step."""
    outer, inner = (
        (contextlib.nullcontext, switch) if each_step else (switch, contextlib.nullcontext)
    )
    with outer():
        for _ in range(SETTLING_STEPS):
            with inner():
                step()
        wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(number):
            with inner():
                step()
        return (
            (time.perf_counter() - wall) / number,
            (time.thread_time() - thread) / number,
            (time.process_time() - process) / number,
        )


def num_collectives(step: Callable[[], None], settings: Any, switch: Callable[[], Any]) -> int:
    """Return the collectives that the agent counts in one step; 0 where there is no agent."""
    from rankscope.rank.attach import start

    agent = start.agent()
    if settings is None or agent is None or agent.context.recorder is None:
        return 0
    with switch():
        before = agent.context.recorder.num_collectives
        step()
        return int(agent.context.recorder.num_collectives - before)


def anonymous_bytes() -> int:
    """Return the resident memory of this process that no file backs."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def memory(arguments: argparse.Namespace) -> None:
    """Print how much memory of its own the agent takes in a rank, files that it maps included."""
    import torch
    import torch.distributed as dist

    del arguments
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1000)

    def work(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 100)).sum().backward()
            for _ in range(20):
                dist.all_reduce(x)
            optimizer.step()

    work(200)
    before = anonymous_bytes()
    import rankscope
    from rankscope.rank.attach import start

    rankscope.init(collector=False, **NO_GOVERNOR)
    work(2000)
    after = anonymous_bytes()
    agent = start.agent()
    assert agent is not None
    assert agent.context.recorder is not None
    mapped = sum(path.stat().st_size for path in agent.context.recorder.directory.glob("*.ring"))
    sys.stdout.write(json.dumps({"heap_bytes": after - before, "rings_bytes": mapped}) + "\n")
    dist.destroy_process_group()


# --- one step, and one call, hot and cold --------------------------------------------------------


def one_step(arguments: argparse.Namespace) -> None:
    """Print what a step costs the training thread more with the variant than without, in us.

    Of a model so small that the rest of the step hardly scatters, on one rank, which waits for no
    other: hot, one step after the other, and cold, with other memory touched before each.
    """
    import torch
    import torch.distributed as dist

    import rankscope

    settings = VARIANTS[arguments.variant][1]
    if settings is not None:
        rankscope.init(collector=False, **settings, **NO_GOVERNOR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, step = make_step(arguments.collectives, 8, arguments.collectives * 64 * 64)
    out: dict[str, Any] = {}
    try:
        switch = switch_for(arguments.variant, model)
        extra = steps_of(step, switch, arguments.variant == "traceml", arguments.pairs)
        out = {name: spread(values) for name, values in extra.items()}
    except Unavailable as reason:
        out = {"skipped": str(reason)}
    report(out)


def steps_of(
    step: Callable[[], None],
    switch: Callable[[], contextlib.AbstractContextManager[Any]],
    each_step: bool,
    pairs: int,
) -> Values:
    """Measure blocks with and without, in turn; return the differences of their means, in us."""
    import torch

    matrix, large = torch.ones(180, 180), torch.ones(6_000_000)
    outer, inner = (
        (contextlib.nullcontext, switch) if each_step else (switch, contextlib.nullcontext)
    )

    def block(steps: int, is_cold: bool, each: Callable[[], Any]) -> float:
        total = 0
        for _ in range(steps):
            if is_cold:
                torch.mm(matrix, matrix)
                large.add_(1)
            began = time.thread_time_ns()
            with each():
                step()
            total += time.thread_time_ns() - began
        return total / steps / 1e3

    extra: Values = {"hot_us": [], "cold_us": []}
    for pair in range(pairs):
        seen: dict[tuple[bool, str], float] = {}
        for is_with in (True, False) if pair % 2 else (False, True):
            around, each = (outer, inner) if is_with else (contextlib.nullcontext,) * 2
            with around():
                block(SETTLING_STEPS, is_cold=False, each=each)
                seen[is_with, "hot_us"] = block(200, is_cold=False, each=each)
                seen[is_with, "cold_us"] = block(60, is_cold=True, each=each)
        for name, values in extra.items():
            values.append(seen[True, name] - seen[False, name])
    return extra


def micro(arguments: argparse.Namespace) -> None:
    """Print what one all_reduce costs the calling thread more with a source than without, in us.

    Alone, or on every rank of a torchrun job, whose figures are put together.
    """
    import torch
    import torch.distributed as dist

    import rankscope

    settings = VARIANTS[arguments.variant][1]
    if settings is not None:
        rankscope.init(collector=False, **settings, **NO_GOVERNOR)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    measures = calls()
    out: dict[str, Any] = {}
    try:
        switch = switch_for(arguments.variant, None)
        for measure in measures.values():  # what is done once for a run is not the cost of a call
            with switch():
                measure()
        extra, bare = pairs_of(measures, switch, arguments.pairs)
        out = {name: spread(values) for name, values in gathered(extra).items()}
        out |= {f"bare_{name}": spread(values) for name, values in gathered(bare).items()}
    except Unavailable as reason:
        out = {"skipped": str(reason)}
    report(out)


Measures = dict[str, Callable[[], float]]
Values = dict[str, list[float]]


def calls() -> Measures:
    """Return by name what measures the CPU of one call, in us: the mean of many calls."""
    import torch
    import torch.distributed as dist

    small, matrix, large = torch.ones(1000), torch.ones(180, 180), torch.ones(6_000_000)

    def hot() -> float:
        began = time.thread_time_ns()
        for _ in range(1000):
            dist.all_reduce(small)
        return (time.thread_time_ns() - began) / 1e6

    def cold() -> float:
        total = 0
        for _ in range(30):
            torch.mm(matrix, matrix)
            large.add_(1)
            began = time.thread_time_ns()
            dist.all_reduce(small)
            total += time.thread_time_ns() - began
        return total / 30e3

    return {"hot_us": hot, "cold_us": cold}


def pairs_of(
    measures: Measures, switch: Callable[[], contextlib.AbstractContextManager[Any]], number: int
) -> tuple[Values, Values]:
    """Measure with and without, in turn; return the differences and what it is without."""
    extra: Values = {name: [] for name in measures}
    bare: Values = {name: [] for name in measures}
    for pair in range(number):
        seen: dict[bool, dict[str, float]] = {}
        for is_with in (True, False) if pair % 2 else (False, True):
            with switch() if is_with else contextlib.nullcontext():
                seen[is_with] = {name: measure() for name, measure in measures.items()}
        for name in measures:
            bare[name].append(seen[False][name])
            extra[name].append(seen[True][name] - seen[False][name])
    return extra, bare


def gathered(values: Values) -> Values:
    """Return the values of all ranks together."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return {name: [one for part in parts for one in part[name]] for name in values}


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high}


def main() -> None:
    """Do one of the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", choices=("worker", "micro", "step", "memory"))
    parser.add_argument("--variant", default="agent", choices=VARIANTS)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--collectives", type=int, default=3)
    arguments = parser.parse_args()
    jobs = {"worker": worker, "micro": micro, "step": one_step, "memory": memory}
    jobs[arguments.job](arguments)


if __name__ == "__main__":
    main()
