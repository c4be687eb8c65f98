"""The loop between analysis and store: findings open, change, recover and open again."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import RANK, Column, encode_chunk
from rankscope_server.analysis import loop as analysis_loop
from rankscope_server.analysis.shedding import Load, Wish
from rankscope_server.analysis.state import Work
from rankscope_server.api.app import create_app
from rankscope_server.api.findings import schema as schema_of_findings
from rankscope_server.findings.finding import Finding
from rankscope_server.replay.replay_table import Deferred
from rankscope_server.settings import Settings
from rankscope_server.store import restart
from rankscope_server.verdict.answers import Answer, Coverage, GroupedFinding, Look, Verdict
from tests.server.conftest import Sender, TestClient, log_line, poster, scraped
from tests.server.receivers import wait_for
from tests.server.runs_sent import steps_of
from tests.server.seed import seed_with

NOW = 1_700_000_000 * 10**9


def make_finding(key: str = "slow/2", **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "key": key, "detector": "straggler", "kind": "slow_compute", "severity": "critical",
        "attempt": 0, "what": "Rank 2 is slow", "why": "1.5x", "next": "look", "confidence": 0.9,
        "confidence_text": "sure", "would_be_wrong_if": "not", "policy_hash": "abc", "ranks": (2,),
        "onset_step": 40,
    }  # fmt: skip
    return Finding(**values | changes)


class Script:
    """Stands in for the analysis: tests say what the next look sees, and see what it was given."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.verdict: Verdict | None = None
        self.failure: Exception | None = None
        self.status: Any = "running"
        self.states: list[FakeState] = []
        self.looks: list[tuple[int, float]] = []  # at which time, how far behind
        self.deferred: list[Work] = []  # by the next look
        self.adopted: list[object] = []

    def make(self, run_id: str) -> FakeState:
        self.states.append(FakeState(run_id, self))
        return self.states[-1]


class FakeState:
    def __init__(self, run_id: str, script: Script) -> None:
        self.run_id, self.script = run_id, script
        self.records: list[schema.AnyRecord] = []
        self.chunks: list[schema.Chunk] = []

    def apply_record(self, record: schema.AnyRecord) -> None:
        self.records.append(record)

    def apply_chunk(
        self, chunk: schema.Chunk, columns: dict[str, Any], calls: object = None
    ) -> None:
        assert set(columns) - {RANK} == set(schema.CHUNK_COLUMNS[chunk.kind])
        self.chunks.append(chunk)

    def deferred(self) -> list[Work]:
        deferred, self.script.deferred = self.script.deferred, []
        return deferred

    def adopt(self, work: Work, made: object) -> None:
        self.script.adopted.append(made)

    def give_up(self, work: Work) -> None:
        """It is no longer under way."""

    def look(self, now_ns: int, behind_seconds: float = 0.0, *, defers: bool = False) -> Look:
        self.script.looks.append((now_ns, behind_seconds))
        if self.script.failure is not None:
            raise self.script.failure
        return Look(
            findings=self.script.findings, detectors=[], verdict=self.script.verdict,
            answer=Answer("healthy", "All is well"), status=self.script.status,
            status_text="running", coverage=Coverage(0, 0, 0, (), (), ""),
        )  # fmt: skip

    def thinning_to_ask(self, wish: Wish | None) -> None:
        """Nothing is asked of these runs."""

    def load(self, *, is_running: bool) -> Load:
        """They send nothing."""
        return Load()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    found = Script()
    monkeypatch.setattr(analysis_loop, "RunState", found.make)
    return found


@pytest.fixture
def look(script: Script, client: TestClient) -> Callable[[], None]:
    looking: Callable[[], None] = client.app.state.service.analysis.look_now  # type: ignore[attr-defined]
    return looking


@pytest.fixture
def run(script: Script, sender: Sender) -> Sender:
    sender.send(log_line("hello"))
    return sender


def history(run: Sender, finding_id: int) -> list[str]:
    return [event["event"] for event in run.get(f"/findings/{finding_id}")["history"]]


