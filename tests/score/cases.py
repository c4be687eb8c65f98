"""The matrix of the score card: what is planted, at what sizes, and what must be found."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tests.simulator.job import Fault, FaultKind, Job, Noise

SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {  # data, tensor, pipeline
    8: ((8, 1, 1), (4, 2, 1), (4, 1, 2)),
    64: ((8, 2, 4), (64, 1, 1), (16, 4, 1)),
    1024: ((16, 8, 8), (128, 8, 1)),
    8192: ((64, 8, 16),),
}
STEPS, ONSET = 90, (42, 50)
# One step in a hundred of any rank takes twice as long, so in a thousand ranks some do in every
# step, and everybody waits for them: a rank has to be slower than that to cost the job anything.
HIDDEN = {8: 0.0, 64: 0.0, 1024: 2.0, 8192: 3.5}  # share of its own time
Plant: TypeAlias = Callable[[random.Random, Job], tuple[Fault, ...]]


@dataclass(frozen=True)
class Diagnosis:
    """One row of the card. `kinds` are the findings of which one must come, for each fault."""

    name: str
    plant: Plant
    kinds: tuple[frozenset[str], ...]
    largest: int = 1024
    smallest: int = 8  # with fewer groups than these have, no place can be told
    names_ranks: bool = True
    counts_info: bool = False  # its finding is advice or a note by design
    needs: frozenset[str] = frozenset()  # of the job: "numbers", "saves", "links", "calls"


@dataclass(frozen=True)
class Case:
    """One simulated run and its truth: for each fault the kinds that tell it, and its ranks."""

    diagnosis: Diagnosis
    job: Job
    seed: int

    @property
    def truth(self) -> list[tuple[Fault, frozenset[str], frozenset[int]]]:
        """Return each fault with the kinds of findings and the ranks that are right."""
        pairs = zip(self.job.faults, self.diagnosis.kinds, strict=True)
        return [(fault, kinds, ranks_of(self.job, fault)) for fault, kinds in pairs]


def ranks_of(job: Job, fault: Fault) -> frozenset[int]:
    """Return the ranks that a fault makes guilty; none where it is everybody's."""
    if fault.kind in ("slow_loader", "slow_save"):
        return frozenset()
    if fault.rank >= 0:
        return frozenset({fault.rank})
    per_host = job.ranks_per_host * (job.hosts_per_leaf if fault.leaf >= 0 else 1)
    first = per_host * (fault.leaf if fault.leaf >= 0 else fault.host)
    return frozenset(range(first, min(first + per_host, job.num_ranks)))


def _slow(kind: FaultKind, low: float = 0.15, high: float = 0.6) -> Plant:
    return lambda chance, job: (
        Fault(kind, chance.randrange(job.num_ranks), chance.randint(*ONSET),
              size=chance.uniform(low, high) + HIDDEN[job.num_ranks]),
    )  # fmt: skip


def _stop(kind: FaultKind) -> Plant:
    def plant(chance: random.Random, job: Job) -> tuple[Fault, ...]:
        points = ("data", "forward", "backward")
        return (Fault(kind, chance.randrange(job.num_ranks), chance.randint(*ONSET),
                      point=chance.choice(points)),)  # type: ignore[arg-type]  # fmt: skip

    return plant


def _wrong_call(chance: random.Random, job: Job) -> tuple[Fault, ...]:
    kinds: tuple[FaultKind, ...] = (
        "skip", "insert", "swap", "shape", "dtype", "operation", "reduce_op",
    )  # fmt: skip
    return (Fault(chance.choice(kinds), chance.randrange(job.num_ranks), chance.randint(*ONSET),
                  steps=1, bucket=chance.randrange(3)),)  # fmt: skip


def _link(chance: random.Random, job: Job) -> tuple[Fault, ...]:
    at = chance.randint(*ONSET)
    size = chance.choice((0.4, 1.0))
    if chance.random() < 0.5:
        return (Fault("slow_link", chance.randrange(job.num_ranks), at, size=size),)
    return (Fault("slow_link", host=chance.randrange(job.num_hosts), start=at, size=size),)


def _on_host(kind: FaultKind, size: float = 0.0) -> Plant:
    return lambda chance, job: (
        Fault(kind, host=chance.randrange(job.num_hosts), start=chance.randint(*ONSET), size=size),
    )


def _slow_then_hang(chance: random.Random, job: Job) -> tuple[Fault, ...]:
    slow, hung = chance.sample(range(job.num_ranks), 2)
    return (
        Fault("slow_compute", slow, 40, size=chance.uniform(0.4, 0.8)),
        Fault("hang", hung, STEPS - 3),
    )


