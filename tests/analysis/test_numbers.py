"""NaN, spikes, odd batches and replicas that drift apart: planted faults, and healthy runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from rankscope.rank.hooks.numbers.replicas import bits, mixed
from rankscope.wire import schema
from rankscope.wire.metric_names import ALTERNATING
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.number_table import CAPACITY, HEAD, NumberTable
from rankscope_server.verdict.answers import Look
from tests.analysis.simulator import START_NS

torch = pytest.importorskip("torch")
Values = dict[str, float]
NAN = float("nan")


def registered(num_ranks: int, num_stages: int = 1) -> list[schema.AnyRecord]:
    return [
        schema.RankRegistered(
            attempt=0, rank=rank, time_ns=START_NS, world_size=num_ranks, local_rank=rank % 8,
            local_world_size=8, node_rank=rank // 8, host=f"node-{rank // 8}", pid=1 + rank,
            stage=rank % num_stages if num_stages > 1 else -1,
            num_stages=num_stages if num_stages > 1 else 0,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


def numbers(rank: int, step: int, **values: float) -> schema.Metrics:
    flags = {
        flag: float(not np.isfinite(values[name]))
        for name, flag in (
            ("loss", "loss_nonfinite"), ("gradient_norm", "gradient_nonfinite"),
            ("gradient_norm_local", "gradient_local_nonfinite"),
        )
        if name in values
    }  # fmt: skip
    return schema.Metrics(
        attempt=0, rank=rank, time_ns=START_NS + step * 10**8 + rank, step=step,
        values=values | flags,
    )  # fmt: skip


def look_at(records: Iterable[schema.AnyRecord]) -> Look:
    state = RunState("run")
    for record in records:
        state.apply_record(record)
    return state.look(START_NS + 10**13)


def of(look: Look, *detectors: str) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector in detectors]


def training(
    seed: int,
    num_ranks: int = 8,
    steps: int = 400,
    change: Callable[[int, int, Values], None] = lambda rank, step, values: None,
    tail: float = 0.0,
) -> list[schema.AnyRecord]:
    """Return the numbers of a job: a falling loss with noise, local and reduced gradient norms.

    `change(rank, step, values)` plants a fault; `tail` > 0: noise of Student's t, so many degrees.
    """
    chance = np.random.default_rng(seed)
    records = registered(num_ranks)
    skew = chance.normal(0, 0.1, num_ranks)  # ranks read different data
    for step in range(1, steps + 1):
        common = 2.0 + 4.0 * np.exp(-step / 150)
        noise = (
            chance.standard_t(tail, (2, num_ranks)) if tail else chance.normal(size=(2, num_ranks))
        )
        shared = float(np.exp(chance.normal(0, 0.15)))
        for rank in range(num_ranks):
            values = {"loss": float(common * np.exp(0.08 * noise[0, rank] + skew[rank]))}
            if step % 4 == 0:
                values["gradient_norm_local"] = float(shared * np.exp(0.1 * noise[1, rank]) * 3)
                values["gradient_norm"] = shared
            change(rank, step, values)
            records.append(numbers(rank, step, **values))
    return records


# --- NaN ------------------------------------------------------------------------------------------


def test_nothing_recorded_is_no_health() -> None:
    look = look_at(registered(4))
    states = {detector.name: (detector.state, detector.remedy != "") for detector in look.detectors}
    assert {states[name] for name in ("nan", "spikes", "outliers", "replicas")} == {
        ("skipped", True)
    }


@pytest.mark.parametrize("seed", range(10))
def test_the_rank_that_brought_in_nan_is_named(seed: int) -> None:
    chance = random.Random(seed)
    culprit, onset = chance.randrange(8), chance.randrange(20, 380)

    def change(rank: int, step: int, values: Values) -> None:
        if step > onset or (step == onset and rank == culprit):
            values["loss"] = NAN
        if step >= onset and "gradient_norm" in values:
            values["gradient_norm"] = NAN

    records = training(seed, change=change)
    chance.shuffle(records)
    look = look_at(records + records[::7])
    (finding,) = of(look, "nan")
    assert (finding.kind, finding.ranks, finding.onset_step) == ("nan", (culprit,), onset)
    assert (finding.severity, finding.state) == ("critical", "open")
    assert culprit not in finding.victims
    assert look.verdict is not None
    assert look.verdict.kind == "nan"


def test_nan_that_a_script_tells_without_a_flag_is_seen() -> None:
    def told(rank: int, step: int) -> schema.Metrics:
        loss = NAN if step > 40 or (step == 40 and rank == 1) else 2.0
        return schema.Metrics(attempt=0, rank=rank, time_ns=START_NS + step, step=step,
                              values={"loss": loss})  # fmt: skip

    records = [told(rank, step) for step in range(1, 61) for rank in range(4)]
    (finding,) = of(look_at([*registered(4), *records]), "nan")
    assert (finding.ranks, finding.onset_step) == ((1,), 40)


def test_damaged_batches_that_the_script_tells_of() -> None:
    def told(rank: int, step: int) -> schema.Metrics:
        total = 2.0 if rank == 3 and step >= 30 else 0.0
        return schema.Metrics(attempt=0, rank=rank, time_ns=START_NS + step, step=step,
                              values={"corrupt_batches": total})  # fmt: skip

    records = [told(rank, step) for step in (10, 30, 50) for rank in range(4)]
    look = look_at([*registered(4), *records])
    (finding,) = of(look, "corrupt-batches")
    assert (finding.kind, finding.ranks, finding.onset_step) == ("corrupt_batch", (3,), 30)
    assert "2 damaged batches" in finding.what


@pytest.mark.parametrize("seed", range(20))
def test_losses_of_few_samples_have_long_tails_and_accuse_nobody(seed: int) -> None:
    """Student's t with three degrees of freedom, as losses of a few short texts scatter."""
    chance = np.random.default_rng(seed)

    def change(rank: int, step: int, values: Values) -> None:
        values["loss"] = 3.0 * float(np.exp(0.07 * chance.standard_t(3)))

    look = look_at(training(seed, 4, change=change))
    assert [finding for finding in of(look, "outliers") if finding.severity != "info"] == []


