"""A real server process: its start, its stream, its end, and what survives its death."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run, wait_until_judged
from tests.server.streams import Stream

ROOT = Path(__file__).parents[2]
Start = Callable[..., ServerProcess]


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=10) as reply:
        return json.load(reply)


def test_stream_hints_resume_heartbeat_and_end(start_server: Start) -> None:
    server = start_server(RANKSCOPE_SERVER_HEARTBEAT_SECONDS="0.3")
    address = f"{server.url}/api/v1/stream?topics=runs,run:demo-run"
    stream = Stream(address)
    deadline = time.monotonic() + 10
    while not stream.comments and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stream.comments == [": heartbeat"] * len(stream.comments) != []
    assert stream.headers is not None
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-accel-buffering"] == "no"
    seed_run(server.url, steps=60, pause_seconds=0.2)

    def changed(topic: str) -> Callable[[list[dict[str, str]]], bool]:
        return lambda events: any(json.loads(event["data"])["topic"] == topic for event in events)

    def named(events: list[dict[str, str]]) -> set[str]:
        ours = [json.loads(event["data"]) for event in events if changed("run:demo-run")([event])]
        return {name for event in ours for name in event["changed"]}

    stream.wait_for(changed("runs"))
    stream.wait_for(changed("run:demo-run"))
    stream.wait_for(lambda events: {"steps", "logs", "ranks"} <= named(events))
    ours = [event for event in stream.events if changed("run:demo-run")([event])]
    times = [json.loads(event["data"])["time_ms"] for event in ours]
    assert all(after - before >= 450 for before, after in itertools.pairwise(times))
    # A reader that comes back gets what it missed; one from another server life starts anew.
    first, *later = [event["id"] for event in stream.events]
    resumed = Stream(address, first)
    resumed.wait_for(lambda events: len(events) >= len(later))
    assert [event["id"] for event in resumed.events[: len(later)]] == later
    foreign = Stream(address, "0badcafe-3")
    foreign.wait_for(lambda events: bool(events) and events[0]["event"] == "reload")
    # Open streams do not hold the server up.
    assert server.end(signal.SIGTERM) < 5
    assert stream.ended.wait(5)
    assert server.process is not None
    assert server.process.returncode == 0
    output = server.output()
    assert "Traceback" not in output, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(start_server: Start, number: int) -> None:
    server = start_server()
    output_url = server.url
    assert server.end(number) < 5
    assert server.process is not None
    assert server.process.returncode == 0
    assert not server.ready.exists()
    output = server.output()
    assert output_url in output
    assert "Traceback" not in output, output
    assert start_server().url  # the next start trips over nothing


def test_a_bad_topic_is_refused(start_server: Start) -> None:
    server = start_server()
    with pytest.raises(urllib.error.HTTPError) as failure:
        get(server, "/api/v1/stream?topics=run:../x")
    with failure.value as error:
        assert error.code == 422


def test_a_second_server_on_the_same_data_says_why_not(start_server: Start, tmp_path: Path) -> None:
    first = start_server()
    assert first.process is not None
    command = [sys.executable, "-m", "rankscope_server.cli", "--port", "0"]
    second = subprocess.run(
        [*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 1
    assert f"in use by process {first.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "no token is set"),
        (["--port", "99999"], "port 99999 is outside"),
        (["--host", "203.0.113.7", "--insecure-bind"], "cannot listen on 203.0.113.7"),
        (["--data-dir", "/proc/nothing"], ""),
        (["--database-url", "sqlite:////dev/null/x.db"], ""),
    ],
)
def test_what_cannot_work_is_one_clear_line(flags: list[str], says: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "RANKSCOPE_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--data-dir", str(tmp_path),
         *flags],
        capture_output=True, text=True, timeout=60, env=environ,
    )  # fmt: skip
    assert done.returncode != 0
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def wait_until_written(server: ServerProcess, words: str) -> None:
    """Wait until the first finding says so: numbers alone are written some seconds later."""
    deadline = time.monotonic() + 60.0
    while words not in json.dumps(get(server, "/api/v1/runs/demo-run/findings")["open"][:1]):
        assert time.monotonic() < deadline, words
        time.sleep(0.1)


def test_killed_and_restarted_it_knows_what_it_knew(start_server: Start) -> None:
    paths = ["/findings", "/map", "/ranks", "/logs", "/collectives", "/errors", "/environment"]
    # on a busy machine the test takes longer than a rank may be silent: that is a finding
    patient = ("--silent-after-seconds", "3600")
    first = start_server(*patient)
    seed_run(first.url, steps=200, end=False)
    wait_until_judged(first.url)
    wait_until_written(first, "121 steps")  # it is slow from step 80 on
    before = {path: get(first, f"/api/v1/runs/demo-run{path}") for path in paths}
    verdict = get(first, "/api/v1/runs/demo-run")["verdict"]
    first.end(signal.SIGKILL)
    second = start_server(*patient)
    wait_until_judged(second.url)
    after = {path: get(second, f"/api/v1/runs/demo-run{path}") for path in paths}
    for answer in (before, after):
        for finding in answer["/findings"]["open"]:
            del finding["updated_ms"]
        for rank in answer["/ranks"]["ranks"]:
            del rank["state"]
    assert after == before
    again = get(second, "/api/v1/runs/demo-run")["verdict"]
    assert (again and again["what"]) == (verdict and verdict["what"])


def test_three_kills_lose_nothing_and_store_nothing_twice() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/kill_server.py"), "--kills", "3", "--json"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert done.returncode == 0, result
    assert result["passed"]
    assert result["acknowledged"] > 20
