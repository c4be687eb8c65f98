"""What `rankscope run` says of its run: the server's own answers, served by a real HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.node.launch import verdicts
from rankscope.node.launch.verdicts import Verdicts
from rankscope_server.api.findings.schema import ShownVerdict
from rankscope_server.api.overview.schema import Counts, Coverage, Overview, ShownAnswer
from rankscope_server.api.runs.schema import RunSummary, ShortAnswer
from tests.trainer.launch import SMALL

RUN = RunSummary(
    run_id="a b", name="a", status="running", status_text="", started_ms=0.0, ended_ms=None,
    last_seen_ms=0.0, world_size=4, num_nodes=1, hosts=["h"], attempt=0, step=9, command=[],
    launcher="torchrun", tags={}, verdict=None, answer=ShortAnswer(state="healthy", text=""),
)  # fmt: skip
SLOW = ShownVerdict(
    id=1, detector="straggler", kind="slow_compute", severity="critical", state="open", attempt=0,
    ranks=[2], what="Rank 2 is slow", why="It computes 1.9 times as long", next="Look at its GPU",
)  # fmt: skip


def overview(status: str, verdict: ShownVerdict | None) -> Overview:
    return Overview(
        run=msgspec.structs.replace(RUN, status=status),
        coverage=Coverage(
            expected=4, registered=4, reporting=4, silent=[], losses=[], lost=0,
            refused=0, missing_batches=0, text="",
        ),
        verdict=verdict, removed=[],
        answer=ShownAnswer(state="healthy", text="No fault found", detail=""),
        numbers=[], attempts=[], trackers=[],
        counts=Counts(0, None, 0, 0, 0, 0),
    )  # fmt: skip


class Site:
    """Answers as it is told to: the last of `answers` stays."""

    def __init__(self, *answers: Overview | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str | None]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers.get("Authorization")))
                answer = site.answers.pop(0) if len(site.answers) > 1 else site.answers[0]
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write(b"{}" if answer is None else msgspec.json.encode(answer))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.close()


def followed(site: Site, monkeypatch: pytest.MonkeyPatch, looks: int) -> list[str]:
    """Return what is said while so many looks are taken."""
    monkeypatch.setattr(verdicts, "LOOK_SECONDS", 0.01)
    said: list[str] = []
    following = Verdicts(site.url, "", "a b", said.append)
    following.start()
    deadline = threading.Event()
    while len(site.asked) < looks and not deadline.wait(0.01):
        pass
    following.stop()
    following._thread.join()
    return said


THREE = [
    "verdict: Rank 2 is slow", "why: It computes 1.9 times as long", "next: Look at its GPU",
]  # fmt: skip


def test_a_verdict_is_said_once_it_has_stood(
    sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    sites.append(Site(None, overview("running", None), overview("running", SLOW)))
    assert followed(sites[0], monkeypatch, 8) == THREE


def test_one_that_comes_and_goes_is_not_said(
    sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, slow = overview("running", None), overview("running", SLOW)
    sites.append(Site(*[calm, slow] * 3, calm))
    assert followed(sites[0], monkeypatch, 8) == []


def test_another_verdict_is_said_again_and_one_that_is_over_too(
    sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = msgspec.structs.replace(SLOW, severity="info")
    hang = msgspec.structs.replace(SLOW, kind="hang", what="Rank 2 hangs", why="", next="")
    sites.append(
        Site(*[overview("running", one) for one in (SLOW, SLOW, SLOW, hang, hang, info, info)])
    )
    assert followed(sites[0], monkeypatch, 10) == [
        *THREE, "verdict: Rank 2 hangs", "verdict: No fault found",
    ]  # fmt: skip


def test_the_last_one_waits_until_the_run_is_over(sites: list[Site]) -> None:
    late = [overview("running", None)] * 2 + [overview("failed", None), overview("failed", SLOW)]
    sites.append(Site(*late))
    found = Verdicts(sites[0].url, "secret", "a b", pytest.fail).last(20.0)
    assert found is not None
    assert found.lines() == THREE
    assert json.loads(json.dumps(found.verdict))["ranks"] == [2]
    assert set(sites[0].asked) == {("/api/v1/runs/a%20b", "Bearer secret")}


def test_a_server_that_never_answers_is_not_waited_for(sites: list[Site]) -> None:
    sites.append(Site(None))
    assert Verdicts(sites[0].url, "", "a b", pytest.fail).last(60.0) is None
    assert len(sites[0].asked) == 1
    assert Verdicts("http://127.0.0.1:1", "", "x", pytest.fail).last(60.0) is None


def test_what_was_seen_last_is_known_without_another_look(sites: list[Site]) -> None:
    sites.append(Site(overview("stuck", SLOW)))
    following = Verdicts(sites[0].url, "", "a b", lambda text: None)
    assert following.seen is None
    following.last(0.0)
    assert following.seen is not None
    assert following.seen.lines() == THREE


def launched(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the agent on and no server."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    words = ("run", "--dir", str(folder), "--run-id", "alone", "--", *command)
    return subprocess.run(
        [sys.executable, "-m", "rankscope", *words], env=clean | variables,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_without_a_server_the_files_have_the_verdict(tmp_path: Path) -> None:
    done = launched(
        tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "rankscope_trainer",
        *SMALL, "--steps", "80", "--fault", "slow_data:rank=1,start=20,size=250ms",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("rankscope: ")]
    verdict, why, following, ended = said[-4:]
    assert verdict.startswith("rankscope: verdict: Rank 1 ")
    assert why.startswith("rankscope: why: ")
    assert following.startswith("rankscope: next: ")
    assert ended.endswith(f"rankscope report {tmp_path / 'alone'}")


def test_a_command_without_ranks_has_no_verdict(tmp_path: Path) -> None:
    done = launched(tmp_path, sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "verdict:" not in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_a_launcher_for_each_rank_the_first_says_it(rank: str, tmp_path: Path) -> None:
    script = "import rankscope; rankscope.init()"
    who = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
    done = launched(tmp_path, sys.executable, "-c", script, **who)
    assert done.returncode == 0, done.stderr
    assert ("rankscope: verdict: " in done.stderr) == (rank == "0"), done.stderr


def test_files_that_cannot_be_read_are_said_to_be(tmp_path: Path) -> None:
    (found,) = verdicts.of_files(tmp_path, 60.0).lines()
    assert found.startswith(f"verdict: none: {tmp_path}: holds no run")
    assert verdicts.of_files(tmp_path, 0.001).lines() == ["verdict: none within 0.001 s"]
