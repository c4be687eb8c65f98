"""`rankscope alerts` against a real server: set up from a file, try, list, close."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope import cli
from tests.server.conftest import ServerProcess
from tests.server.receivers import Receiver, receiving, wait_for
from tests.server.seed import seed_run

ROOT = Path(__file__).parents[2]
FILE = """
[channel.pager]
kind = "webhook"
url = "${PAGER_URL}"
signing_key = "${PAGER_KEY}"
quiet = { start = "22:00", end = "07:00", zone = "Europe/Berlin" }

[rule.crashes]
when = { about = "finding", kinds = ["crash"], lasts_seconds = 0 }
channels = ["pager"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = ServerProcess(tmp_path_factory.mktemp("data"), "--look-seconds", "0.2").start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def environment(server: ServerProcess, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_SERVER", server.url)
    monkeypatch.setenv("PAGER_URL", f"{receiver.url}/hook")
    monkeypatch.setenv("PAGER_KEY", "0123456789abcdef")


def test_channels_and_rules_of_a_file_send_and_are_changed_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receiver: Receiver, server: ServerProcess
) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(FILE)
    assert cli.main(["alerts", "apply", str(path)]) == 0
    assert capsys.readouterr().out == "channel pager: made\nrule crashes: made\n"
    assert cli.main(["alerts", "apply", str(path)]) == 0
    assert capsys.readouterr().out == "channel pager: changed\nrule crashes: changed\n"
    assert cli.main(["alerts", "test", "pager"]) == 0
    assert capsys.readouterr().out == "It arrived.\n"
    assert receiver.got[0].path == "/hook"
    seed_run(server.url, run_id="crashed", steps=40, fault="crash")
    wait_for(lambda: len(receiver.got) > 1, "the alert of the crash")

    def listed() -> list[dict[str, Any]]:
        assert cli.main(["alerts", "list", "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["alerts"]
        return [one for one in found if one["rule_name"] == "crashes"]

    (alert,) = listed()
    assert cli.main(["alerts", "list"]) == 0
    assert f"{alert['id']}  critical  {alert['what']}" in capsys.readouterr().out
    assert cli.main(["alerts", "close", str(alert["id"])]) == 0
    assert f"{alert['id']}  closed" in capsys.readouterr().out
    assert listed() == []
    for action, said in (
        ("channels", "pager  webhook  http://127.0.0.1  on"), ("rules", "crashes  finding"),
        ("deliveries", "sent  pager"),
    ):  # fmt: skip
        capsys.readouterr()
        assert cli.main(["alerts", action]) == 0
        out = capsys.readouterr().out
        assert said in out
        assert "/hook" not in out


def test_the_file_of_the_documents_is_taken_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (ROOT / "docs/alerts.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", document, re.S)
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    values = {"LOGS_HEADERS": "Authorization=Basic%20abc"}
    for name in re.findall(r"\$\{(\w+)\}", text):
        value = values.get(name, "https://hooks.example/abc/0123456789abcdef")
        monkeypatch.setenv(name, value)
    assert cli.main(["alerts", "apply", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["channel"] * 5 + ["rule"] * 3


def test_a_test_that_does_not_arrive_says_why_and_ends_with_1(
    receiver: Receiver, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(FILE)
    assert cli.main(["alerts", "apply", str(path)]) == 0
    receiver.status = 403
    capsys.readouterr()
    assert cli.main(["alerts", "test", "pager"]) == 1
    assert capsys.readouterr().out == "It did not arrive: HTTP 403: ok\n"
    receiver.status = 200


@pytest.mark.parametrize(
    ("words", "text", "code", "said"),
    [
        (["test"], "", 64, "say which"),
        (["list", "x"], "", 64, "one word too many"),
        (["test", "nosuch"], "", 1, "no channel 'nosuch'; there are:"),
        (["close", "x"], "", 64, "named by its number"),
        (["close", "999"], "", 1, "no alert 999"),
        (["apply", "FILE"], "[chanel.x]\n", 64, "write [channel.NAME]"),
        (["apply", "FILE"], "x = \n", 64, "line 1"),
        (["apply", "/no/such"], "", 64, "cannot be read"),
        (["apply", "FILE"], "[channel.x]\nkind = 'slack'\nurl = '${NOT_SET}'\n", 64, "export it"),
        (["apply", "FILE"], "[channel.x]\nkind = 'slack'\n", 1, "channel 'x': url is missing"),
        (["apply", "FILE"], "[rule.x]\nchannels = ['y']\n", 1, "rule 'x': no channel 'y'"),
        (["list", "--server", "http://127.0.0.1:9"], "", 2, "does not answer"),
    ],
)
def test_mistakes_are_said_in_words(
    words: list[str], text: str, code: int, said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    arguments = [str(path) if word == "FILE" else word for word in words]
    assert cli.main(["alerts", *arguments]) == code
    assert said in capsys.readouterr().err
