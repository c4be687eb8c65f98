"""What it takes a server to know a live run again: what it kept, beside reading its batches.

    python benchmarks/restart.py                     # 128 ranks, 10 minutes
    python benchmarks/restart.py --ranks 1024 --minutes 2 --json

Batches of nodes of 8 ranks, one a second, of two steps with 20 collectives each, are stored as a
server stores them, into SQLite. Then the state of the run is made of all of them, as a server does
that kept nothing; and it is written, and read again. Counted is CPU time. What is written anew a
minute later is what the disk has to take while a run is live.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paced import PER_STEP, RANKS_PER_NODE, Job, Node, Template

from rankscope_server.analysis import kept
from rankscope_server.analysis.state import RunState
from rankscope_server.ingest.batch import read_batch, validate_batches
from rankscope_server.store.batches import pack_journal, store_batch
from rankscope_server.store.engine import open_engines
from rankscope_server.store.restart import newest_batch, replay
from rankscope_server.store.unit import Unit

T = TypeVar("T")
RUN = "paced"
STEPS_PER_WINDOW = 2
WINDOWS_PER_MINUTE = 60
_LARGEST = 1 << 28


@dataclass
class Result:
    """CPU seconds, and bytes on disk."""

    cores: int
    ranks: int
    minutes: int
    batches: int = 0
    all_batches_seconds: float = 0.0
    writing_seconds: float = 0.0
    reading_seconds: float = 0.0
    kept_bytes: int = 0
    new_bytes_of_a_minute: int = 0


def store(writing: sa.Engine, template: Template, nodes: list[Node], windows: range) -> int:
    """Store the batches of some seconds; return how many."""
    for window in windows:
        sent_ns = template.start_ns + (window + 1) * 10**9
        bodies = [template.body(RUN, node, window, sent_ns)[0] for node in nodes]
        batches = validate_batches([read_batch(body, "zstd", _LARGEST, True) for body in bodies])
        with writing.begin() as connection:
            unit = Unit(connection)
            for batch in batches:
                unit.run(batch.run_id).want(batch)
            for batch in batches:
                store_batch(unit, batch, pack_journal(batch.records))
            unit.flush()
    return len(windows) * len(nodes)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what work gives, and its CPU seconds."""
    began = time.thread_time()
    return work(), time.thread_time() - began


def read_all(reader: sa.Engine, state: RunState, after: int = 0) -> int:
    """Apply the stored batches after one; return the last."""
    with reader.connect() as connection:
        newest = newest_batch(connection, RUN)
        replay(connection, RUN, state, newest, 0, after=after)
    state.look(time.time_ns())
    return newest


def measure(folder: str, ranks: int, minutes: int) -> Result:
    """Store a run, and make its state in both ways."""
    result = Result(os.cpu_count() or 1, ranks, minutes)
    nodes = [Node(number) for number in range(ranks // RANKS_PER_NODE)]
    windows = minutes * WINDOWS_PER_MINUTE
    start_ns = time.time_ns() - windows * 10**9
    template = Template(Job(ranks), len(nodes), WINDOWS_PER_MINUTE,
                        PER_STEP * STEPS_PER_WINDOW, start_ns, 1.0)  # fmt: skip
    writing, reader = open_engines(f"sqlite:///{folder}/restart.db", "normal")
    result.batches = store(writing, template, nodes, range(windows))
    state = RunState(RUN)
    last, result.all_batches_seconds = timed(lambda: read_all(reader, state))
    (written, parts), result.writing_seconds = timed(
        lambda: ((found := kept.write(state)), found.packed(()))
    )
    result.kept_bytes = len(written.data) + sum(map(len, parts.values()))
    in_order = [parts[digest] for digest in written.digests]
    again, result.reading_seconds = timed(lambda: kept.read(written.data, in_order))
    store(writing, template, nodes, range(windows, windows + WINDOWS_PER_MINUTE))
    read_all(reader, again, last)
    later = kept.write(again)
    result.new_bytes_of_a_minute = len(later.data) + sum(map(len, later.packed(parts).values()))
    for engine in (writing, reader):
        engine.dispose()
    return result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(folder, options.ranks, options.minutes)
    if options.json:
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        return
    mib = 1 << 20
    head = f"{result.cores} cores, {result.ranks} ranks, {result.minutes} min"
    sys.stdout.write(
        f"{head}, {result.batches} batches\n"
        f"all batches read   {result.all_batches_seconds:8.2f} s\n"
        f"state read         {result.reading_seconds:8.2f} s\n"
        f"state written      {result.writing_seconds:8.2f} s, {result.kept_bytes / mib:.1f} MiB\n"
        f"a minute later     {'':8}    {result.new_bytes_of_a_minute / mib:.1f} MiB more\n"
    )


if __name__ == "__main__":
    main()
