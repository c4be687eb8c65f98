"""A server that does not keep up asks the runs that send most for less, later for more again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.wire import schema
from rankscope.wire.thinning import every
from rankscope_server.analysis.asking import ask_to_thin
from rankscope_server.analysis.shedding import FIRST_LEVEL, LIMITS, Load, Shedding, Wish
from rankscope_server.analysis.state import ThinningAsked, thinning_to_ask
from rankscope_server.api.service import Service
from tests.server.commands_sent import Node, answer, registered, state
from tests.server.conftest import Sender, TestClient, scraped
from tests.server.seed import Plan, make_steps, step_chunk

BEHIND, IN_TIME = LIMITS.behind_seconds + 1, 0.5
PLAN = Plan(steps=40, fault="none")


@dataclass
class Ranks:
    """Runs whose ranks do what they are asked for; a second at a time."""

    loads: dict[str, Load]
    now: float = 100.0
    lag: float = 0.0
    shedding: Shedding = field(init=False)

    def __post_init__(self) -> None:
        self.shedding = Shedding(clock=lambda: self.now)

    def pass_(self, seconds: float, delay: float | Iterable[float]) -> None:
        """Let time pass at a delay, or at one after the other again and again."""
        delays = itertools.cycle(delay) if isinstance(delay, Iterable) else itertools.repeat(delay)
        for _ in range(round(seconds)):
            self.now += 1.0
            self.shedding.turn(next(delays), self.lag, self.loads)
            self.loads = {run: self._of(run, load) for run, load in self.loads.items()}

    def _of(self, run: str, load: Load) -> Load:
        asked = self.asked(run)
        return replace(load, level=max(asked, load.level * (load.asked == 0)), asked=asked)

    def asked(self, run: str) -> int:
        wish = self.shedding.wish(run)
        return 0 if wish is None else wish.level

    def levels(self) -> dict[str, int]:
        return {run: self.asked(run) for run in self.loads}


def one(per_second: float = 1e5) -> Ranks:
    return Ranks({"run": Load(per_second)})


def test_less_is_asked_for_only_while_it_is_behind_for_long() -> None:
    ranks = one()
    ranks.pass_(600, LIMITS.behind_seconds)  # as far as a large job may be on a server that is fine
    assert ranks.levels() == {"run": 0}
    for _ in range(20):
        ranks.pass_(LIMITS.sustained_seconds - 1, BEHIND)
        ranks.pass_(1, IN_TIME)
    assert ranks.levels() == {"run": 0}
    ranks.pass_(LIMITS.sustained_seconds + 1, BEHIND)
    assert ranks.levels() == {"run": FIRST_LEVEL}
    assert ranks.shedding.wish("run") == Wish(FIRST_LEVEL, BEHIND)


def test_a_lag_of_the_analysis_counts_where_looks_that_are_rarer_do_not_explain_it() -> None:
    ranks = one()
    ranks.lag = LIMITS.lag_seconds
    ranks.pass_(60, IN_TIME)
    assert ranks.levels() == {"run": 0}
    ranks.lag += 1
    ranks.pass_(LIMITS.sustained_seconds + 1, IN_TIME)
    assert ranks.levels() == {"run": FIRST_LEVEL}
    ranks.lag -= 1
    ranks.pass_(LIMITS.calm_seconds + 1, IN_TIME)
    assert ranks.levels() == {"run": 0}


def test_what_waited_for_a_server_that_was_away_passes_by_itself() -> None:
    ranks = one()
    for waited in range(300, 0, -1):
        ranks.pass_(1, float(waited))
    assert ranks.levels() == {"run": 0}


def test_the_next_level_waits_until_the_last_one_is_felt_and_there_is_a_last_one() -> None:
    ranks, found = one(), []
    for second in range(2_000):
        before = ranks.levels()["run"]
        ranks.pass_(1, BEHIND)
        if ranks.levels()["run"] != before:
            found.append((second, ranks.levels()["run"]))
    assert [level for _, level in found] == list(range(FIRST_LEVEL, LIMITS.highest_level + 1))
    pauses = [after - first for (first, _), (after, _) in itertools.pairwise(found)]
    assert min(pauses) >= LIMITS.effect_seconds + BEHIND


def test_more_is_asked_for_level_by_level_after_a_good_while_in_time() -> None:
    ranks = one()
    ranks.pass_(200, BEHIND)
    level = ranks.levels()["run"]
    assert level > FIRST_LEVEL
    ranks.pass_(10 * LIMITS.calm_seconds, (IN_TIME,) * 60 + (LIMITS.in_time_seconds + 1,))
    assert ranks.levels() == {"run": level}  # never in time for long
    found = []
    while ranks.levels()["run"]:
        ranks.pass_(LIMITS.calm_seconds + 1, IN_TIME)
        found.append(ranks.levels()["run"])
    assert found == [*range(level - 1, FIRST_LEVEL - 1, -1), 0]


def test_a_load_that_comes_back_is_tried_less_and_less_often() -> None:
    """The server keeps up with half of what the run makes, and never with all."""
    ranks, changes, before = one(), [], 0
    for second in range(4 * 3600):
        ranks.pass_(1, IN_TIME if ranks.levels()["run"] else BEHIND)
        if (level := ranks.levels()["run"]) != before:
            changes.append(second)
            before = level
    pairs = zip(changes[::2], changes[1::2], strict=False)  # thinned, and taken back
    thinned = [after - first for first, after in pairs]
    assert thinned[0] < 1.1 * LIMITS.calm_seconds
    assert all(after > 1.5 * first for first, after in itertools.pairwise(thinned[:4]))
    assert max(thinned) <= 1.1 * LIMITS.most_calm_seconds
    assert len(changes) < 30


def test_a_quiet_run_leaves_nothing_out_for_a_loud_one() -> None:
    ranks = Ranks({"loud": Load(1e6), "other": Load(3e5), "quiet": Load(1e4), "none": Load()})
    ranks.pass_(15, BEHIND)
    assert ranks.levels() == {"loud": 2, "other": 0, "quiet": 0, "none": 0}
    ranks.pass_(2_000, BEHIND)
    top = LIMITS.highest_level
    assert ranks.levels() == {"loud": top, "other": top, "quiet": 0, "none": 0}
    ranks.pass_(LIMITS.calm_seconds + 1, IN_TIME)
    assert ranks.levels() == {"loud": top - 1, "other": top - 1, "quiet": 0, "none": 0}


def test_a_run_that_its_budget_thins_already_is_asked_for_more_than_that() -> None:
    ranks = Ranks({"run": Load(1e5, level=4)})
    ranks.pass_(15, BEHIND)
    assert ranks.levels() == {"run": 5}


def test_what_an_earlier_process_asked_for_goes_on_from_there() -> None:
    ranks = Ranks({"run": Load(1e5, level=4, asked=4)})
    assert ranks.shedding.wish("run") is None
    ranks.pass_(1, IN_TIME)
    assert ranks.levels() == {"run": 4}
    ranks.pass_(LIMITS.calm_seconds + 1, IN_TIME)
    assert ranks.levels() == {"run": 3}


@given(
    loads=st.dictionaries(
        st.sampled_from("abcd"),
        st.builds(Load, st.floats(0, 1e7), st.integers(0, 9), st.integers(0, 6)),
        max_size=4,
    ),
    delays=st.lists(st.tuples(st.floats(0, 600), st.integers(1, 200)), max_size=12),
)
def test_whatever_happens_levels_are_bounded_and_steps_small(
    loads: dict[str, Load], delays: list[tuple[float, int]]
) -> None:
    ranks = Ranks(
        {run: replace(load, level=max(load.level, load.asked)) for run, load in loads.items()}
    )
    ranks.pass_(1, 0.0)
    for delay, seconds in delays:
        for _ in range(seconds):
            before = ranks.levels()
            ranks.pass_(1, delay)
            for run, level in ranks.levels().items():
                assert level in {0, *range(FIRST_LEVEL, LIMITS.highest_level + 1)} | {before[run]}
                in_force = max(before[run], loads[run].level)
                assert level <= max(FIRST_LEVEL, in_force + 1)
                assert before[run] - level <= (1 if level else FIRST_LEVEL)
                if level > before[run]:
                    assert delay > LIMITS.behind_seconds
                    assert loads[run].calls_per_second > 0
                if level < before[run]:
                    assert delay <= LIMITS.in_time_seconds
    assert all(load.sent_per_second * every(load.level) == pytest.approx(load.calls_per_second)
               for load in loads.values())  # fmt: skip


# --- what is asked of the ranks of one run -------------------------------------------------------


def asked_of(level: int | None, *states: schema.RankState, hosts: int = 1) -> ThinningAsked | None:
    wish = None if level is None else Wish(level, BEHIND)
    ranks = {s.rank: registered(s.rank, f"node-{s.rank % hosts}") for s in states}
    return thinning_to_ask(ranks, {s.rank: s for s in states}, len(ranks), wish)


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_the_server_needs_is_asked_of_ranks_on_one_node_too(hosts: int) -> None:
    servers = ThinningAsked(3, "behind", BEHIND)
    assert asked_of(3, state(0), state(1), hosts=hosts) == servers
    done = [state(rank, thinning=3, thinning_asked=3) for rank in (0, 1)]
    assert asked_of(3, *done, hosts=hosts) is None
    assert asked_of(None, *done, hosts=hosts) is None  # nothing is taken back before it is known
    assert asked_of(0, *done, hosts=hosts) == ThinningAsked(0, "in time")
    half = [done[0], state(1)]
    assert asked_of(3, *half, hosts=hosts) == servers
    assert asked_of(3, done[0], state(1, alive=False), hosts=hosts) is None


def test_of_what_the_server_and_the_budget_need_the_higher_one_stays() -> None:
    own = {"thinning_wanted": 4, "thinning": 4}
    assert asked_of(3, state(0, **own), state(1, **own), hosts=2) is None
    under = {"thinning_wanted": 2, "thinning": 4, "thinning_asked": 4}
    assert asked_of(4, state(0, **under), state(1, **under), hosts=2) is None
    back = {"thinning_wanted": 2, "thinning": 0}
    assert asked_of(0, state(0, **back), state(1, **back), hosts=2) == ThinningAsked(2, "budget")
    assert asked_of(0, state(0, **back), state(1, **back)) is None  # its collector asks


def test_an_older_agent_that_says_nothing_of_the_server_is_not_asked_back_and_forth() -> None:
    old = {"thinning": 4, "thinning_wanted": 0}
    assert asked_of(4, state(0, **old), state(1, **old), hosts=2) is None
    assert asked_of(0, state(0, **old), state(1, **old), hosts=2) == ThinningAsked(0, "budget")


# --- with a server -------------------------------------------------------------------------------


class Moments:
    """The clock and the delay of a server's decision."""

    def __init__(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        service: Service = client.app.state.service  # type: ignore[attr-defined]
        self.now, self.delay, self.analysis = 100.0, 0.0, service.analysis
        self.analysis.shedding = Shedding(clock=lambda: self.now)
        monkeypatch.setattr(service.intake, "own_delay_seconds", lambda: self.delay)

    def pass_(self, seconds: float, delay: float) -> None:
        """Let a time pass in two looks, and look once more at what was decided."""
        self.delay = delay
        for part in (0.0, seconds, 0.0):
            self.now += part
            self.analysis.look_now()


@pytest.fixture
def moments(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Moments:
    return Moments(client, monkeypatch)


def begun(client: TestClient, hosts: int = 1) -> Node:
    """Return the collector of a run whose four ranks have ended 40 steps."""
    node, times = Node(client, producer="node-a"), make_steps(PLAN)
    node.take(*(registered(rank, f"node-{rank % hosts}") for rank in range(4)))
    node.send(chunks=[step_chunk(PLAN, times, rank, 0, PLAN.steps) for rank in range(4)])
    return node


def are_at(node: Node, step: int, **more: Any) -> list[dict[str, Any]]:
    """Send where all ranks are; return what the server asks for."""
    return node.take(*(state(rank, step=step, **more) for rank in range(4)))


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_are_asked_for_less_and_for_more_again(
    client: TestClient, moments: Moments, hosts: int
) -> None:
    node = begun(client, hosts)
    assert are_at(node, 40) == []
    moments.pass_(15, BEHIND)
    assert scraped(client)["rankscope_shedding_level"] == 2
    (command,) = are_at(node, 42)
    assert (command["kind"], command["level"], command["is_everyone"]) == ("thin", 2, True)
    assert command["asked_by"] == f"{schema.SHEDDING}behind by {BEHIND:.0f} s"
    moments.pass_(5, BEHIND)
    assert len(are_at(node, 43)) == 1  # asked once
    for rank in range(4):
        node.take(answer(command["id"], rank, "done"))
    thinned = {"thinning": 2, "thinning_asked": 2}
    assert are_at(node, 60, **thinned) == []
    moments.pass_(LIMITS.calm_seconds / 2, IN_TIME)
    assert are_at(node, 70, **thinned) == []
    moments.pass_(LIMITS.calm_seconds, IN_TIME)
    (command,) = are_at(node, 80, **thinned)
    assert (command.get("level", 0), command["asked_by"]) == (0, f"{schema.SHEDDING}in time again")
    (newest, *_) = node.get("/commands")["commands"]
    assert newest["text"].endswith("everything is recorded")
    assert scraped(client)["rankscope_shedding_level"] == 0


def test_a_level_that_is_refused_is_not_asked_for_every_minute(client: TestClient) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    node, clock = Node(client, producer="node-a"), [time.time_ns()]
    node.take(*(registered(rank) for rank in range(4)))

    def ask(level: int, after_seconds: int, late: float = 0.0) -> bool:
        clock[0] += after_seconds * 10**9

        def work(unit: Any) -> bool:
            unit.now_ns = clock[0]
            return ask_to_thin(unit, "run", ThinningAsked(level, "behind", 20.0), late)

        return service.writer.run(work)

    assert [ask(2, after) for after in (0, 30, 31, 59, 2)] == [True, False, True, False, True]
    assert ask(3, 1)  # another level is news
    number = node.get("/commands")["commands"][0]["id"]
    node.take(answer(number, 1, "refused", reason="this node takes no commands"))
    assert [ask(3, after) for after in (61, 500, 60)] == [False, False, True]
    assert [ask(3, after, late=50.0) for after in (61, 148, 2)] == [False, False, True]


def test_the_later_all_comes_the_farther_ahead_is_the_step(client: TestClient) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    node, steps = begun(client), []
    are_at(node, 40)
    for level, late in ((2, 0.0), (3, 30.0)):
        asked = ThinningAsked(level, "behind", 20.0)
        assert service.writer.run(
            partial(ask_to_thin, run_id="run", asked=asked, late_seconds=late)
        )
        steps.append(node.get("/commands")["commands"][0]["at_step"])
    times = make_steps(PLAN)
    pace = 1e9 / float(times.duration.mean())
    assert steps[1] - steps[0] == pytest.approx(1.25 * 30 * pace, rel=0.1)


def test_the_cause_stands_in_the_notes_and_on_the_page_of_the_agent(
    client: TestClient, look: Callable[[], None]
) -> None:
    node = Node(client, producer="node-a")
    node.take(*(registered(rank) for rank in range(4)))
    fields = {
        "from_level": "0", "level": "3", "every": "4", "from_step": "40",
        "overhead_ratio": "0.00100", "budget_ratio": "0.00500", "source": "probe",
        "us_per_collective": "4.0", "why": "agreed for all ranks",
        "servers_why": "behind by 23 s",
    }  # fmt: skip
    node.take(*(
        schema.Event(attempt=0, rank=rank, time_ns=time.time_ns(), name="thinning_changed",
                     step=40, fields=fields) for rank in range(4)
    ))  # fmt: skip
    look()
    (note,) = node.get("")["answer"]["notes"]
    assert note == (
        "One step in 4 is recorded whole, the others without their single collectives, since step "
        "40, because the server did not keep up (behind by 23 s); to record more, give the server "
        "more processors, raise RANKSCOPE_FLUSH_SECONDS, or run a second server on PostgreSQL"
    )
    why = {change["why"] for change in node.get("/agent")["changes"]}
    assert why == {
        "the server did not keep up (behind by 23 s); agreed for all ranks; "
        "probe: 4.0 us for each collective"
    }


@pytest.fixture
def look(client: TestClient) -> Callable[[], None]:
    looking: Callable[[], None] = client.app.state.service.analysis.look_now  # type: ignore[attr-defined]
    return looking


def test_how_long_batches_wait_at_collectors_is_the_servers_delay(client: TestClient) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]

    for odd in ("", "-5", "x", "9" * 40):
        send_late(client, "odd", odd)
    assert service.intake.own_delay_seconds() == 0.0
    for producer in ("a", "b"):
        send_late(client, producer, str(time.time_ns() + 30 * 10**9))
    assert service.intake.own_delay_seconds() == pytest.approx(30, abs=5)
    assert service.intake.delay_seconds("run") == pytest.approx(30, abs=5)
    assert service.intake.delay_seconds("other") == 0.0


def test_what_waits_at_collectors_is_no_silence_of_ranks(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    monkeypatch.setattr(service, "settings", replace(service.settings, silent_after_seconds=0.0))
    sender = Sender(client)
    sender.send(state(0))

    def silent() -> list[list[int]]:
        pages = sender.get("")["coverage"], sender.get("/report")["coverage"]
        states = [row["rank"] for row in sender.get("/ranks")["ranks"] if row["state"] == "silent"]
        return [*([row["rank"] for row in page["silent"]] for page in pages), states]

    assert silent() == [[0], [0], [0]]
    for producer in ("a", "b"):
        send_late(client, producer, str(time.time_ns() + 30 * 10**9))
    assert silent() == [[], [], []]


def send_late(client: TestClient, producer: str, clock: str) -> None:
    """Send a batch when the clock of its collector, in nanoseconds, says `clock`."""
    body = Sender(client, producer=producer).body(state(1))
    headers = {schema.CLOCK_HEADER: clock}
    reply = client.post("/api/v1/ingest", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
