"""A real server for a scenario, and runs that are watched by the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import api, fork_server
from tests.agent import recorded
from tests.command_server import Forked
from tests.scenarios.trainer import command, forked
from tests.server.conftest import ServerProcess


class Watched:
    """A run of the reference trainer under `rankscope run`, and its server."""

    def __init__(self, server: ServerProcess, directory: Path, run_id: str) -> None:
        self.server, self.directory, self.run_id = server, directory, run_id
        self.log = directory / f"{run_id}.log"
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.url = server.url  # of the run: a server that restarts listens elsewhere

    def start(self, ranks: int, *arguments: str, **variables: str) -> Watched:
        """Start it under torchrun, whose ranks need not import PyTorch."""
        return self._start(command(ranks, *arguments), fork_server.under_torchrun() | variables)

    def start_forked(self, ranks: int, *arguments: str, **variables: str) -> Watched:
        """Start it sooner, where it does not matter what launched it."""
        return self._start(forked(ranks, *arguments), variables, is_forked=True)

    def start_launcher(self, *command: str) -> Watched:
        """Start another launcher, whose ranks need not import PyTorch."""
        return self._start(list(command), fork_server.under_torchrun())

    def start_script(self, ranks: int, *command: str) -> Watched:
        """Start a script of its own the same way."""
        return self._start([*fork_server.launcher(ranks), *command], {}, is_forked=True)

    def _start(
        self, launcher: list[str], variables: dict[str, str], *, is_forked: bool = False
    ) -> Watched:
        environment = recorded.environment(self.directory, **variables)
        for name in ("RANKSCOPE", "RANKSCOPE_RUN_ID", "RANKSCOPE_COLLECTOR", "PYTHONPATH"):
            environment.pop(name)
        launch = [
            sys.executable, "-m", "rankscope", "run", "--server", self.url,
            "--run-id", self.run_id, "--", *launcher,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = (
                Forked(launch, env=environment, stdout=log, stderr=log)
                if is_forked
                else subprocess.Popen(
                    launch, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
        return self

    def get(self, path: str = "") -> dict[str, Any]:
        """Read the API; an answer of 404 is an empty object: the run is not there yet."""
        return api.get(f"{self.server.url}/api/v1/runs/{self.run_id}{path}")

    def until(self, what: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Return the first true value of `what`; fail with the run's output after a while."""
        deadline = time.monotonic() + seconds
        while True:
            value = what()
            if value:
                return value
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def step(self) -> int:
        return int(self.get().get("run", {}).get("step") or 0)

    def ranks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/ranks").get("ranks", [])
        return found

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)


def processes_of(directory: Path) -> dict[int, str]:
    """Return the command lines of processes whose environment names this directory, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or entry.name == str(os.getpid()):
            continue
        try:
            if str(directory).encode() in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = line
        except OSError:
            continue
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    folder = tmp_path / "server"
    folder.mkdir()
    process = ServerProcess(folder).start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server of a module's tests, each of which names a run of its own."""
    process = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield process
    process.close()


@pytest.fixture
def watched(server: ServerProcess, tmp_path: Path) -> Iterator[Watched]:
    run = Watched(server, tmp_path, "scenario")
    yield run
    run.stop()
