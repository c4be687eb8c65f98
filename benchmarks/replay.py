"""How long a replay takes: 1,024 ranks x 2,000 steps, from the recorded operations to S_r.

    python benchmarks/replay.py [--ranks 1024] [--steps 2000] [--stages 1] [--microbatches 8]

Prints seconds and the peak memory of the process. The budget is 10 s.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from rankscope_server.replay.event_graph import GraphBuilder
from rankscope_server.replay.replay import Replay


def data_parallel(ranks: int, steps: int, buckets: int) -> Replay:
    """Return data parallel steps of random work."""
    builder, chance = GraphBuilder(ranks), np.random.default_rng(0)
    nodes = []
    for rank in range(ranks):
        for bucket in range(buckets):
            nodes.append(builder.work(rank))
            builder.issue(rank, bucket)
        for bucket in range(buckets):
            builder.join(rank, bucket)
        nodes.append(builder.work(rank))
    for bucket in range(1, buckets):
        builder.follow(bucket, bucket - 1)
    return _replay(builder, ranks, steps, np.zeros(ranks, np.int64), chance)


def pipelines(ranks: int, steps: int, stages: int, microbatches: int) -> Replay:
    """Return GPipe steps of random work, replicas of a pipeline beside each other."""
    builder, chance = GraphBuilder(ranks), np.random.default_rng(0)
    for rank in range(ranks):
        stage = rank % stages
        for direction in (1, -1):
            first, last = (0, stages - 1) if direction > 0 else (stages - 1, 0)
            for number in range(microbatches):
                if stage != first:
                    key = (direction, rank - direction, number)
                    builder.issue(rank, key)
                    builder.join(rank, key)
                builder.work(rank)
                if stage != last:
                    builder.issue(rank, (direction, rank, number))
        builder.issue(rank, "world")
        builder.join(rank, "world")
        builder.work(rank)
    return _replay(builder, ranks, steps, np.arange(ranks) % stages, chance)


def _replay(
    builder: GraphBuilder, ranks: int, steps: int, stage: np.ndarray, chance: np.random.Generator
) -> Replay:
    graph = builder.build()
    recorded = chance.lognormal(2.0, 0.05, (graph.num_nodes, steps))
    return Replay(
        graph=graph, recorded=recorded, kind=np.zeros(graph.num_nodes, np.int64), kinds=("work",),
        stage=stage, step_ms=np.ones(steps),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--buckets", type=int, default=4)
    args = parser.parse_args()
    began = time.perf_counter()
    if args.stages > 1:
        replay = pipelines(args.ranks, args.steps, args.stages, args.microbatches)
    else:
        replay = data_parallel(args.ranks, args.steps, args.buckets)
    built = time.perf_counter()
    now = replay.mean_step_ms()
    replayed = time.perf_counter()
    without = replay.step_without_ms([3])
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"{args.ranks} ranks x {args.steps} steps, {replay.graph.num_nodes} nodes a step")
    print(f"graph and random durations {built - began:.1f} s")
    print(f"replay {replayed - built:.1f} s, what-if {done - replayed:.1f} s")
    print(f"S_r {now / without:.4f}; peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
