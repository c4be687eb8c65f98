"""Starts a preflight from what was asked: who takes part, the plan, Ctrl-C, the outcome."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight import secret, transports
from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.exchange.discover import Discovery, discover
from rankscope.preflight.facts import launch
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import CheckFinding, NodeReport
from rankscope.preflight.plan import (
    UNNAMED,
    Plan,
    Progress,
    Request,
    StandsAside,
    UsageError,
)
from rankscope.preflight.probe import schedule
from rankscope.preflight.system import System
from rankscope.preflight.transports import Transports

if TYPE_CHECKING:
    from rankscope.preflight.runner import Outcome

_RUN_VARIABLES = (
    "RANKSCOPE_RUN_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOB_ID",
    "FLUX_JOB_ID",
)
SSH_LIMIT_S = 120.0  # of agents started over ssh: `--deep` with idle connections takes 60 s
_GROUP = "rankscope.preflight"  # entry points: checks of other packages


@dataclass(frozen=True)
class Ended:
    """A preflight that came to its end, or was brought to it."""

    outcome: Outcome
    is_interrupted: bool


def look_up(request: Request, system: System) -> Discovery:
    """Return who takes part. Raises StandsAside."""
    who = discover(system, request.who, launch.collect(system, request.command))
    if who.stands_aside:
        raise StandsAside(who.stands_aside)
    return who


def plan_of(request: Request, system: System, who: Discovery, by: Transports | None = None) -> Plan:
    """Return what the runner is to do. Raises UsageError."""
    if who.errors:
        raise UsageError("; ".join(who.errors))
    is_alone = who.num_nodes == 1 or (by is not None and by.is_over_ssh)
    run_id = request.run_id or run_id_of(system, is_alone)
    over = by or transports.Transports()
    is_shared = request.is_mesh and not is_alone
    known = secret_of(request, system, not is_shared, over.share)
    key = RunKey.of(known.text, run_id)
    return Plan(
        run_id=run_id,
        key=key,
        secret=known,
        who=who,
        options=request.options,
        wait_s=request.wait_s,
        timeout_s=request.timeout_s,
        command=request.command,
        carriers=over.carriers(key, known, who, request),
        is_mesh=request.is_mesh,
        foreign=foreign_checks(),
        system=system,
    )


def run_id_of(system: System, is_alone: bool = False) -> str:
    """Return the name that all nodes of this run share without having talked.

    Nothing that a wrong launch may differ in belongs to it: node counts, names and ports are what
    the preflight compares, and nodes with another name never hear of each other.
    """
    for name in _RUN_VARIABLES:
        if system.environ.get(name):
            return system.environ[name]
    return secrets.token_hex(2) if is_alone else UNNAMED


def secret_of(
    request: Request, system: System, is_alone: bool = False, share: str = ""
) -> secret.Secret:
    """Return what agents of one run share and strangers do not know. Raises UsageError."""
    asked = secret.Asked(
        token_file=request.token_file, share=share, is_insecure=request.is_insecure,
        is_alone=is_alone,
    )  # fmt: skip
    try:
        return secret.find(system.environ, asked)
    except secret.SecretError as error:
        raise UsageError(str(error)) from error


def foreign_checks() -> tuple[Check, ...]:
    """Return the checks that installed packages add. Raises UsageError if one cannot be loaded."""
    checks: list[Check] = []
    for entry in entry_points(group=_GROUP):
        try:
            checks += _instances(entry.load())
        except Exception as error:  # code of others
            raise UsageError(
                f"the check {entry.name!r} of {entry.value} cannot be loaded: {error}; repair or "
                "uninstall that package"
            ) from error
    return tuple(checks)


def _instances(found: object) -> Iterable[Check]:
    """Take a class, an instance, or a tuple of them."""
    if isinstance(found, tuple | list):
        return [check for one in found for check in _instances(one)]
    made: Check = found() if isinstance(found, type) else found  # type: ignore[assignment]
    return [made]


class Stop:
    """Ends the preflight that was given it; may be called from any thread."""

    def __init__(self) -> None:
        self.end: Callable[[], object] | None = None

    def __call__(self) -> None:
        """End it, if it runs."""
        if self.end is not None:
            self.end()


def run(plan: Plan, progress: Progress, stop_asked: Stop | None = None) -> Ended:
    """Run the preflight here and now. The first Ctrl-C ends it with what is known until then."""
    return asyncio.run(_run(plan, progress, stop_asked or Stop()))


class _Clock:
    """Passes stages on, and starts the clock of --timeout when no node is waited for any more."""

    def __init__(self, progress: Progress, start: Callable[[], object]) -> None:
        self._progress = progress
        self._start: Callable[[], object] | None = start

    def stage(self, name: str, detail: str = "") -> None:
        """Show what is being done."""
        if name not in ("facts", "waiting") and self._start is not None:
            self._start()
            self._start = None
        self._progress.stage(name, detail)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._progress.note(text)


async def _run(plan: Plan, progress: Progress, stop_asked: Stop) -> Ended:
    from rankscope.preflight.runner import PreflightAgent  # torch-free, but not needed for --help

    loop = asyncio.get_running_loop()
    if plan.timeout_s:
        progress = _Clock(progress, lambda: loop.call_later(plan.timeout_s, stop))
    if plan.secret.notice:
        progress.note(plan.secret.notice)
    agent = PreflightAgent(plan, progress)
    is_interrupted = False

    def stop() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        agent.stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends it as it always would
            loop.remove_signal_handler(number)

    stop_asked.end = partial(loop.call_soon_threadsafe, stop)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        outcome = await agent.run()
    finally:
        stop_asked.end = None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return Ended(outcome, is_interrupted)


def run_from_outside(
    request: Request, system: System, who: Discovery, progress: Progress
) -> Outcome:
    """Start an agent on every node, from a machine that is none of them, and evaluate the reports.

    Raises UsageError.
    """
    from rankscope.preflight.runner import Outcome
    from rankscope.preflight.verdict.engine import evaluate

    run_id = request.run_id or run_id_of(system, is_alone=True)
    started = time.monotonic()
    progress.stage("ssh", f"{len(who.nodes)} nodes")
    limit_s = request.timeout_s or SSH_LIMIT_S
    known = secret_of(request, system, is_alone=True)
    reports, failures = asyncio.run(_collected(run_id, known, who, request, limit_s))
    run = Run(run_id, who.nodes, reports, request.options)
    verdict = evaluate(run, foreign_checks())
    took_ms = (time.monotonic() - started) * 1e3
    notes = [
        CheckFinding(id="ssh", status="unknown", title=f"{node}: {why}", nodes=(node,))
        for node, why in failures.items()
    ]
    verdict = msgspec.structs.replace(
        verdict,
        elapsed_ms=took_ms,
        coverage=schedule.coverage(who.nodes),
        notes=(*notes, *verdict.notes),
    )
    return Outcome(verdict, run)


async def _collected(
    run_id: str, known: secret.Secret, who: Discovery, request: Request, limit_s: float
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    carrier = transports.over_ssh(who.nodes, run_id, known, who, request)
    try:
        return await carrier.collect(request.wait_s, limit_s), carrier.failures
    finally:
        await carrier.close()
