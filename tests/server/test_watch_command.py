"""`rankscope watch` and `rankscope search` show in the terminal what the API says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rankscope.cli.storage import StorageFailed
from rankscope.cli.watch import Watching
from rankscope.wire import schema, zstd
from tests.api import get
from tests.command_server import run
from tests.ports import free_port
from tests.server.conftest import Sender, ServerProcess, log_line
from tests.server.seed import post_body, seed_run, wait_until_judged

PATIENCE_SECONDS = 40.0


def environ() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return kept | {"COLUMNS": "200"}


def rankscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "rankscope", *arguments], env=environ())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("watched")).start()
    seed_run(server.url, run_id="slow", ranks=4, steps=300, slow_rank=2)
    seed_run(server.url, run_id="well", ranks=2, steps=60, fault="none")
    wait_until_judged(server.url)
    yield server
    server.close()


def test_one_look_has_the_answer_and_the_ranks_worst_first(server: ServerProcess) -> None:
    done = rankscope("watch", "slow", "--once", "--server", server.url)
    page = get(f"{server.url}/api/v1/runs/slow")
    assert page["verdict"]["severity"] == "critical"
    assert done.returncode == 1, done.stderr
    assert page["answer"]["text"] in done.stdout
    (slow,) = page["verdict"]["ranks"]
    table = done.stdout[done.stdout.index("rank  host") :].splitlines()
    assert table[1].split()[0] == str(slow)
    mesh = get(f"{server.url}/api/v1/runs/slow/parallelism")["mesh"]
    (column,) = (one for one in mesh["values"] if one["key"] == "own_ms")
    assert f"{column['values'][mesh['rank'].index(slow)]:,.1f} ms" in table[1]


def test_scripts_get_the_answers_of_the_api(server: ServerProcess) -> None:
    done = rankscope("watch", "well", "--once", "--json", "--server", server.url)
    assert done.returncode == 0, done.stderr
    looked = json.loads(done.stdout)
    page = get(f"{server.url}/api/v1/runs/well")
    assert {name: looked[name] for name in page} == page
    assert {row["rank"] for row in looked["ranks"]} == {0, 1}
    assert all(row["own_ms"] > 0 for row in looked["ranks"])


def test_a_live_run_is_watched_to_its_end(server: ServerProcess) -> None:
    """Without a run it is the newest live one; it ends with that."""
    seed_run(server.url, run_id="live", ranks=2, steps=40, fault="none", end=False)
    with started("watch", "--server", server.url, "--every", "0.2", "--json") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert first["run"]["run_id"] == "live"
        assert first["run"]["ended_ms"] is None
        ended = [
            schema.RankEnded(attempt=0, rank=rank, time_ns=time.time_ns(), reason="clean")
            for rank in range(2)
        ]
        send(server, Sender(None, "live", "other"), *ended)  # type: ignore[arg-type]
        *_, last = map(json.loads, watching.stdout)
        assert last["run"]["status"] == "ended"
        assert watching.wait(PATIENCE_SECONDS) == 0


def test_what_cannot_be_watched(server: ServerProcess) -> None:
    lost = rankscope("watch", "no-such", "--once", "--server", server.url)
    assert (lost.returncode, "no run 'no-such'" in lost.stderr) == (2, True)
    away = rankscope("watch", "--once", "--server", f"127.0.0.1:{free_port()}")
    assert (away.returncode, "does not answer" in away.stderr) == (2, True)
    often = rankscope("watch", "slow", "--every", "0", "--server", server.url)
    assert (often.returncode, "0.2 to 3,600" in often.stderr) == (64, True)


class Answers:
    """A server that is away for some questions."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def ask(self, _method: str, path: str) -> dict[str, Any]:
        if path.endswith(("/ranks", "/findings", "/parallelism")):
            return {"ranks": [], "open": [], "mesh": {"rank": [], "values": []}}
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"run": {"status": answer}, "verdict": None}


def test_a_server_that_starts_again_is_waited_for() -> None:
    client = Answers("running", StorageFailed("away"), StorageFailed("away"), "ended")
    shown: list[str] = []
    watching = Watching(client, "run", sleep=lambda _: None)  # type: ignore[arg-type]
    last = watching.watch(lambda seen: shown.append(seen.page["run"]["status"]), 1.0, once=False)
    assert shown == ["running", "ended"]
    assert last.is_over
    refused = Answers("running", StorageFailed("410", 410))
    with pytest.raises(StorageFailed, match="410"):
        Watching(refused, "run", sleep=lambda _: None).watch(  # type: ignore[arg-type]
            lambda _seen: None, 1.0, once=False
        )


# --- search --------------------------------------------------------------------------------------


