"""The demo: a real server, a real run with a real fault, and what Rankscope says about it.

Everything runs as separate processes that a user could start by hand; this module only starts
them, watches the API and stops them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FAULTS: tuple[str, ...] = ("slow_compute", "slow_data", "hang", "crash")
STEPS = {"ddp": 260, "pipeline": 260}
# extra time of the slow rank as a multiple of its own step; a pipeline hides part of a delay
_SIZES = {("slow_compute", "pipeline"): 2.0}
_EARLIEST_STEP, _LATEST_STEP = 60, 140
_SERVER_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_QUIET_SECONDS = 3.0  # the verdict must stand for so long after the end


class DemoFailed(RuntimeError):
    """A part of the demo did not start or died; the message says which and where its log is."""


@dataclass(frozen=True)
class Plan:
    """What the demo does: `fault` is one of FAULTS or None for a clean run."""

    fault: str | None
    rank: int
    start_step: int
    ranks: int
    strategy: str
    steps: int

    def trainer_arguments(self, manifest: Path) -> list[str]:
        """Return the trainer's command line for this plan."""
        arguments = ["--strategy", self.strategy, "--steps", str(self.steps)]
        if self.fault is not None:
            fault = f"{self.fault}:rank={self.rank},start={self.start_step}"
            if size := _SIZES.get((self.fault, self.strategy)):
                fault += f",size={size}"
            arguments += ["--fault", fault, "--fault-manifest", str(manifest)]
        return arguments


def draw(fault: str, ranks: int, strategy: str, seed: int | None) -> Plan:
    """Draw rank and step at random, the fault too where it is "random"."""
    chance = random.Random(seed)
    chosen: str | None = chance.choice(FAULTS) if fault == "random" else fault
    return Plan(
        fault=None if chosen == "none" else chosen,
        rank=chance.randrange(ranks),
        start_step=chance.randint(_EARLIEST_STEP, _LATEST_STEP),
        ranks=ranks,
        strategy=strategy,
        steps=STEPS[strategy],
    )


