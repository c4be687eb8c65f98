"""A server asks live ranks: stacks, a profile, recording off and on, and what a hang asks for."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import api, fork_server
from tests.agent import recorded
from tests.command_server import run
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
PROGRAM = Path(__file__).with_name("loop_program.py")
TOKEN = "open sesame"
SECONDS = 60.0


class Loop:
    """The small DDP loop on two ranks, under `rankscope run`, and its server."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        (folder / "server").mkdir(parents=True)
        self.server = ServerProcess(folder / "server", RANKSCOPE_TOKEN=TOKEN).start()
        self.stop_file, self.losses = folder / "stop", folder / "losses"
        self.variables = recorded.environment(folder, **variables) | {
            "RANKSCOPE_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        for name in ("RANKSCOPE", "RANKSCOPE_RUN_ID", "RANKSCOPE_COLLECTOR", "PYTHONPATH"):
            self.variables.pop(name)
        launch = [
            sys.executable, "-m", "rankscope", "run", "--server", self.server.url,
            "--run-id", "loop", "--", *command(self.losses, self.stop_file),
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(launch, env=self.variables, stdout=log, stderr=log)

    def request(self, path: str, body: Any = None, token: str = TOKEN, **headers: str) -> bytes:
        request = urllib.request.Request(
            f"{self.server.url}/api/v1/runs/loop{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers,
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            content: bytes = reply.read()
        return content

    def get(self, path: str = "") -> dict[str, Any]:
        return api.get(f"{self.server.url}/api/v1/runs/loop{path}", TOKEN)

    def until(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (found := what()):
            log = (self.folder / "log").read_text(errors="replace")
            assert self.process.poll() is None, log[-3000:]
            assert time.monotonic() < deadline, log[-3000:]
            time.sleep(0.1)
        return found

    def step(self) -> int:
        return int(self.get().get("run", {}).get("step") or 0)

    def ask(self, **wanted: Any) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.request("/commands", wanted))
        return made

    def done(self, asked: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what became of a command by rank, once all of them have answered."""

        def finished() -> dict[str, Any] | None:
            command = self.get(f"/commands/{asked['id']}")
            return None if command["is_open"] else command

        return {one["rank"]: one for one in self.until(finished)["ranks"]}

    def num_collectives(self) -> int:
        return sum(row["count"] for row in self.get("/collectives")["rows"])

    def collector_pid(self) -> int:
        return int((self.run_directory() / "node" / "pid").read_text())

    def run_directory(self) -> Path:
        (found,) = self.folder.rglob("loop/node")
        return found.parent

    def end(self) -> int:
        self.stop_file.touch()
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.server.close()


def command(losses: Path, stop: Path, *steps: str) -> list[str]:
    return [*fork_server.launcher(2), str(PROGRAM), str(losses), str(stop), *steps]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path)
    try:
        loop.until(lambda: loop.step() >= 5)
        yield loop
    finally:
        loop.close()


def test_stacks_profile_off_and_on(loop: Loop, tmp_path: Path) -> None:
    """Everything of one run, in the order in which a person would ask."""
    _stacks(loop)
    _profile(loop)
    _own_profiler_comes_first(loop)
    _off_and_on(loop)
    _files_are_private(loop)
    _ends_within_a_profile(loop)
    _late(loop)
    _results_are_identical(loop, tmp_path)


def _stacks(loop: Loop) -> None:
    done = loop.done(loop.ask(kind="stacks", ranks=[0, 1]))
    assert {rank: one["state"] for rank, one in done.items()} == {0: "done", 1: "done"}
    for rank in (0, 1):
        (stacks,) = loop.get(f"/ranks/{rank}")["stacks"]
        assert "loop_program.py" in stacks["text"]
        assert stacks["reason"] == "asked for by user"


def _profile(loop: Loop) -> None:
    (done,) = loop.done(loop.ask(kind="profile", ranks=[1], num_steps=2)).values()
    assert (done["rank"], done["state"]) == (1, "done"), done
    assert done["reason"].startswith("2 steps in")
    packed = loop.request(done["trace"].removeprefix("api/v1/runs/loop"))
    assert len(packed) == done["trace_bytes"]
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("aten::addmm") == 2  # one forward in each of the two steps
    assert any(name.startswith("gloo:all_reduce") for name in names)
    summed = {one["name"]: one for one in done["operators"]}
    assert summed["aten::addmm"]["count"] == 2
    total = sum(event["dur"] for event in events if event.get("name") == "aten::addmm")
    assert summed["aten::addmm"]["total_ms"] == pytest.approx(total / 1e3, rel=1e-3)
    assert 0 < summed["aten::addmm"]["self_ms"] <= summed["aten::addmm"]["total_ms"]


def _own_profiler_comes_first(loop: Loop) -> None:
    """The script's profiler starts within our window: ours gives way, the script sees nothing."""
    switch = loop.stop_file.with_suffix(".profile")
    switch.touch()
    try:
        done = loop.done(loop.ask(kind="profile", ranks=[1], num_steps=20))
    finally:
        switch.unlink()
    assert done[1]["state"] == "refused"
    assert "of the script" in done[1]["reason"]
    step = loop.step()
    loop.until(lambda: loop.step() > step + 3)


def _off_and_on(loop: Loop) -> None:
    asked = loop.ask(kind="agent_off")
    done = loop.done(asked)
    reason = f"before step {asked['at_step']}"
    assert [one["reason"] for one in done.values()] == [reason, reason]
    agent = loop.until(lambda: (found := loop.get("/agent"))["off"] == [0, 1] and found)
    assert {row["state"] for row in agent["sources"] if row["hook"] == "collectives"} == {"off"}
    before, step = loop.until(lambda: _settled(loop)), loop.step()
    loop.until(lambda: loop.step() >= step + 20)  # training goes on, and is seen to
    assert loop.num_collectives() == before
    hang = next(one for one in loop.get("/findings")["detectors"] if one["name"] == "hang")
    assert hang["state"] == "skipped"
    assert "switched off" in hang["reason"]
    done = loop.done(loop.ask(kind="agent_on"))
    assert {one["state"] for one in done.values()} == {"done"}
    loop.until(lambda: loop.num_collectives() > before + 20)
    agent = loop.get("/agent")
    assert (agent["off"], agent["alone"]) == ([], [])
    issued = [rank["groups"][0]["issued"] for rank in map(_rank_of(loop), (0, 1))]
    assert abs(issued[0] - issued[1]) <= 60  # the same collectives were left out on both
    accused = [one for one in loop.get("/findings")["open"] if one["severity"] != "info"]
    assert accused == []


def _settled(loop: Loop) -> int:
    """Return the number of collectives once none came in 20 steps: those of before are stored."""
    number, step = loop.num_collectives(), loop.step()
    loop.until(lambda: loop.step() >= step + 20)
    return number if loop.num_collectives() == number else 0


def _rank_of(loop: Loop) -> Callable[[int], dict[str, Any]]:
    return lambda rank: loop.get(f"/ranks/{rank}")


def _files_are_private(loop: Loop) -> None:
    directories = [path for path in loop.run_directory().rglob("*") if path.is_dir()]
    assert len(directories) > 4
    for path in (loop.run_directory(), *directories):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def _ends_within_a_profile(loop: Loop) -> None:
    """torch crashes in a process that ends while it profiles: ours is stopped before."""
    loop.stop_file.with_suffix(".slow").touch()
    asked = loop.ask(kind="profile", ranks=[0], num_steps=20)
    loop.until(lambda: loop.get(f"/commands/{asked['id']}")["ranks"][0]["state"] == "running")
    assert loop.end() == 0
    (done,) = loop.get(f"/commands/{asked['id']}")["ranks"]
    assert (done["state"], done["reason"]) == (
        "refused", "the process ended before it was done",
    )  # fmt: skip


def _late(loop: Loop) -> None:
    loop_over = urllib.error.HTTPError
    with pytest.raises(loop_over) as refused:
        loop.ask(kind="stacks", ranks=[0])
    with refused.value:
        assert refused.value.code == 409
        assert "no rank of this run is alive" in refused.value.read().decode()


def _results_are_identical(loop: Loop, tmp_path: Path) -> None:
    """The same loop without any agent, for as many steps: every loss bit for bit."""
    losses = loop.losses.with_suffix(".0").read_text().splitlines()
    alone = tmp_path / "alone"
    variables = {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}
    done = subprocess.run(
        command(alone, tmp_path / "never", str(len(losses))),
        env=variables | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    for rank in (0, 1):
        found = loop.losses.with_suffix(f".{rank}").read_text()
        assert found == alone.with_suffix(f".{rank}").read_text()


def test_one_rank_alone_off_and_on_is_never_matched(loop: Loop) -> None:
    (done,) = loop.done(loop.ask(kind="agent_off", ranks=[1])).values()
    assert done["state"] == "done"
    (done,) = loop.done(loop.ask(kind="agent_on", ranks=[1])).values()
    assert "no longer matched with those of its peers" in done["reason"]
    loop.until(lambda: loop.get("/agent")["alone"] == [1])
    groups = {group["group"]: group["ranks"] for group in loop.get("/ranks/1")["groups"]}
    assert groups["0@1" if "0@1" in groups else "0#2@1"] == [1]
    hang = next(one for one in loop.get("/findings")["detectors"] if one["name"] == "hang")
    assert hang["state"] == "skipped"
    assert not [one for one in loop.get("/findings")["open"] if one["kind"] != "straggler"]


@pytest.mark.core
def test_a_collector_is_killed_and_a_rank_hangs(loop: Loop) -> None:
    _a_collector_that_is_killed_does_each_command_once(loop)
    _a_hang_asks_for_stacks_and_its_page_shows_them(loop)


def _a_collector_that_is_killed_does_each_command_once(loop: Loop) -> None:
    profiles = _profiles_of_which_the_last_runs(loop)
    os.kill(loop.collector_pid(), 9)
    assert loop.done(profiles[-1])[0]["state"] == "done"  # 20 steps, by the next collector
    os.kill(loop.collector_pid(), 9)
    again = loop.done(loop.ask(kind="stacks", ranks=[0]))
    assert again[0]["state"] == "done"
    assert len(loop.get("/ranks/0")["stacks"]) == 1
    (directory,) = loop.run_directory().glob("0/0.*")
    answered = set(json.loads((directory / "answers").read_text())["answers"])
    assert str(profiles[-1]["id"]) in answered
    assert answered <= {str(one["id"]) for one in profiles}


def _profiles_of_which_the_last_runs(loop: Loop) -> list[dict[str, Any]]:
    """Ask for profiles until one is seen under way: on a busy machine one may be over at once."""
    profiles: list[dict[str, Any]] = []

    def seen() -> str | None:
        state: str = loop.get(f"/commands/{profiles[-1]['id']}")["ranks"][0]["state"]
        return state if state in ("running", "done") else None

    for _ in range(5):
        profiles.append(loop.ask(kind="profile", ranks=[0], num_steps=20))
        if loop.until(seen) == "running":
            return profiles
    raise AssertionError("no profile was seen under way")


def _a_hang_asks_for_stacks_and_its_page_shows_them(loop: Loop) -> None:
    loop.until(lambda: loop.step() >= 12)  # a first step may take long
    loop.stop_file.with_suffix(".hang").touch()
    (finding,) = loop.until(
        lambda: [one for one in loop.get("/findings")["open"] if one["kind"] == "hang"]
    )
    assert finding["ranks"] == [1]

    def shown() -> dict[str, Any] | None:
        detail = loop.get(f"/findings/{finding['id']}")
        return detail if detail["stacks"] and not detail["commands"][0]["is_open"] else None

    detail = loop.until(shown)
    assert {one["rank"] for one in detail["stacks"]} == {1}
    assert "loop_program.py" in detail["stacks"][0]["text"]
    asked = detail["commands"][0]
    assert asked["asked_by"] == f"finding {finding['id']}"
    assert [(one["rank"], one["state"]) for one in asked["ranks"]] == [(1, "done")]
    page = loop.get("/hang")
    assert (page["text"], page["state"]) == (finding["what"], "hang")
    root, waiting = page["graph"]["nodes"]
    assert (root["ranks"]["some"], root["standing"]) == ([1], "missing")
    assert (waiting["ranks"]["some"], waiting["standing"]) == ([0], "waiting")
    stack = page["stacks"][0]
    assert (stack["rank"], stack["note"]) == (1, "")
    assert any("loop_program.py" in frame["file"] for frame in stack["frames"])


def test_a_slow_rank_is_sampled_and_the_evidence_says_where_it_is(loop: Loop) -> None:
    loop.until(lambda: loop.step() >= 60)
    loop.stop_file.with_suffix(".late").touch()

    def slow() -> dict[str, Any] | None:
        found = [one for one in loop.get("/findings")["open"] if one["ranks"] == [1]]
        return next((one for one in found if one["severity"] != "info"), None)

    loop.until(slow)

    def told() -> list[str]:
        texts = [one["text"] for one in (slow() or {"evidence": []})["evidence"]]
        return [text for text in texts if "be_late (loop_program.py:" in text]

    (text,) = loop.until(told)
    assert " stacks rank 1 is in " in text
    assert ", rank 0 in 0 of " in text
    asked = [one["asked_by"] for one in loop.get("/commands")["commands"]]
    assert asked
    assert all(one.startswith("sampling of finding ") for one in asked)


def test_a_node_that_takes_no_commands_says_so_and_strangers_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, RANKSCOPE_COMMANDS="0")
    try:
        loop.until(lambda: loop.step() >= 3)
        (done,) = loop.done(loop.ask(kind="stacks", ranks=[0])).values()
        assert (done["state"], done["reason"]) == (
            "refused", "this node takes no commands: RANKSCOPE_COMMANDS=0",
        )  # fmt: skip
        for token, headers, code in (
            ("wrong", {}, 401),
            (TOKEN, {"Origin": "https://elsewhere.example"}, 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                loop.request("/commands", {"kind": "agent_off"}, token, **headers)
            with refused.value:
                assert refused.value.code == code
        assert len(loop.get("/commands")["commands"]) == 1
        _command_line(loop)
    finally:
        loop.close()


def _command_line(loop: Loop) -> None:
    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return run(
            [sys.executable, "-m", "rankscope", "ask", *words, "--server", loop.server.url],
            env=loop.variables,
        )

    refused = ask("stacks", "loop", "--ranks", "0-1", "--json")
    assert refused.returncode == 1
    assert [one["state"] for one in json.loads(refused.stdout)["ranks"]] == ["refused"] * 2
    assert ask("stacks", "no-such-run").returncode == 2
    wrong = ask("profile", "loop", "--steps", "21")
    assert wrong.returncode == 64
    assert "--steps: from 1 to 20" in wrong.stderr
