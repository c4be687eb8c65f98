"""Is the slow rank named in training programs that nobody here wrote?

    python benchmarks/foreign.py [--programs nanogpt,mingpt] [--sources probe,kernels] [--seeds 3]
    python benchmarks/foreign.py --table

Programs of `tests/foreign/programs.py`, each clean and with faults from outside: `sleep`, in one
rank's forward; `stopped`, a rank that SIGSTOP holds for 60 % of the time; on demand `early`, the
same sleep from the first step on, `data`, a sleep before each batch of one rank's loader, `item`,
one wherever its script calls .item(), `thread`, a second thread that computes in Python, `pinned`,
a rank that may use but one processor, on which two others compute, and `limited`, a rank whose
control group may use a quarter of a processor (as root). A run with a fault ends a while after it
was named. Resumes where it was stopped; results are in
benchmarks/results/foreign.jsonl. Wrong is a healthy rank that is accused, a fault for which no rank
or another kind is named, and "Healthy" over it. Exit code 1 if less than 95 % are right, a healthy
rank is accused, or "healthy" is said over a loss.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from forced import SOURCES, available, environment_of
from real_ranks import Server, findings_of
from rows import ROOT, Key, Rows, parser_of

sys.path[:0] = [str(ROOT)]

from tests.foreign import programs  # noqa: E402
from tests.foreign.programs import Program  # noqa: E402

KEYS = ("program", "source", "fault", "seed")
FAULTS = ("none", "sleep", "stopped")
KINDS = {
    "sleep": ("slow_compute",), "early": ("slow_compute",), "data": ("slow_data",),
    "stopped": ("stopped_process",),
    "item": ("slow_compute",), "thread": ("busy_thread",), "pinned": ("cpu_pinning",),
    "limited": ("cpu_limit",),
}  # fmt: skip
RIGHT, PEACE, SILENT, ACCUSES = "right", "healthy over a loss", "said nothing", "accuses"
OTHER = "another kind"
RIGHT_SHARE = 0.95
SECONDS = 75.0  # of a run: 25 without the fault, and 50 to name it
LOOKED_ON_S = 10.0  # after it was named: who is accused then?
FAULT_AFTER_S = float(os.environ.get("FOREIGN_AFTER_S", "25"))
STOP_S, GO_S = 0.15, 0.10
CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US, LIMIT_US = 100_000, 25_000


def run_one(program: Program, source: str, fault: str, seed: int) -> dict[str, Any]:
    """Run one program and return what was said of it."""
    rank = random.Random(f"{program.name} {fault} {seed}").randrange(program.ranks)
    with tempfile.TemporaryDirectory(prefix="rankscope-foreign-") as scratch:
        folder = Path(scratch)
        server = Server(folder)
        try:
            return _run(program, source, fault, rank, server, folder)
        finally:
            server.close()


def _run(
    program: Program, source: str, fault: str, rank: int, server: Server, folder: Path
) -> dict[str, Any]:
    after_s = fault_after_s(program) if fault != "early" else 0.0
    slow_s = max(1.5 * program.step_ms, 20.0) / 1e3
    inject = (
        {
            "FOREIGN_RANK": str(rank),
            "FOREIGN_AT": str(time.monotonic() + after_s),
            "FOREIGN_S": str(slow_s),
            "FOREIGN_PLACE": "sleep" if fault == "early" else fault,
        }
        if fault in ("sleep", "early", "data", "item", "thread")
        else {}
    )
    with (folder / "output").open("wb") as output:
        process = start(program, source, server, folder, output.fileno(), inject)
    try:
        with _OUTSIDE.get(fault, _nothing)(server, rank, after_s):
            seen = _watched(process, server, fault, rank if fault != "none" else None, after_s)
    finally:
        end(process)
    if not seen["steps"]:
        raise SystemExit((folder / "output").read_text(errors="replace")[-3000:])
    return seen


def fault_after_s(program: Program) -> float:
    """Return the seconds from the start of a program to its fault."""
    return FAULT_AFTER_S + program.start_s


def start(
    program: Program,
    source: str,
    server: Server,
    folder: Path,
    output: int,
    inject: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a program under `rankscope run`, as the run "foreign" of a server."""
    place = folder / "program"
    place.mkdir()
    words = program.prepare(place)
    environ = {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}
    environ |= environment_of(source, folder) | inject | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests" / "foreign" / "inject"),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", "foreign",
        "--dir", str(folder / "run"), "--", *command_of(program, words),
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=place, env=environ, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def command_of(program: Program, words: Sequence[str]) -> list[str]:
    """Return what starts a program's ranks; `words` are those that `prepare` gave."""
    launcher = [] if program.is_alone else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)
    ]  # fmt: skip
    return [sys.executable, *launcher, *words]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _watched(
    process: subprocess.Popen[bytes], server: Server, fault: str, rank: int | None, after_s: float
) -> dict[str, Any]:
    """Look until the fault was named for a while or the time is over; return the judgement."""
    began = time.monotonic()
    overview: dict[str, Any] = {}
    kinds: dict[str, None] = {}
    named_after, accused, until = None, "", after_s + SECONDS - FAULT_AFTER_S
    while time.monotonic() - began < until and process.poll() is None:
        time.sleep(1.0)
        overview = server.get("runs/foreign") or overview
        for one in findings_of(server, "foreign"):
            if one["severity"] == "info":
                continue
            if set(one["ranks"]) - {rank}:
                accused = f"{ACCUSES} {one['ranks']}: {one['what']}"
            elif one["ranks"] == [rank]:
                kinds[one["kind"]] = None
        if named_after is None and kinds.keys() & set(KINDS.get(fault, ())):
            named_after = round(time.monotonic() - began - after_s, 1)
            until = min(until, time.monotonic() - began + LOOKED_ON_S)
    answer = overview.get("answer") or {}
    judgement = RIGHT
    if accused:
        judgement = accused
    elif rank is not None and named_after is None:
        named = f"{OTHER}: {', '.join(kinds)}" if kinds else SILENT
        judgement = PEACE if answer.get("state") == "healthy" else named
    verdict = overview.get("verdict") or {}
    return {
        "rank": rank, "judgement": judgement, "named_after_seconds": named_after,
        "verdict": verdict.get("what", ""), "kind": verdict.get("kind", ""),
        "answer": answer.get("text", ""), "steps": (overview.get("run") or {}).get("step", 0),
    }  # fmt: skip


