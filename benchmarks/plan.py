"""What `rankscope plan` predicts of the reference trainer, beside what it takes here.

    python benchmarks/plan.py                      all that has no row yet, then the table
    python benchmarks/plan.py --kinds memory --ranks 2,4 --strategies ddp,fsdp
    python benchmarks/plan.py --table --write      run nothing; put the table into docs/plan.md

Memory is real: how far each process rises above a tiny run of the same kind. Of time the schedule,
the messages and the update are real, and the layers sleep for most of theirs (`layer_seconds`), as
this machine has fewer cores than ranks. Two things are measured on one rank and given to the
planner, what the host does for a layer and the rate of an update, and two on several, the link and
messages between two matrices that are cut; nothing of the run that is predicted. `load` of a row is
what else ran on the machine. Without rows of this code the table is made of those that there are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import ROOT, Rows, newest, parser_of

from rankscope.cli.plan_trainer import layout_of, load, model_of
from rankscope.planning.layout import Layout
from rankscope.planning.machine import Link, Machine
from rankscope.planning.memory import memory_of
from rankscope.planning.model import OPTIMIZER_BYTES, Model
from rankscope.planning.step import step_time
from rankscope.wire.formulas import bus_factor

RANK = Path(__file__).with_name("plan_rank.py")
DOCUMENT = ROOT / "docs" / "plan.md"
BEGIN = "<!-- predicted and measured: made by benchmarks/plan.py -->"
END = "<!-- end of predicted and measured -->"
LAYERS, LAYER_SECONDS = 8, 0.05  # where time is measured
DATA = "--device cpu --data-bytes 200000 --log-every 100000".split()
OF_TIME = f"--layers {LAYERS} --width 96 --heads 4 --context 16 --batch-size 1".split()
OF_MEMORY = "--layers 12 --width 256 --heads 4 --context 64 --batch-size 8".split()
# Flags of each strategy, and on how many ranks.
STRATEGIES: dict[str, tuple[str, tuple[int, ...]]] = {
    "ddp": ("--strategy ddp --microbatches 2", (1, 2, 3, 4)),
    "ring": ("--strategy ring --microbatches 2", (2, 3, 4)),
    "local_sgd": ("--strategy local_sgd --microbatches 2", (1, 2, 3, 4)),
    "hogwild": ("--strategy hogwild --microbatches 2", (1, 2, 3, 4)),
    "fsdp": ("--strategy fsdp --microbatches 2", (1, 2, 3, 4)),
    "fsdp, 2 copies": ("--strategy fsdp --microbatches 2 --replicas 2", (4,)),
    "fsdp, recompute": ("--strategy fsdp --microbatches 2 --checkpoint-activations", (2, 4)),
    "tensor": ("--strategy tensor --microbatches 2", (1, 2, 4)),
    "tensor, sequence": ("--strategy tensor --microbatches 2 --sequence-parallel", (2, 4)),
    "gpipe": ("--strategy pipeline --schedule gpipe --microbatches 8", (2, 3, 4)),
    "1f1b": ("--strategy pipeline --schedule 1f1b --microbatches 8", (2, 3, 4)),
    "interleaved": ("--strategy pipeline --schedule interleaved --microbatches 12", (2, 3, 4)),
    "zero_bubble": ("--strategy pipeline --schedule zero_bubble --microbatches 12", (2, 3, 4)),
    "model_parallel": ("--strategy model_parallel", (2, 3, 4)),
    "pipedream": ("--strategy pipedream --microbatches 4", (2, 3, 4)),
    "hybrid 2x2x1": ("--strategy hybrid --data-parallel 2 --pipeline-parallel 2 "
                     "--tensor-parallel 1 --microbatches 8", (4,)),
    "hybrid 2x1x2": ("--strategy hybrid --data-parallel 2 --pipeline-parallel 1 "
                     "--tensor-parallel 2 --microbatches 2", (4,)),
    "hybrid 1x2x2": ("--strategy hybrid --data-parallel 1 --pipeline-parallel 2 "
                     "--tensor-parallel 2 --microbatches 8", (4,)),
    "parameter_server": ("--strategy parameter_server --microbatches 2", (2, 3, 4)),
    "2 servers": ("--strategy parameter_server --servers 2 --microbatches 2", (4,)),
}  # fmt: skip
# Microbatches on one rank: slope and rest, of each kind of program, as FSDP2 and DTensor do work of
# their own in every layer.
PROGRAMS = {
    "ddp": "--strategy ddp", "fsdp": "--strategy fsdp", "tensor": "--strategy tensor",
    "sequence": "--strategy tensor --sequence-parallel",
}  # fmt: skip
CALIBRATIONS = tuple((f"{name} {number}", 1) for name in PROGRAMS for number in (2, 4))
CUT_OVER = (2, 4)  # ranks over which layers are cut
SCHEDULED = ("gpipe", "1f1b", "interleaved", "zero_bubble", "hybrid 2x2x1", "hybrid 1x2x2")
SENDING = ("gpipe", "1f1b", "interleaved", "zero_bubble", "model_parallel", "pipedream", "ring")
KEYS = ("kind", "strategy", "ranks")


def flags_of(kind: str, strategy: str, ranks: int) -> list[str]:
    """Return the trainer's arguments."""
    if kind in ("link", "message"):
        return []
    if (strategy, ranks) in CALIBRATIONS:
        name, number = strategy.split()
        own = [*PROGRAMS[name].split(), "--microbatches", number]
    else:
        own = STRATEGIES[strategy][0].split()
    flags = [*DATA, *own, *(OF_MEMORY if kind == "memory" else OF_TIME)]
    if kind == "time":
        flags += ["--microbatches", "4"] * (strategy in SCHEDULED)  # or steps are too long
        # a layer that is cut over ranks takes each of them its share of the time
        layout = layout_of(load(" ".join(flags), ranks), ranks)
        flags += ["--layer-seconds", f"{LAYER_SECONDS / layout.tensor:.6f}"]
    return flags