def test_lines_are_those_of_the_page_oldest_first(server: ServerProcess) -> None:
    query = "level:>=warning"
    done = rankscope("search", query, "--run", "slow", "--limit", "7", "--json",
                     "--server", server.url)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    page = get(f"{server.url}/api/v1/runs/slow/logs?q={query}&limit=7")
    assert len(lines) == 7  # more than a page whose alike lines were folded
    assert lines[-len(page["lines"]) :] == page["lines"][::-1]
    everywhere = rankscope("search", query, "--limit", "3", "--server", server.url)
    assert all(re.search(r" (slow|well|live) ", line) for line in everywhere.stdout.splitlines()
               if line[:2] == "20")  # fmt: skip


def test_more_lines_than_a_page_has(server: ServerProcess) -> None:
    sender = Sender(None, "well", "many")  # type: ignore[arg-type]
    lines = [log_line(f"wordy {at:04}", time_ns=time.time_ns() + at) for at in range(1_200)]
    send(server, sender, *lines)
    done = rankscope("search", "wordy", "--run", "well", "--limit", "1100", "--json",
                     "--server", server.url)  # fmt: skip
    found = [json.loads(line)["message"] for line in done.stdout.splitlines()]
    assert found == [f"wordy {at:04}" for at in range(100, 1_200)]


def test_nothing_found_and_a_bad_query(server: ServerProcess) -> None:
    none = rankscope("search", "nowhere-to-be-found", "--run", "slow", "--server", server.url)
    assert (none.returncode, none.stdout) == (1, "")
    bad = rankscope("search", 'step:12 "abc', "--run", "slow", "--server", server.url)
    assert bad.returncode == 64
    said, query, mark = bad.stderr.splitlines()
    assert "quotation mark" in said
    assert query[mark.index("^")] == '"'
    spaced = rankscope("search", "日本  a\x1b   (b", "--run", "slow", "--server", server.url)
    _, query, mark = spaced.stderr.splitlines()
    assert query[mark.index("^") - len("日本")] == "("  # each of the two is two places wide
    both = rankscope("search", "x", "--follow", "--facets", "--server", server.url)
    assert (both.returncode, "--follow" in both.stderr) == (64, True)
    lost = rankscope("search", "x", "--run", "no-such", "--server", server.url)
    assert (lost.returncode, "no run 'no-such'" in lost.stderr) == (2, True)


def test_new_lines_are_followed_until_ctrl_c(server: ServerProcess) -> None:
    seed_run(server.url, run_id="tailed", ranks=2, steps=20, fault="none", end=False)
    with started("search", "needle", "--run", "tailed", "--follow", "--json",
                 "--server", server.url) as following:  # fmt: skip
        assert following.stdout is not None
        sender = Sender(None, "tailed", "later")  # type: ignore[arg-type]
        for number in range(3):
            at = log_line(f"needle {number}", time_ns=time.time_ns())
            send(server, sender, log_line("hay"), at)
            assert json.loads(following.stdout.readline())["message"] == f"needle {number}"
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE_SECONDS) == 130


def test_new_lines_of_all_runs_are_followed(server: ServerProcess) -> None:
    with started("search", "needle42", "--follow", "--json", "--server", server.url) as following:
        assert following.stdout is not None
        for number in range(4):
            sender = Sender(None, f"many-{number % 2}", f"p{number}")  # type: ignore[arg-type]
            at = log_line(f"needle42 {number}", time_ns=time.time_ns())
            send(server, sender, log_line("hay"), at)
            line = json.loads(following.stdout.readline())
            assert (line["message"], line["run_id"]) == (
                f"needle42 {number}", f"many-{number % 2}",
            )  # fmt: skip
        following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE_SECONDS) == 130


def test_lines_are_counted_by_what_they_are_of(server: ServerProcess) -> None:
    for run_id, count in (("counted-1", 3), ("counted-2", 5)):
        sender = Sender(None, run_id, "p")  # type: ignore[arg-type]
        lines = [log_line(f"tally {at}", rank=at % 2, level=40) for at in range(count)]
        send(server, sender, *lines)
    done = rankscope("search", "tally", "--facets", "--server", server.url)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines() if line]
    assert said[0] == ["8", "lines"]
    assert said[said.index(["run"]) + 1 :][:2] == [["5", "counted-2"], ["3", "counted-1"]]
    assert said[said.index(["rank"]) + 1 :][:2] == [["5", "rank", "0"], ["3", "rank", "1"]]
    as_json = rankscope("search", "tally", "--facets", "--json", "--run", "counted-1",
                        "--server", server.url)  # fmt: skip
    assert json.loads(as_json.stdout)["facets"]["level"] == [["ERROR", 3]]


def send(server: ServerProcess, sender: Sender, *records: Any) -> None:
    post_body(server.url, zstd.pack(sender.body(*records)))


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rankscope", *words]
    process = subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
