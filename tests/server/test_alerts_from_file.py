"""Channels and rules of the server's file: checked, stored at its start, changed there alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rankscope_server.cli import serve
from tests.server.conftest import ServerProcess
from tests.server.receivers import receiving

KEY = "a key of some length"
CHANNEL = """
[alerts.channel.controller]
kind = "webhook"
url = "{url}"
signing_key = "${{HOOK_KEY}}"
quiet = {{ start = "22:00", end = "07:00", zone = "UTC" }}
"""
RULE = """
[alerts.rule."Hangs"]
when = { about = "finding", kinds = ["hang"], min_severity = "critical" }
channels = ["controller"]
"""
Start = Callable[..., ServerProcess]


def ask(server: ServerProcess, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/api/v1/alerts/{path}", timeout=30, **more)


def named(server: ServerProcess, group: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in ask(server, group).json()[group]}


def test_a_server_has_the_channels_and_rules_of_its_file(
    start_server: Start, tmp_path: Path
) -> None:
    file = tmp_path / "rankscope.toml"
    with receiving() as receiver:
        file.write_text(CHANNEL.format(url=f"{receiver.url}/path") + RULE)
        file.chmod(0o600)
        server = start_server("--config", str(file), HOOK_KEY=KEY)
        channel, rule = named(server, "channels")["controller"], named(server, "rules")["Hangs"]
        assert channel["is_from_file"] is rule["is_from_file"] is True
        assert rule["channels"] == [channel["id"]]
        assert channel["quiet"]["start"] == "22:00"
        assert channel["target"]["url"] == channel["target"]["signing_key"] == "(set)"
        assert named(server, "rules")["Critical findings"]["is_from_file"] is False
        sent = ask(server, f"channels/{channel['id']}/test", "POST").json()
        assert sent["state"] == "sent"
        assert receiver.got[0].path == "/path"
        for group, one in (("channels", channel), ("rules", rule)):
            refused = ask(server, f"{group}/{one['id']}", "DELETE")
            assert refused.status_code == 409
            assert refused.json()["error"]["what"] == "it is from the file of the server"
            assert "start the server again" in refused.json()["error"]["remedy"]
        body = {"name": "Hangs", "when": {"about": "lag"}}
        assert ask(server, f"rules/{rule['id']}", "PUT", json=body).status_code == 409
        body = {"name": "controller", "target": {"kind": "slack", "url": "http://127.0.0.1:1/"}}
        assert ask(server, f"channels/{channel['id']}", "PUT", json=body).status_code == 409
        assert named(server, "rules")["Hangs"] == rule


def test_what_is_taken_out_of_the_file_goes_and_what_a_person_made_stays(
    start_server: Start, tmp_path: Path
) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text("")
    server = start_server("--config", str(file))
    mine = {"name": "Hangs", "when": {"about": "lag", "seconds": 9}}
    made = ask(server, "rules", "POST", json=mine).json()
    other = {"name": "Other", "when": {"about": "lag"}}
    ask(server, "rules", "POST", json=other)
    server.end()
    file.write_text(CHANNEL.format(url="${HOOK_URL}") + RULE)
    server = start_server(
        "--config", str(file), HOOK_KEY=KEY, HOOK_URL="http://127.0.0.1:9/first-path"
    )
    rule = named(server, "rules")["Hangs"]
    assert (rule["id"], rule["is_from_file"]) == (made["id"], True)
    assert rule["when"]["kinds"] == ["hang"]
    first = named(server, "channels")["controller"]["id"]
    server.end()
    server = start_server("--config", str(file), HOOK_KEY=KEY, HOOK_URL="http://localhost:9/x")
    again = named(server, "channels")["controller"]
    assert (again["id"], again["place"]) == (first, "http://localhost")
    server.end()
    file.write_text("")
    server = start_server("--config", str(file))
    assert named(server, "channels") == {}
    assert "Hangs" not in named(server, "rules")
    assert named(server, "rules")["Other"]["is_from_file"] is False
    assert len(named(server, "rules")) == 6


GOOD = CHANNEL.format(url="https://hooks.example/path") + RULE


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    flags = ["--config", str(path), "--data-dir", str(path.parent), "--port", "0", "--check"]
    code = serve(flags)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_check_says_how_many_there_are_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_KEY", KEY)
    file = tmp_path / "rankscope.toml"
    file.write_text(GOOD)
    file.chmod(0o600)
    code, said = checked(file, capsys)
    assert code == 0
    (line,) = [one for one in said.splitlines() if one.startswith("alerts")]
    assert "1 channels, 1 rules" in line
    assert str(file) in line
    assert KEY not in said
    assert "hooks.example" not in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "webhook"', 'kind = "pigeon"', "alerts.channel.controller: Invalid value"),
        ('kind = "webhook"', 'kind = "webhook"\ncolour = 1', "unknown field `colour`"),
        ("${HOOK_KEY}", "short", "alerts.channel.controller.signing_key: a key of less than 16"),
        ("${HOOK_KEY}", "${NO_SUCH}", "NO_SUCH is not set; export it"),
        ("https://hooks", "ftp://hooks", "alerts.channel.controller.url: this is no address"),
        ('zone = "UTC"', 'zone = "Atlantis"', "quiet.zone: 'Atlantis' is no time zone"),
        ('["hang"]', '["bang"]', "alerts.rule.Hangs.when.kinds: 'bang' is no kind of finding"),
        ('["controller"]', '["pager"]', "no channel 'pager' in this file; there are: controller"),
        ('["controller"]', '"controller"', "no channel 'controller' in this file"),
        ("[alerts.rule.", "[alerts.rules.", "alerts.rules is not known; write [alerts.channel"),
        ("[alerts.rule.", "[alarms.rule.", "alarms is no setting; use alerts"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    old: str, new: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOOK_KEY", KEY)
    file = tmp_path / "rankscope.toml"
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    file.chmod(0o600)
    code, text = checked(file, capsys)
    assert code == 2
    assert said in text
    assert str(file) in text
    assert KEY not in text
    assert serve(["--config", str(file), "--data-dir", str(tmp_path), "--port", "0"]) == 2


def test_a_secret_in_a_file_that_others_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_KEY", KEY)
    monkeypatch.setenv("HOOK_URL", "https://hooks.example/secret-path")
    file = tmp_path / "rankscope.toml"
    file.write_text(GOOD)
    file.chmod(0o644)
    code, said = checked(file, capsys)
    assert code == 2
    assert "alerts.channel.controller.url can be read by other users; say chmod 600" in said
    file.write_text(GOOD.replace("https://hooks.example/path", "${HOOK_URL}"))
    code, said = checked(file, capsys)
    assert code == 0
    assert "secret-path" not in said
