"""The ledger of runs that are killed and start again, and the distance of checkpoints."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.goodput.checkpointing import (
    LLAMA_FAILURES_PER_HOST_DAY,
    daly,
    mtbf_of,
    waste,
    young,
)
from rankscope_server.diagnose.goodput.detector import ledger_of
from rankscope_server.diagnose.goodput.ledger import PARTS, Ledger
from rankscope_server.findings.finding import Finding
from rankscope_server.verdict.answers import Look
from tests.analysis.records import registered
from tests.analysis.simulator import START_NS

SECOND = 10**9


class Job:
    """A job that trains, saves, is killed and starts again, with its own account of the time."""

    def __init__(self, seed: int, num_ranks: int = 4, numbers: str = "of the script") -> None:
        """Choose how steps are counted: as the `script` does, or `anew` in each attempt.

        Counting anew the script may have `told` its own numbers.
        """
        self.numbers = numbers
        self.first = 1
        self.chance = random.Random(seed)
        self.num_ranks = num_ranks
        self.state = RunState("run")
        self.now = 0.0  # seconds
        self.truth = dict.fromkeys(PARTS, 0.0)
        self.saved = 0  # step
        self.saves: list[tuple[int, int, float, float]] = []  # attempt, step, time, seconds
        self.items: list[object] = []

    def attempt(
        self,
        number: int,
        steps: int,
        save_every: int = 20,
        save_s: float = 2.0,
        clean: bool = False,
    ) -> None:
        """Run one attempt up to `steps` more steps, from the last checkpoint."""
        truth, ranks, chance = self.truth, self.num_ranks, self.chance
        came_up = self.now
        self._register(number)
        boot = chance.uniform(3, 8)
        truth["start-up"] += boot * ranks
        self.now += boot
        rows: list[dict[str, float]] = []
        first = self.first = self.saved + 1
        for step in range(first, first + steps):
            rows.append(self._step(number, step, step == first, save_every, save_s))
        done = self.saved
        kept = {row["step"] for row in rows if row["step"] <= done} if not clean else None
        for row in rows:
            lost = kept is not None and row["step"] not in kept
            for part in ("productive", "communication and waiting", "data", "checkpoint"):
                truth["lost work" if lost else part] += row[part] * ranks
            truth["first steps"] += row["first steps"] * ranks
        self._steps(number, rows)
        tail = chance.uniform(0.5, 4)
        truth["after the end" if clean else "stuck or failing"] += tail * ranks
        self.now += tail
        self._end(number, clean)
        if not clean:
            pause = chance.uniform(5, 20)
            truth["restart"] += pause * ranks
            self.now += pause
        assert came_up < self.now

    def _step(
        self, number: int, step: int, is_first: bool, save_every: int, save_s: float
    ) -> dict[str, float]:
        row = {
            "step": step, "started": self.now, "productive": self.chance.uniform(0.5, 0.7),
            "communication and waiting": self.chance.uniform(0.1, 0.3),
            "data": self.chance.uniform(0.01, 0.05), "checkpoint": 0.0,
            "first steps": 0.0,
        }  # fmt: skip
        if is_first:
            row["first steps"] = 6.0
        if step % save_every == 0:
            row["checkpoint"] = save_s
            self.saved = step
        self.now += sum(row[name] for name in row if name in PARTS)
        if row["checkpoint"]:
            self.saves.append((number, step, self.now, save_s))
        return row

    def counted(self, step: int) -> int:
        """Return the agent's count of a step."""
        return step if self.numbers == "of the script" else step - self.first + 1

    def _register(self, number: int) -> None:
        for rank in range(self.num_ranks):
            self.items.append(schema.RankRegistered(
                attempt=number, rank=rank, time_ns=self.ns, world_size=self.num_ranks,
                local_rank=rank, local_world_size=self.num_ranks, node_rank=0, host="a",
                pid=100 * number + rank + 1,
            ))  # fmt: skip

    @property
    def ns(self) -> int:
        return START_NS + int(self.now * SECOND)

    def _end(self, number: int, clean: bool) -> None:
        for rank in range(self.num_ranks):
            self.items.append(schema.RankEnded(
                attempt=number, rank=rank, time_ns=self.ns,
                reason="clean" if clean else "signal", signal=None if clean else 9,
                exit_code=0 if clean else None,
            ))  # fmt: skip

    def _steps(self, number: int, rows: list[dict[str, float]]) -> None:
        def ns(name: str) -> np.ndarray:
            return np.array([int(row[name] * SECOND) for row in rows], np.int64)

        for rank in range(self.num_ranks):
            for begin in range(0, len(rows), 10):
                part = slice(begin, begin + 10)
                columns = {
                    name: np.zeros(len(rows[part]), np.int64) for name in schema.STEP_COLUMNS
                }
                columns["step"] = np.array(
                    [self.counted(int(row["step"])) for row in rows[part]], np.int64
                )
                columns["started_ns"] = START_NS + ns("started")[part]
                columns["data_ns"] = ns("data")[part]
                columns["checkpoint_ns"] = ns("checkpoint")[part]
                columns["backward_blocked_ns"] = ns("communication and waiting")[part]
                columns["backward_ns"] = (
                    ns("productive") + ns("communication and waiting") + ns("first steps")
                )[part]
                columns["duration_ns"] = (
                    columns["backward_ns"] + columns["data_ns"] + columns["checkpoint_ns"]
                )
                if begin == 0:
                    columns["flags"][0] = schema.STEP_FIRST
                chunk = schema.Chunk(
                    kind="steps", attempt=number, rank=rank, host="", count=len(rows[part]),
                    time_lo_ns=int(columns["started_ns"][0]), time_hi_ns=self.ns,
                    data=f"{number} {rank} {begin}".encode(),
                )  # fmt: skip
                self.items.append((chunk, columns))
        for row in rows if self.numbers == "told" else []:
            self.items.append(schema.Metrics(
                attempt=number, rank=0, time_ns=START_NS + int(row["started"] * SECOND),
                step=int(row["step"]), values={"loss": 1.0},
                counted_step=self.counted(int(row["step"])) + 1,
            ))  # fmt: skip
        for attempt, step, at, seconds in self.saves:
            if attempt == number:
                after = self.numbers != "of the script"  # saved behind the update of a step
                self.items.append(schema.Event(
                    attempt=number, rank=0, time_ns=START_NS + int(at * SECOND),
                    step=self.counted(step) + after,
                    name="checkpoint", fields={"seconds": f"{seconds}", "how": "torch.save"},
                ))  # fmt: skip

    def apply(self, items: list[object] | None = None) -> RunState:
        for item in self.items if items is None else items:
            if isinstance(item, tuple):
                self.state.apply_chunk(*item)
            else:
                self.state.apply_record(item)  # type: ignore[arg-type]
        return self.state

    def book(self) -> Ledger:
        attempts = self.state._attempts
        now = self.ns
        past = [attempts[number].window(now) for number in sorted(attempts)[:-1]]
        book = ledger_of(attempts[max(attempts)].window(now, past))
        assert book is not None
        return book


