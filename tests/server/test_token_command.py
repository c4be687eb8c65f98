"""`rankscope token` on a data directory, beside a server that runs, and through the API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests import doctor
from tests.command_server import run
from tests.server.conftest import ServerProcess

Start = Callable[..., ServerProcess]


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")}
    return run([sys.executable, "-m", "rankscope", "token", *words], env=clean | environ)


def make(*words: str, **environ: str) -> str:
    done = command("create", *words, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def status(server: ServerProcess, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.get(f"{server.url}/api/v1/runs", headers=headers, trust_env=False).status_code


def wait_for(server: ServerProcess, token: str, wanted: int) -> None:
    deadline = time.monotonic() + 10
    while status(server, token) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_running_server_takes_note_of_what_another_process_does(
    start_server: Start, tmp_path: Path
) -> None:
    server = start_server()
    assert status(server, "") == 200
    where = ("--data-dir", str(tmp_path))
    admin = make("ops", "--role", "admin", "--project", "*", *where)
    wait_for(server, "", 401)
    assert status(server, admin) == 200
    assert command("revoke", admin[3:15], *where).returncode == 0
    wait_for(server, admin, 401)
    rows = json.loads(command("list", "--json", *where).stdout)["tokens"]
    assert [(row["name"], row["state"]) for row in rows] == [("ops", "revoked")]
    reader = make("reader", "--role", "read", *where)
    assert status(server, reader) == 200


def test_tokens_let_a_server_listen_to_other_machines(start_server: Start, tmp_path: Path) -> None:
    checked = [
        sys.executable, "-m", "rankscope", "serve", "--host", "0.0.0.0", "--port", "0",
        "--data-dir", str(tmp_path), "--check",
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name != "RANKSCOPE_TOKEN"}
    shut = run(checked, env=environ)
    assert shut.returncode == 1
    assert "no token is set" in shut.stdout
    token = make("x", "--role", "read", "--data-dir", str(tmp_path))
    ready = run(checked, env=environ)
    assert ready.returncode == 0, ready.stdout
    server = start_server("--host", "0.0.0.0")
    assert (status(server, ""), status(server, token)) == (401, 200)


def test_through_the_api(start_server: Start) -> None:
    server = start_server(RANKSCOPE_TOKEN="operator")
    environ = {"RANKSCOPE_SERVER": server.url, "RANKSCOPE_TOKEN": "operator"}
    token = make("node", "--role", "ingest", "--role", "read", "--project", "a", **environ)
    assert status(server, token) == 200
    shown = command("list", **environ).stdout
    assert "ingest, read" in shown
    assert "quota" not in shown
    assert token not in shown
    new = command("rotate", token[3:15], "--grace-hours", "0.5", **environ)
    assert new.returncode == 0, new.stderr
    assert "works for 0.5 h more" in new.stderr
    assert status(server, new.stdout.strip()) == 200
    assert command("revoke", token[3:15], **environ).stdout == f"token {token[3:15]} is revoked\n"
    assert status(server, token) == 401
    refused = command("list", **environ | {"RANKSCOPE_TOKEN": new.stdout.strip()})
    assert refused.returncode == 1
    make("slow", "--role", "ingest", "--bytes-per-second", "4000", "--events-per-second", "500",
         **environ)  # fmt: skip
    slow = json.loads(command("list", "--json", **environ).stdout)["tokens"][0]
    assert (slow["bytes_per_second"], slow["events_per_second"]) == (4_000, 500)
    words = command("list", **environ | {"COLUMNS": "160"}).stdout
    assert "4,000 bytes/s, 500 events/s" in words
    assert "this wants the role admin" in refused.stderr


def test_a_run_and_a_preflight_with_a_token_that_only_sends(
    start_server: Start, tmp_path: Path
) -> None:
    server = start_server(RANKSCOPE_TOKEN="operator")
    admin = {"RANKSCOPE_SERVER": server.url, "RANKSCOPE_TOKEN": "operator"}
    sender = make("node", "--role", "ingest", "--project", "vision", **admin)
    reader = make("people", "--role", "read", "--project", "vision", **admin)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")}
    clean |= {"RANKSCOPE_SERVER": server.url, "RANKSCOPE_TOKEN": sender}
    clean |= {"RANKSCOPE_DIR": str(tmp_path / "runs")}
    program = "import rankscope; rankscope.init()"
    for words in (
        ("run", "--run-id", "the-run", "--", sys.executable, "-c", program),
        ("preflight", "--nodes", "1", "--only", "limits"),
    ):
        done = run([sys.executable, "-m", "rankscope", *words], timeout=240, env=clean)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (0, 1), done.stdout + done.stderr  # warnings of this machine
    for token, total in ((reader, 1), (make("x", "--role", "read", **admin), 0)):
        headers = {"Authorization": f"Bearer {token}"}
        for path in ("runs", "preflight/runs"):
            reply = httpx.get(f"{server.url}/api/v1/{path}", headers=headers, trust_env=False)
            assert reply.json()["total"] == total, (path, reply.text)


def test_the_doctor_says_what_a_token_lacks(start_server: Start, tmp_path: Path) -> None:
    server = start_server(RANKSCOPE_TOKEN="operator")
    environ = {"RANKSCOPE_SERVER": server.url, "RANKSCOPE_TOKEN": "operator"}
    reader, sender = (make("x", "--role", role, **environ) for role in ("read", "ingest"))

    def detail(token: str) -> str:
        clean = {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}
        clean |= {"RANKSCOPE_SERVER": server.url, "RANKSCOPE_TOKEN": token}
        done = doctor.run("--json", env=clean | {"RANKSCOPE_DIR": str(tmp_path / "runs")})
        rows = json.loads(done.stdout)["rows"]
        return next(str(row["detail"]) for row in rows if row["part"] == "server")

    assert "wants a token" in detail("")
    assert "does not take the token" in detail("wrong")
    assert "it has read and not ingest" in detail(reader)
    assert detail(sender) == "answers: ok"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("create", "x", "--role", "root"), 64, "invalid choice"),
        (("create", "x"), 64, "--role"),
        (("create", "x", "--role", "read", "--days", "nan"), 64, "--days"),
        (("create", "x", "--role", "read", "--days", "0"), 64, "--days"),
        (("create", "x", "--role", "read", "--project", "a b"), 1, "cannot be a project"),
        (("rotate", "000000000000", "--grace-hours", "inf"), 64, "--grace-hours"),
        (("rotate", "000000000000"), 1, "no token '000000000000'"),
        (("revoke", "../x"), 1, "no token '../x'"),
        (("list", "--server", "http://127.0.0.1:9"), 64, "exclude each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_done(words: tuple[str, ...], code: int, says: str, tmp_path: Path) -> None:
    done = command(*words, "--data-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_line() -> None:
    done = command("list", "--server", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
