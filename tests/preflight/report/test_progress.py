"""The live line: one line that changes in a terminal, one line per stage elsewhere."""

from __future__ import annotations

import io

import pytest

from rankscope.preflight.report import progress
from rankscope.preflight.report.progress import Live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    with Live(stream) as live:
        live.stage("facts")
        live.stage("waiting", "node2 (2 of 3 reported, 0 s of 60)")
        live.stage("waiting", "node2 (2 of 3 reported, 1 s of 60)")
        live.stage("paths", "to 2 nodes")
    assert stream.getvalue().splitlines() == [
        "rankscope preflight: looking at this node",
        "rankscope preflight: waiting for node2 (2 of 3 reported, 0 s of 60)",
        "rankscope preflight: testing the paths to 2 nodes",
    ]


def test_a_terminal_gets_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PAUSE_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with Live(stream) as live:
        live.stage("facts")
        for seconds in range(3):
            live.stage("waiting", f"node2 (2 of 3 reported, {seconds} s of 60) \x1b[31m\n")
    text = stream.getvalue()
    assert "\n" not in text
    assert text.endswith("\r\x1b[K")
    drawn = text.split("\r\x1b[K")[1:-1]
    assert drawn[0] == "looking at this node"
    assert len(drawn) == 4
    assert all(len(line) < 40 and "\x1b" not in line for line in drawn)


def test_a_stream_that_nobody_reads_stops_nothing() -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Live(Broken()) as live:
        live.stage("facts")
        live.stage("paths")