def test_nan_of_all_ranks_at_once_accuses_nobody() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        if step >= 100:
            values["loss"] = NAN

    (finding,) = of(look_at(training(0, change=change)), "nan")
    assert (finding.ranks, finding.onset_step) == ((), 100)


def test_nan_first_seen_in_reduced_gradients_accuses_nobody() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        values.pop("gradient_norm_local", None)
        if step >= 101:
            values["loss"] = NAN
        if step >= 100 and "gradient_norm" in values:
            values["gradient_norm"] = NAN

    (finding,) = of(look_at(training(0, change=change)), "nan")
    assert finding.ranks == ()
    assert "reduced gradients" in finding.why


def test_the_last_stage_of_a_pipeline_is_not_accused() -> None:
    records: list[schema.AnyRecord] = registered(4, num_stages=4)
    records += [numbers(3, step, loss=1.0 if step < 50 else NAN) for step in range(1, 90)]
    (finding,) = of(look_at(records), "nan")
    assert finding.ranks == ()
    assert "stage" in finding.why


def test_nan_of_one_batch_that_passed_is_over() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        if rank == 5 and step == 100:
            values["loss"] = NAN

    look = look_at(training(0, change=change))
    (finding,) = of(look, "nan")
    assert (finding.ranks, finding.state, finding.severity) == ((5,), "recovered", "warning")
    assert look.verdict is None


# --- spikes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_spike_that_recovers_is_transient(seed: int) -> None:
    onset = 150 + 20 * seed

    def change(rank: int, step: int, values: Values) -> None:
        size = 1.0 + 2.0 * np.exp(-(step - onset) / 5) if step >= onset else 1.0
        for name in values:
            values[name] *= size

    look = look_at(training(seed, change=change))
    found = of(look, "spikes")
    assert [(finding.kind, finding.severity, finding.state) for finding in found] == [
        ("loss_spike", "info", "recovered")
    ]
    assert found[0].onset_step is not None
    assert abs(found[0].onset_step - onset) <= 4
    assert "transient" in found[0].what
    assert look.verdict is None


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_does_not_come_back_diverges(seed: int) -> None:
    def change(rank: int, step: int, values: Values) -> None:
        if step >= 250:
            for name in values:
                values[name] *= 2.5

    look = look_at(training(seed, change=change))
    (finding,) = of(look, "spikes")
    assert (finding.kind, finding.severity, finding.ranks) == ("divergence", "critical", ())
    assert finding.onset_step is not None
    assert abs(finding.onset_step - 250) <= 3


