"""Two server processes on one PostgreSQL: who does what, and what a kill or a stop moves."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from rankscope_server.store.leases import Held
from tests.server.conftest import Sender, ServerProcess, TestClient, log_line, poster
from tests.server.postgres import Postgres
from tests.server.receivers import receiving, wait_for
from tests.server.seed import seed_with
from tests.server.streams import Stream

RUN = "demo-run"
NOW = 1_700_000_000 * 10**9
QUICK = ("--look-seconds", "0.1", "--retention-seconds", "3600")


class Pair:
    """Two servers, and the database that they share."""

    def __init__(self, folder: Path, url: str, **environ: str) -> None:
        self.engine = sa.create_engine(
            url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool
        )
        flags = ("--database-url", url, *QUICK)
        self.servers = [ServerProcess(folder / name, *flags, **environ) for name in ("a", "b")]
        for server in self.servers:
            server.folder.mkdir()
            server.start()

    def rows(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(statement), values)]

    def owner(self, name: str) -> ServerProcess | None:
        """Return the process that has a lease; None where no process has."""
        found = self.rows(
            "SELECT server.name FROM lease JOIN server ON server.id = lease.owner"
            " WHERE lease.name = :name",
            name=name,
        )
        pids = {server.process.pid: server for server in self.servers if server.process}
        return pids.get(int(found[0][0].rpartition(" ")[2])) if found else None

    def split(self, name: str) -> tuple[ServerProcess, ServerProcess]:
        """Return the process that has a lease, and the other one."""
        owner = wait_for(lambda: self.owner(name), f"an owner of {name}")
        (other,) = (server for server in self.servers if server is not owner)
        return owner, other

    def wait_until_taken(self, name: str, owner: ServerProcess) -> None:
        wait_for(lambda: self.owner(name) is owner, f"{name} has moved")

    def close(self) -> None:
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
            server.close()


@pytest.fixture
def pair(tmp_path: Path, postgres: Postgres) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def start(**environ: str) -> Pair:
            made = Pair(tmp_path, postgres.create_migrated(), **environ)
            stack.callback(made.close)
            return made

        yield start


def ask(server: ServerProcess, path: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, method=method)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def bodies_of(**choices: Any) -> list[bytes]:
    """Return the batches of a run with a slow rank, zstd packed."""
    bodies: list[bytes] = []
    seed_with(bodies.append, **choices)
    return bodies


def send(server: ServerProcess, body: bytes) -> dict[str, Any]:
    reply = httpx.post(
        f"{server.url}/api/v1/ingest", content=body, headers={"Content-Encoding": "zstd"},
        timeout=30, trust_env=False,
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def verdict_of(server: ServerProcess, run: str = RUN) -> Any:
    found = ask(server, f"runs/{run}")
    return (found["verdict"] or {}).get("ranks"), found["run"]["status"]


def wait_until_over(server: ServerProcess) -> None:
    wait_for(lambda: verdict_of(server) == ([2], "ended"), "the verdict on the whole run")


def histories(pair: Pair) -> Counter[tuple[str, str]]:
    """Return how often each finding opened, by attempt and key."""
    rows = pair.rows(
        "SELECT finding.key, finding_event.event FROM finding_event"
        " JOIN finding ON finding.id = finding_id"
    )
    return Counter((key, event) for key, event in rows)


def test_a_run_that_is_sent_to_both_is_stored_once_and_judged_once(
    pair: Callable[..., Pair],
) -> None:
    both = pair()
    bodies = bodies_of(ranks=4, steps=100)
    answers: list[bool] = []

    def send_to(server: ServerProcess, some: list[bytes]) -> None:
        answers.extend(send(server, body)["duplicate"] for body in some)

    # every batch to both at about the same time, and most of it twice more
    threads = [
        threading.Thread(target=send_to, args=(server, part))
        for server in both.servers
        for part in (bodies, bodies[5:])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(False) == len(bodies)
    for server in both.servers:
        wait_until_over(server)
    one, two = (ask(server, f"runs/{RUN}") for server in both.servers)
    assert one["counts"] == two["counts"]
    stored = both.rows("SELECT count(*), count(DISTINCT (producer_id, sequence)) FROM batch")
    assert stored == [(len(bodies), len(bodies))]
    assert both.rows('SELECT sum("count") FROM op_rollup') == both.rows(
        "SELECT sum(\"count\") FROM chunk WHERE kind = 'collectives'"
    )
    (lines,) = both.rows('SELECT sum("count") FROM log_block')
    assert both.rows("SELECT log_lines FROM run") == [lines]
    opened = [number for (_, event), number in histories(both).items() if event == "opened"]
    assert opened == [1] * len(opened) != []


def test_a_killed_owner_is_followed_by_the_other(pair: Callable[..., Pair]) -> None:
    both = pair()
    bodies = bodies_of(ranks=4, steps=100)
    for body in bodies[: len(bodies) // 2]:
        send(both.servers[0], body)
    owner, other = both.split(f"analysis of {RUN}")
    (before,) = both.rows("SELECT epoch FROM lease WHERE run_id = :run", run=RUN)
    owner.end(signal.SIGKILL)
    for body in bodies[len(bodies) // 2 - 2 :]:  # the last ones again: their answers may be lost
        send(other, body)
    wait_until_over(other)
    assert both.rows("SELECT epoch FROM lease WHERE run_id = :run", run=RUN) == [(before[0] + 1,)]
    assert both.owner(f"analysis of {RUN}") is other
    for name in ("alerts", "retention", "preflights"):
        both.wait_until_taken(name, other)
    assert both.rows("SELECT count(*) FROM batch") == [(len(bodies),)]
    assert all(number == 1 for (_, event), number in histories(both).items() if event == "opened")
    server = both.servers[both.servers.index(owner)].start()  # it comes back, and takes nothing
    wait_until_over(server)
    assert both.owner(f"analysis of {RUN}") is other


def test_a_stopped_owner_is_followed_and_writes_nothing_when_it_is_woken(
    pair: Callable[..., Pair],
) -> None:
    both = pair()
    bodies = bodies_of(ranks=4, steps=100)
    for body in bodies[: len(bodies) // 2]:
        send(both.servers[0], body)
    owner, other = both.split(f"analysis of {RUN}")
    wait_for(lambda: both.rows("SELECT answer FROM run")[0][0], "a look that was stored")
    assert owner.process is not None
    os.kill(owner.process.pid, signal.SIGSTOP)
    for body in bodies[len(bodies) // 2 - 2 :]:
        send(other, body)
    wait_until_over(other)
    both.wait_until_taken("alerts", other)
    written = both.rows("SELECT count(*), max(id) FROM finding_event")
    os.kill(owner.process.pid, signal.SIGCONT)
    wait_for(lambda: verdict_of(owner) == ([2], "ended"), "it reads what the other found")
    # It takes batches again, and what they say reaches the process that looks.
    with httpx.Client(base_url=owner.url) as client:
        sender = Sender(client, run_id=RUN)  # type: ignore[arg-type]
        sender.send(log_line("RuntimeError: CUDA out of memory", level=40, rank=1))
    stream = ask(owner, f"runs/{RUN}/logs?q=memory")
    assert stream["total"] == 1
    assert both.owner(f"analysis of {RUN}") is other
    assert both.rows("SELECT count(*), max(id) FROM finding_event") == written
    assert all(number == 1 for (_, event), number in histories(both).items() if event == "opened")


def test_a_reader_of_one_hears_of_what_the_other_stored(pair: Callable[..., Pair]) -> None:
    both = pair()
    one, two = both.servers
    stream = Stream(f"{two.url}/api/v1/stream?topics=runs,run:{RUN}")
    wait_for(lambda: stream.headers, "the stream is open")
    for body in bodies_of(ranks=4, steps=60):
        send(one, body)

    def named(events: list[dict[str, str]]) -> bool:
        ours = [json.loads(event["data"]) for event in events if event["event"] == "change"]
        names = {name for one in ours if one["topic"] == f"run:{RUN}" for name in one["changed"]}
        return {"steps", "logs", "ranks", "verdict"} <= names and any(
            one["topic"] == "runs" for one in ours
        )

    stream.wait_for(named)
    assert not [event for event in stream.events if event["event"] == "reload"]


def test_what_one_is_asked_for_the_owner_does(pair: Callable[..., Pair]) -> None:
    both = pair()
    bodies = bodies_of(ranks=2, steps=40)
    for body in bodies:
        send(both.servers[0], body)
    owner, other = both.split("retention")
    wait_for(lambda: verdict_of(other)[1] == "ended", "the run is over")
    ask(other, f"runs/{RUN}?confirm={RUN}", "DELETE")
    for server in both.servers:  # refused by both from the first moment
        with pytest.raises(urllib.error.HTTPError) as failure:
            ask(server, f"runs/{RUN}")
        with failure.value as error:
            assert error.code == 410
    wait_for(lambda: ask(other, f"deletions/{RUN}")["finished_ms"], "its data is gone")
    assert both.rows("SELECT count(*) FROM chunk") == [(0,)]
    before = ask(owner, "retention")["progress"]["round_ended_ms"] or 0
    ask(other, "retention", "POST")
    for server in both.servers:  # whichever is asked says how the owner is
        wait_for(
            lambda server=server: (
                ask(server, "retention")["progress"]["round_ended_ms"] or 0
            ) > before,
            "a round",
        )  # fmt: skip


def test_a_message_is_sent_by_one_and_after_its_death_by_the_other(
    pair: Callable[..., Pair],
) -> None:
    with receiving() as receiver, receiving() as watchdog:
        both = pair(
            RANKSCOPE_SERVER_DEADMAN_URL=f"{watchdog.url}/alive",
            RANKSCOPE_SERVER_DEADMAN_SECONDS="1",
        )
        owner, other = both.split("alerts")
        target = {"kind": "webhook", "url": receiver.url, "signing_key": "0123456789abcdef"}
        ask(other, "alerts/channels", "POST", {"name": "hook", "target": target})
        for number, server in enumerate((owner, other)):
            crash = bodies_of(run_id=f"crash-{number}", ranks=2, steps=40, fault="crash")
            for body in crash:
                send(other, body)
            wait_for(
                lambda number=number: [
                    one for one in receiver.got if one.json["run_id"] == f"crash-{number}"
                ],
                f"the message about run {number}",
            )  # fmt: skip
            wait_for(lambda: ask(other, "alerts/status")["deadman"]["asked_ms"], "it is asked")
            if server is owner:
                wait_for(  # killed before that, it would leave the message to be sent again
                    lambda: not ask(other, "alerts/deliveries?state=pending")["deliveries"],
                    "it is stored as sent",
                )
                owner.end(signal.SIGKILL)
                asked = len(watchdog.got)
                watchdog.wait(asked + 2)  # the other asks on
        sent = Counter((one.json["alert"], one.json["event"]) for one in receiver.got)
        assert set(sent.values()) == {1}


def test_preflights_are_coordinated_by_one_and_refused_by_the_other_until_it_dies(
    pair: Callable[..., Pair],
) -> None:
    both = pair()
    owner, other = both.split("preflights")
    made = ask(owner, "preflight/runs", "POST", {"num_nodes": 2})
    join = httpx.Request(
        "POST", f"{other.url}/api/v1/preflight/runs/{made['id']}/join",
        headers={"Authorization": f"Bearer {made['token']}"}, json={"node": "a"},
    )  # fmt: skip
    with httpx.Client(trust_env=False) as client:
        refused = client.send(join)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "another server" in refused.json()["error"]["what"]
        wait_for(lambda: both.rows("SELECT count(*) FROM preflight") == [(1,)], "it is stored")
        owner.end(signal.SIGKILL)
        wait_for(lambda: client.send(join).status_code == 200, "the other has taken over")


# --- within one process, where a test can stop the world at the worst moment


def two_apps(tmp_path: Path, url: str) -> list[TestClient]:
    return [
        TestClient(
            create_app(
                Settings(
                    data_dir=str(tmp_path / name), database_url=url, look_seconds=3600.0,
                    disk_reserve_bytes=0,
                )
            ),
            base_url="http://127.0.0.1:8787",
        )
        for name in ("a", "b")
    ]  # fmt: skip


def test_a_look_that_began_before_the_lease_was_lost_writes_nothing(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create_migrated()
    first, second = two_apps(tmp_path, url)
    with first, second:
        seed_with(poster(first), ranks=4, steps=100)
        analysis: AnalysisLoop = first.app.state.service.analysis  # type: ignore[attr-defined]
        other: AnalysisLoop = second.app.state.service.analysis  # type: ignore[attr-defined]
        engine = first.app.state.service.reader  # type: ignore[attr-defined]
        name = f"analysis of {RUN}"
        lease = analysis._leases.hold(name, RUN)
        analysis._leases.take()
        lease = analysis._leases.hold(name, RUN)
        assert lease is not None

        def counted() -> tuple[int, int]:
            with engine.connect() as connection:
                events = connection.scalar(sa.text("SELECT count(*) FROM finding_event"))
                return events, connection.scalar(sa.text("SELECT version FROM run"))

        before = counted()
        # What a process believes that was stopped after it had asked for its lease.
        monkeypatch.setattr(analysis._leases, "hold", lambda name, run_id="": stale(lease, name))
        analysis._leases.release(name)
        analysis._leases.renew()  # type: ignore[attr-defined]
        analysis.look_now()
        assert counted() == before
        other.look_now()
        after = counted()
        assert after[0] > before[0]
        analysis.look_now()
        assert counted() == after


def stale(lease: Held, name: str) -> Held:
    return lease if name == lease.name else Held(name, lease.owner, 0)


def test_lines_that_the_other_stored_reach_the_look(tmp_path: Path, postgres: Postgres) -> None:
    """Also those that were joined into a block with earlier ones."""
    first, second = two_apps(tmp_path, postgres.create_migrated())
    with first, second:
        one, two = Sender(first, producer="p1"), Sender(second, producer="p2")
        register = schema.RankRegistered(
            attempt=0, rank=0, time_ns=NOW, host="node-a", world_size=1, local_rank=0,
            local_world_size=1, node_rank=0, pid=1,
        )  # fmt: skip
        one.send(register, log_line("begin"))
        analysis: AnalysisLoop = first.app.state.service.analysis  # type: ignore[attr-defined]
        analysis.look_now()
        state = analysis._runs["run"].state
        assert state is not None
        for number in range(3):
            two.send(log_line(f"CUDA out of memory {number}", level=40))
            one.send(log_line(f"NCCL WARN unhandled system error {number}", level=40))
        analysis.look_now()
        rows = state._attempts[0].lines.rows
        said = {row.text for row in rows.values()}
        assert {"CUDA out of memory 0", "NCCL WARN unhandled system error 0"} <= said
        assert analysis._runs["run"].state is state  # read on, not anew