def kinds(*names: str) -> tuple[frozenset[str], ...]:
    """Return one set of kinds."""
    return (frozenset(names),)


DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis("slow compute", _slow("slow_compute"), kinds("slow_compute"), 8192),
    Diagnosis("other work on the host", _slow("contention"), kinds("host_contention")),
    Diagnosis("garbage collection", _slow("garbage"), kinds("garbage_collection")),
    Diagnosis("heat or power", _slow("thermal"), kinds("thermal_or_power", "throttle")),
    Diagnosis("slow data", _slow("slow_data"), kinds("slow_data")),
    Diagnosis("page cache", _slow("page_cache"), kinds("page_cache")),
    Diagnosis("slow loader on all ranks",
              lambda chance, job: (Fault("slow_loader", start=2, size=chance.uniform(0.2, 0.5)),),
              kinds("slow_data"), names_ranks=False),
    Diagnosis("slow link", _link, kinds("slow_link"), smallest=64,
              needs=frozenset({"links", "calls"})),
    Diagnosis("hang", _stop("hang"), kinds("hang"), 8192),
    Diagnosis("crash", _stop("crash"), kinds("crash")),
    Diagnosis("wrong call", _wrong_call, kinds("desync"), needs=frozenset({"calls"})),
    Diagnosis("clock set", _on_host("clock_set", 1500.0), kinds("clock_offset"),
              needs=frozenset({"calls"})),
    Diagnosis("drift of versions",
              lambda chance, job: (Fault("drift", host=chance.randrange(job.num_hosts)),),
              kinds("version_drift"), 8192),
    Diagnosis("NaN", _slow("nan"), kinds("nan"), needs=frozenset({"numbers"})),
    Diagnosis("replicas apart", _slow("replica_drift"), kinds("replica_drift"),
              needs=frozenset({"numbers"})),
    Diagnosis("memory growth", lambda chance, job: (
        Fault("leak", chance.randrange(job.num_ranks), 10, size=chance.uniform(20, 50)),),
        kinds("memory_growth"), needs=frozenset({"numbers"})),
    Diagnosis("slow checkpoints", lambda chance, job: (
        Fault("slow_save", start=60, size=chance.uniform(2, 4)),), kinds("slow_checkpoint"),
        names_ranks=False, counts_info=True, needs=frozenset({"saves"})),
    Diagnosis("slow rank, then a hang", _slow_then_hang,
              (frozenset({"slow_compute"}), frozenset({"hang"}))),
    Diagnosis("nothing (clean)", lambda chance, job: (), ()),
)  # fmt: skip


def case_of(diagnosis: Diagnosis, num_ranks: int, seed: int) -> Case:
    """Return the run of one seed. All that is random of it comes from the seed and the names."""
    chance = random.Random(f"{diagnosis.name} {num_ranks} {seed}")
    needs, shapes = diagnosis.needs, SHAPES[num_ranks]
    data, tensor, pipeline = shapes[seed % len(shapes)]
    if "links" in needs:  # a layout in which groups tell one part from another
        data, tensor, pipeline = {64: (8, 2, 4), 1024: (16, 8, 8)}[num_ranks]
    job = Job(
        data=data, tensor=tensor, pipeline=pipeline, steps=STEPS, seed=seed, microbatches=2,
        forward_ms=200.0, transfer_ms=20.0 if "links" in needs else 2.0,
        ranks_per_host=2 if num_ranks == 8 else 4 if num_ranks == 64 else 8, hosts_per_leaf=4,
        tells_numbers="numbers" in needs or diagnosis.name.startswith("nothing"),
        save_every=10 if "saves" in needs else 0,
        noise=Noise(sigma=chance.uniform(0.01, 0.03), clock_offset_ms=5.0, clock_drift_ppm=10.0),
    )  # fmt: skip
    return Case(diagnosis, dataclasses.replace(job, faults=diagnosis.plant(chance, job)), seed)


def matrix(sizes: dict[int, int], only: str = "") -> Iterator[Case]:
    """Yield the cases; `sizes` says how many seeds of each diagnosis at each number of ranks."""
    for diagnosis in DIAGNOSES:
        if only in diagnosis.name:
            for num_ranks, seeds in sizes.items():
                if diagnosis.smallest <= num_ranks <= diagnosis.largest:
                    yield from (case_of(diagnosis, num_ranks, seed) for seed in range(seeds))
