#!/usr/bin/env python3
"""Chunks in a store of objects: one object for what a transaction takes, or one for each chunk.

    python benchmarks/objects.py [--chunks 128] [--bytes 20000] [--rounds 15]

Starts SeaweedFS on loopback. Says what it takes to keep the chunks of a transaction, to read all of
them and to read one in 16; medians, with the CPU of this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from rankscope_server.store.objects import ObjectBlobs, open_objects
from tests.server.object_stores import BUCKET, SeaweedFS

MS = 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--bytes", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = SeaweedFS(Path(folder)).start()
        try:
            os.environ.update(store.environ)
            blobs = open_objects(f"s3://{BUCKET}", "benchmark")
            measure(blobs, arguments.chunks, arguments.bytes, arguments.rounds)
            blobs.close()
        finally:
            store.close()


def measure(blobs: ObjectBlobs, num_chunks: int, num_bytes: int, rounds: int) -> None:
    made = [os.urandom(num_bytes) for _ in range(num_chunks)]
    ways = {
        "one object": [("run/steps", data) for data in made],
        "one each": [(f"run/{at}", data) for at, data in enumerate(made)],
    }
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way, parts in ways.items():  # in turns
            places, *seconds = timed(lambda parts=parts: blobs.put(parts))
            took.setdefault((way, "keep"), []).append((seconds[0], seconds[1]))
            for what, chosen in (("read all", places), ("read 1 in 16", places[::16])):
                found, *seconds = timed(lambda chosen=chosen: blobs.get(chosen))
                assert None not in found
                took.setdefault((way, what), []).append((seconds[0], seconds[1]))
    print(f"{num_chunks} chunks of {num_bytes:,} bytes")
    for (way, what), seconds in took.items():
        wall, cpu = (statistics.median(one[at] for one in seconds) * MS for at in (0, 1))
        print(f"{way:11} {what:13} {wall:8.1f} ms, {cpu:7.1f} ms of CPU")


def timed(work: Callable[[], list[object]]) -> tuple[list[object], float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