@contextlib.contextmanager
def _later(
    harm: Callable[[psutil.Process, threading.Event], None],
    server: Server,
    rank: int,
    after_s: float,
) -> Iterator[None]:
    """Do harm to the process of a rank, from a while after the start until the run is over."""
    over = threading.Event()

    def begin() -> None:
        if over.wait(after_s):
            return
        while (pid := _process_of(server, rank)) is None:  # a busy machine starts it later
            if over.wait(1.0):
                return
        with contextlib.suppress(psutil.NoSuchProcess):
            harm(psutil.Process(pid), over)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _process_of(server: Server, rank: int) -> int | None:
    ranks = server.get("runs/foreign/ranks").get("ranks", [])
    return next((one["pid"] for one in ranks if one["rank"] == rank), None)


def _stop(victim: psutil.Process, over: threading.Event) -> None:
    """Hold it for most of the time."""
    while not over.wait(GO_S):
        victim.suspend()
        over.wait(STOP_S)
        victim.resume()


def _pin(victim: psutil.Process, over: threading.Event) -> None:
    """Leave it one processor, and let two others compute there."""
    here = psutil.Process().cpu_affinity()[:1]
    busy = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    for process in busy:
        process.cpu_affinity(here)
    try:
        while not over.wait(1.0):  # new threads take after the one that starts them
            for thread in victim.threads():
                os.sched_setaffinity(thread.id, here)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _limit(victim: psutil.Process, over: threading.Event) -> None:
    """Put it into a control group, of version 1 or 2, that may use little processor time."""
    old = CGROUPS / "cpu"
    parent = old if old.is_dir() else CGROUPS
    group = parent / f"rankscope-foreign-{victim.pid}"
    if parent == CGROUPS:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        if parent == CGROUPS:
            (group / "cpu.max").write_text(f"{LIMIT_US} {PERIOD_US}")
            (group / "cgroup.procs").write_text(str(victim.pid))
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(LIMIT_US))
            for thread in victim.threads():
                (group / "tasks").write_text(str(thread.id))
        over.wait()
    finally:
        name = "cgroup.procs" if parent == CGROUPS else "tasks"
        for line in (group / name).read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (parent / name).write_text(line)
        group.rmdir()