def of(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == "goodput"]


@pytest.mark.parametrize("numbers", ["of the script", "anew", "told"])
@pytest.mark.parametrize("seed", range(12))
def test_the_ledger_of_a_job_that_is_killed_and_restarted(seed: int, numbers: str) -> None:
    job = Job(seed, numbers=numbers)
    for number in range(3):
        job.attempt(number, job.chance.randint(45, 95))
    job.attempt(3, 60, clean=True)
    job.apply()
    book = job.book()
    assert sum(book.parts.values()) == pytest.approx(book.wall_seconds, rel=1e-9)
    assert book.wall_seconds == pytest.approx(job.now * 4, rel=5e-3)
    for part in PARTS:
        expected = job.truth[part] / (job.now * 4)
        assert book.share(part) == pytest.approx(expected, abs=0.005), part
    kept = ("productive", "communication and waiting", "data", "evaluation")
    truth = sum(job.truth[part] for part in kept) / (job.now * 4)
    assert book.ettr == pytest.approx(truth, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_it_adds_up_whatever_is_lost_doubled_or_late(seed: int) -> None:
    job = Job(seed)
    job.attempt(0, 70)
    job.attempt(1, 50)
    chance = random.Random(seed)
    items = [item for item in job.items if not isinstance(item, tuple) or chance.random() > 0.1]
    items += chance.sample(items, 20)
    chance.shuffle(items)
    job.apply(items)
    book = job.book()
    assert sum(book.parts.values()) == pytest.approx(book.wall_seconds, rel=1e-9)
    assert min(book.parts.values()) >= 0


def test_the_ledger_as_a_finding() -> None:
    job = Job(1)
    job.attempt(0, 70)
    job.attempt(1, 60, clean=True)
    found = of(job.apply().look(job.ns))
    (ledger,) = [one for one in found if one.kind == "goodput"]
    assert (ledger.severity, ledger.ranks) == ("info", ())
    assert "1 restart, 10 steps done again" in ledger.why


def test_a_run_of_some_seconds_says_nothing_yet() -> None:
    job = Job(1)
    job.attempt(0, 20)
    look = job.apply().look(job.ns)
    status = next(detector for detector in look.detectors if detector.name == "goodput")
    assert status.state == "skipped"


# --- checkpoints ---------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    delta, mtbf, restart = 60.0, 86_400.0, 300.0
    assert young(delta, mtbf) == pytest.approx(3220, abs=1)
    assert daly(delta, mtbf) == pytest.approx(3180, abs=1)
    assert waste(young(delta, mtbf), delta, mtbf, restart) == pytest.approx(0.0407, abs=1e-4)
    assert waste(daly(delta, mtbf), delta, mtbf, restart) == pytest.approx(0.0407, abs=1e-4)
    assert waste(10_800, delta, mtbf, restart) == pytest.approx(0.0715, abs=1e-4)
    assert daly(200_000, mtbf) == mtbf


def lost_share(interval: float, delta: float, gaps: np.ndarray, restart: float) -> float:
    """Return the share of time lost when work goes `interval` between saves, failing after gaps."""
    cycle = interval + delta
    kept = np.floor(gaps / cycle) * interval
    return 1.0 - float(kept.sum() / (gaps + restart).sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("delta", "mtbf"), [(60.0, 86_400.0), (20.0, 7200.0), (120.0, 20_000.0)])
def test_the_interval_is_near_the_best_by_brute_force(seed: int, delta: float, mtbf: float) -> None:
    chance = np.random.default_rng(seed)
    gaps = chance.exponential(mtbf, 100_000)
    tried = daly(delta, mtbf) * np.exp(np.linspace(-0.8, 0.8, 33))
    losses = np.array([lost_share(one, delta, gaps, 300.0) for one in tried])
    # the optimum is flat: a parabola through the losses finds its place
    a, b, _ = np.polyfit(np.log(tried), losses, 2)
    best = float(np.exp(-b / (2 * a)))
    assert daly(delta, mtbf) == pytest.approx(best, rel=0.10)
    assert lost_share(daly(delta, mtbf), delta, gaps, 300.0) <= losses.min() + 5e-4


@pytest.mark.parametrize("shape", [0.5, 0.7])
def test_bursts_of_failures_cost_little_more_than_the_oracle(shape: float) -> None:
    chance = np.random.default_rng(1)
    gaps = chance.weibull(shape, 100_000)
    gaps *= 86_400.0 / gaps.mean()
    tried = daly(60.0, 86_400.0) * np.exp(np.linspace(-1.5, 1.5, 61))
    losses = np.array([lost_share(one, 60.0, gaps, 300.0) for one in tried])
    assert lost_share(daly(60.0, 86_400.0), 60.0, gaps, 300.0) <= losses.min() + 0.005


def test_failures_from_the_prior_and_from_the_run() -> None:
    assert LLAMA_FAILURES_PER_HOST_DAY * 1000 == pytest.approx(3.8, abs=0.02)
    fresh = mtbf_of(0, 0.0, 128, min_own=3)
    assert fresh.days == pytest.approx(1 / (LLAMA_FAILURES_PER_HOST_DAY * 128))
    assert fresh.low < fresh.days < fresh.high
    own = mtbf_of(8, 16.0, 8, min_own=3)
    assert own.days == pytest.approx(16.0 / 8 / 8)
    assert "of this run" in own.source


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_failing_runs_covers_the_truth(seed: int) -> None:
    chance = np.random.default_rng(seed)
    covered = 0
    for _ in range(400):
        failures = int(chance.poisson(12))
        own = mtbf_of(max(failures, 3), 12.0, 1, min_own=3)
        covered += own.low <= 1.0 <= own.high
    assert covered >= 0.82 * 400


def test_saving_too_seldom_in_a_job_that_fails_often() -> None:
    job = Job(3)
    for number in range(4):
        job.attempt(number, 170, save_every=80, save_s=0.5)
    job.attempt(4, 165, save_every=80, save_s=0.5)
    found = of(job.apply().look(job.ns))
    advice = [one for one in found if one.kind == "checkpoint_interval"]
    assert len(advice) == 1
    assert advice[0].severity == "warning"
    assert advice[0].cost_throughput_ratio is not None
    assert advice[0].cost_throughput_ratio > 0.02


def test_a_slow_checkpoint_and_the_rank_that_saves_slowly() -> None:
    job = Job(3)
    job.attempt(0, 150, save_every=10, save_s=3.0)
    for rank in (1, 2, 3):
        for _, step, at, _ in job.saves:
            job.items.append(schema.Event(
                attempt=0, rank=rank, time_ns=START_NS + int(at * SECOND), step=step,
                name="checkpoint", fields={"seconds": "0.4", "how": "torch.save"},
            ))  # fmt: skip
    found = [one for one in of(job.apply().look(job.ns)) if one.kind == "slow_checkpoint"]
    assert [(finding.ranks, finding.severity) for finding in found] == [((0,), "warning")]
    assert found[0].cost_throughput_ratio == pytest.approx(3.0 / 12.0, abs=0.05)


def marking(seconds: list[float], every: int = 50, waits: float = 0.2) -> list[Finding]:
    """Return what is said of a run that saves in `rankscope.phase("checkpoint")`, without a hook.

    `seconds` of each save on rank 0; the other ranks save nothing and wait for it.
    """
    state, steps = RunState("run"), every * len(seconds) + 10
    held = np.zeros(steps)
    held[every - 1 : every * len(seconds) : every] = seconds
    lasts = 0.2 + waits + held
    begins = np.concatenate([[0.0], np.cumsum(lasts)[:-1]])
    for rank in range(4):
        state.apply_record(registered(rank, 4, pid=100 + rank))
        columns = {name: np.zeros(steps, np.int64) for name in schema.STEP_COLUMNS}
        saves = held * (rank == 0)
        columns["step"] = np.arange(1, steps + 1)
        columns["started_ns"] = START_NS + (begins * SECOND).astype(np.int64)
        columns["duration_ns"] = (lasts * SECOND).astype(np.int64)
        columns["checkpoint_ns"] = (saves * SECOND).astype(np.int64)
        columns["backward_ns"] = columns["duration_ns"] - columns["checkpoint_ns"]
        columns["backward_blocked_ns"] = ((waits + held - saves) * SECOND).astype(np.int64)
        columns["flags"] = np.where(saves > 0, schema.STEP_CHECKPOINT, 0)
        columns["num_collectives"][:] = 1
        head = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="", count=steps, time_lo_ns=1, time_hi_ns=2,
            data=b"%d" % rank,
        )  # fmt: skip
        state.apply_chunk(head, columns)
    look = state.look(START_NS + int(lasts.sum() * SECOND))
    return [one for one in of(look) if one.kind == "slow_checkpoint"]


