"""What the node collector costs, and how often it is faster than the reaper.

    python benchmarks/collector.py [--ranks 4] [--rate 1000] [--seconds 30] [--json]

CPU: fake ranks write real rings at a fixed rate, a real collector uploads to a receiver in this
process; its CPU time is read from /proc over the middle of the run. Reapers: processes are killed
while a parent waits for them in the way of torchrun (a look each tenth of a second) or blocked in
wait(2), with the collector's death watch beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the fake ranks and the receiver of the tests

from rankscope.collector.liveness import DeathWatch  # noqa: E402
from rankscope.collector.sources.process import ProcessSampler  # noqa: E402
from rankscope.ring import process_start_ticks  # noqa: E402
from tests.agent.collector import processes  # noqa: E402
from tests.agent.collector.receiver import Receiver  # noqa: E402


def cpu_share(ranks: int, rate: float, seconds: float) -> dict[str, float]:
    """Return the collector's CPU share and what it sent."""
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        run.mkdir()
        children = [
            processes.start_rank(run, rank, int(rate * (seconds + 6)), rate)
            for rank in range(ranks)
        ]
        collector = processes.start_collector(run, server=receiver.url)
        time.sleep(5)  # imports and the first turns are over
        sampler = ProcessSampler()
        before, begun = sampler.sample(collector.pid)[0], time.monotonic()
        time.sleep(seconds)
        after, rss_bytes = sampler.sample(collector.pid)
        elapsed = time.monotonic() - begun
        for child in children:
            child.wait()
            processes.stop(child)
        collector.wait(60)
        rows = len(receiver.rows("collectives", "sequence"))
        chunks = [c for b in receiver.batches.values() for c in b.chunks if c.kind == "collectives"]
    receiver.close()
    share = (after - before) / elapsed
    return {
        "ranks": ranks,
        "collectives_per_second_and_rank": rate,
        "cpu_share_of_one_core": round(share, 4),
        "cpu_us_per_collective": round(share * 1e6 / (ranks * rate), 2),
        "rss_mb": round(rss_bytes / 1e6, 1),
        "collectives_arrived": rows,
        "chunk_bytes_per_collective": round(sum(len(c.data) for c in chunks) / max(rows, 1), 2),
    }


def reapers(kills: int) -> dict[str, dict[str, int]]:
    """Return who told the exit status, by the way in which the parent waits."""
    watch = DeathWatch(lambda: None)
    watch.start()
    os.nice(10)  # as the collector; the watch keeps its own
    results = {}
    for way in ("polls each 0.1 s", "blocks in wait"):
        sources: Counter[str] = Counter()
        for _ in range(kills):
            process = subprocess.Popen(["/bin/sleep", "60"])
            watch.watch(way, process.pid, process_start_ticks(process.pid))
            process.send_signal(signal.SIGKILL)
            if way == "blocks in wait":
                process.wait()
            while process.poll() is None:
                time.sleep(0.1)
            status = watch.deaths.get(timeout=10).status
            sources["unknown" if status is None else status.source] += 1
        results[way] = dict(sources)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {
        "cpu": cpu_share(arguments.ranks, arguments.rate, arguments.seconds),
        "exit_status_told_by": reapers(arguments.kills),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for part, figures in result.items():
        print(part)
        for name, value in figures.items():
            print(f"  {name:34} {value}")


if __name__ == "__main__":
    main()