_OUTSIDE = {
    "stopped": partial(_later, _stop), "pinned": partial(_later, _pin),
    "limited": partial(_later, _limit),
}  # fmt: skip


def _nothing(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def table(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the table by program and source, and whether it is good enough."""
    words = (RIGHT, OTHER, SILENT, PEACE, ACCUSES)
    lines = [
        "| program | source | runs | right | another kind | said nothing | healthy over a loss | "
        "healthy rank accused |",
        "|" + "---|" * 8,
    ]
    for program, source in dict.fromkeys((row["program"], row["source"]) for row in rows):
        mine = [row for row in rows if (row["program"], row["source"]) == (program, source)]
        counts = [sum(row["judgement"].startswith(word) for row in mine) for word in words]
        lines.append("| " + " | ".join(map(str, (program, source, len(mine), *counts))) + " |")
    wrong = [row for row in rows if row["judgement"] != RIGHT]
    is_good = bool(rows) and len(wrong) <= (1 - RIGHT_SHARE) * len(rows)
    return lines, is_good and not any(
        row["judgement"].startswith((ACCUSES, PEACE)) for row in wrong
    )


def misses(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return a list item for each run that is not right, with what was answered."""
    return [
        f"- {row['program']}, {row['source']}, {row['fault']}, seed {row['seed']}: "
        f"{row['judgement']}; {row['answer']}"
        for row in rows
        if row["judgement"] != RIGHT
    ]


def here(names: list[str]) -> list[str]:
    """Return the programs whose packages and data are there; name the others."""
    found = []
    for name in names:
        packages, needs_data = programs.BY_NAME[name].packages, programs.BY_NAME[name].needs_data
        lacking = [one for one in packages.split() if importlib.util.find_spec(one) is None]
        if lacking:
            print(f"{name}: not there: pip install {' '.join(lacking)}", flush=True)
        elif needs_data and not programs.PROGRAMS.is_dir():
            print(f"{name}: no {programs.PROGRAMS}", flush=True)
        else:
            found.append(name)
    return found


def wanted_runs(chosen: argparse.Namespace) -> list[Key]:
    """Return the runs that were asked for, all of a seed before the next."""
    sources = available(chosen.sources.split(","))
    return [
        (program, source, fault, seed)
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        for program in here(chosen.programs.split(","))
        for source in sources
        for fault in chosen.faults.split(",")
    ]


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = parser_of(
        __doc__, "foreign.jsonl", sources=SOURCES[::2], seeds=3, least_seconds=SECONDS
    )
    parser.add_argument(
        "--programs", default=",".join(programs.BY_NAME), help="with commas between"
    )
    parser.add_argument("--faults", default=",".join(FAULTS), help="likewise")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    for key in [] if chosen.table else rows.missing(wanted_runs(chosen)):
        row = rows.add(key, run_one(programs.BY_NAME[key[0]], *key[1:]))
        print(f"{key[0]:<10}{key[1]:<9}{key[2]:<9}seed {key[3]}  {row['steps']:>6} steps  "
              f"{row['judgement']}  {row['kind']} {row['named_after_seconds']}", flush=True
        )  # fmt: skip
    lines, is_good = table(rows.all())
    print("\n".join(lines))
    print("\n".join(misses(rows.all())))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
