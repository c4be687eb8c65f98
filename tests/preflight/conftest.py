"""Trials of the laboratory, in the background of the tests that read them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import capabilities
from tests.preflight.faults import BY_NAME
from tests.preflight.trial import Trial, Way, attempt

NUM_AT_ONCE = 3  # laboratories; their nodes wait more than they compute
# Torch is left out: its import would take most of the time. So is, in the crowd, what is timed.
_TIMED = ("net.latency", "net.jitter", "net.loss", "net.bandwidth")
_CROWDED = Way(has_torch=False, skip=_TIMED)


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the secrets that preflights make out of the home directory of who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Trial]]]:
    """Try all selected faults in the background; each test waits for its own."""
    names = [
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "trials" in item.fixturenames
        and _is_possible(item)
    ]
    with ThreadPoolExecutor(NUM_AT_ONCE) as crowd:
        running = {name: crowd.submit(attempt, BY_NAME[name], _CROWDED) for name in names}
        yield running
        for future in running.values():
            future.cancel()


def _is_possible(item: pytest.Item) -> bool:
    needed = (name for mark in item.iter_markers("needs") for name in mark.args)
    return not any(map(capabilities.lacks, needed))
