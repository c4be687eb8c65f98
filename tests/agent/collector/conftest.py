"""Fixtures of the collector's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.collector import processes
from tests.agent.collector.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run; a collector left in it is killed."""
    directory = tmp_path / "test-run"
    directory.mkdir()
    yield directory
    if (directory / "node" / "pid").exists():
        pid = processes.collector_pid(directory)
        if processes.is_alive(pid):
            processes.os.kill(pid, 9)
            processes.wait_for(lambda: not processes.is_alive(pid))
