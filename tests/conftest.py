"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from rankscope.rank import guard
from tests import capabilities

# In the background of a shell this process ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples in every run: what fails here fails everywhere. RANKSCOPE_EXAMPLES=2000 asks
# for so many, by chance.
_EXAMPLES = int(os.environ.get("RANKSCOPE_EXAMPLES", "0"))
hypothesis.settings.register_profile(
    "tests",
    max_examples=_EXAMPLES or 100,
    derandomize=not _EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: what the machine lacks is the reason why a test is skipped."""
    for mark in item.iter_markers("needs"):
        capabilities.need(*mark.args)


@pytest.fixture(autouse=True)
def agent_failures_are_test_failures(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The guard hides bugs from training; it must not hide them from us."""
    if "swallows" not in request.keywords:
        seen: list[str] = []
        monkeypatch.setattr(guard, "on_failure", seen.append)
        yield
        assert not seen, f"the guard swallowed a failure in {seen}"
    else:
        guard.failures.clear()
        guard._last_logged.clear()
        yield
        guard.failures.clear()
