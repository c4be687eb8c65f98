"""The whole command as a process of its own: agents that meet, Ctrl-C, files, the launch gate."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

# one after the other: they look for agents on this machine, and want the same ports
pytestmark = pytest.mark.together("agents of preflight")

COMMAND = [sys.executable, "-m", "rankscope"]
# What this machine may really have is no matter of these tests: one check answers for all.
ONE_CHECK = ("--only", "port.master.free")
GOLDEN = Path(__file__).parent / "report" / "golden"
LIMIT_S = 200  # of one call on a machine that does much else; an idle one needs some 2 s


@pytest.fixture
def port() -> int:
    """Return a port below the ephemeral range that nobody holds."""
    for number in range(29600, 29900):
        with socket.socket() as probe:
            try:
                probe.bind(("", number))
            except OSError:
                continue
            return number
    raise AssertionError("no free port")


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return variables without a launcher's, and with a place for what a run records."""
    prefixes = ("RANKSCOPE", "SLURM", "MASTER", "OMPI", "RANK", "WORLD", "LOCAL_", "TORCHELASTIC")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    places = {"RANKSCOPE_DIR": str(tmp_path / "runs"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return clean | places | {"COLUMNS": "100"} | more


def call(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], env=environ(tmp_path, **more), cwd=tmp_path, capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.fixture
def waiting(tmp_path: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Start an agent that waits for another one, which never comes."""
    words = ["preflight", "--nodes", "127.0.0.1,192.0.2.1", "--node", "127.0.0.1", "--quick",
             "--only", "node.absent,port.master.free"]  # fmt: skip
    process = subprocess.Popen(
        [*COMMAND, *words, "--master-port", str(port)], env=environ(tmp_path), cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_one_machine_is_checked_and_every_report_is_written(tmp_path: Path, port: int) -> None:
    places = {name: str(tmp_path / name) for name in ("json", "junit", "html", "exclude-list")}
    words = [word for name, place in places.items() for word in (f"--{name}", place)]
    done = call(tmp_path, "preflight", "--quick", "--master-port", str(port), *ONE_CHECK, *words)
    assert done.returncode == 0, done.stderr
    assert "exit 0" in done.stdout
    document = json.loads((tmp_path / "json").read_bytes())
    assert document["exit_code"] == 0
    assert len(document["verdict"]["reported"]) == 1
    assert (tmp_path / "junit").read_text().count("<testcase") == len(
        document["verdict"]["results"]
    )
    assert (tmp_path / "html").read_text().startswith("<!DOCTYPE html>")
    assert "looking at this node" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_ctrl_c_prints_what_is_known_and_leaves_no_port(
    waiting: subprocess.Popen[str], port: int
) -> None:
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "waiting for" in line:
            assert "192.0.2.1" in line
            assert "1 of 2 reported" in line
            break
    waiting.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = waiting.communicate(timeout=LIMIT_S)
    assert time.monotonic() - started < 30
    assert waiting.returncode == 3
    assert "interrupted" in out
    assert "192.0.2.1: no report" in out
    assert "Traceback" not in err
    with socket.socket() as probe:
        probe.bind(("", port))


def test_ctrl_c_twice_ends_it(waiting: subprocess.Popen[str]) -> None:
    assert waiting.stderr is not None
    next(line for line in waiting.stderr if "waiting for" in line)
    waiting.send_signal(signal.SIGINT)
    time.sleep(0.05)  # as fast as a person
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=LIMIT_S)
    assert (waiting.returncode, "Traceback" in err) == (3, False), err


def redirected(tmp_path: Path, port: int, code: int, redirect: str) -> tuple[int, str]:
    """Run a preflight that ends with `code`, a stream changed by a shell; return code, stderr."""
    words = ["--quick", "--master-port", str(port), *ONE_CHECK]
    if code:
        words = ["merge", str(GOLDEN / "red.json"), "-v"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", *COMMAND, "preflight", *words, "--json", "out"],
        env=environ(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    stages = ("rankscope preflight: looking", "rankscope preflight: waiting")
    said = [line for line in done.stderr.splitlines() if not line.startswith(stages)]
    return done.returncode, "\n".join(said)


@pytest.mark.parametrize("code", [0, 2])
def test_a_reader_who_has_seen_enough_changes_no_exit_code(
    code: int, tmp_path: Path, port: int
) -> None:
    ended = redirected(tmp_path, port, code, "| true; exit ${PIPESTATUS[0]}")
    assert ended == (code, "")
    assert json.loads((tmp_path / "out").read_bytes())["exit_code"] == code


@pytest.mark.parametrize(("code", "ends_with"), [(0, 3), (2, 2)])
def test_a_stdout_that_takes_nothing_is_no_pass(
    code: int, ends_with: int, tmp_path: Path, port: int
) -> None:
    full = "rankscope preflight: the answer cannot be shown: No space left on device"
    assert redirected(tmp_path, port, code, "> /dev/full") == (ends_with, full)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("redirect", ["2>&-", ">&-"])
def test_a_stream_that_is_closed_takes_nothing_and_breaks_nothing(
    redirect: str, code: int, tmp_path: Path, port: int
) -> None:
    assert redirected(tmp_path, port, code, redirect) == (code, "")
    assert (tmp_path / "out").exists()


def test_a_limit_of_time_ends_it_with_what_is_known(tmp_path: Path, port: int) -> None:
    limit = ("--timeout", "0.001")
    done = call(tmp_path, "preflight", "--master-port", str(port), *ONE_CHECK, *limit)
    assert done.returncode == 3, done.stderr
    assert "interrupted" in done.stdout


def test_a_report_on_stdout_is_evaluated_elsewhere(tmp_path: Path, port: int) -> None:
    nodes = ("--nodes", "127.0.0.1,192.0.2.1", "--node", "127.0.0.1", "--wait", "1000")
    words = ("--emit", "--quick", "--master-port", str(port), *ONE_CHECK)
    emitted = call(tmp_path, "preflight", *words, *nodes)
    assert emitted.returncode == 0, emitted.stderr
    assert emitted.stdout.count("\n") == 1
    (tmp_path / "all.jsonl").write_text(emitted.stdout)
    merged = call(tmp_path, "preflight", "merge", "all.jsonl", "--quick")
    assert "1 node" in merged.stdout  # --nodes was not given to it
    assert merged.returncode == 0, merged.stderr


def test_two_agents_that_go_by_one_name_are_found(tmp_path: Path, port: int) -> None:
    share = tmp_path / "share"
    share.mkdir()
    words = ["preflight", "--nodes", "127.0.0.1,192.0.2.1", "--node", "127.0.0.1", "--quick",
             "--share", str(share), "--wait", str(LIMIT_S), "--only", "node.twice"]  # fmt: skip
    agents = [
        subprocess.Popen(
            [*COMMAND, *words, "--json", str(tmp_path / f"{number}.json"),
             "--master-port", str(port + number)],  # with one port the second waits for its turn
            env=environ(tmp_path), cwd=tmp_path,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for number in range(2)
    ]  # fmt: skip
    pids = {agent.pid for agent in agents}
    try:
        have_noticed: set[int] = set()
        deadline = time.monotonic() + LIMIT_S
        while have_noticed != pids:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            for path in share.glob("*/*.json"):
                report = json.loads(path.read_bytes().splitlines()[0])["report"]
                if report.get("claims"):
                    have_noticed.add(report["pid"])
        for agent in agents:
            agent.send_signal(signal.SIGINT)
            agent.wait(LIMIT_S)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    for number in range(2):
        document = json.loads((tmp_path / f"{number}.json").read_bytes())
        (finding,) = (f for f in document["verdict"]["findings"] if f["id"] == "node.twice")
        assert finding["nodes"] == ["127.0.0.1"]
        assert {agent["pid"] for agent in finding["evidence"]["agents"]} == pids
        assert finding["status"] == "warn"  # one machine has both


MARK = "import pathlib; pathlib.Path('launched').touch()"


def launch(
    tmp_path: Path, port: int, *words: str, busy: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    with socket.socket() as holder:
        if busy:
            holder.bind(("", port))
            holder.listen()
        return call(
            tmp_path, "run", *words, "--", sys.executable, "-c", MARK,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1",
            LOCAL_RANK="0", RANKSCOPE_PROBE_BUILD="0", **more,
        )  # fmt: skip


def test_the_gate_refuses_a_launch_whose_port_is_taken(tmp_path: Path, port: int) -> None:
    done = launch(tmp_path, port, "--preflight=quick", busy=True)
    assert done.returncode == 78, done.stderr
    assert "not launched:" in done.stderr
    assert str(port) in done.stderr
    assert not (tmp_path / "launched").exists()


def test_the_gate_only_warns_if_asked_so(tmp_path: Path, port: int) -> None:
    done = launch(tmp_path, port, "--preflight=quick", "--preflight-on", "never", busy=True)
    assert (tmp_path / "launched").exists(), done.stderr
    assert done.returncode == 0
    assert "FAIL 1" in done.stderr


@pytest.mark.core
@pytest.mark.parametrize(("refuse_on", "code"), [("warn", 78), ("fail", 0)])
def test_the_gate_refuses_warnings_if_asked_so(tmp_path: Path, refuse_on: str, code: int) -> None:
    with socket.socket() as probe:  # a port that the kernel hands out: that is a warning
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    done = launch(tmp_path, port, "--preflight=quick", "--preflight-on", refuse_on)
    assert f"MASTER_PORT {port} is in the ephemeral range" in done.stderr
    assert done.returncode == code, done.stderr
    assert (tmp_path / "launched").exists() == (code == 0)


def test_the_gate_lets_a_good_launch_through_and_its_ports_are_free(
    tmp_path: Path, port: int
) -> None:
    words = [sys.executable, "-c", f"import socket; socket.create_server(('', {port}))"]
    done = call(
        tmp_path, "run", "--preflight=quick", "--", *words, MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rankscope preflight" in done.stderr


def test_the_gate_names_wrong_usage(tmp_path: Path) -> None:
    done = call(tmp_path, "run", "--preflight", "--preflight-nodes", "a[2-1]", "--", "true")
    assert done.returncode == 64
    assert "--preflight-nodes" in done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    ready = tmp_path / "ready"
    words = ["serve", "--port", "0", "--ready-file", str(ready), "--data-dir", str(tmp_path / "db")]
    process = subprocess.Popen(
        [*COMMAND, *words], env=environ(tmp_path), cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists() or not ready.read_text().endswith("}"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait(20)


def fetched(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=20) as answer:
        document: dict[str, object] = json.loads(answer.read())
    return document


def test_the_result_is_kept_on_the_server_whichever_way_it_came_about(
    tmp_path: Path, port: int, server: str
) -> None:
    quick = ("preflight", "--quick", "--master-port", str(port))
    uploaded = call(tmp_path, *quick, RANKSCOPE_SERVER=server)
    met_there = call(tmp_path, *quick, "--server", server, "--run", "seven")
    for done in (uploaded, met_there):
        found = re.search(r"http\S+", done.stdout)
        assert found is not None, done.stdout + done.stderr
        verdict = fetched(found[0])["verdict"]
        assert isinstance(verdict, dict)
        assert len(verdict["reported"]) == 1


def test_a_server_that_is_away_costs_a_sentence_and_not_the_answer(
    tmp_path: Path, port: int
) -> None:
    away = "http://127.0.0.1:9"
    words = ("preflight", "--quick", "--master-port", str(port), *ONE_CHECK)
    done = call(tmp_path, *words, RANKSCOPE_SERVER=away)
    assert done.returncode == 0, done.stderr
    assert "was not kept on the server" in done.stderr
    assert "1 check passed" in done.stdout
