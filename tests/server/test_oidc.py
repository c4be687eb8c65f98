"""Sign-in with an issuer of OpenID Connect: there and back, who may what, what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from rankscope_server.access import claims, logins
from rankscope_server.access.claims import Grant
from rankscope_server.api.access import oidc as routes
from rankscope_server.api.app import create_app
from rankscope_server.cli import serve
from rankscope_server.limits import Buckets
from rankscope_server.settings import ConfigFile, Settings
from tests.server.conftest import Sender, ServerProcess, TestClient, log_line
from tests.server.oidc_issuer import CLIENT, SECRET, Issuer, issuing, new_key

BASE = "http://127.0.0.1:8787"
BEGIN, BACK = "/api/v1/session/oidc", "/api/v1/session/oidc/callback"
TABLES = {
    "access": {
        "admins": {"claim": "groups", "value": "ops", "roles": ["admin"], "project": "*"},
        "vision": {
            "claim": "realm.roles", "value": "vision-*", "roles": ["operate"], "project": "vision",
        },
        "all": {
            "claim": "email", "value": "*@lab.example", "roles": ["read"], "project": "default",
        },
    }
}  # fmt: skip
OPS = {"sub": "u1", "preferred_username": "ada", "groups": ["staff", "ops"]}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as found:
        found.person = OPS
        yield found


def settings_of(issuer: Issuer, folder: Path, **more: Any) -> Settings:
    values: dict[str, Any] = {
        "data_dir": str(folder), "look_seconds": 3600.0, "disk_reserve_bytes": 0,
        "public_url": BASE, "oidc_issuer": issuer.url, "oidc_client_id": CLIENT,
        "oidc_client_secret": SECRET, "file": ConfigFile(path="file", tables={"oidc": TABLES}),
    }  # fmt: skip
    return Settings(**(values | more))


@pytest.fixture
def client(issuer: Issuer, tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(
        create_app(settings_of(issuer, tmp_path)), base_url=BASE, follow_redirects=False
    ) as client:
        yield client


def begin(client: TestClient, **query: str) -> str:
    """Begin in this browser; return where the issuer sends it back to."""
    sent = client.get(BEGIN, params=query)
    assert sent.status_code == 303, sent.text
    cookie = sent.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert f"Path={BACK}" in cookie
    back = httpx.get(sent.headers["location"]).headers["location"]
    assert back.startswith(f"{BASE}{BACK}?")
    return back.removeprefix(BASE)


def refused(client: TestClient, back: str, why: str) -> None:
    """Check that no one comes in by an address."""
    reply = client.get(back)
    assert reply.status_code == 303
    assert reply.headers["location"] == f"{BASE}/sign-in?refused={why}"
    assert "rankscope_session" not in reply.headers.get("set-cookie", "")
    assert client.get("/api/v1/runs").status_code == 401


def who(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/v1/session").json()
    return found


def test_signed_in_by_claims_and_out_again(client: TestClient, issuer: Issuer) -> None:
    assert who(client) | {"has_issuer": True, "required": True, "signed_in": False} == who(client)
    assert client.get("/api/v1/runs").status_code == 401
    assert issuer.asked == []
    reply = client.get(begin(client, next="runs/x/logs?q=a"))
    assert reply.headers["location"] == f"{BASE}/runs/x/logs?q=a"
    cookies = reply.headers.get_list("set-cookie")
    (session,) = [one for one in cookies if one.startswith("rankscope_session=")]
    assert "HttpOnly" in session
    assert "SameSite=strict" in session
    assert "Max-Age=86400" in session
    found = who(client)
    assert (found["name"], found["project"]) == ("ada (oidc)", "*")
    assert "admin" in found["roles"]
    assert 86_000 < found["expires_ms"] / 1e3 - time.time() < 86_401
    rows = client.get("/api/v1/audit").json()["rows"]
    assert [(row["who"], row["action"], row["project"]) for row in rows] == [
        ("ada (oidc)", "sign in", "*")
    ]
    (shown,) = client.get("/api/v1/sessions").json()["sessions"]
    assert (shown["name"], shown["by"], shown["is_own"]) == ("ada (oidc)", "issuer", True)
    cookie = session.partition("=")[2].partition(";")[0]
    client.delete("/api/v1/session")
    client.cookies.set("rankscope_session", cookie)
    assert client.get("/api/v1/runs").status_code == 401
    assert issuer.asked == ["/.well-known/openid-configuration", "/authorize", "/token", "/keys"]


@pytest.mark.parametrize(
    ("person", "project", "role"),
    [
        ({"groups": "ops"}, "*", "admin"),
        ({"realm": {"roles": ["x", "vision-eu"]}}, "vision", "operate"),
        ({"realm.roles": ["vision-eu"]}, "vision", "operate"),
        ({"email": "a@lab.example", "email_verified": True}, "default", "read"),
        ({"groups": ["ops"], "realm": {"roles": ["vision-eu"]}}, "*", "admin"),
        ({"email": "a@lab.example"}, None, None),
        ({"email": "a@lab.example", "email_verified": "true"}, None, None),
        ({"email": "a@lab.example.org", "email_verified": True}, None, None),
        ({"groups": ["OPS", "oops"]}, None, None),
        ({"groups": {"ops": True}}, None, None),
        ({}, None, None),
    ],
)
def test_the_first_grant_that_fits_counts(
    person: dict[str, Any], project: str | None, role: str | None
) -> None:
    grants = [
        Grant(claim=one["claim"], value=one["value"], roles=one["roles"], project=one["project"])
        for one in TABLES["access"].values()
    ]  # type: ignore[arg-type]
    found = claims.person_of(grants, {"sub": "u"} | person).grant
    assert (found and found.project) == project
    assert (found and found.roles[0]) == role


def test_who_is_of_one_project_sees_that_alone(client: TestClient, issuer: Issuer) -> None:
    issuer.person = {"sub": "u2", "realm": {"roles": ["vision-a"]}}
    client.get(begin(client))
    assert who(client)["name"] == "u2 (oidc)"
    assert client.get("/api/v1/runs").status_code == 200
    assert client.get("/api/v1/tokens").status_code == 403
    assert client.get("/api/v1/settings").status_code == 403  # of all projects
    body = Sender(client).body(log_line("x"))
    assert client.post("/api/v1/ingest", content=body).status_code == 403


def test_who_fits_no_grant_has_no_access_and_that_is_written_down(
    client: TestClient, issuer: Issuer
) -> None:
    issuer.person = {"sub": "u3", "email": "eve@lab.example"}
    refused(client, begin(client), "access")
    issuer.person = OPS
    client.get(begin(client))
    rows = client.get("/api/v1/audit").json()["rows"]
    assert ("u3 (oidc)", "sign in without access") in [(r["who"], r["action"]) for r in rows]


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "http://127.0.0.1:1"},
        {"iss": None},
        {"aud": "another"},
        {"aud": ["another", "third"]},
        {"aud": ["rankscope", "another"]},  # no azp says whose it is
        {"aud": ["rankscope", "another"], "azp": "another"},
        {"nonce": "another"},
        {"nonce": None},
        {"exp": 1},
        {"exp": None},
        {"iat": int(time.time()) + 3_600},
        {"nbf": int(time.time()) + 3_600},
        {"sub": None},
    ],
    ids=json.dumps,
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    client: TestClient, issuer: Issuer, changes: dict[str, Any]
) -> None:
    issuer.changes = changes
    refused(client, begin(client), "token")
    issuer.changes = {}
    assert client.get(begin(client)).headers["location"] == f"{BASE}/runs"


def test_a_signature_that_is_not_the_issuers_is_refused(client: TestClient, issuer: Issuer) -> None:
    right = issuer.key
    issuer.key, issuer.published = new_key("one"), [right]  # the same name, another key
    refused(client, begin(client), "token")
    issuer.key, issuer.algorithm = right, "none"
    refused(client, begin(client), "token")
    issuer.algorithm = "RS256"
    client.get(begin(client))
    assert who(client)["signed_in"]


def test_an_issuer_without_keys_is_one_that_cannot_be_asked(
    client: TestClient, issuer: Issuer
) -> None:
    issuer.has_keys = False
    refused(client, begin(client), "issuer")
    issuer.has_keys = True
    client.get(begin(client))
    assert who(client)["signed_in"]


def test_keys_that_the_issuer_changed_are_asked_for_again(
    client: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.get(begin(client))
    client.delete("/api/v1/session")
    issuer.key = new_key("two")
    refused(client, begin(client), "token")  # they were asked for a moment ago
    service: Any = client.app
    later = time.time() + 60
    monkeypatch.setattr(service.state.service.issuer, "_clock", lambda: later)
    client.get(begin(client))
    assert who(client)["signed_in"]


def test_a_state_is_good_once_in_its_browser_for_ten_minutes(
    client: TestClient, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = begin(client)
    assert client.get(back).headers["location"] == f"{BASE}/runs"
    client.delete("/api/v1/session")
    refused(client, back, "expired")  # replayed
    back = begin(client)
    mine = client.cookies.get("rankscope_sign_in")
    client.cookies.clear()
    refused(client, back, "expired")  # in another browser
    client.cookies.set("rankscope_sign_in", str(mine), domain="127.0.0.1", path=BACK)
    refused(client, back, "expired")  # and by that it is used
    monkeypatch.setattr(logins, "LOGIN_SECONDS", 0)
    refused(client, begin(client), "expired")
    for state in ("", "unknown", "\x00", "x" * 200):
        reply = client.get(BACK, params={"state": state, "code": "1"})
        assert reply.headers.get("location", "").endswith("refused=expired"), reply.text
    assert client.get(BACK, params={"state": "x" * 300}).status_code == 422


def test_a_code_of_another_sign_in_is_refused(client: TestClient, issuer: Issuer) -> None:
    """The code of an attacker's own sign-in does not fit the verifier of this browser."""
    stolen = parse_qs(urlsplit(begin(client)).query)["code"][0]
    state = parse_qs(urlsplit(begin(client)).query)["state"][0]
    refused(client, f"{BACK}?state={state}&code={stolen}", "token")


