"""What every finding that a test of detectors makes must be."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings.finding import Finding

_KINDS = {detector.name: frozenset(detector.kinds) for detector in DETECTORS}


@pytest.fixture(autouse=True)
def kinds_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a detector makes a finding of a kind that it does not declare."""
    make = Finding.__init__

    def checked(self: Finding, **values: Any) -> None:
        make(self, **values)
        known = _KINDS.get(self.detector)
        if known is not None:
            assert self.kind in known, f"{self.detector} does not declare {self.kind!r}"

    monkeypatch.setattr(Finding, "__init__", checked)
