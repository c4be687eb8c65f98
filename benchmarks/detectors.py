"""What all detectors cost: 1,024 ranks at one step a second, a look after every step.

    python benchmarks/detectors.py [--ranks 1024] [--stages 1] [--microbatches 8] [--seconds 96]

A small job is simulated and repeated over the ranks. Prints the CPU seconds of each second of the
job (feeding and looking), and the peak memory. The budget is one core and 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import time
from itertools import count

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.analysis.state import RunState
from tests.analysis.simulator import START_NS
from tests.analysis.timeline import Timeline, data_parallel, groups_of, noisy, pipeline

_NUMBERS = count()


def small_job(stages: int, microbatches: int, steps: int) -> tuple[Timeline, list[int]]:
    """Return a job of 16 ranks, or of two pipelines."""
    num_ranks = 2 * stages if stages > 1 else 16
    factor = noisy(1, num_ranks, steps)
    if stages > 1:
        program = pipeline(
            stages, microbatches, "1f1b", lambda r, s: 5 * factor[r, s], 1.0, replicas=2
        )
        groups = groups_of(stages, 2)
    else:
        program = data_parallel(30, 60, 4, 8, lambda r, s: factor[r, s])
        groups = {"world": tuple(range(num_ranks))}
    job = Timeline(num_ranks, steps, program, groups).run()
    return job, [rank % stages for rank in range(num_ranks)]


def moved(
    item: tuple[schema.Chunk, dict[str, Column]], rank: int, shift_steps: int, shift_ns: int
) -> tuple[schema.Chunk, dict[str, Column]]:
    """Return a chunk as that of another rank, some steps later."""
    chunk, columns = item
    new = dict(columns)
    new["step"] = np.asarray(columns["step"]) + shift_steps
    name = "started_ns" if chunk.kind == "steps" else "arrived_ns"
    new[name] = np.asarray(columns[name]) + shift_ns
    if chunk.kind == "collectives":
        peer = np.asarray(columns["peer_rank"])
        new["peer_rank"] = np.where(peer >= 0, peer + rank - chunk.rank, -1)
        chunk = msgspec.structs.replace(chunk, data=encode_chunk(new))
    chunk = replace_chunk(chunk, rank, shift_ns)
    return chunk, new


def replace_chunk(chunk: schema.Chunk, rank: int, shift_ns: int) -> schema.Chunk:
    """Return the envelope of another rank; every chunk is one that was never seen."""
    data = chunk.data if chunk.kind == "collectives" else str(next(_NUMBERS)).encode()
    return msgspec.structs.replace(
        chunk, rank=rank, time_lo_ns=chunk.time_lo_ns + shift_ns,
        time_hi_ns=chunk.time_hi_ns + shift_ns, data=data,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=96)
    args = parser.parse_args()
    period = 16
    job, stages = small_job(args.stages, args.microbatches, period + 1)
    kinds: dict[tuple[int, int], list[tuple[schema.Chunk, dict[str, Column]]]] = {}
    state = RunState("bench")
    size = len(job.ranks)
    for _, what in job.items(
        stages=stages if args.stages > 1 else [], microbatches=args.microbatches, per_chunk=1
    ):
        if isinstance(what, tuple):
            kinds.setdefault((what[0].rank, int(np.asarray(what[1]["step"])[0])), []).append(what)
        elif isinstance(what, schema.RankRegistered):
            for rank in range(what.rank, args.ranks, size):
                state.apply_record(
                    schema.RankRegistered(
                        attempt=0,
                        rank=rank,
                        time_ns=START_NS,
                        world_size=args.ranks,
                        local_rank=rank % 8,
                        local_world_size=8,
                        node_rank=rank // 8,
                        host=f"node-{rank // 8}",
                        pid=rank,
                        stage=what.stage,
                        num_stages=what.num_stages,
                        num_microbatches=what.num_microbatches,
                    )
                )
    length_ns = int((job.ranks[0].steps[-1]["started"] - job.ranks[0].steps[1]["started"]) * 1e6)
    took, events = [], 0
    for second in range(args.seconds):
        step, lap = 2 + second % period, second // period
        batch = [
            moved(item, rank, lap * period, lap * length_ns)
            for rank in range(args.ranks)
            for item in kinds[rank % size, step]
        ]
        events += sum(len(columns["step"]) for _, columns in batch)
        began = time.process_time()
        for chunk, columns in batch:
            state.apply_chunk(chunk, columns)
        look = state.look(START_NS + second * 10**9)
        took.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    late = np.array(took[args.seconds // 3 :])
    print(f"{args.ranks} ranks, {events // args.seconds} rows a second")
    print(f"CPU seconds a second: mean {late.mean():.2f}, highest {late.max():.2f}")
    print(f"peak memory {peak:.2f} GiB")
    for status in look.detectors:
        print(f"{status.name}: {status.state} {status.reason}")
    print([finding.what for finding in look.findings][:3])


if __name__ == "__main__":
    main()
