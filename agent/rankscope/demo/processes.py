"""The processes of a demo: the server, the launched trainer, and the end of both.

Everything is what a user could start by hand; nothing here knows more than a user would.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rankscope.address import AddressError
from rankscope.demo.plan import DemoPlan
from rankscope.http import HttpError, get

# What of the caller's environment says how to record; all else names another run, or its server.
_PASSED_ON = (
    "RANKSCOPE_CACHE", "RANKSCOPE_COLLECTIVES", "RANKSCOPE_OVERHEAD_PERCENT",
    "RANKSCOPE_PROBE_BUILD",
)  # fmt: skip
_SERVER_START_SECONDS = 120.0
_ANSWER_SECONDS = 60.0  # of a server that computes on a machine with more to do than processors
_MAX_BYTES = 64 << 20  # of an answer
_STOP_SECONDS = 15.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_IN_USE = "is in use by process"  # what a server says whose data directory another one has


class DemoFailed(RuntimeError):
    """A part of the demo did not start or died; the message says which and where its log is."""


class Api:
    """Reads the server's JSON. Raises DemoFailed when it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the answer, None where the thing does not exist yet."""
        body = self._read(f"api/v1/{path}")
        answer: dict[str, Any] | None = None if body is None else json.loads(body)
        return answer

    def is_behind(self) -> bool:
        """Return whether the server has stored something that its analysis has not seen yet."""
        counters = (self._read("metrics") or b"").decode()
        behind = re.search(r"^rankscope_runs_behind (\S+)$", counters, re.MULTILINE)
        return behind is None or float(behind[1]) > 0.0

    def _read(self, path: str) -> bytes | None:
        try:
            answer = get(
                self.url, f"/{path}", timeout_seconds=_ANSWER_SECONDS, max_answer_bytes=_MAX_BYTES
            )
        except (HttpError, AddressError) as error:
            raise DemoFailed(f"the server does not answer at {self.url}: {error}") from error
        if answer.status not in (200, 404):
            raise DemoFailed(f"the server answered {answer.status} to {path}")
        return answer.body if answer.status == 200 else None


class Demo:
    """One demo: its processes, its run and its truth. Use as a context manager."""

    def __init__(
        self, plan: DemoPlan, data_directory: Path, port: int, *, may_move: bool = False
    ) -> None:
        """`may_move`: where a server has the data directory, take one beside the logs."""
        self.plan = plan
        self._may_move = may_move
        self.directory = data_directory
        self.run_id = time.strftime("demo-%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        self.log_directory = data_directory / "demo" / self.run_id
        self.manifest = self.log_directory / "faults.jsonl"
        self.api = Api("")
        self._port = port
        self._server: subprocess.Popen[bytes] | None = None
        self._training: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Demo:
        self.log_directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        with _undisturbed():
            self.stop_training()
            if self._server is not None:
                _stop(self._server, signal.SIGTERM)

    @property
    def url(self) -> str:
        """Address of the run's page."""
        return f"{self.api.url}/runs/{self.run_id}"

    @property
    def training_log(self) -> Path:
        """Where the output of the ranks and their launcher is."""
        return self.log_directory / "training.log"

    def start_server(self) -> None:
        """Start the server on loopback and wait until it answers."""
        try:
            self._serve()
        except DemoFailed as error:
            if not self._may_move or _IN_USE not in " ".join(str(error).split()):
                raise
            self.directory = self.log_directory / "data"
            self._serve()

    def _serve(self) -> None:
        ready = self.log_directory / "server.json"
        self._server = self._start(
            "server.log",
            [sys.executable, "-m", "rankscope", "serve", "--host", "127.0.0.1",
             "--port", str(self._port), "--data-dir", str(self.directory),
             "--ready-file", str(ready)],
        )  # fmt: skip
        deadline = time.monotonic() + _SERVER_START_SECONDS
        while not ready.exists():
            if self._server.poll() is not None:
                raise DemoFailed(self._last_words("server", "server.log"))
            if time.monotonic() > deadline:
                raise DemoFailed(f"the server did not start: see {self.log_directory}/server.log")
            time.sleep(0.1)
        self.api = Api(json.loads(ready.read_text())["url"])

    def start_training(self) -> None:
        """Launch the reference trainer under torchrun, watched by the agent."""
        plan = self.plan
        command = [
            sys.executable, "-m", "rankscope", "run", "--server", self.api.url,
            "--run-id", self.run_id, "--name", f"demo {plan.strategy}",
            "--dir", str(self.log_directory / "run"), "--",
            *launcher(plan.ranks), *plan.trainer_arguments(self.manifest),
        ]  # fmt: skip
        self._training = self._start(self.training_log.name, command)

    def training_ended(self) -> bool:
        """Return whether the launcher has come back."""
        return self._training is not None and self._training.poll() is not None

    def arriving(self) -> str:
        """Return what may still change the verdict of a training that has ended, or nothing."""
        if _processes_of(self.run_id):  # the launcher is gone, so this is the collector
            return "the collector was still sending what the ranks recorded"
        return "the server was still working on it" if self.api.is_behind() else ""

    def stop_training(self) -> None:
        """End the ranks, their launcher and their collector."""
        if self._training is not None:
            _stop(self._training, signal.SIGTERM)
            _end_ranks(self.run_id)

    def fired(self) -> dict[str, Any] | None:
        """Return the first fault that really fired, from the trainer's own manifest."""
        try:
            lines = self.manifest.read_text().splitlines()
        except FileNotFoundError:
            return None
        return next((entry for entry in map(json.loads, lines) if "start_step" in entry), None)

    def last_words(self) -> str:
        """Return why the training failed, as far as its output shows."""
        return self._last_words("training", self.training_log.name)

    def _start(self, log: str, command: list[str]) -> subprocess.Popen[bytes]:
        # a session of their own: Ctrl-C reaches only the demo, which ends them in order
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RANKSCOPE") or name in _PASSED_ON
        }
        with (self.log_directory / log).open("ab") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )

    def _last_words(self, what: str, log: str) -> str:
        path = self.log_directory / log
        lines = path.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"the {what} ended; the end of {path}:", *lines])


def launcher(ranks: int) -> list[str]:
    """Return the command that starts so many ranks of the reference trainer."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", "rankscope_trainer",
    ]  # fmt: skip


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no second Ctrl-C leave behind what the first one began to end; it takes seconds."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Ask a process to end; after a while kill its whole session."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever is left of its session
    process.wait()


def _end_ranks(run_id: str) -> None:
    """Kill what is left of a run.

    torchrun gives each rank a session of its own. It forgets those that it has started when it is
    asked to end while it starts the next, and it waits longer than we do for one that is stuck.
    """
    ranks = _processes_of(run_id)
    for process in ranks:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ranks, _STOP_SECONDS)


def _processes_of(run_id: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _run_of(process) == run_id]


def _run_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANKSCOPE_RUN_ID", "")
    except (psutil.Error, OSError):
        return ""
