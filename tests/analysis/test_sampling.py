"""Ranks that draw the same samples, and epochs in the same order; and those that only look so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.data_passes import DataPasses

START_NS = 1_790_000_000_000_000_000
BATCHES = ("0a", "1b", "2c", "3d")
GROUP = "4 00c0ffee"


def drawn(
    rank: int, number: int = 1, batches: Sequence[str] = BATCHES, *, step: int = 0,
    epoch: str = "", sampler: str = "SequentialSampler", shuffles: str = "", group: str = GROUP,
    loader: int = 0,
) -> schema.Event:  # fmt: skip
    return schema.Event(
        attempt=0, rank=rank, time_ns=START_NS + number, name="data pass",
        step=step or 4 + 40 * (number - 1),
        fields={
            "loader": str(loader), "pass": str(number), "batches": " ".join(batches),
            "group": group, "sampler": sampler, "shuffles": shuffles, "epoch": epoch,
        },
    )  # fmt: skip


def numbers(
    ranks: int = 4, loss: Callable[[int, int], float] = lambda rank, step: 3.0 - step / 100,
    norm: Callable[[int, int], float] | None = None,
) -> list[schema.AnyRecord]:  # fmt: skip
    """Return losses of 48 steps by rank and step, and norms of each 16th."""
    found: list[schema.AnyRecord] = []
    for rank in range(ranks):
        for step in range(1, 49):
            values = {"loss": loss(rank, step)}
            if norm is not None and step % 16 == 0:
                values["gradient_norm_local"] = norm(rank, step)
            found.append(schema.Metrics(
                attempt=0, rank=rank, time_ns=START_NS + step, step=step, values=values,
            ))  # fmt: skip
    return found


def found(records: Sequence[schema.AnyRecord], ranks: int = 4) -> list[Finding]:
    state = RunState("run")
    rows: list[schema.AnyRecord] = [
        schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=ranks, local_rank=rank,
            local_world_size=ranks, node_rank=0, host="a", pid=rank,
        ) for rank in range(ranks)
    ] + list(records)  # fmt: skip
    random.Random(5).shuffle(rows)
    for record in [*rows, *rows[:9]]:
        state.apply_record(record)
    look = state.look(START_NS + 10**12)
    return [one for one in look.findings if one.detector == "sampling"]


def test_the_same_samples_on_all_ranks_cost_what_all_but_one_do() -> None:
    (finding,) = found([*(drawn(rank) for rank in range(4)), *numbers()])
    assert (finding.kind, finding.severity, finding.ranks) == ("same_samples", "critical", ())
    assert finding.cost_throughput_ratio == pytest.approx(0.75)
    assert finding.what == "All 4 ranks train on the same samples: 75 % of their work adds nothing"
    assert "losses are the same to the last bit" in finding.why
    assert "DistributedSampler(dataset)" in finding.next
    assert finding.confidence >= 0.9


def test_a_sampler_with_the_wrong_rank_is_named() -> None:
    records = [drawn(rank, sampler="DistributedSampler") for rank in range(4)]
    (finding,) = found([*records, *numbers()])
    assert "num_replicas" in finding.next


def test_hand_made_batches_show_by_losses_and_gradients() -> None:
    (finding,) = found(numbers(norm=lambda rank, step: 1.0 + step / 100))
    assert (finding.kind, finding.severity) == ("same_samples", "critical")
    assert 0.85 <= finding.confidence < 0.95


def other_loss(rank: int, step: int) -> float:
    return 3.0 - step / 100 + rank / 10


def test_where_losses_differ_it_may_be_meant() -> None:
    """Ranks that share a sequence draw the same batch and learn from another part of it."""
    (finding,) = found([*(drawn(rank) for rank in range(4)), *numbers(loss=other_loss)])
    assert (finding.kind, finding.severity) == ("same_samples", "info")
    assert finding.cost_throughput_ratio is None


INNOCENT = {
    "each its own": [drawn(rank, batches=[f"{rank}{one}" for one in BATCHES]) for rank in range(4)],
    "one differs": [*(drawn(rank) for rank in range(3)), drawn(3, batches=("0a", "1b", "2c", "9"))],
    "no replicas, as of tensor parallel ranks": [drawn(rank, group="") for rank in range(4)],
    "one rank of each group of replicas": [
        drawn(rank, batches=[f"{rank % 2}{one}" for one in BATCHES], group=f"2 {rank // 2}")
        for rank in range(4)
    ],
    "replicas that are not all known": [drawn(rank) for rank in range(3)],
    "one batch for ever": [drawn(rank, batches=("0a",) * 4) for rank in range(4)],
    "no numbers in the batches": [drawn(rank, batches=("",) * 4) for rank in range(4)],
    "only its first pass": [
        one for rank in range(4) for one in (drawn(rank), drawn(rank, 2, [f"{rank}e", f"{rank}f"]))
    ],
}


@pytest.mark.parametrize("records", INNOCENT.values(), ids=INNOCENT)
def test_what_is_no_direct_evidence_accuses_nobody(records: list[schema.AnyRecord]) -> None:
    """Losses that are reduced before they are logged are the same on all ranks."""
    assert not found([*records, *numbers()])


@pytest.mark.parametrize(
    "how",
    [
        {},  # the losses alone
        {"norm": lambda rank, step: 1.0 + step / 100 + rank / 1e6},
        {"norm": lambda rank, step: 0.0},  # zero gradients
        {"norm": lambda rank, step: 1.0},  # the same in each step
        {"loss": other_loss, "norm": lambda rank, step: 1.0 + step / 100},
        {"ranks": 3, "norm": lambda rank, step: 1.0 + step / 100},  # one is not known
    ],
    ids=["losses", "norms differ", "zero", "constant", "losses differ", "a rank lacks"],
)
def test_losses_alone_are_no_evidence(how: dict[str, Callable[[int, int], float]]) -> None:
    assert not found(numbers(**how))  # type: ignore[arg-type]


def test_one_rank_has_nobody_to_share_with() -> None:
    records = [drawn(0, group="1 00"), *numbers(1, norm=lambda rank, step: 1.0 + step / 100)]
    assert not found(records, ranks=1)


def test_one_loader_of_several_costs_what_is_not_known() -> None:
    other = [drawn(rank, batches=[f"{rank}x", f"{rank}y"], loader=1) for rank in range(4)]
    (finding,) = found([*(drawn(rank) for rank in range(4)), *other, *numbers()])
    assert (finding.severity, finding.cost_throughput_ratio) == ("warning", None)


def shuffled(number: int, epoch: int, **how: str) -> list[schema.Event]:
    sampler = how.get("sampler", "DistributedSampler")
    kept = how.get("order", str(epoch))
    return [
        drawn(
            rank, number, [f"{rank}{kept}{one}" for one in BATCHES], sampler=sampler,
            shuffles=how.get("shuffles", "True"), epoch=f"{epoch} of seed 0",
        ) for rank in range(4)
    ]  # fmt: skip


def test_an_epoch_that_is_never_set() -> None:
    (finding,) = found([*shuffled(1, 0), *shuffled(2, 0), *shuffled(3, 0)])
    assert (finding.kind, finding.severity, finding.onset_step) == ("same_order", "warning", 44)
    assert "still in epoch 0" in finding.what
    assert "set_epoch(epoch)" in finding.next


def test_augmented_samples_in_the_same_order() -> None:
    (finding,) = found([*shuffled(1, 0, order="a"), *shuffled(2, 0, order="b")])
    assert finding.kind == "same_order"


@pytest.mark.parametrize(
    "records",
    [
        [*shuffled(1, 0), *shuffled(2, 1)],
        [*shuffled(1, 0), *shuffled(2, 0), *shuffled(3, 1)],  # a trial before the first epoch
        [*shuffled(1, 0, shuffles="False"), *shuffled(2, 0, shuffles="False")],
        # a sampler that is not torch's may shuffle by more than its epoch
        [*shuffled(1, 0, sampler="Mine", order="a"), *shuffled(2, 0, sampler="Mine", order="b")],
        [*shuffled(1, 0), *(drawn(rank, 2, step=6, sampler="DistributedSampler", shuffles="True",
                                  epoch="0 of seed 0") for rank in range(4))],
    ],
    ids=["set", "a trial", "not shuffled", "another sampler", "begun again"],
)  # fmt: skip
def test_an_order_that_changes_or_may_not_is_no_mistake(records: list[schema.Event]) -> None:
    assert not found(records)


@pytest.mark.parametrize("seed", range(20))
def test_any_field_is_taken(seed: int) -> None:
    chance = random.Random(seed)
    words = ["", "0", "1", "x", "-1", "9" * 40, "True", "4 zz", "²", "0a 1b", " "]
    events = [
        schema.Event(
            attempt=0, rank=chance.randrange(-1, 4), time_ns=START_NS, name="data pass",
            fields={name: chance.choice(words) for name in
                    ("loader", "pass", "batches", "group", "sampler", "shuffles", "epoch")},
        ) for _ in range(80)
    ]  # fmt: skip
    assert {one.kind for one in found(events)} <= {"same_samples", "same_order"}


def test_no_rank_fills_the_memory() -> None:
    table = DataPasses()
    for number in range(5_000):
        table.take(drawn(0, number % 1000, loader=number // 5))
    passes = [one for numbers in table.by_loader.values() for one in numbers.values()]
    assert sum(map(len, passes)) == 64
    assert len(passes) <= 64
