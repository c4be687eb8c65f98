"""`rankscope report` as people call it: on a run directory, a data folder and a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rankscope import cli
from rankscope.files import journal, ring
from rankscope.wire import schema
from rankscope_server.api.app import create_app
from rankscope_server.report.bundle import CONTENTS
from rankscope_server.settings import Settings
from tests.agent.collector.fake_rank import FakeRank
from tests.server.conftest import Sender, ServerProcess, TestClient, log_line, poster
from tests.server.seed import seed_run, seed_with
from tests.shared_data import SHARED_DATA

S = 10**9
GONE = 5_000_000
SECRET = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def report(*arguments: object, **variables: str) -> Done:
    """Run the command in this process, with 80 columns and no terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, value in ({"COLUMNS": "80"} | variables).items():
            patch.setenv(name, value)
        try:
            code = cli.main(["report", *map(str, arguments)])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def data_of(*arguments: object) -> dict[str, Any]:
    done = report(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def gone_rank(directory: Path, rank: int) -> FakeRank:
    """Return a rank whose process is not there: its number is above what Linux gives."""
    fake = FakeRank(directory, rank, pid=GONE + rank)
    for one in fake.rings:
        fields = list(ring.IDENTITY.unpack_from(one.buffer))
        fields[4] = GONE + rank
        ring.IDENTITY.pack_into(one.buffer, 0, *fields)
    return fake


def hung_run(directory: Path, *, missing: int = 2, with_ends: bool = True) -> int:
    """Write what four ranks leave of which one never enters collective 21, ended 40 s later.

    Returns the wall time of the end.
    """
    now, wall = time.monotonic_ns(), time.time_ns()
    for rank in range(4):
        fake = gone_rank(directory, rank)
        identity: dict[str, Any] = {"attempt": 0, "rank": rank, "time_ns": wall - 60 * S}
        fake.record(
            schema.RankRegistered(
                **identity, world_size=4, local_rank=rank, local_world_size=4, node_rank=0,
                host="node-a", pid=GONE + rank, backend="gloo",
            )
        )  # fmt: skip
        fake.record(schema.GroupDefined(**identity, group="0", ranks=[0, 1, 2, 3], backend="gloo"))
        fake.record(schema.Environment(**identity, facts={"torch": "2.13.0", "python": "3.11.9"}))
        fake.say(f"rank {rank} says hello with {SECRET}")
        for step in range(20):
            at = now - 60 * S + step * S
            number = fake.issue(arrived_ns=at + S // 2, step=step + 1)
            fake.end(number, ended_ns=at + S // 2 + S // 100)
            fake.step(
                started_ns=at, ended_ns=at + S, forward_ns=S // 2, backward_ns=S // 2,
                num_collectives=1,
            )  # fmt: skip
        if rank != missing:
            fake.issue(arrived_ns=now - 40 * S, step=21)
        ring.U64.pack_into(fake.ring.buffer, ring.HEARTBEAT_AT, now - 40 * S)
        ring.U64.pack_into(fake.ring.buffer, ring.STEP_AT, 21)
    if with_ends:
        folder = directory / "node" / "collector"
        folder.mkdir(parents=True)
        writer = journal.JournalWriter(folder)
        for rank in range(4):
            end = schema.RankEnded(
                attempt=0, rank=rank, time_ns=wall, reason="signal", signal=15, last_step=21,
                detail="killed by SIGTERM",
            )  # fmt: skip
            writer.append(journal.RECORD, schema.encode(end))
        writer.close()
    return wall


def test_a_run_directory_without_any_server(tmp_path: Path) -> None:
    run = tmp_path / "job-7"
    hung_run(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = data_of(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before  # only read
    assert found["run"]["run_id"] == "job-7"
    assert (found["verdict"]["kind"], found["verdict"]["ranks"]) == ("hang", [2])
    assert found["run"]["step"] == 21
    assert [row["rank"] for row in found["ranks"]] == [2, 0, 1, 3]  # the culprit first
    assert {row["exit_text"] for row in found["ranks"]} == {"killed by SIGTERM"}
    skipped = [one["name"] for one in found["detectors"] if one["state"] == "skipped"]
    told = " ".join(found["not_measured"])
    assert skipped
    assert all(f"{name}: " in told for name in skipped)


def test_without_a_witness_of_the_end_nobody_is_accused(tmp_path: Path) -> None:
    """A machine that lost power: the record is looked at as of its last sign."""
    wall = hung_run(tmp_path / "job", with_ends=False)
    found = data_of(tmp_path / "job")
    seen = [row["last_seen_ms"] for row in found["ranks"]]
    assert max(seen) <= wall / 1e6 + 1_000  # their lines were written a moment later
    assert {row["state"] for row in found["ranks"]} == {"silent"}
    assert found["verdict"] is None
    assert found["answer"]["state"] != "healthy"
    assert "how its ranks ended is not known" in found["notes"][0]


@pytest.mark.parametrize(
    ("encoding", "side", "top", "bottom"), [("utf-8", "│", "╭─", "╰"), ("ascii", "|", "+-", "+")]
)
def test_the_first_screen_holds_everything(
    tmp_path: Path, encoding: str, side: str, top: str, bottom: str
) -> None:
    """As a program of its own, on a terminal of 80 columns and 24 lines."""
    hung_run(tmp_path / "job")
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "report", str(tmp_path / "job")],
        env=os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": encoding, "PYTHONWARNINGS": "error"},
        capture_output=True, encoding=encoding, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    screen = done.stdout.splitlines()[:24]
    text = "\n".join(screen)
    assert "py-spy" not in done.stdout  # no process is left to look at
    for label in ("What", "Why", "Cost", "Next", "Sure", "Disproved if", "Ruled out"):
        assert f"{side} {label} " in text, label
    assert screen[0].startswith(f"{top} Culprit found")
    assert any(line.startswith(bottom) for line in screen)
    assert "Not measured: unknown, not healthy" in done.stdout


class Markup(HTMLParser):
    """Collects tags, and everything that a browser could load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "data", "action", "poster", "background")
        self.loads += [value or "" for name, value in attrs if name in names or name[:2] == "on"]


def test_the_page_loads_nothing_and_says_all(tmp_path: Path) -> None:
    run = tmp_path / "job"
    hung_run(run)
    gone_rank(run, 9).say("<script>alert(1)</script><img src=http://x/y>")
    done = report(run, "--html", tmp_path / "a.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.html").read_text()
    seen = Markup()
    seen.feed(text)
    assert seen.loads == []
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert not re.search(r"url\(|@import|https?://", text.replace("http://x/y", ""))
    assert "default-src 'none'" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "light-dark(" in text
    assert "@media print" in text
    found = data_of(run)
    for row in found["summary"]:
        assert row["text"].replace("'", "&#x27;").replace(">", "&gt;")[:60] in text


def test_the_bundle_holds_what_the_page_says_and_no_secret(tmp_path: Path) -> None:
    run = tmp_path / "job"
    hung_run(run)
    done = report(run, "--bundle", tmp_path / "a.zip")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert list(files) == [name for name, _ in CONTENTS]
    document = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    assert re.findall(r"^\| `([\w.]+)` \| (.+) \|$", document, re.M) == list(CONTENTS)
    for name, text in files.items():
        assert "ghp_" not in text, name
    assert "says hello with ***" in files["last_lines.txt"]
    assert json.loads(files["versions.json"])["run"]["torch"] == "2.13.0"
    assert json.loads(files["report.json"])["verdict"]["ranks"] == [2]


def test_a_data_folder_of_a_server_that_is_down(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    settings = Settings(data_dir=str(folder), look_seconds=3600.0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        seed_with(poster(client), run_id="older", steps=100, start_ns=time.time_ns() - 3600 * S)
        Sender(client, "newer").send(
            log_line("a password: password=hunter2hunter2", time_ns=time.time_ns()),
            schema.Environment(
                attempt=0, rank=0, time_ns=time.time_ns(), facts={"env.MY_TOKEN": "abc"}
            ),
        )
        client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    found = data_of(folder, "--run", "older")
    assert found["verdict"]["ranks"] == [2]
    found = data_of(folder)
    assert found["run"]["run_id"] == "newer"
    assert "older" in found["notes"][0]
    assert "hunter2" not in json.dumps(found)
    assert found["environment"]["common"] == [{"fact": "env.MY_TOKEN", "value": "***"}]
    done = report(folder, "--run", "no-such")
    assert done.returncode == 2
    assert "older" in done.stderr


@pytest.mark.multiproc
def test_a_run_on_a_server(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start_server("--look-seconds", "0.2", RANKSCOPE_TOKEN="t0ken")
    seed_run(server.url, token="t0ken", run_id="on-server", steps=100)
    deadline = time.monotonic() + 30
    while True:
        done = report("on-server", "--server", server.url, "--json", RANKSCOPE_TOKEN="t0ken")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        if found["verdict"] is not None and found["verdict"]["ranks"] == [2]:
            break
        assert time.monotonic() < deadline, found["answer"]
        time.sleep(0.3)
    assert found["source"] == server.url
    assert found["budget"]["rows"]
    assert report("no-such", "--server", server.url, RANKSCOPE_TOKEN="t0ken").returncode == 2
    refused = report("on-server", "--server", server.url, RANKSCOPE_TOKEN="")
    assert refused.returncode == 2
    assert "token" in refused.stderr


def test_what_cannot_be_reported_says_why(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr
    done = report("some-run", "--server", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "is the server up, or did you mean a directory?" in done.stderr
    done = report(tmp_path / "a", tmp_path / "b")
    assert done.returncode == 2
    assert "no such files or directories" in done.stderr
    hung_run(tmp_path / "runs" / "one")
    done = report(tmp_path / "runs", "--html", tmp_path / "missing" / "a.html")
    assert done.returncode == 2
    assert "not written" in done.stderr
    assert report().returncode == 64


DUMPS = SHARED_DATA / "flight_recorder" / "gpu_error_1st"


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
def test_a_folder_of_dumps_is_reported_without_a_server() -> None:
    found = data_of(DUMPS)
    assert found["verdict"]["ranks"] == [12, 14]
    assert "flight-recorder" in found["source"]