def test_saves_that_only_the_script_marks_are_saves() -> None:
    (finding,) = marking([6.0] * 8)
    assert (finding.severity, finding.onset_step) == ("warning", 50)
    assert finding.cost_throughput_ratio == pytest.approx(6.0 / 26.0, abs=0.02)
    assert "A save holds the job for 6.0 s" in finding.why
    assert marking([0.1] * 8) == []  # little


@pytest.mark.parametrize("num_slow", [2, 3, 4, 6])
def test_since_which_save_they_are_slow_is_known(num_slow: int) -> None:
    (finding,) = marking([1.0] * 6 + [9.0] * num_slow)
    assert finding.onset_step == 350
    assert "before step 350 it took 1.0 s" in finding.why


def evaluating(seconds: dict[int, float], waits: float, every: int = 10) -> list[Finding]:
    """Return what is said of 200 steps of 1 s on 4 ranks, of which some evaluate now and then."""
    state = RunState("run")
    for rank in range(4):
        state.apply_record(registered(rank, 4, pid=100 + rank))
        columns = {name: np.zeros(200, np.int64) for name in schema.STEP_COLUMNS}
        columns["step"] = np.arange(1, 201)
        own = seconds.get(rank, 0.0)
        longest = max(seconds.values(), default=0.0)
        is_due = columns["step"] % every == 0
        columns["evaluation_ns"] = (is_due * own * SECOND).astype(np.int64)
        columns["backward_ns"] = np.full(200, SECOND, np.int64)
        columns["other_blocked_ns"] = (is_due * waits * (longest - own) * SECOND).astype(np.int64)
        columns["other_ns"] = (is_due * (longest - own) * SECOND).astype(np.int64)
        columns["duration_ns"] = SECOND + (is_due * longest * SECOND).astype(np.int64)
        columns["flags"] = np.where(is_due & (own > 0), schema.STEP_EVALUATION, 0)
        ends = np.cumsum(columns["duration_ns"])
        columns["started_ns"] = START_NS + ends - columns["duration_ns"]
        chunk = schema.Chunk(
            kind="steps", attempt=0, rank=rank, host="", count=200, time_lo_ns=START_NS,
            time_hi_ns=START_NS + int(ends[-1]), data=f"{rank}".encode(),
        )  # fmt: skip
        state.apply_chunk(chunk, columns)
    return [one for one in of(state.look(START_NS + int(ends[-1]))) if "evaluat" in one.kind]


def test_a_rank_that_evaluates_while_the_others_wait() -> None:
    (found,) = evaluating({0: 2.0}, waits=1.0)
    assert (found.kind, found.ranks, found.severity) == ("lone_evaluation", (0,), "warning")
    assert found.cost_throughput_ratio == pytest.approx(2.0 / 12.0, rel=0.02)
    assert "Rank 0 on node-0 evaluates while ranks 1 to 3 wait: 17 % of the time" in found.what
    (small,) = evaluating({0: 0.5}, waits=1.0)
    assert small.severity == "info"


def test_evaluation_that_costs_nobody_anything_is_silent() -> None:
    assert evaluating(dict.fromkeys(range(4), 2.0), waits=1.0) == []  # all of them do
    assert evaluating({0: 2.0}, waits=0.0) == []  # nobody waits for it
    assert evaluating({0: 0.05}, waits=1.0) == []


def test_saves_of_little_weight_are_silent() -> None:
    job = Job(3)
    job.attempt(0, 150, save_every=50, save_s=0.2)
    assert of(job.apply().look(job.ns)) == []