def test_an_issuer_that_refuses_or_is_another_one(client: TestClient, issuer: Issuer) -> None:
    issuer.denies = "access_denied"
    refused(client, begin(client), "denied")


def test_an_issuer_that_names_itself_otherwise_is_not_used(issuer: Issuer, tmp_path: Path) -> None:
    issuer.named = "https://id.example"
    app = create_app(settings_of(issuer, tmp_path))
    with TestClient(app, base_url=BASE, follow_redirects=False) as client:
        sent = client.get(BEGIN)
        assert sent.headers["location"] == f"{BASE}/sign-in?refused=issuer"
        assert "set-cookie" not in sent.headers


def test_an_issuer_that_is_down_is_said_and_tokens_go_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = Issuer(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    app = create_app(settings_of(nowhere, tmp_path, token="of the operator"))
    with TestClient(app, base_url=BASE, follow_redirects=False) as client:
        assert client.get(BEGIN).headers["location"] == f"{BASE}/sign-in?refused=issuer"
        headers = {"Authorization": "Bearer of the operator"}
        assert client.get("/api/v1/runs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path", ["//evil.example", "https:evil", "\\\\evil.example", "/runs", "runs#x", "a" * 501]
)
def test_no_one_is_sent_elsewhere_afterwards(client: TestClient, path: str) -> None:
    reply = client.get(BEGIN, params={"next": path})
    if reply.status_code == 303:  # it is below the dashboard's root, whatever it looks like
        back = httpx.get(reply.headers["location"]).headers["location"].removeprefix(BASE)
        assert client.get(back).headers["location"].startswith(f"{BASE}/")
    else:
        assert reply.status_code == 422


def test_wrong_comings_back_and_beginnings_are_limited(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [client.get(BACK, params={"state": str(n)}).status_code for n in range(12)]
    assert codes == [303] * 10 + [429] * 2
    service: Any = client.app
    monkeypatch.setattr(service.state.service, "begun", Buckets(lambda: 0.0))
    monkeypatch.setattr(routes, "BEGUN", 2)
    assert [client.get(BEGIN).status_code for _ in range(3)] == [303, 303, 429]


def test_sessions_end_when_the_rules_change(issuer: Issuer, tmp_path: Path) -> None:
    def served(**more: Any) -> TestClient:
        app = create_app(settings_of(issuer, tmp_path, **more))
        return TestClient(app, base_url=BASE, follow_redirects=False)

    with served() as client:
        client.get(begin(client))
        cookie = client.cookies["rankscope_session"]
    with served() as client:  # another start with the same rules
        client.cookies.set("rankscope_session", cookie)
        assert who(client)["name"] == "ada (oidc)"
    fewer = {"access": {"all": TABLES["access"]["all"]}}
    with served(file=ConfigFile(tables={"oidc": fewer})) as client:
        client.cookies.set("rankscope_session", cookie)
        assert client.get("/api/v1/runs").status_code == 401
    with served(oidc_issuer="", file=ConfigFile(), token="t") as client:
        client.cookies.set("rankscope_session", cookie)
        assert client.get("/api/v1/runs").status_code == 401
        assert client.get(BEGIN).status_code == 404
        assert who(client)["has_issuer"] is False


FILE = """
public_url = "https://rankscope.example"
oidc_issuer = "https://id.example"
oidc_client_id = "rankscope"
[oidc.access.all]
claim = "groups"
value = "staff"
roles = ["read"]
project = "default"
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("https://id.example", "http://id.example", "oidc_issuer is no address of HTTPS"),
        ('oidc_client_id = "rankscope"', "", "oidc_client_id is not set: register"),
        ('public_url = "https://rankscope.example"', "", "public_url is not set: the issuer"),
        ('oidc_issuer = "https://id.example"', "", "oidc_issuer is not set: say whose claims"),
        ('["read"]', '["king"]', "oidc.access.all: Invalid enum value 'king'"),
        ('"default"', '"a b"', "oidc.access.all: Expected `str` matching regex"),
        ('value = "staff"', "", "missing required field `value`"),
        ("[oidc.access.all]", "[oidc.grants.all]", "oidc.grants is not known; write [oidc.access"),
        (FILE[FILE.index("[oidc") :], "", "no one could do anything: write [oidc.access.NAME]"),
        ("oidc_client_id", 'oidc_scopes = "email"\noidc_client_id', "oidc_scopes lacks openid"),
    ],
)
def test_what_cannot_work_is_said_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    file = tmp_path / "rankscope.toml"
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    flags = ["--config", str(file), "--data-dir", str(tmp_path), "--port", "0"]
    assert serve([*flags, "--check"]) == serve(flags) == 2
    assert said in capsys.readouterr().err


def test_check_asks_no_issuer_and_an_issuer_shuts_the_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_SERVER_OIDC_CLIENT_SECRET", SECRET)
    file = tmp_path / "rankscope.toml"
    file.write_text(FILE)
    flags = ["--config", str(file), "--data-dir", str(tmp_path), "--port", "0", "--check"]
    assert serve([*flags, "--host", "0.0.0.0"]) == 0
    said = capsys.readouterr().out
    assert "1 grants; the issuer is asked at the first sign-in" in said
    assert SECRET not in said


def test_without_an_issuer_its_libraries_are_not_even_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rankscope_server.api.app import create_app\n"
        "from rankscope_server.settings import Settings\n"
        "from starlette.testclient import TestClient\n"
        f"with TestClient(create_app(Settings(data_dir={str(tmp_path)!r}))) as client:\n"
        "    client.get('http://127.0.0.1/api/v1/session')\n"
        "sys.exit(bool({'authlib', 'joserfc', 'cryptography'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_real_server_signs_a_browser_in(
    issuer: Issuer, start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    file = tmp_path / "rankscope.toml"
    grant = FILE[FILE.index("[oidc") :].replace("staff", "${TEAM}").replace("read", "admin")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    file.write_text(grant)
    server = start_server(
        "--config", str(file), "--port", str(port), "--public-url", f"http://127.0.0.1:{port}",
        "--oidc-issuer", issuer.url, "--oidc-client-id", CLIENT,
        TEAM="ops", RANKSCOPE_SERVER_OIDC_CLIENT_SECRET=SECRET,
    )  # fmt: skip
    with httpx.Client(follow_redirects=True) as browser:
        page = browser.get(f"{server.url}{BEGIN}")  # there, back, and to the page
        assert page.status_code == 200
        assert str(page.url) == f"http://127.0.0.1:{port}/runs"
        found = browser.get(f"{server.url}/api/v1/session").json()
        assert (found["name"], found["project"]) == ("ada (oidc)", "default")
        assert browser.get(f"{server.url}/api/v1/tokens").status_code == 200