def test_the_losses_of_a_generator_and_its_critic_may_rise() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        values[ALTERNATING] = 1.0
        if step >= 250:
            values["loss"] *= 2.5

    look = look_at(training(1, change=change))
    (finding,) = of(look, "spikes")
    assert (finding.kind, finding.severity) == ("divergence", "info")
    assert "networks that train in turn" in finding.what
    assert look.verdict is None


def test_a_divergence_stays_known_when_its_onset_has_left_the_table() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        if step >= 250:
            for name in values:
                values[name] *= 2.5

    state = RunState("run")
    kinds = []
    for at, record in enumerate(training(1, num_ranks=4, steps=1500, change=change)):
        state.apply_record(record)
        if at % 400 == 0:
            found = of(state.look(START_NS + at), "spikes")
            kinds.append(
                {
                    (finding.kind, finding.onset_step)
                    for finding in found
                    if finding.severity != "info"
                }
            )
    assert kinds[-1] == {("divergence", 250)}


# --- one rank among the others --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_whose_gradients_are_wrong_again_and_again(seed: int) -> None:
    chance = random.Random(seed)
    culprit = chance.randrange(8)

    def change(rank: int, step: int, values: Values) -> None:
        if rank == culprit and step >= 220 and "gradient_norm_local" in values:
            values["gradient_norm_local"] *= 6.0

    found = of(look_at(training(seed, change=change)), "outliers")
    assert [
        (finding.kind, finding.ranks, finding.severity, finding.state) for finding in found
    ] == [("corruption", (culprit,), "warning", "open")]
    assert found[0].onset_step is not None
    assert 220 <= found[0].onset_step <= 228


@pytest.mark.parametrize("seed", range(10))
def test_one_odd_batch_that_the_job_felt(seed: int) -> None:
    culprit, onset = seed % 8, 240

    def change(rank: int, step: int, values: Values) -> None:
        if step == onset:
            if rank == culprit:
                values["loss"] *= 12.0
                values["gradient_norm_local"] *= 40.0
            values["gradient_norm"] *= 8.0

    found = of(look_at(training(seed, change=change)), "outliers")
    assert [(finding.kind, finding.ranks, finding.severity) for finding in found] == [
        ("corrupt_batch", (culprit,), "warning")
    ]
    assert found[0].onset_step == onset
    assert found[0].state == "recovered"


def test_the_spike_of_an_odd_batch_is_folded_into_it() -> None:
    def change(rank: int, step: int, values: Values) -> None:
        if step >= 240:
            values["loss"] *= 1 + 3 * np.exp(-(step - 240) / 5)
        if step == 240:
            values["gradient_norm"] *= 8.0
            if rank == 3:
                values["gradient_norm_local"] *= 40.0

    look = look_at(training(2, change=change))
    spikes = of(look, "spikes")
    assert spikes
    assert {spike.explained_by for spike in spikes} == {"0/outliers/3"}


@pytest.mark.parametrize("tail", [0.0, 4.0])
def test_healthy_training_says_nothing_above_info(tail: float) -> None:
    loud = []
    for seed in range(20):
        look = look_at(training(1000 + seed, tail=tail))
        loud += [f for f in look.findings if f.severity != "info"]
    assert loud == []


# --- replicas -------------------------------------------------------------------------------------


