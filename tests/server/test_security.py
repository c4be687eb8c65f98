"""Who is let in: Host header, token, sign-in, headers; and the dashboard's own files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope_server.api import web
from rankscope_server.api.app import create_app
from rankscope_server.api.security import allowed_hosts, host_name
from rankscope_server.settings import Settings, SettingsError, check_door, parse
from tests.server.conftest import Sender, TestClient, log_line, new_data

TOKEN = "correct horse battery staple"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(data_dir=new_data(tmp_path), token=TOKEN, look_seconds=3600.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/api/v1/runs", "/metrics", "/api/v1/openapi.json", "/api/v1/settings"]
)
def test_without_the_token_there_is_no_data(guarded: TestClient, path: str) -> None:
    reply = guarded.get(path)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["remedy"]
    for given in ("wrong", TOKEN[0], TOKEN[:-1], TOKEN[1:], f"{TOKEN}r", TOKEN.upper()):
        wrong = guarded.get(path, headers={"Authorization": f"Bearer {given}"})
        assert wrong.status_code == 401
    right = guarded.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert right.status_code == 200
    assert TOKEN not in right.text


def test_ingest_wants_the_token_too(guarded: TestClient) -> None:
    body = Sender(guarded).body(log_line("x"))
    assert guarded.post("/api/v1/ingest", content=body).status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.post("/api/v1/ingest", content=body, headers=headers).status_code == 200


def test_sign_in_trades_the_token_for_a_cookie(guarded: TestClient) -> None:
    assert guarded.get("/api/v1/health").status_code == 200
    before = guarded.get("/api/v1/session").json()
    assert (before["required"], before["signed_in"], before["roles"]) == (True, False, [])
    for given in ("no", TOKEN[:-1], f"{TOKEN}r"):
        assert guarded.post("/api/v1/session", json={"token": given}).status_code == 401
    assert guarded.post("/api/v1/session", content=b"{").status_code == 400
    assert guarded.post("/api/v1/session", content=b"x" * 9_999).status_code == 413
    reply = guarded.post("/api/v1/session", json={"token": TOKEN})
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert guarded.get("/api/v1/runs").status_code == 200
    now = guarded.get("/api/v1/session").json()
    assert (now["required"], now["signed_in"], now["project"]) == (True, True, "*")
    assert now["roles"] == ["ingest", "read", "operate", "admin"]
    guarded.delete("/api/v1/session")
    assert guarded.get("/api/v1/runs").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]:80", "a" * 999]
)
def test_a_foreign_name_is_refused(client: TestClient, host: str) -> None:
    reply = client.get("/api/v1/runs", headers={"Host": host})
    assert reply.status_code == 421
    assert reply.json()["error"]["field"] == "Host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8787"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/v1/runs", headers={"Host": host}).status_code == 200


OWN = "127.0.0.1:8787"


@pytest.mark.parametrize(
    ("host", "origin", "is_taken"),
    [
        (OWN, "http://127.0.0.1:8787", True),
        (OWN, "https://evil.example", False),
        (OWN, "https://evil.example:8787", False),
        (OWN, "null", False),
        (OWN, "http://127.0.0.1.evil.example:8787", False),
        (OWN, "http://127.0.0.1:9000", False),  # another program of this machine
        (OWN, "http://localhost:3000", False),
        (OWN, "http://127.0.0.1", False),
        (OWN, "http://127.0.0.1:" + "8" * 5000, False),
        ("[::1]:8787", "http://[::1]:8787", True),
        ("[::1]:8787", "http://[::1]:3000", False),
        ("localhost", "http://localhost:9000", True),  # a proxy may take off the port
        ("127.0.0.1:8787", "https://scope.example", True),  # one that says another name
        ("scope.example", "https://scope.example", True),
        ("scope.example:443", "https://scope.example", True),
        ("scope.example:8787", "http://scope.example:9000", False),
        ("scope.example:8787", "http://localhost:8787", False),
    ],
)
def test_only_a_page_of_this_server_changes_anything(
    settings: Settings, host: str, origin: str, is_taken: bool
) -> None:
    app = create_app(replace(settings, allowed_hosts="scope.example"))
    with TestClient(app, base_url="http://127.0.0.1:8787") as client:
        body = Sender(client).body(log_line("x"))
        headers = {"Host": host, "Origin": origin}
        reply = client.post("/api/v1/ingest", content=body, headers=headers)
        assert reply.status_code == (200 if is_taken else 403), reply.text


@pytest.mark.parametrize(
    ("site", "is_taken"),
    [("same-origin", True), ("none", True), ("same-site", False), ("cross-site", False),
     ("", False)],
)  # fmt: skip
def test_what_the_browser_says_of_the_sender_goes_first(
    client: TestClient, site: str, is_taken: bool
) -> None:
    body = Sender(client).body(log_line("x"))
    # a proxy with TLS: the browser's origin is none that the server knows
    headers = {"Sec-Fetch-Site": site, "Origin": "https://scope.example"}
    reply = client.post("/api/v1/ingest", content=body, headers=headers)
    assert reply.status_code == (200 if is_taken else 403)
    assert client.get("/api/v1/runs", headers=headers).status_code == 200  # a link from elsewhere


@pytest.mark.parametrize(("port", "is_taken"), [(80, False), (8787, True)])
def test_a_host_without_a_port_has_that_of_the_server_where_it_is_the_usual_one(
    settings: Settings, port: int, is_taken: bool
) -> None:
    app = create_app(settings)
    with TestClient(app, base_url=f"http://localhost:{port}") as client:
        body = Sender(client).body(log_line("x"))
        headers = {"Host": "localhost", "Origin": "http://localhost:9000"}
        reply = client.post("/api/v1/ingest", content=body, headers=headers)
        assert reply.status_code == (200 if is_taken else 403)


def test_more_names_may_be_allowed() -> None:
    settings = Settings(host="10.0.0.5", allowed_hosts="train.example, Box")
    hosts = allowed_hosts(settings)
    assert hosts is not None
    assert {"10.0.0.5", "train.example", "box", "localhost"} <= hosts
    assert host_name("[fe80::1]:80") == "fe80::1"


def test_another_address_than_loopback_wants_a_token() -> None:
    for host in ("0.0.0.0", "192.168.1.4", "::", "example.org"):
        with pytest.raises(SettingsError, match="no token is set"):
            check_door(Settings(host=host), has_tokens=False)
        check_door(Settings(host=host), has_tokens=True)
        check_door(Settings(host=host, token="t"), has_tokens=False)
        check_door(Settings(host=host, insecure_bind=True), has_tokens=False)
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_door(Settings(host=host), has_tokens=False)


def test_settings_come_from_flags_then_environment_then_defaults(tmp_path: Path) -> None:
    environ = {"RANKSCOPE_SERVER_PORT": "1", "RANKSCOPE_SERVER_LOOK_SECONDS": "2.5"}
    settings = parse(["--port", "2", "--data-dir", str(tmp_path)], environ)
    assert (settings.port, settings.look_seconds) == (2, 2.5)
    with pytest.raises(SettingsError, match="RANKSCOPE_SERVER_PORT"):
        parse([], {"RANKSCOPE_SERVER_PORT": "many"})
    with pytest.raises(SettingsError, match="synchronous"):
        parse(["--synchronous", "off"], {})


def test_an_abbreviated_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--insecure"], {})
    assert "unrecognized arguments: --insecure" in capsys.readouterr().err


def test_yes_or_no_is_a_word_that_means_one_of_them() -> None:
    name = "RANKSCOPE_SERVER_INSECURE_BIND"
    for word, value in {"1": True, "On": True, "yes": True, "TRUE": True, "0": False, "off": False,
                        "no": False, "false": False}.items():  # fmt: skip
        assert parse([], {name: word}).insecure_bind is value
    with pytest.raises(SettingsError, match=f"{name}='enabled' is neither yes nor no: say 1 or 0"):
        parse([], {name: "enabled"})


def test_every_answer_carries_the_safety_headers(client: TestClient) -> None:
    for path in ("/", "/api/v1/runs", "/api/v1/nothing", "/static/x/y"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] in ("no-cache", "private, no-cache", "no-store")


@pytest.fixture
def assets(client: TestClient, tmp_path: Path) -> Path:
    folder = tmp_path / "web"
    (folder / "app").mkdir(parents=True)
    (folder / "index.html").write_text(
        '<!doctype html><html><head><meta charset="utf-8">'
        '<script type="importmap">{"imports": {"a": "./static/{version}/app/a.js"}}</script>'
        "</head><body></body></html>"
    )
    (folder / "app/a.js").write_text("export const a = 1;\n" * 200)
    (folder / ".secret").write_text("no")
    (tmp_path / "outside.txt").write_text("no")
    client.app.state.assets = web.Assets(folder)  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize(
    ("path", "base"),
    [("/", "./"), ("/runs", "./"), ("/runs/x", "../"), ("/runs/x/ranks", "../../"),
     ("/runs/x/", "../../")],
)  # fmt: skip
def test_the_page_knows_its_depth(client: TestClient, assets: Path, path: str, base: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-cache"
    assert f'<base href="{base}">' in reply.text
    assert reply.text.index("<base") < reply.text.index("importmap")
    (script,) = re.findall(r'importmap">(.*?)</script>', reply.text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in reply.headers["content-security-policy"]
    assert "{version}" not in reply.text


def test_modules_of_the_first_route_are_named_before_they_are_found(
    client: TestClient, assets: Path
) -> None:
    (assets / "app/pages").mkdir()
    (assets / "app/main.js").write_text("import {\n  b,\n} from './b.js';\nimport 'a';\n")
    (assets / "app/b.js").write_text("export const lazy = () => import('./late.js');\n")
    (assets / "app/late.js").write_text("export const text = 'from nothing';\n")
    (assets / "app/pages/overview.js").write_text("import { b } from '../b.js';\n")
    for path, more in {"/runs": [], "/runs/x": ["app/pages/overview.js"]}.items():
        text = client.get(path).text
        found = re.findall(r'<link rel="modulepreload" href="static/\w+/([^"]+)">', text)
        assert found == ["app/main.js", "app/b.js", "app/a.js", *more]
        assert text.index("importmap") < text.index("modulepreload")


def test_heads_of_pages_and_assets_are_answered(client: TestClient, assets: Path) -> None:
    for path in ("/", "/runs/x", f"/static/{web.assets_version(assets)}/app/a.js"):
        reply, whole = client.head(path), client.get(path)
        assert reply.status_code == 200
        assert reply.content == b""
        assert reply.headers["content-type"] == whole.headers["content-type"]
        assert reply.headers["cache-control"] == whole.headers["cache-control"]
    assert client.head("/static/v/no.js").status_code == 404
    assert client.head("/api/v1/runs").status_code == 405


def test_assets_live_for_ever_under_their_version(client: TestClient, assets: Path) -> None:
    version = web.assets_version(assets)
    reply = client.get(f"/static/{version}/app/a.js")
    assert reply.headers["content-type"].startswith("text/javascript")
    assert "immutable" in reply.headers["cache-control"]
    assert reply.headers["content-encoding"] == "gzip"
    assert "immutable" not in client.get("/static/old/app/a.js").headers["cache-control"]
    (assets / "app/a.js").write_text("changed")
    page = client.get("/").text
    assert version not in page
    assert web.assets_version(assets) in page


@pytest.mark.parametrize(
    "path",
    ["../outside.txt", "%2e%2e/outside.txt", "..%2foutside.txt", ".secret", "app", "no.js", "",
     "/etc/passwd", "%00", "app/a.js/x", "a" * 5_000],
)  # fmt: skip
def test_nothing_else_is_served(client: TestClient, assets: Path, path: str) -> None:
    assert client.get(f"/static/v/{path}").status_code == 404


def test_missing_assets_give_a_clear_page(client: TestClient, tmp_path: Path) -> None:
    client.app.state.assets = web.Assets(tmp_path / "nowhere")  # type: ignore[attr-defined]
    reply = client.get("/runs")
    assert reply.status_code == 503
    assert "files are missing" in reply.text
    client.app.state.assets = web.Assets(None)  # type: ignore[attr-defined]
    assert client.get("/").status_code == 503
    assert client.get("/static/v/a.js").status_code == 404
