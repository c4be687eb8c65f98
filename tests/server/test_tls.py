"""HTTPS by two flags, the authority of it in the agent's client, and proxies that are believed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.http import CA_VARIABLE, Client, HttpError
from rankscope.node.upload.server import Server
from rankscope.settings import Settings as AgentSettings
from rankscope.settings import to_environment
from rankscope_server.access.roles import ROLES
from rankscope_server.api.app import create_app
from rankscope_server.settings import ROLES as SETTINGS_ROLES
from rankscope_server.settings import Settings as ServerSettings
from rankscope_server.settings import SettingsError, parse
from tests.server.conftest import Sender, ServerProcess, TestClient, log_line

Start = Callable[..., ServerProcess]
TOKEN = "the operator's own words"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


def make_pair(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Make a certificate for loopback that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=rankscope", "-keyout", key, "-out", cert,
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def ask(url: str, path: str, environ: dict[str, str], token: str = TOKEN) -> Any:
    with contextlib.closing(Client(url, token, environ=environ)) as client:
        answer = client.request("GET", path)
        assert answer.status == 200, answer.why()
        return answer.fields


def test_https_is_spoken_and_its_authority_believed_by_setting(
    start_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make_pair(tmp_path)
    server = start_server("--tls-cert", str(cert), "--tls-key", str(key), RANKSCOPE_TOKEN=TOKEN)
    assert server.url.startswith("https://127.0.0.1:")
    with pytest.raises(HttpError, match=r"(?i)certificate verify failed"):
        ask(server.url, "/api/v1/runs", {})
    trusted = to_environment(AgentSettings(ca_file=str(cert)))
    assert list(trusted) == [CA_VARIABLE]
    assert ask(server.url, "/api/v1/runs", trusted)["total"] == 0
    with pytest.raises(HttpError, match=f"{CA_VARIABLE}=.*name a file of certificates"):
        ask(server.url, "/api/v1/runs", {CA_VARIABLE: str(tmp_path / "none.pem")})
    # the collector's connection, and the commands, take it from the environment
    monkeypatch.setenv(CA_VARIABLE, str(cert))
    with contextlib.closing(Server(server.url, TOKEN)) as connection:
        body = Sender(None).body(log_line("x"))  # type: ignore[arg-type]
        answer = connection.send("/api/v1/ingest", body, {})
        assert (answer.status, answer.is_ours) == (200, True), answer.text
        reply = connection.send("/api/v1/session", json.dumps({"token": TOKEN}).encode(), {})
        assert reply.status == 200
    made = subprocess.run(
        [sys.executable, "-m", "rankscope", "token", "create", "x", "--role", "read", "--server",
         server.url],
        capture_output=True, text=True, timeout=60, env=os.environ | {"RANKSCOPE_TOKEN": TOKEN},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert ask(server.url, "/api/v1/session", trusted, made.stdout.strip())["roles"] == ["read"]


def test_a_new_certificate_is_taken_without_a_restart(start_server: Start, tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--log-level", "info")
    server = start_server(*flags, RANKSCOPE_TOKEN=TOKEN)
    first = to_environment(AgentSettings(ca_file=str(shutil.copy(cert, tmp_path / "first.pem"))))
    new_cert, new_key = make_pair(tmp_path, "new")
    second = to_environment(AgentSettings(ca_file=str(new_cert)))

    # half of a renewal: the certificate is there before its key
    os.replace(shutil.copy(new_cert, tmp_path / "arriving"), cert)
    server.wait_for_line("is not used")
    assert ask(server.url, "/api/v1/runs", first)["total"] == 0

    os.replace(new_key, key)
    server.wait_for_line("have the new certificate")
    assert ask(server.url, "/api/v1/runs", second)["total"] == 0
    with pytest.raises(HttpError, match=r"(?i)certificate verify failed"):
        ask(server.url, "/api/v1/runs", first)


def test_a_pair_that_does_not_fit_is_refused_before_the_start(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path)
    _, other = make_pair(tmp_path, "other")
    parse(["--tls-cert", str(cert), "--tls-key", str(key)], {})
    for flags, says in (
        (["--tls-key", str(key)], "tls_cert is not"),
        (["--tls-cert", str(cert)], "does not work with its key"),
        (["--tls-cert", str(cert), "--tls-key", str(other)], "does not work with its key"),
        (["--tls-cert", str(tmp_path / "no"), "--tls-key", str(key)], "cannot be read"),
        (["--trusted-proxies", "10.0.0.0/99"], "trusted_proxies"),
        (["--trusted-proxies", "proxy.example"], "trusted_proxies"),
        (["--proxy-user-header", "X-User"], "name the networks of the proxy"),
        (["--proxy-user-roles", "read,root"], "root is none of"),
    ):
        with pytest.raises(SettingsError, match=says):
            parse(flags, {})


def test_a_forwarded_address_is_believed_of_named_proxies_alone(start_server: Start) -> None:
    forged = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}

    def seen(server: ServerProcess) -> str:
        with contextlib.closing(Client(server.url, TOKEN, environ={})) as client:
            for n in range(2):
                client.request("GET", "/api/v1/runs", headers=forged, token=f"guess {n}")
            rows = client.request("GET", "/api/v1/audit").fields["rows"]
            return str(rows[0]["address"])

    plain = start_server(RANKSCOPE_TOKEN=TOKEN)
    assert seen(plain) == "127.0.0.1"
    plain.close()
    behind = start_server("--trusted-proxies", "127.0.0.0/8,::1", RANKSCOPE_TOKEN=TOKEN)
    assert seen(behind) == "203.0.113.9"
    reply = Client(behind.url, environ={}).request(
        "POST", "/api/v1/session", json.dumps({"token": TOKEN}).encode(), forged
    )
    assert reply.status == 200


def as_user(client: TestClient, *names: str, **more: str) -> Any:
    headers = [("X-Forwarded-User", name) for name in names] + list(more.items())
    return client.get("/api/v1/session", headers=headers).json()  # type: ignore[arg-type]


def test_a_proxy_names_the_user_and_a_stranger_does_not(tmp_path: Path) -> None:
    settings = ServerSettings(
        data_dir=str(tmp_path), trusted_proxies="10.0.0.0/8", look_seconds=3600.0,
        proxy_user_header="X-Forwarded-User", proxy_user_roles="operate,ingest",
    )  # fmt: skip
    app = create_app(settings)
    base = "http://127.0.0.1:8787"
    with TestClient(app, base_url=base, client=("10.1.2.3", 5)) as proxy:
        user = as_user(proxy, "ada\x1b[0m")
        assert (user["name"], user["project"]) == ("ada[0m (proxy)", "*")
        assert user["roles"] == ["ingest", "read", "operate"]
        assert proxy.get("/api/v1/runs", headers={"X-Forwarded-User": "ada"}).status_code == 200
        assert proxy.get("/api/v1/audit", headers={"X-Forwarded-User": "ada"}).status_code == 403
        assert proxy.get("/api/v1/runs").status_code == 401  # it says nothing of a user
        assert not as_user(proxy, "ada", "root")["signed_in"]
        assert not as_user(proxy, "ada", Authorization="Bearer wrong")["signed_in"]
        for address in ("192.0.2.1", "127.0.0.1", "not an address"):
            stranger = TestClient(app, base_url=base, client=(address, 5))
            assert not as_user(stranger, "ada")["signed_in"]
            forwarded = {"X-Forwarded-For": "10.1.2.3"}
            assert not as_user(stranger, "ada", **forwarded)["signed_in"]
            stranger.close()


def test_the_roles_of_settings_are_those_of_tokens() -> None:
    assert tuple(ROLES) == SETTINGS_ROLES
