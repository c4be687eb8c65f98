"""Tokens, sessions and the audit log: made, used, rotated, revoked, written down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.access import audit, door, tokens, tries
from rankscope_server.access.door import Credential, Door
from rankscope_server.access.roles import OPERATOR, Principal
from rankscope_server.access.tokens import NewToken
from rankscope_server.api.app import create_app
from rankscope_server.problems import Problem
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.engine import open_engines
from rankscope_server.store.unit import Unit
from tests.server.conftest import Sender, ServerProcess, TestClient, log_line, new_data
from tests.server.filling import chunk

BASE = "http://127.0.0.1:8787"
OPERATOR_TOKEN = "the operator's own words"
READER = NewToken(name="reader", roles=("read",), project="alpha")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(data_dir=new_data(tmp_path), token=OPERATOR_TOKEN, look_seconds=3600.0)
    with TestClient(create_app(settings), base_url=BASE) as client:
        yield client


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    pair = open_engines(f"sqlite:///{tmp_path / 'x.db'}", "normal")
    yield pair[0]
    for one in pair:
        one.dispose()


def made(engine: sa.Engine, new: NewToken = READER) -> tuple[str, str]:
    with engine.begin() as connection:
        return tokens.create(connection, new, "test", time.time_ns())


def make(client: TestClient, **asked: Any) -> dict[str, str]:
    body = {"name": "one", "roles": ["read"], "project": "alpha"} | asked
    reply = client.post("/api/v1/tokens", json=body, headers=bearer(OPERATOR_TOKEN))
    assert reply.status_code == 200, reply.text
    answer: dict[str, str] = reply.json()
    return answer


def test_the_store_holds_no_token_and_no_cookie(guarded: TestClient, tmp_path: Path) -> None:
    token = make(guarded)["token"]
    guarded.post("/api/v1/session", json={"token": token})
    cookie = guarded.cookies["rankscope_session"]
    guarded.post("/api/v1/session", json={"token": OPERATOR_TOKEN})
    stored = b"".join(part.read_bytes() for part in tmp_path.glob("rankscope.db*"))
    for secret in (token.rpartition("_")[2], cookie, OPERATOR_TOKEN):
        assert secret.encode() not in stored
    assert b"scrypt$16384$8$1$" in stored


def test_a_secret_is_compared_as_a_whole() -> None:
    stored = tokens.hashed("secret")
    assert tokens.matches("secret", stored)
    for other in ("", "secre", "secret ", "Secret"):
        assert not tokens.matches(other, stored)
    for broken in ("", "secret", "scrypt$1$2", "scrypt$x$8$1$AA==$AA==", "scrypt$3$8$1$AA==$AA=="):
        assert not tokens.matches("secret", broken)
    assert tokens.hashed("secret") != stored


def test_a_token_is_verified_once_and_looked_up_again(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes: list[str] = []
    slow = tokens.matches
    monkeypatch.setattr(
        tokens, "matches", lambda secret, stored: hashes.append(secret) or slow(secret, stored)
    )
    now = [0.0]
    entry = Door("", engine, lambda: now[0])
    id, token = made(engine)
    credential = Credential(token)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: entry.admit(credential), range(40)))
    assert {one.name for one in found if isinstance(one, Principal)} == {f"reader ({id})"}
    assert len(found) == 40
    assert len(hashes) <= 2  # those that began at the same moment
    assert entry.known(credential) == found[0]
    with engine.begin() as connection:  # by another process
        tokens.revoke(connection, id, None, time.time_ns())
    assert entry.known(credential) is not None
    now[0] += door.RECHECK_S
    assert entry.known(credential) is None
    assert entry.admit(credential) == "this token is revoked"
    assert entry.known(credential) is None
    assert len(hashes) <= 2


def test_what_is_revoked_here_ends_at_once_even_while_it_is_verified(engine: sa.Engine) -> None:
    entry = Door("", engine)
    id, token = made(engine)
    credential = Credential(token)
    assert isinstance(entry.admit(credential), Principal)
    with engine.begin() as connection:
        tokens.revoke(connection, id, None, time.time_ns())
    entry.forget()
    assert entry.known(credential) is None
    # One that was read before and is about to be remembered after is not remembered.
    second_id, second = made(engine)
    verify = entry._of_token

    def revoked_meanwhile(given: Credential) -> Principal | str:
        found = verify(given)
        with engine.begin() as connection:
            tokens.revoke(connection, second_id, None, time.time_ns())
        entry.forget()
        return found

    entry._of_token = revoked_meanwhile  # type: ignore[method-assign]
    entry.admit(Credential(second))
    assert entry.known(Credential(second)) is None


def test_memory_of_tokens_is_bounded(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_REMEMBERED", 5)
    entry = Door("", engine)
    for n in range(20):
        assert isinstance(entry.admit(Credential(f"wrong {n}")), str)
    assert len(entry._refused._found) == 5


def test_a_token_that_expires(engine: sa.Engine) -> None:
    soon = time.time_ns() + 3600 * 10**9
    id, token = made(engine, NewToken(name="x", roles=("read",), project="a", expires_ns=soon))
    assert isinstance(Door("", engine).admit(Credential(token)), Principal)
    with engine.begin() as connection:
        row = tokens.find(connection, id, None)
        assert isinstance(tokens.principal(row, soon - 1), Principal)
        assert tokens.principal(row, soon) == "this token has expired"
        connection.execute(sa.update(tables.token).values(expires_ns=time.time_ns()))
    assert Door("", engine).admit(Credential(token)) == "this token has expired"


@pytest.mark.parametrize(
    ("new", "field"),
    [
        (NewToken(name="", roles=("read",), project="a"), "name"),
        (NewToken(name="a\nb", roles=("read",), project="a"), "name"),
        (NewToken(name="x", roles=(), project="a"), "roles"),
        (NewToken(name="x", roles=("root",), project="a"), "roles"),  # type: ignore[arg-type]
        (NewToken(name="x", roles=("read",), project="a/b"), "project"),
        (NewToken(name="x", roles=("read",), project=""), "project"),
        (NewToken(name="x", roles=("read",), project="a", expires_ns=1), "expires"),
        (NewToken(name="x", roles=("read",), project="a", bytes_per_second=-1), "bytes_per_second"),
    ],
)  # fmt: skip
def test_a_token_that_cannot_be(engine: sa.Engine, new: NewToken, field: str) -> None:
    with pytest.raises(Problem) as failure:
        made(engine, new)
    assert (failure.value.status, failure.value.field) == (422, field)
    assert failure.value.remedy


def test_listed_rotated_and_revoked_over_http(guarded: TestClient) -> None:
    old = make(
        guarded, roles=["operate", "ingest"], expires_days=10, bytes_per_second=99,
        events_per_second=7,
    )  # fmt: skip
    shown = guarded.get("/api/v1/tokens", headers=bearer(OPERATOR_TOKEN)).json()["tokens"]
    (row,) = shown
    assert (row["id"], row["roles"], row["state"]) == (old["id"], ["ingest", "operate"], "active")
    assert (row["bytes_per_second"], row["created_by"]) == (99, "RANKSCOPE_TOKEN")
    assert row["events_per_second"] == 7
    assert old["token"] not in str(shown)
    assert guarded.get("/api/v1/runs", headers=bearer(old["token"])).status_code == 200
    path = f"/api/v1/tokens/{old['id']}"
    new = guarded.post(f"{path}/rotate", json={}, headers=bearer(OPERATOR_TOKEN)).json()
    rows = guarded.get("/api/v1/tokens", headers=bearer(OPERATOR_TOKEN)).json()["tokens"]
    ends = {row["id"]: row["expires_ms"] for row in rows}
    assert ends[old["id"]] - time.time() * 1e3 == pytest.approx(86_400e3, abs=60e3)
    assert ends[new["id"]] - time.time() * 1e3 == pytest.approx(864_000e3, abs=60e3)
    for token in (old["token"], new["token"]):  # both, until the old one has been replaced
        assert guarded.get("/api/v1/runs", headers=bearer(token)).status_code == 200
    assert guarded.delete(path, headers=bearer(OPERATOR_TOKEN)).json()["state"] == "revoked"
    assert guarded.get("/api/v1/runs", headers=bearer(old["token"])).status_code == 401
    assert guarded.get("/api/v1/runs", headers=bearer(new["token"])).status_code == 200
    gone = guarded.post(f"{path}/rotate", json={}, headers=bearer(OPERATOR_TOKEN))
    assert gone.status_code == 409


def test_an_admin_of_a_project_is_admin_of_it_alone(guarded: TestClient) -> None:
    admin = bearer(make(guarded, roles=["admin"])["token"])
    other = make(guarded, project="beta")
    for project in ("beta", "*"):
        asked = {"name": "x", "roles": ["read"], "project": project}
        reply = guarded.post("/api/v1/tokens", json=asked, headers=admin)
        assert (reply.status_code, reply.json()["error"]["field"]) == (403, "project")
    own = guarded.post("/api/v1/tokens", json={"name": "x", "roles": ["read"]}, headers=admin)
    assert own.status_code == 200
    shown = guarded.get("/api/v1/tokens", headers=admin).json()["tokens"]
    assert {row["project"] for row in shown} == {"alpha"}
    assert other["id"] not in str(guarded.get("/api/v1/audit", headers=admin).json())


def test_the_first_token_of_an_open_server_must_open_it_again(client: TestClient) -> None:
    asked: dict[str, Any] = {"name": "x", "roles": ["read"], "project": "alpha"}
    assert client.post("/api/v1/tokens", json=asked).status_code == 409
    first = client.post("/api/v1/tokens", json=asked | {"roles": ["admin"], "project": "*"}).json()
    assert client.get("/api/v1/runs").status_code == 401
    admin = bearer(first["token"])
    assert client.get("/api/v1/runs", headers=admin).status_code == 200
    client.delete(f"/api/v1/tokens/{first['id']}", headers=admin)
    assert client.get("/api/v1/runs").status_code == 401  # a revoked one keeps it shut


def test_a_session_ends_with_its_time_its_token_and_on_request(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=str(tmp_path), token=OPERATOR_TOKEN, look_seconds=3600.0, session_hours=2.0
    )
    with TestClient(create_app(settings), base_url=BASE) as client:
        one = make(client)
        cookie = client.post("/api/v1/session", json={"token": one["token"]})
        assert "Max-Age=7200" in cookie.headers["set-cookie"].replace("max-age", "Max-Age")
        shown = client.get("/api/v1/session").json()
        assert (shown["roles"], shown["project"]) == (["read"], "alpha")
        assert client.get("/api/v1/runs").status_code == 200
        client.delete(f"/api/v1/tokens/{one['id']}", headers=bearer(OPERATOR_TOKEN))
        assert client.get("/api/v1/runs").status_code == 401
        client.post("/api/v1/session", json={"token": OPERATOR_TOKEN})
        stolen = dict(client.cookies)
        assert client.get("/api/v1/runs").status_code == 200
        client.delete("/api/v1/session")
        client.cookies.update(stolen)
        assert client.get("/api/v1/runs").status_code == 401  # not in the browser alone
        client.cookies.clear()
        client.post("/api/v1/session", json={"token": OPERATOR_TOKEN})
        with client.app.state.service.writer._engine.begin() as connection:  # type: ignore[attr-defined]
            connection.execute(sa.update(tables.session).values(expires_ns=time.time_ns()))
        client.app.state.service.door.forget()  # type: ignore[attr-defined]
        assert client.get("/api/v1/runs").status_code == 401


def test_sessions_are_listed_and_ended_by_an_admin(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), token=OPERATOR_TOKEN, look_seconds=3600.0)
    app = create_app(settings)
    with TestClient(app, base_url=BASE) as client:
        browser = TestClient(app, base_url=BASE)  # with cookies of its own
        alpha, beta = make(client), make(client, name="two", project="beta")
        admin = make(client, roles=["admin"])["token"]
        for token in (alpha["token"], beta["token"], OPERATOR_TOKEN):
            browser.cookies.clear()
            assert browser.post("/api/v1/session", json={"token": token}).status_code == 200
        shown = browser.get("/api/v1/sessions").json()["sessions"]
        assert [(one["name"], one["by"], one["project"], one["is_own"]) for one in shown] == [
            ("RANKSCOPE_TOKEN", "operator", "*", True), ("two", "token", "beta", False),
            ("one", "token", "alpha", False),
        ]  # fmt: skip
        assert [one["roles"] for one in shown] == [["admin"], ["read"], ["read"]]
        assert all(one["created_ms"] < one["expires_ms"] for one in shown)
        seen = client.get("/api/v1/sessions", headers=bearer(admin)).json()["sessions"]
        assert [one["name"] for one in seen] == ["one"]  # of its project alone
        theirs = client.delete(f"/api/v1/sessions/{shown[1]['id']}", headers=bearer(admin))
        assert theirs.status_code == 404
        ended = client.delete(f"/api/v1/sessions/{shown[0]['id']}", headers=bearer(OPERATOR_TOKEN))
        assert ended.json()["name"] == "RANKSCOPE_TOKEN"
        assert browser.get("/api/v1/runs").status_code == 401  # at once
        again = client.delete(f"/api/v1/sessions/{shown[0]['id']}", headers=bearer(OPERATOR_TOKEN))
        assert again.status_code == 404
        assert client.get("/api/v1/runs", headers=bearer(alpha["token"])).status_code == 200
        rows = client.get("/api/v1/audit", headers=bearer(OPERATOR_TOKEN)).json()["rows"]
        assert [row["target"] for row in rows if row["action"] == "end session"] == [shown[0]["id"]]


def test_another_operators_token_ends_its_sessions(tmp_path: Path) -> None:
    first = Settings(data_dir=str(tmp_path), token=OPERATOR_TOKEN, look_seconds=3600.0)
    with TestClient(create_app(first), base_url=BASE) as client:
        client.post("/api/v1/session", json={"token": OPERATOR_TOKEN})
        cookies = dict(client.cookies)
    for token, status in ((OPERATOR_TOKEN, 200), ("another one", 401)):
        settings = Settings(data_dir=str(tmp_path), token=token, look_seconds=3600.0)
        with TestClient(create_app(settings), base_url=BASE) as client:
            client.cookies.update(cookies)
            assert client.get("/api/v1/runs").status_code == status


def test_a_cookie_is_secure_where_the_page_is(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), token=OPERATOR_TOKEN, look_seconds=3600.0)
    for scheme in ("http", "https"):
        with TestClient(create_app(settings), base_url=f"{scheme}://127.0.0.1:8787") as client:
            reply = client.post("/api/v1/session", json={"token": OPERATOR_TOKEN})
            assert ("Secure" in reply.headers["set-cookie"]) is (scheme == "https")


def test_wrong_tokens_are_limited_and_the_right_one_is_not(guarded: TestClient) -> None:
    good = make(guarded)["token"]
    assert guarded.get("/api/v1/runs", headers=bearer(good)).status_code == 200
    for n in range(tries.TRIES):
        assert guarded.get("/api/v1/runs", headers=bearer(f"guess {n}")).status_code == 401
    limited = guarded.post("/api/v1/session", json={"token": "another guess"})
    assert limited.status_code == 429
    assert 0 < int(limited.headers["retry-after"]) <= 11
    # who is known goes on, and who repeats an old mistake is told so and does not guess
    assert guarded.get("/api/v1/runs", headers=bearer(good)).status_code == 200
    for _ in range(50):
        assert guarded.get("/api/v1/runs", headers=bearer("guess 3")).status_code == 401


def test_tries_by_address_in_bounded_memory() -> None:
    now = [0.0]
    limits = tries.Tries(lambda: now[0])
    for _ in range(tries.TRIES):
        limits.begin("10.0.0.1")
    with pytest.raises(Problem):
        limits.begin("10.0.0.1")
    limits.begin("10.0.0.2")
    for n in range(tries.TRIES):  # one network of IPv6 is one caller
        limits.begin(f"2001:db8::{n}")
    with pytest.raises(Problem):
        limits.begin("2001:db8:0:0:ffff::1")
    now[0] += tries.TRY_AGAIN_S
    limits.begin("10.0.0.1")
    written = [limits.failed("10.0.0.1") for _ in range(30)]
    assert [deed.count for deed in written if deed is not None] == [1]
    assert [deed.count for deed in limits.rest()] == [29]
    assert limits.rest() == []
    now[0] += tries.SUMMED_UP_S
    again = limits.failed("10.0.0.1")
    assert again is not None
    assert again.count == 1
    for n in range(5_000):
        limits.failed(f"10.1.{n // 250}.{n % 250}")
    assert len(limits._counts) <= tries.MAX_ADDRESSES + 1


def test_the_audit_log_names_who_did_what(guarded: TestClient) -> None:
    sender = Sender(guarded)
    one = make(guarded, roles=["operate"])
    ingest = make(guarded, roles=["ingest"])
    body = sender.body(log_line("x"))
    guarded.post("/api/v1/ingest", content=body, headers=bearer(ingest["token"]))
    asked = guarded.post(
        "/api/v1/runs/run/commands", json={"kind": "stacks"}, headers=bearer(one["token"])
    )
    assert asked.json()["asked_by"] == f"one ({one['id']})"
    refused = guarded.post(
        "/api/v1/runs/run/commands", json={"kind": "stacks", "ranks": [9]},
        headers=bearer(one["token"]),
    )  # fmt: skip
    assert refused.status_code == 409  # nothing was done
    for n in range(3):
        guarded.get("/api/v1/runs", headers=bearer(f"guess {n}"))
    guarded.post("/api/v1/session", json={"token": one["token"]})
    kept = guarded.post("/api/v1/searches", json={"name": "errors", "q": "level:error"})
    guarded.delete(f"/api/v1/searches/{kept.json()['searches'][0]['id']}")
    guarded.delete("/api/v1/session")
    guarded.cookies.clear()
    guarded.delete(f"/api/v1/tokens/{one['id']}", headers=bearer(OPERATOR_TOKEN))
    rows = guarded.get("/api/v1/audit", headers=bearer(OPERATOR_TOKEN)).json()["rows"]
    shown = [(row["action"], row["who"], row["target"], row["count"]) for row in rows][::-1]
    assert shown == [
        ("create token", "RANKSCOPE_TOKEN", one["id"], 1),
        ("create token", "RANKSCOPE_TOKEN", ingest["id"], 1),
        ("command", f"one ({one['id']})", "run", 1),
        ("sign-in failed", "unknown", "", 1),
        ("sign in", f"one ({one['id']})", "", 1),
        ("keep saved search", f"one ({one['id']})", "errors", 1),
        ("delete saved search", f"one ({one['id']})", "1", 1),
        ("sign out", f"one ({one['id']})", "", 1),
        ("revoke token", "RANKSCOPE_TOKEN", one["id"], 1),
        ("sign-in failed", "unknown", "", 2),
    ]
    assert rows[7]["detail"] == "stacks, ranks all"
    assert {row["address"] for row in rows} == {"testclient"}
    page = guarded.get("/api/v1/audit?limit=2", headers=bearer(OPERATOR_TOKEN)).json()
    rest = guarded.get(
        f"/api/v1/audit?limit=2&before={page['before']}", headers=bearer(OPERATOR_TOKEN)
    ).json()
    ids = [row["id"] for row in (*page["rows"], *rest["rows"])]
    assert ids == sorted(ids, reverse=True) == [row["id"] for row in rows[:4]]


def test_the_audit_log_is_bounded(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "AUDIT_KEPT", 50)
    deed = audit.Deed(action="x", who="y", project="*")
    with engine.begin() as connection:
        for _ in range(300):
            audit.record(connection, deed, 1)
        kept = connection.scalar(sa.select(sa.func.count()).select_from(tables.audit))
    assert kept == 50


def test_a_stream_ends_with_the_token_that_opened_it(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server(RANKSCOPE_TOKEN=OPERATOR_TOKEN)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        asked = {"name": "x", "roles": ["read"], "project": "alpha"}
        made = client.post("/api/v1/tokens", json=asked, headers=bearer(OPERATOR_TOKEN)).json()
        stream = client.stream(
            "GET", "/api/v1/stream?topics=*", headers=bearer(made["token"])
        )  # fmt: skip
        with stream as reply:
            lines = reply.iter_lines()
            assert next(lines) == "retry: 2000"
            with httpx.Client(base_url=server.url, trust_env=False) as other:
                other.delete(f"/api/v1/tokens/{made['id']}", headers=bearer(OPERATOR_TOKEN))
                body = Sender(None).body(log_line("x"))  # type: ignore[arg-type]
                other.post("/api/v1/ingest", content=body, headers=bearer(OPERATOR_TOKEN))
            assert "run:run" not in "".join(lines)  # to its end, which comes at the next change


def test_a_stream_of_a_project_hints_at_its_own_runs_alone(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server(RANKSCOPE_TOKEN=OPERATOR_TOKEN)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        found = {}
        for project in ("alpha", "beta"):
            asked = {"name": "x", "roles": ["admin"], "project": project}
            reply = client.post("/api/v1/tokens", json=asked, headers=bearer(OPERATOR_TOKEN))
            found[project] = reply.json()["token"]
        path = "/api/v1/stream?topics=runs,run:of-alpha,run:of-beta,preflights"
        with client.stream("GET", path, headers=bearer(found["beta"])) as reply:
            lines = reply.iter_lines()
            next(lines)
            with httpx.Client(base_url=server.url, trust_env=False) as other:
                for project in ("alpha", "beta"):
                    body = Sender(None, f"of-{project}").body(log_line("x"))  # type: ignore[arg-type]
                    headers = bearer(found[project])
                    other.post("/api/v1/preflight/runs", json={}, headers=headers)
                    other.post("/api/v1/ingest", content=body, headers=headers)
            topics = []
            for line in lines:
                if line.startswith("data: "):
                    topics.append(json.loads(line.removeprefix("data: "))["topic"])
                if "run:of-beta" in topics and "preflights" in topics:
                    break
    assert "run:of-alpha" not in topics


def test_alerts_of_a_project_are_those_of_its_runs(guarded: TestClient) -> None:
    service = guarded.app.state.service  # type: ignore[attr-defined]
    readers = {project: make(guarded, project=project)["token"] for project in ("alpha", "beta")}

    def write(unit: Unit) -> None:
        for project in readers:
            run = {"run_id": f"of-{project}", "project": project, "status": "running"}
            unit.connection.execute(sa.insert(tables.run).values(run))
        for subject in ("of-alpha", "of-beta", ""):
            unit.connection.execute(
                sa.insert(tables.alert).values(
                    uid=subject,
                    subject=subject,
                    run_id=subject,
                    state="open",
                    severity="critical",
                    what=f"alert {subject or 'of the server'}",
                )
            )

    service.writer.run(write)

    def seen(token: str, **params: str) -> tuple[set[str], int]:
        body = guarded.get("/api/v1/alerts", headers=bearer(token), params=params).json()
        return {one["what"] for one in body["alerts"]}, body["num_open"]

    assert seen(OPERATOR_TOKEN)[1] == 3
    for project, token in readers.items():
        assert seen(token) == ({f"alert of-{project}"}, 1)
        assert guarded.get("/api/v1/alerts/rules", headers=bearer(token)).status_code == 403
    assert seen(readers["alpha"], run="of-beta") == (set(), 0)


def test_a_search_of_a_project_finds_and_counts_its_own_runs_alone(guarded: TestClient) -> None:
    found = {}
    for project in ("alpha", "beta"):
        token = make(guarded, roles=["ingest", "read"], project=project)["token"]
        found[project] = bearer(token)
        group = schema.GroupDefined(
            attempt=0, rank=0, time_ns=10**18, group=f"pg-{project}", ranks=[0], backend="gloo"
        )
        body = Sender(guarded, f"of-{project}").body(log_line("needle"), log_line("hay"), group)
        guarded.post("/api/v1/ingest", content=body, headers=found[project])

    def search(project: str, **asked: Any) -> Any:
        return guarded.get("/api/v1/search", params=asked, headers=found[project])

    for asked in ({}, {"q": "needle"}, {"q": "run:of-*"}, {"run": "of-alpha,of-beta"}):
        answer = search("beta", **asked).json()
        assert answer["facets"]["run"] == [["of-beta", answer["total"]]]
        assert [project for project, _ in answer["facets"]["project"]] == ["beta"]
        assert {run["run_id"] for run in answer["runs"]} == {"of-beta"}
        assert {line["run_id"] for line in answer["lines"]} == {"of-beta"}
    for asked in ({"q": "run:of-alpha"}, {"q": "project:alpha"}, {"run": "of-alpha"}):
        answer = search("beta", **asked).json()
        assert (answer["total"], answer["lines"]) == (0, [])
        assert "alpha" not in str(answer)
    unknown = search("beta", q="group:pg-alpha")
    assert (unknown.status_code, unknown.json()["error"]["at"]) == (422, [0, 14])
    last = search("beta").json()["last_id"]
    body = Sender(guarded, "of-alpha", "later").body(log_line("more"))
    guarded.post("/api/v1/ingest", content=body, headers=found["alpha"])
    later = search("beta", after=last).json()
    assert (later["lines"], later["last_id"]) == ([], last)  # not even that something came


def test_a_quota_is_a_429_that_says_when(guarded: TestClient) -> None:
    limited = make(guarded, roles=["ingest"], bytes_per_second=100)["token"]
    sender = Sender(guarded)
    first = sender.body(log_line("x" * 5_000))
    reply = guarded.post("/api/v1/ingest", content=first, headers=bearer(limited))
    assert reply.status_code == 200  # the rest of its burst and a debt
    second = guarded.post("/api/v1/ingest", content=first, headers=bearer(limited))
    assert second.status_code == 429
    assert 30 < int(second.headers["retry-after"]) < 60
    free = make(guarded, roles=["ingest"])["token"]
    assert guarded.post("/api/v1/ingest", content=first, headers=bearer(free)).status_code == 200


def test_a_quota_of_events_counts_what_was_stored(guarded: TestClient) -> None:
    limited = make(guarded, roles=["ingest"], events_per_second=1)["token"]
    sender = Sender(guarded)

    def send(body: bytes) -> Any:
        return guarded.post("/api/v1/ingest", content=body, headers=bearer(limited))

    first = sender.body(*(log_line(f"{n}") for n in range(11)), chunks=[chunk(1, count=20)])
    assert send(first).status_code == 200  # 31 of a burst of 10
    refused = send(sender.body(log_line("x")))
    assert refused.status_code == 429
    assert 10 < int(refused.headers["retry-after"]) <= 21
    error = refused.json()["error"]
    assert error["what"] == "the quota of this token is 1 events per second"
    assert error["remedy"].endswith(" s, or have its quota raised")
    free = make(guarded, roles=["ingest"])["token"]
    assert guarded.post("/api/v1/ingest", content=first, headers=bearer(free)).json()["duplicate"]


def test_a_batch_that_comes_again_is_not_counted_again(guarded: TestClient) -> None:
    limited = make(guarded, roles=["ingest"], events_per_second=2)["token"]
    body = Sender(guarded).body(*(log_line(f"{n}") for n in range(15)))
    replies = [
        guarded.post("/api/v1/ingest", content=body, headers=bearer(limited)) for _ in range(5)
    ]
    assert [reply.status_code for reply in replies] == [200] * 5  # 20 are the burst


def test_principals_of_all_projects_send_to_the_default_one(guarded: TestClient) -> None:
    body = Sender(guarded).body(log_line("x"))
    guarded.post("/api/v1/ingest", content=body, headers=bearer(OPERATOR_TOKEN))
    (run,) = guarded.get("/api/v1/runs", headers=bearer(OPERATOR_TOKEN)).json()["runs"]
    assert run["project"] == "default" == OPERATOR.sends_to