def measure(ranks: int, jobs: list[tuple[str, str]], rounds: int) -> Iterator[dict[str, Any]]:
    """Run kinds and strategies one after the other in one group; yield what each took, as it ends.

    Seconds are the mean over ranks, memory is that of the rank with most. Of several rounds all
    take turns, and the median of each counts.
    """
    num_jobs, jobs = len(jobs), jobs * rounds
    found: list[list[dict[str, Any]]] = [[] for _ in range(num_jobs)]
    work = [(kind, flags_of(kind, strategy, ranks)) for kind, strategy in jobs]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(RANK), folder, json.dumps(work)]
        # large blocks are mapped one by one, so that memory that is freed is seen to be free
        variables = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        child = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        files = [Path(folder, f"rank-{rank}.jsonl") for rank in range(ranks)]
        for number, (kind, _) in enumerate(jobs):
            while not all(_num_lines(path) > number for path in files):
                if child.poll() is not None and not all(_num_lines(p) > number for p in files):
                    log.seek(0)
                    raise SystemExit(f"{jobs[number]} on {ranks} ranks:\n{log.read()}")
                time.sleep(0.2)
            rows = [json.loads(path.read_text().splitlines()[number]) for path in files]
            found[number % num_jobs].append(_merged(kind, rows))
            if number >= len(jobs) - num_jobs:
                yield _middle(found[number % num_jobs])
        child.wait()


def _middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number of rows with the same names, also of those by size."""
    return {
        name: _middle([row[name] for row in rows]) if isinstance(value, dict)
        else statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
    }  # fmt: skip


def _num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _merged(kind: str, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "link":  # rank 0 begins and ends the round trips
        return max(by_rank, key=lambda found: found["send"][str(1 << 24)])
    pick = max if kind == "memory" else statistics.mean
    return {name: pick(found[name] for found in by_rank) for name in by_rank[0]}


def wanted(kinds: list[str], strategies: list[str], ranks: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of all rows that were asked for, calibrations first."""
    if "time" in kinds:
        yield from (("time", name, number) for name, number in CALIBRATIONS)
        yield from (("link", "", number) for number in ranks if number > 1)
        yield from (("message", "", number) for number in CUT_OVER if number in ranks)
    for kind in kinds:
        for name in strategies:
            # one rank of a kind of program is its calibration
            first = 2 if kind == "time" else 1
            yield from ((kind, name, n) for n in STRATEGIES[name][1] if n in ranks and n >= first)


