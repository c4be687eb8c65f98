"""What the node collector costs on the wire, in memory and in CPU, and how often it beats a reaper.

    python benchmarks/collector.py [--ranks 4] [--rate 1000] [--json]

Wire: eight ranks write steps of one second with 1 to 300 collectives each, as sharded training of
a transformer would; counted are the bodies that a receiver takes, with states and samples of the
node, after the start. CPU: ranks write at a fixed rate; the collector's CPU time is read over
some windows in the middle. Reapers: processes are killed while a parent waits for them in the way
of torchrun (a look each tenth of a second) or blocked in wait(2), with the collector's death watch
beside it. All of it takes less than a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the fake ranks and the receiver of the tests

from rankscope.node.processes.liveness import DeathWatch  # noqa: E402
from rankscope.process.family import process_start_ticks  # noqa: E402
from tests.agent.collector import processes  # noqa: E402
from tests.agent.collector.receiver import Receiver  # noqa: E402

LOAD = ROOT / "tests" / "agent" / "collector" / "load_ranks.py"
RANKS = 8  # of the load for the wire
PER_STEP = (1, 10, 40, 300)
WARM_SECONDS = 5.0


def cpu_share(ranks: int, rate: float, windows: int, seconds: float) -> dict[str, Any]:
    """Return the collector's CPU per collective and its memory, over some windows of a run."""
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        run.mkdir()
        count = int(rate * (windows * seconds + WARM_SECONDS + 2))
        children = [processes.start_rank(run, rank, count, rate) for rank in range(ranks)]
        collector = processes.start_collector(run, server=receiver.url)
        time.sleep(WARM_SECONDS)  # imports and the first turns are over
        spent = [cpu_seconds(collector.pid)]
        for _ in range(windows):
            time.sleep(seconds)
            spent.append(cpu_seconds(collector.pid))
        memory = rss_bytes(collector.pid)
        for child in children:
            child.wait()
            processes.stop(child)
        collector.wait(60)
        rows = len(receiver.rows("collectives", "sequence"))
    receiver.close()
    costs = [(b - a) * 1e6 / (ranks * rate * seconds) for a, b in itertools.pairwise(spent)]
    return {
        "ranks": ranks,
        "collectives_per_second_and_rank": rate,
        "cpu_us_per_collective_median": round(statistics.median(costs), 2),
        "cpu_us_per_collective_least": round(min(costs), 2),
        "cpu_us_per_collective_most": round(max(costs), 2),
        "cpu_ratio_of_one_core": round(statistics.median(costs) * ranks * rate / 1e6, 4),
        "rss_mb": round(memory / 1e6, 1),
        "collectives_arrived": rows,
    }


def wire(per_step: tuple[int, ...], steps: int) -> dict[str, dict[str, float]]:
    """Return what RANKS ranks with steps of a second cost on the wire and in memory."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor() as pool:
        places = [Path(directory) / f"run-{count}" / "run" for count in per_step]
        found = pool.map(wire_of, places, per_step, [steps] * len(per_step))
        return {
            f"{count} collectives a step": one for count, one in zip(per_step, found, strict=True)
        }


def wire_of(run: Path, per_step: int, steps: int) -> dict[str, float]:
    """Return the same for one number of collectives a step."""
    run.mkdir(parents=True)
    receiver = Receiver()
    load = subprocess.Popen(
        [sys.executable, str(LOAD), str(run), str(RANKS), str(per_step), "1", str(steps)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    collector = processes.start_collector(run, server=receiver.url)
    time.sleep(WARM_SECONDS)
    bytes_before, steps_before = receiver.num_bytes, len(receiver.rows("steps", "step"))
    memory = 0
    while load.poll() is None:
        memory = max(memory, rss_bytes(collector.pid))
        time.sleep(0.2)
    bytes_after, steps_after = receiver.num_bytes, len(receiver.rows("steps", "step"))
    collector.wait(60)
    events = receiver.rows("collectives", "sequence")
    chunks = [c for b in receiver.batches.values() for c in b.chunks]
    sizes = {
        kind: sum(len(c.data) for c in chunks if c.kind == kind)
        for kind in ("collectives", "steps")
    }
    receiver.close()
    return {
        "bytes_per_rank_and_step": round(
            (bytes_after - bytes_before) / (steps_after - steps_before)
        ),
        "of_them_collectives": round(sizes["collectives"] / (RANKS * steps)),
        "of_them_steps": round(sizes["steps"] / (RANKS * steps)),
        "chunk_bytes_per_collective": round(sizes["collectives"] / len(events), 2),
        "rss_mb": round(memory / 1e6, 1),
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


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
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--steps", type=int, default=18, help="of the load for the wire")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {
        "wire": wire(PER_STEP, arguments.steps),
        "cpu": cpu_share(arguments.ranks, arguments.rate, arguments.windows, arguments.seconds),
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