class Api:
    """Reads the server's JSON. Raises DemoFailed when it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the answer, None where the thing does not exist yet."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=10) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise DemoFailed(f"the server answered {error.code} to {path}") from error
        except OSError as error:
            raise DemoFailed(f"the server does not answer at {self.url}: {error}") from error


class Demo:
    """One demo: its processes, its run and its truth. Use as a context manager."""

    def __init__(self, plan: Plan, data_directory: Path, port: int) -> None:
        self.plan = plan
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
        self.stop_training()
        if self._server is not None:
            _stop(self._server, signal.SIGTERM)

    @property
    def url(self) -> str:
        """Address of the run's page."""
        return f"{self.api.url}/runs/{self.run_id}"

    def start_server(self) -> None:
        """Start the server on loopback and wait until it answers."""
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
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(plan.ranks),
            "-m", "rankscope_trainer", *plan.trainer_arguments(self.manifest),
        ]  # fmt: skip
        self._training = self._start("training.log", command)

    def training_ended(self) -> bool:
        """Return whether the launcher has come back."""
        return self._training is not None and self._training.poll() is not None

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

    def truth(self) -> dict[str, Any] | None:
        """Return the contract's truth: fault, rank and first step; None if nothing fired."""
        fired = self.fired()
        return fired and {key: fired[key] for key in ("fault", "rank", "start_step")}

    def last_words(self) -> str:
        """Return why the training failed, as far as its output tells."""
        return self._last_words("training", "training.log")

    def _start(self, log: str, command: list[str]) -> subprocess.Popen[bytes]:
        # a session of their own: Ctrl-C reaches only the demo, which ends them in order
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")
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
    told to end while it starts the next, and it waits longer than we do for one that is stuck.
    """
    ranks = [process for process in psutil.process_iter() if _run_of(process) == run_id]
    for process in ranks:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(ranks, _STOP_SECONDS)


def _run_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANKSCOPE_RUN_ID", "")
    except (psutil.Error, OSError):
        return ""


@dataclass(frozen=True)
class View:
    """What the API says at one moment."""

    run: dict[str, Any]
    findings: list[dict[str, Any]]
    verdict: dict[str, Any] | None
    answer: str
    loss: float | None

    @property
    def step(self) -> int:
        """The last step that the server knows."""
        return int(self.run.get("step") or 0)


def watch(demo: Demo, once: bool) -> Iterator[View]:
    """Yield a view twice a second until the run is over and its verdict stands.

    A hang never ends by itself: with `once` its ranks are stopped when the verdict has stood.
    """
    stood_since: float | None = None
    last_key: object = None
    while True:
        view = _look(demo)
        if view is not None:
            yield view
        over = demo.training_ended()
        stuck = view is not None and (view.verdict or {}).get("kind") == "hang"
        key = (over, stuck, (view.verdict or {}).get("what") if view else None)
        if key != last_key or view is None:
            last_key, stood_since = key, time.monotonic()
        if over and view is None and time.monotonic() - (stood_since or 0) > _STOP_SECONDS:
            raise DemoFailed(demo.last_words())
        if stood_since is not None and time.monotonic() - stood_since > _QUIET_SECONDS:
            if over and view is not None and view.run.get("status") not in _NOT_OVER:
                return
            if stuck and not over:
                if once:
                    demo.stop_training()
                return
        if over and stood_since is not None and time.monotonic() - stood_since > 2 * _STOP_SECONDS:
            return
        time.sleep(0.5)


_NOT_OVER = ("starting", "running")


def _look(demo: Demo) -> View | None:
    overview = demo.api.get(f"runs/{demo.run_id}")
    if overview is None:
        return None
    findings = demo.api.get(f"runs/{demo.run_id}/findings") or {}
    metrics = demo.api.get(f"runs/{demo.run_id}/metrics?names=loss") or {}
    values = [series["value"][-1] for series in metrics.get("series", []) if series["value"]]
    return View(
        run=overview["run"],
        findings=[*findings.get("open", []), *findings.get("recovered", [])],
        verdict=overview.get("verdict"),
        answer=(overview.get("answer") or {}).get("text", ""),
        loss=values[0] if values else None,
    )


VERDICT_FIELDS = (
    "kind", "ranks", "onset_step", "cost_throughput_ratio", "what", "why", "next",
)  # fmt: skip


def result(demo: Demo, view: View | None) -> dict[str, Any]:
    """Return the contract of `--once --json`: truth, verdict, match and address."""
    truth = demo.truth()
    verdict = None
    if view is not None and view.verdict is not None and view.verdict["severity"] != "info":
        verdict = {field: view.verdict[field] for field in VERDICT_FIELDS}
    if truth is None:
        match = demo.plan.fault is None and verdict is None
    else:
        match = verdict is not None and (verdict["kind"], verdict["ranks"]) == (
            truth["fault"], [truth["rank"]],
        )  # fmt: skip
    findings = [] if view is None else view.findings
    return {
        "truth": truth,
        "verdict": verdict,
        "match": match,
        "url": demo.url,
        "findings": [
            {field: finding[field] for field in ("kind", "severity", "ranks", "what")}
            for finding in findings
        ],
        "named_after_seconds": _named_after_seconds(demo.fired(), findings),
    }


def _named_after_seconds(
    fired: dict[str, Any] | None, findings: list[dict[str, Any]]
) -> float | None:
    """Return the time from the fault's first firing to the finding that names it."""
    # a slow rank's finding may be older: noise of the same rank opens it as info
    if fired is None or fired["fault"] not in ("hang", "crash"):
        return None
    began_ms = fired["start_time_ns"] / 1e6
    opened = [
        finding["opened_ms"]
        for finding in findings
        if finding["kind"] == fired["fault"] and finding["ranks"] == [fired["rank"]]
    ]
    return round((min(opened) - began_ms) / 1e3, 3) if opened else None
