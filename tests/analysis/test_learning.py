"""Steps from which nothing is learnt, and losses of accumulated passes on the wrong scale."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from rankscope.wire import schema
from rankscope.wire.metric_names import ALTERNATING
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding

START_NS = 1_790_000_000_000_000_000
RANKS = 4
Number = Callable[[int, int], float | None]


def falling(rank: int, step: int) -> float:
    return 3.0 - step / 1000 + rank / 10


def metrics(
    loss: Number = falling, norm: Number = lambda rank, step: 1.0, steps: int = 160, **more: float
) -> list[schema.AnyRecord]:
    """Return the loss of each step and the norm of each 16th, by rank and step."""
    found: list[schema.AnyRecord] = []
    for rank in range(RANKS):
        for step in range(1, steps + 1):
            values = {"loss": loss(rank, step)} | more
            if step % 16 == 0:
                values["gradient_norm"] = norm(rank, step)
            found.append(schema.Metrics(
                attempt=0, rank=rank, time_ns=START_NS + step, step=step,
                values={name: value for name, value in values.items() if value is not None},
            ))  # fmt: skip
    return found


def scaled(
    passes: int, factors: str, *, local: int = 0, reduction: str = "mean", ranks: int = RANKS
) -> list[schema.AnyRecord]:
    fields = {
        "passes": str(passes), "local": str(local), "factors": factors, "reduction": reduction,
    }  # fmt: skip
    return [
        schema.Event(attempt=0, rank=rank, time_ns=START_NS, step=2, name="loss scale",
                     fields=fields)
        for rank in range(ranks)
    ]  # fmt: skip


def found(records: Sequence[schema.AnyRecord]) -> list[Finding]:
    state = RunState("run")
    rows = [*records]
    random.Random(7).shuffle(rows)
    for record in [*rows, *rows[:9]]:
        state.apply_record(record)
    look = state.look(START_NS + 10**12)
    return [one for one in look.findings if one.detector == "learning"]


def test_a_graph_that_is_cut_from_the_first_step() -> None:
    (finding,) = found(metrics(lambda rank, step: 5.5, lambda rank, step: 0.0))
    assert (finding.kind, finding.severity, finding.onset_step) == ("nothing_learnt", "warning", 1)
    assert finding.what == "Nothing is learnt: no gradient reaches the weights"
    assert "the loss is 5.5 in every step" in finding.why
    assert finding.confidence >= 0.9


def test_a_gradient_that_is_lost_later_is_named_with_its_step() -> None:
    (finding,) = found(metrics(norm=lambda rank, step: float(step < 64)))
    assert (finding.severity, finding.onset_step) == ("warning", 64)
    assert "since step 64" in finding.what


def test_weights_that_no_optimizer_holds() -> None:
    """One batch again and again, whose loss and gradient stay what they are."""
    (finding,) = found(metrics(lambda rank, step: 2.0 + rank))
    assert "the loss never changes" in finding.what
    assert "2 to 5 by rank" in finding.why
    assert "optimizer" in finding.next


def test_a_loss_that_came_down_to_0_has_nothing_more_to_teach() -> None:
    (finding,) = found(
        metrics(lambda rank, step: max(0.0, 3.0 - step / 20), lambda rank, step: float(step < 60))
    )
    assert finding.severity == "info"


@pytest.mark.parametrize(
    "records",
    [
        metrics(),
        metrics(norm=lambda rank, step: float(rank == 2)),  # one rank holds what is trained
        metrics(norm=lambda rank, step: float(step != 96 and step != 112)),  # underflow
        metrics(norm=lambda rank, step: None if step < 112 else 0.0),  # too few
        metrics(lambda rank, step: 2.0 if step > 30 else 3.0),  # it has come down
        metrics(lambda rank, step: 2.0 + (rank == 3) * step / 1e6),  # one changes
        metrics(lambda rank, step: 2.0, steps=15),
        metrics(lambda rank, step: 2.0, lambda rank, step: 0.0, **{ALTERNATING: 1.0}),
        metrics(lambda rank, step: 2.0 if step < 9 else None),  # only logged at first
    ],
    ids=["healthy", "shards", "underflow", "few norms", "converged", "one rank", "few losses",
         "in turn", "few known"],
)  # fmt: skip
def test_what_may_be_healthy_is_no_finding(records: list[schema.AnyRecord]) -> None:
    assert not found(records)


def test_a_loss_that_is_divided_twice() -> None:
    (finding,) = found([*metrics(), *scaled(4, "4 4", local=3)])
    assert (finding.kind, finding.severity) == ("accumulation", "warning")
    assert (
        finding.what == "The loss is divided by 4 twice, so that the gradient is 4 times too small"
    )


def test_a_loss_that_is_not_divided() -> None:
    (finding,) = found([*metrics(), *scaled(4, "", local=3)])
    assert "not divided by 4" in finding.what
    assert finding.confidence < 0.85


@pytest.mark.parametrize(
    "records",
    [
        scaled(4, "4"),
        scaled(4, "2 2"),  # by the passes, as parts of one division
        scaled(4, "16"),
        scaled(4, "4 4", reduction="sum"),  # by the samples of a batch, and by the passes
        scaled(4, "4 4", reduction=""),
        scaled(4, "", local=0),  # several losses, or networks
        scaled(4, "", local=3, reduction="sum"),
        scaled(3, "6"),
        [*scaled(4, "4 4", ranks=1), *scaled(4, "4", ranks=4)[1:]],  # ranks that differ
        scaled(0, "nan inf"),
    ],
)
def test_what_is_divided_otherwise_is_no_finding(records: list[schema.AnyRecord]) -> None:
    assert not found([*metrics(), *records])


def rated(
    rate: Callable[[int], float], *, samples: float = 256.0, group: str = "4 aa", begins: int = 1
) -> list[schema.AnyRecord]:
    """Return the learning rate of 60 steps, and a pass over a loader of replicas."""
    more: list[schema.AnyRecord] = [
        schema.Metrics(
            attempt=0, rank=rank, time_ns=START_NS + step, step=step,
            values={"learning_rate": rate(step), "samples": samples},
        ) for rank in range(RANKS) for step in range(begins, 61)
    ]  # fmt: skip
    fields = {"loader": "0", "pass": "1", "batches": "", "group": group}
    return [*metrics(), *more, *(
        schema.Event(attempt=0, rank=rank, time_ns=START_NS, name="data pass", fields=fields)
        for rank in range(RANKS)
    )]  # fmt: skip


def test_a_large_batch_without_warm_up_is_advised() -> None:
    (finding,) = found(rated(lambda step: 1e-3 * 0.99**step))
    assert (finding.kind, finding.severity) == ("no_warm_up", "info")
    assert "a batch of 1,024 samples" in finding.what


@pytest.mark.parametrize(
    "records",
    [
        rated(lambda step: min(1.0, step / 20) * 1e-3),
        rated(lambda step: 1e-3, samples=64.0),
        rated(lambda step: 1e-3, group=""),  # how many replicas there are is not known
        rated(lambda step: 1e-3, begins=12),  # how it began is not known
        rated(lambda step: 0.0),
    ],
    ids=["warm-up", "small", "no replicas", "later", "zero"],
)
def test_where_warm_up_is_there_or_not_known_nothing_is_advised(
    records: list[schema.AnyRecord],
) -> None:
    assert not found(records)


def used(
    classes: str = "AdamW Adam Optimizer object", given: str = "0.001", replicas: str = "4",
    attempt: int = 0, ranks: int = RANKS,
) -> list[schema.AnyRecord]:  # fmt: skip
    fields = {"classes": classes, "given": given, "replicas": replicas}
    return [
        schema.Event(attempt=attempt, rank=rank, time_ns=START_NS, name="optimizer", fields=fields)
        for rank in range(ranks)
    ]


def registered(rank: int) -> schema.AnyRecord:
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=START_NS, world_size=4, local_rank=rank, local_world_size=4,
        node_rank=0, host="node-a", pid=7 + rank,
    )  # fmt: skip


def test_a_rate_times_the_ranks_is_advised_against_for_adam() -> None:
    (finding,) = found([*rated(lambda step: 4e-3, samples=8.0), *used()])
    assert (finding.kind, finding.severity) == ("linear_scaling", "info")
    assert "4 times, and AdamW is no SGD" in finding.what
    assert "gives a rate of 0.001, and the optimizer takes 0.004" in finding.why
    assert "Try 0.002" in finding.next


def test_so_is_one_by_the_batch_over_a_usual_one() -> None:
    warm = [*rated(lambda step: min(1.0, step / 20) * 2e-3), *used("FusedAdam Optimizer")]
    (finding,) = found(warm)
    assert (finding.kind, finding.severity) == ("linear_scaling", "info")
    assert "as much as 512 samples are in its batch of 1,024" in finding.why


def test_so_is_one_that_grew_with_the_batch_from_one_attempt_to_the_next() -> None:
    state = RunState("run")
    for attempt, ranks, rate in ((0, 2, 1e-3), (1, 4, 2e-3)):
        shown = [*rated(lambda step, rate=rate: rate, samples=8.0),
                 *used(given="", replicas=str(ranks))]  # fmt: skip
        for record in (*map(registered, range(ranks)), *shown):
            if record.rank < ranks:
                state.apply_record(msgspec.structs.replace(record, attempt=attempt))
    look = state.look(START_NS + 10**12)
    (finding,) = (one for one in look.findings if one.kind == "linear_scaling")
    assert finding.attempt == 1
    assert "0.001 for 16 samples of a step in attempt 0, 0.002 for 32 now" in finding.why


@pytest.mark.parametrize(
    "records",
    [
        [*rated(lambda step: 4e-3, samples=8.0), *used("SGD Optimizer object")],
        [*rated(lambda step: 1e-3, samples=8.0), *used()],
        [*rated(lambda step: 2e-3, samples=8.0), *used()],  # by the root
        [*rated(lambda step: 3e-3, samples=8.0), *used()],
        [*rated(lambda step: 4e-3, samples=8.0), *used(given="")],
        [*rated(lambda step: 4e-3, samples=8.0), *used(ranks=2), *used(given="0.002")[2:]],
        [*rated(lambda step: step * 4e-3 / 60, samples=8.0), *used()],  # it still rises
        [*rated(lambda step: 4e-3, samples=8.0), *used(given="nan")],
        [*rated(lambda step: 4e-3, samples=8.0), *used(given="x")],
        [*rated(lambda step: 4e-3, samples=8.0), *used(replicas="-4", given="-1e-3")],
        rated(lambda step: 4e-3, samples=8.0),
    ],
    ids=["SGD", "not scaled", "root", "another factor", "not given", "ranks differ", "rises",
         "nan", "no number", "negative", "no optimizer"],
)  # fmt: skip
def test_other_rates_are_not(records: list[schema.AnyRecord]) -> None:
    assert not found(records)


@pytest.mark.parametrize("seed", range(20))
def test_any_field_is_taken(seed: int) -> None:
    chance = random.Random(seed)
    words = ["", "0", "2", "2 2", "x", "-1", "1e400", "nan", "mean", "9" * 30]
    events = [
        schema.Event(
            attempt=0, rank=chance.randrange(-1, 4), time_ns=START_NS + step, name="loss scale",
            fields={name: chance.choice(words)
                    for name in ("passes", "local", "factors", "reduction")},
        ) for step in range(40)
    ]  # fmt: skip
    events += [
        schema.Event(
            attempt=0, rank=chance.randrange(-1, 4), time_ns=START_NS + step, name="optimizer",
            fields={name: chance.choice(words) for name in ("classes", "given", "replicas")},
        ) for step in range(40)
    ]  # fmt: skip
    assert {one.kind for one in found([*metrics(), *events])} <= {"accumulation"}