class Model:
    """Parameters of one replica as the agent sums them up."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(torch.randn(size, generator=generator))
            for size in ((33, 7), (128,), (5, 5), (1,))
        ]

    def flip(self, chance: random.Random) -> None:
        """Flip one bit of one parameter."""
        data = chance.choice(self.parameters).detach().reshape(-1).view(torch.int32)
        at = chance.randrange(data.numel())
        data[at] = data[at] ^ (1 << chance.randrange(31))

    def checksum(self) -> float:
        return mixed(torch.stack([bits(parameter) for parameter in self.parameters]))


@pytest.mark.parametrize("seed", range(50))
def test_one_flipped_bit_is_found_at_the_next_check(seed: int) -> None:
    chance = random.Random(seed)
    num_ranks, culprit = chance.choice([4, 8]), chance.randrange(4)
    models = [Model() for _ in range(num_ranks)]
    state = RunState("run")
    for record in registered(num_ranks):
        state.apply_record(record)
    flip_at = chance.randrange(300, 900)
    for check in range(128, 1280, 128):
        if flip_at <= check < flip_at + 128:
            models[culprit].flip(chance)
        order = list(range(num_ranks))
        chance.shuffle(order)
        for rank in order:
            record = numbers(rank, check, replica_checksum=models[rank].checksum())
            state.apply_record(record)
            state.apply_record(record)
        found = of(state.look(START_NS + check), "replicas")
        expected = [(culprit,)] if check >= flip_at else []
        assert [one.ranks for one in found] == expected
    assert found[0].onset_step == -(-flip_at // 128) * 128
    assert found[0].kind == "replica_drift"


def test_no_false_alarm_over_ten_thousand_steps() -> None:
    state = RunState("run")
    for record in registered(8):
        state.apply_record(record)
    chance = random.Random(1)
    found = []
    for step in range(128, 10_001, 128):
        value = float(chance.getrandbits(53))
        for rank in range(8):
            if chance.random() > 0.05:  # some are lost
                state.apply_record(numbers(rank, step, replica_checksum=value))
        found += of(state.look(START_NS + step), "replicas")
    assert found == []


def test_two_replicas_that_differ_accuse_nobody() -> None:
    records = registered(2)
    records += [numbers(rank, 128, replica_checksum=float(rank)) for rank in range(2)]
    (finding,) = of(look_at(records), "replicas")
    assert finding.ranks == ()
    assert finding.severity == "critical"


def tensor_parallel(bad: int | None) -> Look:
    """Return a job of four replicas of a model split over two ranks: 0, 2, 4, 6 and 1, 3, 5, 7."""
    records: list[schema.AnyRecord] = registered(8)
    for rank in range(8):
        for name, members in (
            ("world", range(8)),
            ("dp", range(rank % 2, 8, 2)),
            ("tp", range(rank // 2 * 2, rank // 2 * 2 + 2)),
        ):
            records.append(
                schema.GroupDefined(
                    attempt=0,
                    rank=rank,
                    time_ns=START_NS,
                    group=name,
                    ranks=list(members),
                    backend="",
                )
            )
    for step in range(128, 1280, 128):
        for rank in range(8):
            value = step + rank % 2 + 0.5 * (rank == bad and step >= 640)
            records.append(numbers(rank, step, replica_checksum=value))
    return look_at(records)


def test_ranks_that_share_a_model_are_compared_within_their_group() -> None:
    assert of(tensor_parallel(None), "replicas") == []
    (finding,) = of(tensor_parallel(3), "replicas")
    assert (finding.ranks, finding.onset_step) == ((3,), 640)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_table_is_bounded_and_indifferent_to_order_and_doubling(seed: int) -> None:
    chance = random.Random(seed)
    items = [
        (rank, step, {"loss": rank + step / 7.0}) for rank in range(20) for step in range(1, 900)
    ]
    tables = []
    for order in range(2):
        if order:
            items += chance.sample(items, 1000)
            chance.shuffle(items)
        table = NumberTable()
        for rank, step, values in items:
            table.put(rank, step, 0, values)
        tables.append(table)
    plain, shuffled = tables
    assert plain.steps("loss") == shuffled.steps("loss") == list(range(900 - CAPACITY["loss"], 900))
    assert plain.head("loss") == shuffled.head("loss") == list(range(1, HEAD + 1))
    for one, other in zip(plain.typical("loss"), shuffled.typical("loss"), strict=True):
        assert np.array_equal(one, other)