def predicted(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Return what the planner says of a row."""
    kind, name, ranks = (row[key] for key in KEYS)
    settings = load(" ".join(flags_of(kind, name, ranks)), ranks)
    model, layout = model_of(settings), layout_of(settings, ranks)
    machine = Machine(nodes=1, devices=ranks, memory_bytes=0.0, reserved_bytes=0.0)
    if kind == "memory":
        return memory_of(model, layout, machine, settings.optimizer).total
    machine = calibrated(machine, model, layout, rows, link_name(name))
    took = step_time(evened(model), layout, machine, settings.optimizer)
    assert took is not None
    return took.total


def program_of(layout: Layout) -> str:
    """Return which calibration is of the same kind of program."""
    if layout.tensor > 1:
        return "sequence" if layout.sequence_parallel else "tensor"
    return "fsdp" if layout.shard == 3 else "ddp"


def link_name(strategy: str) -> str:
    """Return the operation whose link the strategy uses."""
    is_sent = strategy in SENDING or strategy in ("parameter_server", "2 servers")
    return "send" if is_sent else "all_reduce"


def evened(model: Model) -> Model:
    """Return the model with all work in its layers, which sleep: one FLOP in each."""
    change = dataclasses.replace
    return change(
        model, first=change(model.first, forward_flops=0.0),
        last=change(model.last, forward_flops=0.0), layer=change(model.layer, forward_flops=1.0),
    )  # fmt: skip


def calibrated(
    machine: Machine, model: Model, layout: Layout, rows: list[dict[str, Any]], link: str
) -> Machine:
    """Return the machine with the rates that one rank had, and the link of so many ranks.

    What sleeps is the work of the layers, which may be cut. The rest is what the host does for
    each of them. Ranks that do the same at once share the cores, and it takes them that much
    longer; stages of a pipeline take turns.
    """
    by_key = {tuple(row[key] for key in KEYS): row for row in rows}
    program = program_of(layout)
    few, many = (by_key["time", f"{program} {number}", 1]["seconds"] for number in (2, 4))
    each = (many - few) / 2  # of a microbatch
    update = few - 2 * each
    cores = os.cpu_count() or 1
    shared = max(1.0, machine.devices / cores)
    at_once = max(1.0, machine.devices / layout.pipeline / cores)
    asleep = 3 * LAYERS * LAYER_SECONDS
    awake = max(0.0, each - asleep) * at_once
    state = 3 * model.precision.item_bytes + 2 * OPTIMIZER_BYTES["adamw"]
    inside = None
    if machine.devices > 1:
        inside = fitted(by_key["link", "", machine.devices][link], link, machine.devices)
    return dataclasses.replace(
        machine, flops=3 * LAYERS / asleep, host_layer_seconds=awake / (3 * LAYERS),
        memory_bytes_per_second=model.parameters * state / max(update, 1e-9) / shared,
        inside=inside, least_message_seconds=least_message(layout, by_key),
    )  # fmt: skip


def least_message(layout: Layout, by_key: dict[tuple[Any, ...], dict[str, Any]]) -> float:
    """Return what a message inside of a cut layer takes of this host, beyond the layer's own work.

    Of two matrices there are two sums, or twice as many gathers and scatters.
    """
    if layout.tensor == 1:
        return 0.0
    row = by_key["message", "", layout.tensor]
    name, number = ("sequence_seconds", 4) if layout.sequence_parallel else ("seconds", 2)
    return float(max(0.0, row[name] - row["alone"]) / number)


def fitted(by_size: dict[str, float], operation: str, ranks: int) -> Link:
    """Return the link of these times: hops of the smallest message, bytes of the largest."""
    members = ranks if operation == "all_reduce" else 2
    factor = bus_factor(operation, members) or 1.0
    hops = factor * members if operation == "all_reduce" else 1.0
    sizes = sorted(by_size, key=int)
    small, large = by_size[sizes[0]], by_size[sizes[-1]]
    rate = factor * (int(sizes[-1]) - int(sizes[0])) / max(large - small, 1e-9)
    return Link(rate, small / hops)


def errors_of(kind: str, rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float, float]]:
    """Return the rows of a kind, each with what was measured and what is predicted."""
    value = "bytes" if kind == "memory" else "seconds"
    first = 2 if kind == "time" else 1
    known = [
        row
        for row in rows
        if row["kind"] == kind and row["strategy"] in STRATEGIES and row["ranks"] >= first
    ]
    order = list(STRATEGIES)
    known.sort(key=lambda row: (order.index(row["strategy"]), row["ranks"]))
    return [(row, row[value], predicted(row, rows)) for row in known]


def table(rows: list[dict[str, Any]]) -> str:
    """Return each row beside its prediction, and the errors."""
    lines: list[str] = []
    for kind, unit, scale in (("memory", "MB", 1e6), ("time", "ms", 1e-3)):
        found = errors_of(kind, rows)
        if not found:
            continue
        sizes = sorted(abs(said / value - 1) for _, value, said in found)
        lines += [
            f"{kind.capitalize()}, {len(sizes)} runs: median error "
            f"{statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}.",
            "",
            f"| strategy | ranks | measured, {unit} | predicted | error | load |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['strategy']} | {row['ranks']} | {value / scale:.1f} | {said / scale:.1f} | "
            f"{said / value - 1:+.1%} | {row['load']} |"
            for row, value, said in found
        ]
        lines.append("")
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table into the document."""
    head, mark, rest = DOCUMENT.read_text().partition(BEGIN + "\n")
    assert mark, DOCUMENT
    DOCUMENT.write_text(head + mark + text + END + rest.partition(END)[2])


def main() -> None:
    parser = parser_of(__doc__, "plan.jsonl", sources=(), seeds=1, least_seconds=0.0)
    parser.add_argument("--kinds", default="memory,time")
    parser.add_argument("--strategies", default=";".join(STRATEGIES), help="with ; between")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--rounds", type=int, default=1, help="in turns; the median counts")
    parser.add_argument("--write", action="store_true", help="put the table into docs/plan.md")
    arguments = parser.parse_args()
    rows = Rows(arguments.out, KEYS, arguments.label)
    keys = wanted(
        arguments.kinds.split(","), arguments.strategies.split(";"),
        [int(number) for number in arguments.ranks.split(",")],
    )  # fmt: skip
    if not arguments.table:
        missing = rows.missing(keys)
        for ranks in sorted({key[2] for key in missing}):
            jobs = [(kind, strategy) for kind, strategy, number in missing if number == ranks]
            for (kind, strategy), found in zip(
                jobs, measure(ranks, jobs, arguments.rounds), strict=True
            ):
                print(json.dumps(rows.add((kind, strategy, ranks), found)), flush=True)
    text = table(rows.all() or newest(arguments.out, KEYS))
    print(text)
    if arguments.write:
        write(text)


if __name__ == "__main__":
    main()