def test_a_run_is_behind_until_a_look_has_seen_its_batches(
    client: TestClient, run: Sender, script: Script, look: Callable[[], None]
) -> None:
    def behind() -> float:
        return scraped(client)["rankscope_runs_behind"]

    assert behind() == 1
    script.failure = RuntimeError("broken")
    look()
    assert behind() == 1  # a look that failed has seen nothing
    script.failure = None
    look()
    assert behind() == 0
    run.send(log_line("more"))
    assert behind() == 1


def test_what_a_look_defers_is_made_beside_the_looks_and_seen_by_a_later_one(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    thread_names: list[str] = []

    def make() -> str:
        thread_names.append(threading.current_thread().name)
        return "made"

    def fail() -> None:
        raise ZeroDivisionError("no rows")

    def deferred(make: Callable[[], object]) -> Work:
        return Work(0, Deferred("replay", np.zeros(0, np.int64), (), 0, make))

    def looked() -> bool:
        look()
        return bool(script.adopted)

    script.deferred = [deferred(fail), deferred(make)]
    wait_for(looked, "what was made")
    assert script.adopted == ["made"]
    assert thread_names != [threading.current_thread().name]
    before = len(script.looks)
    look()  # what failed is not asked for again by the loop
    assert len(script.looks) == before + 1


def test_the_life_of_a_finding(run: Sender, script: Script, look: Callable[[], None]) -> None:
    script.findings = [make_finding()]
    look()
    look()
    (found,) = run.get("/findings")["open"]
    assert (found["state"], found["ranks"], found["what"]) == ("open", [2], "Rank 2 is slow")
    script.findings = [make_finding(what="Rank 2 is slower", cost_throughput_ratio=0.3)]
    look()
    script.findings = []
    look()
    answer = run.get("/findings")
    assert answer["open"] == []
    (over,) = answer["recovered"]
    assert (over["id"], over["what"]) == (found["id"], "Rank 2 is slower")
    assert over["cost_throughput_ratio"] == 0.3
    script.findings = [make_finding()]
    look()
    assert run.get("/findings")["open"][0]["id"] == found["id"]
    assert history(run, found["id"]) == ["opened", "changed", "recovered", "reopened"]
    counts = run.get("")["counts"]
    assert (counts["findings_open"], counts["findings_recovered"]) == (1, 0)


def test_what_costs_most_stands_first(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    costs = {"a": 0.05, "b": None, "c": 0.4}
    script.findings = [
        make_finding(key, what=key, cost_throughput_ratio=cost) for key, cost in costs.items()
    ]
    look()
    assert [item["what"] for item in run.get("/findings")["open"]] == ["c", "a", "b"]


def test_ranks_are_stuck_as_long_as_their_hang_lasts(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    run.send(
        *(
            schema.RankRegistered(
                attempt=0, rank=rank, time_ns=NOW, world_size=3, local_rank=rank,
                local_world_size=3, node_rank=0, host="node-a", pid=rank,
            )
            for rank in range(3)
        )
    )  # fmt: skip
    script.findings = [make_finding("h", detector="hang", kind="hang", ranks=(1,), victims=(0,))]
    look()
    states = [row["state"] for row in run.get("/ranks")["ranks"]]
    assert states == ["stuck", "stuck", "running"]
    script.findings = []
    look()
    states = [row["state"] for row in run.get("/ranks")["ranks"]]
    assert states == ["running"] * 3


def test_a_detector_may_say_that_it_is_over(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    script.findings = [make_finding(state="recovered", ended_step=60)]
    look()
    look()
    (over,) = run.get("/findings")["recovered"]
    assert over["ended_step"] == 60
    assert history(run, over["id"]) == ["opened", "recovered"]


def test_acknowledged_stays_so_until_it_recovers(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    script.findings = [make_finding()]
    look()
    finding_id = run.get("/findings")["open"][0]["id"]
    path = f"/api/v1/runs/{run.run_id}/findings/{finding_id}/acknowledge"
    assert run.client.post(path).json()["state"] == "acknowledged"
    assert run.client.post(path).json()["state"] == "acknowledged"
    script.findings = [make_finding(what="other words")]
    look()
    assert run.get("/findings")["open"][0]["state"] == "acknowledged"
    script.findings = []
    look()
    assert run.get("/findings")["recovered"][0]["id"] == finding_id
    assert history(run, finding_id) == ["opened", "acknowledged", "changed", "recovered"]
    missing = f"/api/v1/runs/{run.run_id}/findings/999/acknowledge"
    assert run.client.post(missing).status_code == 404


def test_the_verdict_names_findings_by_their_ids(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    culprit = make_finding("a", what="the cause")
    victim = make_finding("b", what="the effect", ranks=(), explained_by="a")
    script.findings = [culprit, victim]
    values = {field.name: getattr(culprit, field.name) for field in dataclasses.fields(culprit)}
    script.verdict = Verdict(**values, folded=(GroupedFinding("b", "the effect"),))
    look()
    ids = {item["what"]: item["id"] for item in run.get("/findings")["open"]}
    page = run.get("")
    assert page["verdict"]["id"] == ids["the cause"]
    assert page["verdict"]["folded"] == [{"id": ids["the effect"], "what": "the effect"}]
    effect = run.get(f"/findings/{ids['the effect']}")
    assert effect["explained_by"] == ids["the cause"]
    assert page["run"]["verdict"]["what"] == "the cause"
    assert page["answer"] == {
        "state": "healthy", "text": "All is well", "detail": "", "deciding": [], "notes": [],
    }  # fmt: skip


def test_a_look_that_fails_costs_an_answer_and_nothing_else(
    run: Sender, script: Script, look: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    other = Sender(run.client, "other")
    other.send(log_line("x"))
    script.findings = [make_finding()]
    look()
    script.failure = ZeroDivisionError("no steps")
    look()
    answer = run.get("")["answer"]
    assert answer["state"] == "unknown"
    assert "ZeroDivisionError: no steps" in answer["detail"]
    assert len(run.get("/findings")["open"]) == 1
    assert caplog.text.count("the analysis of run failed") == 1
    look()
    assert caplog.text.count("the analysis of run failed") == 1, "logged once, not each second"
    script.failure = None
    look()
    assert run.get("")["answer"]["state"] == "healthy"
    assert other.get("")["answer"]["state"] == "healthy"


def test_batches_reach_the_analysis_once_in_order(
    script: Script, look: Callable[[], None], sender: Sender
) -> None:
    for number in range(3):
        sender.send(schema.Event(attempt=0, rank=0, time_ns=NOW, name=f"e{number}"))
    look()
    for number in range(3, 6):
        body = sender.body(schema.Event(attempt=0, rank=0, time_ns=NOW, name=f"e{number}"))
        for _ in range(2):
            sender.client.post("/api/v1/ingest", content=body)
    look()
    (state,) = script.states
    assert [record.name for record in state.records] == [f"e{number}" for number in range(6)]


def test_a_new_server_gives_the_analysis_the_same(script: Script, settings: Settings) -> None:
    def run_server(seed: bool) -> FakeState:
        with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
            loop = client.app.state.service.analysis  # type: ignore[attr-defined]
            if seed:
                Sender(client, "demo-run", "first").send(log_line("begin"))
                loop.look_now()
                seed_with(poster(client), steps=60, end=False)
            loop.look_now()
            return script.states[-1]

    live, rebuilt = run_server(True), run_server(False)
    assert rebuilt is not live
    assert rebuilt.chunks == live.chunks

    def kept(state: FakeState) -> list[schema.AnyRecord]:
        left_out = schema.LogLine | schema.RankState
        return [record for record in state.records if not isinstance(record, left_out)]

    def newest(state: FakeState) -> dict[int, schema.RankState]:
        return {r.rank: r for r in state.records if isinstance(r, schema.RankState)}

    assert kept(rebuilt) == kept(live)
    assert newest(rebuilt) == newest(live)


def test_findings_survive_a_restart_without_a_second_opening(
    script: Script, settings: Settings
) -> None:
    script.findings = [make_finding()]
    for _ in range(3):
        with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
            sender = Sender(client)
            if not script.states:
                sender.send(log_line("x"))
            client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
            (found,) = sender.get("/findings")["open"]
            assert history(sender, found["id"]) == ["opened"]


def test_status_and_end_come_from_the_look(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    run.send(schema.RankEnded(attempt=0, rank=0, time_ns=NOW + 5, reason="clean", exit_code=0))
    script.status = "ended"
    look()
    summary = run.get("")["run"]
    assert summary["status"] == "ended"
    assert summary["ended_ms"] == pytest.approx((NOW + 5) / 1e6)


def test_a_wobbling_cost_is_not_a_history(
    run: Sender, script: Script, look: Callable[[], None]
) -> None:
    for cost in range(5):
        script.findings = [make_finding(cost_throughput_ratio=cost / 100)]
        look()
    (found,) = run.get("/findings")["open"]
    assert history(run, found["id"]) == ["opened"]


def test_a_run_that_fell_behind_is_read_again(
    script: Script, look: Callable[[], None], sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(schema.Event(attempt=0, rank=0, time_ns=NOW, name="e0"))
    look()
    monkeypatch.setattr(analysis_loop, "MAX_WAITING_BYTES", 2_500)
    for number in range(1, 9):
        sender.send(schema.Event(attempt=0, rank=0, time_ns=NOW, name=f"e{number}"))
    look()
    assert [record.name for record in script.states[-1].records] == [f"e{n}" for n in range(9)]


def test_what_waits_is_bounded_over_all_runs(
    script: Script,
    look: Callable[[], None],
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run of which most waits is read again; the others are not."""
    senders = {name: Sender(client, name) for name in ("little", "much")}
    for sender in senders.values():
        sender.send(schema.Event(attempt=0, rank=0, time_ns=NOW, name="e0"))
    look()
    monkeypatch.setattr(analysis_loop, "MAX_WAITING_BYTES", 4_500)
    runs = run_of(look)
    for number in range(1, 6):
        if number < 3:
            senders["little"].send(schema.Event(attempt=0, rank=0, time_ns=NOW, name="one"))
        senders["much"].send(schema.Event(attempt=0, rank=0, time_ns=NOW, name=f"e{number}"))
        assert sum(run.waiting_bytes for run in runs.values()) <= 4_500
    assert len(runs["little"].waiting) == 2
    assert runs["much"].state is None
    look()
    assert [state.run_id for state in script.states] == ["little", "much", "much"]
    assert [record.name for record in script.states[-1].records] == [f"e{n}" for n in range(6)]


def test_every_field_of_a_finding_is_shown() -> None:
    """A field that a detector learns to fill must not be lost on its way to the page."""
    drawn = {"levels"}  # the lines of its picture: tests/server/test_pictures.py
    missing = {field.name for field in dataclasses.fields(Finding)} - {"key"} - drawn
    assert missing <= set(schema_of_findings.ShownFinding.__struct_fields__)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_data_folder_is_private(settings: Settings, client: TestClient) -> None:
    folder = Path(settings.data_dir)
    assert folder.stat().st_mode & 0o077 == 0


def test_a_delay_of_the_server_is_no_silence_of_ranks(
    script: Script, run: Sender, client: TestClient, look: Callable[[], None]
) -> None:
    """What waits for 10 s to be stored may be what ranks sent: silence counts up to then."""
    service = client.app.state.service  # type: ignore[attr-defined]
    look()
    before_ns, behind = script.looks[-1]
    assert behind == 0.0
    with service.intake.under_way(1000) as waiting:
        waiting.since = time.monotonic() - 10.0
        look()
    now_ns, behind = script.looks[-1]
    assert 10.0 <= behind < 20.0
    assert abs(now_ns - (time.time_ns() - int(behind * 1e9))) < 5e9
    assert now_ns < before_ns
    look()
    assert script.looks[-1][1] == 0.0


def test_what_waits_for_a_look_is_bounded_and_nothing_is_lost(
    script: Script, run: Sender, look: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound chunks wait as they came, and are decoded when it is their turn."""
    look()
    monkeypatch.setattr(analysis_loop, "MAX_WAITING_EVENTS", 5)
    for rank in (0, 1, 0, 1):
        run.send(chunks=[steps_of(rank=rank)])
    (live,) = run_of(look).values()
    assert live.waiting_events <= 5
    assert [isinstance(fed.chunks[0], schema.Chunk) for fed in live.waiting][-1]
    look()
    assert sorted(chunk.rank for chunk in script.states[-1].chunks)[-4:] == [0, 0, 1, 1]
    assert (live.waiting_events, live.waiting_bytes) == (0, 0)


def test_many_events_reach_the_tables_before_the_next_look(
    script: Script, run: Sender, look: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look of this server is an hour away: what comes until then does not pile up."""
    look()
    monkeypatch.setattr(analysis_loop, "_MANY_EVENTS", 5)
    for rank in (0, 1):
        run.send(chunks=[steps_of(rank=rank)])
    (live,) = run_of(look).values()
    wait_for(lambda: not live.waiting, "nothing waits")
    assert sorted(chunk.rank for chunk in script.states[-1].chunks) == [0, 1]
    assert len(script.looks) == 1
    assert live.news_since is not None  # no look has seen it


def test_a_run_that_nothing_comes_from_is_looked_at_less_and_less_often(
    script: Script, run: Sender, look: Callable[[], None]
) -> None:
    """Its silence is found in time: a tenth of it later at most, and half a minute."""
    look()
    (live,) = run_of(look).values()
    now = live.last_news = live.looked = float(round(live.last_news))  # sums of such are exact
    looks = []
    for seconds in range(1, 1_000):
        if live.is_due(now + seconds):
            looks.append(seconds)
            live.looked = now + seconds
    assert looks[:10] == list(range(1, 11))
    assert all(
        later - before <= max(1, min(later / 10 + 1, 30)) for before, later in pairwise(looks)
    )
    assert len(looks) < 80
    run.send(chunks=[steps_of(rank=0)])
    assert live.is_due(live.looked + 1)


def test_the_loop_itself_leaves_quiet_runs_alone(
    script: Script, run: Sender, look: Callable[[], None]
) -> None:
    look()
    analysis: analysis_loop.AnalysisLoop = look.__self__  # type: ignore[attr-defined]
    (live,) = run_of(look).values()
    live.last_news -= 100.0
    count = len(script.looks)
    analysis.look_now(is_every_run=False)
    assert len(script.looks) == count
    run.send(chunks=[steps_of(rank=0)])
    analysis.look_now(is_every_run=False)
    assert len(script.looks) == count + 1


def run_of(look: Callable[[], None]) -> dict[str, analysis_loop.LiveRun]:
    """Return what the loop holds, by run."""
    loop: analysis_loop.AnalysisLoop = look.__self__  # type: ignore[attr-defined]
    return loop._runs


def test_a_run_is_read_again_with_its_steps_and_its_newest_collectives(
    script: Script, look: Callable[[], None], sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which everything came; of collectives no more than tables would hold."""
    for number in range(1, 5):
        event = schema.Event(attempt=0, rank=0, time_ns=NOW, name=f"e{number}")
        sender.send(event, chunks=[steps_of(rank=number % 2), collectives_of(number)])
    monkeypatch.setitem(restart.MOST_EVENTS, "collectives", 15)
    look()
    state = script.states[-1]
    assert [record.name for record in state.records] == ["e1", "e2", "e3", "e4"]
    kinds = [chunk.kind for chunk in state.chunks]
    assert kinds == ["steps", "steps", "steps", "collectives", "steps", "collectives"]
    newest = [chunk for chunk in state.chunks if chunk.kind == "collectives"]
    assert [chunk.step_lo for chunk in newest] == [3, 4]


def collectives_of(step: int, count: int = 10) -> schema.Chunk:
    """Return some collectives of one step."""
    columns: dict[str, Column] = {
        name: ["x"] * count if name in schema.STRING_COLUMNS else np.full(count, step)
        for name in schema.COLLECTIVE_COLUMNS
    }
    return schema.Chunk(
        kind="collectives", attempt=0, rank=0, host="node-a", count=count, time_lo_ns=0,
        time_hi_ns=0, data=encode_chunk(columns),
    )  # fmt: skip
