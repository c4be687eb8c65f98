"""The laboratory as a fixture: it runs, or says loudly why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.preflight.faults import BY_NAME
from tests.preflight.injections import has_compiler
from tests.preflight.nslab import unavailable
from tests.preflight.trial import Trial, Way, attempt

NUM_AT_ONCE = 3  # laboratories; their nodes wait more than they compute
# Torch is left out: its import would take most of the time. So is, in the crowd, what is timed.
_TIMED = ("net.latency", "net.jitter", "net.loss", "net.bandwidth")
_CROWDED = Way(has_torch=False, skip=_TIMED)
_ALONE = Way(has_torch=False)
_REQUIRED = "RANKSCOPE_REQUIRE_LAB"  # set where the laboratory must run: skipped is failed
_not_run: list[str] = []


@pytest.fixture(scope="session")
def laboratory() -> None:
    """Skip what needs hosts of namespaces where there can be none; fail if they must be."""
    reason = unavailable()
    if reason is None:
        return
    _not_run.append(reason)
    if os.environ.get(_REQUIRED) == "1":
        pytest.fail(f"{_REQUIRED}=1, but the laboratory cannot run: {reason}")
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _not_run:
        terminalreporter.write_line(f"preflight laboratory: NOT RUN, {_not_run[0]}", yellow=True)


@pytest.fixture(scope="session")
def trials(laboratory: None, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Trial]]]:
    """Try all selected faults in the background; each test waits for its own.

    What is found by timing has the machine for itself, after all others.
    """
    names = [
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "trials" in item.fixturenames
    ]
    faults = [BY_NAME[name] for name in names if _is_possible(name)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as crowd, ThreadPoolExecutor(1) as alone:
        running = {
            fault.name: crowd.submit(attempt, fault, _CROWDED)
            for fault in faults
            if not fault.is_timed
        }
        rest = tuple(running.values())

        def timed(name: str) -> Trial:
            for future in rest:
                future.exception()
            return attempt(BY_NAME[name], _ALONE)

        running.update({f.name: alone.submit(timed, f.name) for f in faults if f.is_timed})
        yield running
        for future in running.values():
            future.cancel()


def _is_possible(name: str) -> bool:
    return has_compiler() or not name.startswith("clock-")
