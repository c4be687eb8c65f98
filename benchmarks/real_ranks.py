"""Is every fault of the reference trainer found, on real ranks, with the right kind and rank?

    python benchmarks/real_ranks.py [--seeds 10] [--clean 50] [--faults NAME,...] [--out FILE]
    python benchmarks/real_ranks.py --join FILE... [--out FILE]

One server takes all runs; each run is the trainer under `rankscope run`, as a user would start it.
The truth is the trainer's manifest of what really fired, and nothing else is told to the server.
A rank is accused if a finding above info names it. Writes one JSON object per run to --out, as they
end; the score card reads it (`python benchmarks/scorecard.py --page`). `--join` runs nothing and
adds the results of other files. A later result of the same fault, strategy and seed stands for an
earlier one. Exit code 1 if fewer than 90 % of a fault's runs are right, or a healthy rank is ever
accused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rankscope_trainer.faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests import api  # noqa: E402
from tests.score.real import (  # noqa: E402
    ACCUSES,
    EVERYBODY,
    FALSE_ALARM,
    NO_FAULT,
    NOT_FIRED,
    RIGHT,
    FirstNamed,
    RealRun,
    is_named,
    judge,
    read,
    record_of,
    write,
)

RESULTS = ROOT / "benchmarks" / "results" / "real_ranks.jsonl"

STEP_TIMES = "times.jsonl"  # the trainer's own clock
RIGHT_SHARE = 0.9
GIVE_UP_SECONDS = 150.0  # for a run that neither ends nor is named
STANDS_SECONDS = 4.0  # a finding stands for so long before a stuck run is stopped
SETTLE_SECONDS = 12.0  # for the last look after the end


@dataclass(frozen=True)
class Case:
    """How a fault is shown: strategy, ranks, steps and the flags that it needs."""

    fault: str
    strategy: str = "ddp"
    ranks: int = 4
    steps: int = 200
    start: tuple[int, int] | None = (50, 90)  # drawn from; None: before the first step
    size: str = ""
    steps_of_fault: int = 0  # 0: to the end
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()  # flags of torchrun
    beside: tuple[str, ...] = ()  # other faults, without which it has no effect
    directory: bool = False  # it needs a folder of checkpoints
    among: tuple[int, ...] = ()  # ranks that the fault can meet, if not all
    everybody: bool = False  # the fault is the run's: no rank is to blame


def _case(fault: str, **how: Any) -> Case:
    return Case(fault, **how)


SPECIAL: dict[str, dict[str, Any]] = {
    "bad_shard": {
        "size": "200ms", "steps": 320, "flags": ("--batch-size", "1", "--microbatches", "1"),
    },
    "slow_epoch_start": {"flags": ("--data-bytes", "40000"), "steps": 320, "start": (2, 3)},
    "worker_leak": {"flags": ("--loader-workers", "1"), "steps": 320, "size": "8MiB"},
    "memory_leak": {"steps": 320, "size": "8MiB"},
    "uneven_stages": {"strategy": "pipeline", "start": None, "everybody": True},
    "few_microbatches": {
        "strategy": "pipeline", "start": None, "everybody": True,
        "flags": (
            "--schedule", "gpipe", "--microbatches", "8", "--batch-size", "1",
            "--layer-seconds", "0.004",
        ),
    },
    "stale_weights": {"strategy": "pipedream", "start": None, "everybody": True},
    "hot_shard": {
        "strategy": "parameter_server", "start": None, "flags": ("--servers", "2"),
        "everybody": True,
    },
    "version_drift": {"start": None},
    "environment_drift": {"start": None},
    "port_in_use": {"start": None, "ranks": 2, "among": (0,)},  # it is the first that listens
    "different_seeds": {"start": None},
    "slow_checkpoint": {
        "directory": True, "flags": ("--checkpoint-every", "20"), "start": (30, 40),
    },
    # How often to save is worth a word only where the job is known to fail: it is killed thrice.
    "rare_checkpoint": {
        "directory": True, "start": None, "everybody": True, "steps": 300,
        "flags": ("--checkpoint-every", "4"), "launcher": ("--max-restarts", "4"),
        "beside": tuple(f"sigkill:rank=1,start={60 + 60 * n},attempt={n}" for n in range(3)),
    },
    "disk_full": {  # of replicas the first writes
        "directory": True, "flags": ("--checkpoint-every", "20"), "start": (30, 40), "among": (0,),
    },
    "corrupt_batch": {"flags": ("--check-batches",), "steps_of_fault": 3},
    "exploding_loss": {"everybody": True},
    "forgotten_sampler": {"start": (1, 1), "everybody": True},
    "forgotten_set_epoch": {
        "start": (1, 1), "everybody": True, "flags": ("--data-bytes", "65536"),
    },
    "no_gradient": {"start": (1, 1), "everybody": True},
    "divided_twice": {"start": (1, 1), "everybody": True},
    "not_divided": {"start": (1, 1), "everybody": True},
    "slow_link": {"size": "2MiB/s"},
    "clock_offset": {},
    "clock_drift": {"size": "2000ppm", "steps": 400},
}  # fmt: skip
CASES = [_case(fault.name, **SPECIAL.get(fault.name, {})) for fault in FAULTS]
CLEAN = (
    ("ddp", 4), ("pipeline", 4), ("fsdp", 4), ("tensor", 2), ("parameter_server", 3),
    ("pipedream", 4), ("ring", 4), ("local_sgd", 4), ("model_parallel", 2), ("hogwild", 2),
    ("hybrid", 8),
)  # fmt: skip


class Server:
    """`rankscope serve` with its data in a directory."""

    def __init__(self, directory: Path) -> None:
        ready = directory / "ready.json"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rankscope", "serve", "--host", "127.0.0.1", "--port", "0",
             "--data-dir", str(directory), "--ready-file", str(ready)],
            stdout=(directory / "server.log").open("wb"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        while not ready.exists():
            if self._process.poll() is not None:
                raise SystemExit(f"the server did not start: see {directory}/server.log")
            time.sleep(0.1)
        self.url = json.loads(ready.read_text())["url"]

    def get(self, path: str) -> dict[str, Any]:
        """Return the API's answer, empty for what is not there yet."""
        return api.get(f"{self.url}/api/v1/{path}")

    def close(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(30)


def findings_of(server: Server, run_id: str) -> list[dict[str, Any]]:
    """Return all findings of a run, open and recovered."""
    answer = server.get(f"runs/{run_id}/findings")
    return [*answer.get("open", []), *answer.get("recovered", [])]


def run_name(case: Case, seed: int, *, is_planted: bool = True) -> str:
    """Return the id of a run, and the name of its folder."""
    return f"{case.fault}-{case.strategy}-{seed}" + ("" if is_planted else "-without")


def run_case(
    server: Server, case: Case, seed: int, directory: Path, *, is_planted: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> RealRun:  # fmt: skip
    """Run the trainer once and ask the server what it says.

    Where it is not planted, the fault is left out of a run that is the same in all else.
    The run has this `environment`, beside what is there and is none of our settings.
    """
    chance = random.Random(f"{case.fault} {case.strategy} {seed}")
    rank = EVERYBODY if case.everybody else chance.choice(case.among or range(case.ranks))
    kind = next((fault.finding for fault in FAULTS if fault.name == case.fault), "")
    outcome = RealRun(case.fault, case.strategy, seed, rank, case.ranks, kind)
    run_id = run_name(case, seed, is_planted=is_planted)
    folder = directory / run_id
    folder.mkdir()
    command = _command(server, case, rank, chance, run_id, folder, is_planted)
    first = FirstNamed(outcome)
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True,
            env={**_environment(), **environment},
        )  # fmt: skip
    try:
        _watch(server, first, run_id, process, comes_again=bool(case.launcher))
    finally:
        _end(process, run_id)
    outcome.fired = _fired(folder / "manifest", case.fault)
    outcome.found = _settled(server, first, run_id)
    outcome.verdict = server.get(f"runs/{run_id}").get("verdict")
    fired_ns = (outcome.fired or {}).get("start_time_ns")
    is_still_named = any(is_named(outcome, one) for one in outcome.found)
    if fired_ns is not None and is_still_named and first.at_seconds is not None:
        outcome.named_after_seconds = first.at_seconds - fired_ns / 1e9
    outcome.wall_seconds = time.monotonic() - began
    outcome.judgement = judge(outcome)
    return outcome


def _command(
    server: Server, case: Case, rank: int, chance: random.Random, run_id: str, folder: Path,
    is_planted: bool,
) -> list[str]:  # fmt: skip
    trainer = ["--strategy", case.strategy, "--steps", str(case.steps),
               "--step-times", str(folder / STEP_TIMES),
               "--seed", str(chance.randrange(1000)), *case.flags]  # fmt: skip
    if case.strategy == "ddp":
        trainer.append("--mask-buffer")  # DDP sends it in each forward, which waits for it
    if case.directory:
        trainer += ["--checkpoint-dir", str(folder / "checkpoints")]
    if case.fault != NO_FAULT and is_planted:
        where = "all" if rank == EVERYBODY else rank
        fault = f"{case.fault}:rank={where}"
        if case.start is not None:
            fault += f",start={chance.randint(*case.start)}"
        if case.steps_of_fault:
            fault += f",steps={case.steps_of_fault}"
        if case.size:
            fault += f",size={case.size}"
        trainer += ["--fault", fault, "--fault-manifest", str(folder / "manifest")]
    for other in case.beside:
        trainer += ["--fault", other]
    return [
        sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", run_id,
        "--dir", str(folder / "run"), "--", sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(case.ranks), *case.launcher,
        "-m", "rankscope_trainer", *trainer,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return kept | {"OMP_NUM_THREADS": "1"}


def _watch(
    server: Server, first: FirstNamed, run_id: str, process: subprocess.Popen[bytes], *,
    comes_again: bool,
) -> None:  # fmt: skip
    """Wait for the end of the run, or until a run that is stuck has been named for a while."""
    deadline, last_step, named_at, moved_at = time.monotonic() + GIVE_UP_SECONDS, -1, 0.0, 0.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        step = int(server.get(f"runs/{run_id}").get("run", {}).get("step") or 0)
        now = time.monotonic()
        if step != last_step:
            last_step, moved_at = step, now
        findings = findings_of(server, run_id)
        first.look(findings, time.time())
        loud = [one for one in findings if one["severity"] != "info"]
        named_at = (named_at or now) if loud else 0.0
        is_stuck = not comes_again and now - moved_at > 2 * STANDS_SECONDS
        if is_stuck and named_at and now - named_at > STANDS_SECONDS:
            return


def _end(process: subprocess.Popen[bytes], run_id: str) -> None:
    import psutil

    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            pass
    for other in psutil.process_iter(["environ"]):
        if (other.info["environ"] or {}).get("RANKSCOPE_RUN_ID") == run_id:
            other.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def _settled(server: Server, first: FirstNamed, run_id: str) -> list[dict[str, Any]]:
    """Return the findings when they have not changed for some looks after the end."""
    deadline, before, same = time.monotonic() + SETTLE_SECONDS, "", 0
    while True:
        findings = findings_of(server, run_id)
        first.look(findings, time.time())
        now = json.dumps([[one["kind"], one["ranks"], one["severity"]] for one in findings])
        same = same + 1 if now == before else 0
        if same >= 6 or time.monotonic() > deadline:
            return findings
        before = now
        time.sleep(0.5)


def _fired(manifest: Path, fault: str) -> dict[str, Any] | None:
    if not manifest.exists():
        return None
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    return next((line for line in lines if line.get("fault") == fault), None)


def plan(seeds: int, clean: int, names: list[str], first_seed: int) -> list[tuple[Case, int]]:
    """Return the runs: every case with each seed, then the clean ones over all strategies."""
    cases = [case for case in CASES if not names or case.fault in names]
    runs = [(case, first_seed + number) for number in range(seeds) for case in cases]
    for number in range(clean):
        strategy, ranks = CLEAN[number % len(CLEAN)]
        runs.append((Case(NO_FAULT, strategy, ranks), first_seed + number))
    return runs


def main() -> int:
    """Run all, print as they come, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each fault")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--clean", type=int, default=50, help="runs without a fault")
    parser.add_argument("--faults", default="", help="only these, with commas between")
    parser.add_argument("--join", type=Path, nargs="+", help="run nothing, add these results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="keep what was recorded in this directory")
    arguments = parser.parse_args()
    names = [name for name in arguments.faults.split(",") if name]
    if arguments.join:
        write(arguments.out, read(RealRun, arguments.out, *arguments.join))
        return summary(read(RealRun, arguments.out))
    outcomes: list[RealRun] = []
    with tempfile.TemporaryDirectory(prefix="rankscope-real-") as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        server = Server(directory)
        try:
            for case, seed in plan(arguments.seeds, arguments.clean, names, arguments.first_seed):
                outcomes.append(run_case(server, case, seed, directory))
                print(_line(outcomes[-1]), flush=True)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(record_of(outcomes[-1])) + "\n")
        finally:
            server.close()
    write(arguments.out, read(RealRun, arguments.out))
    return summary(outcomes)


def _line(outcome: RealRun) -> str:
    named = outcome.named_after_seconds
    return (
        f"{outcome.fault:<24}{outcome.strategy:<17}seed {outcome.seed:<4}rank {outcome.rank:<3} "
        f"named after {'-' if named is None else f'{named:.1f} s':<8} {outcome.wall_seconds:3.0f} s"
        f"  {outcome.judgement}"
    )


def summary(outcomes: list[RealRun]) -> int:
    """Print the share that is right by fault; return the exit code."""
    by_fault: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        by_fault[outcome.fault].append(outcome.judgement)
    is_short = False
    for fault, judgements in by_fault.items():
        right, fired = judgements.count(RIGHT), len(judgements) - judgements.count(NOT_FIRED)
        print(f"{fault:<24}{right}/{fired}")
        is_short |= right < RIGHT_SHARE * fired or not fired
    accused = [one for one in outcomes if one.judgement.startswith((ACCUSES, FALSE_ALARM))]
    print(f"{len(outcomes)} runs on {os.cpu_count()} cores; {len(accused)} accuse a healthy rank")
    return 1 if is_short or accused else 0


if __name__ == "__main__":
    sys.exit(main())
