"""The line below the output of `rankscope run`: on a terminal alone, and in nobody's way."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING
from rankscope.node.launch.status import StatusLine, status_text, steps_of
from tests.trainer.launch import SMALL


class Screen:
    """A terminal of one column of lines: what is on it after some bytes."""

    def __init__(self) -> None:
        self.sent = b""
        self.descriptor, self.other = pty.openpty()

    def write(self, _terminal: int, data: bytes) -> bool:
        self.sent += data
        return True

    def lines(self) -> list[str]:
        """Return the lines that are seen: an erased one is empty, a written one is replaced."""
        lines = [""]
        for part in re.findall(rb"\x1b\[2K|\x1b\[2m[^\x1b]*\x1b\[0m|\r|\n|[^\x1b\r\n]+", self.sent):
            if part == b"\x1b[2K":
                lines[-1] = ""
            elif part == b"\n":
                lines.append("")
            elif part != b"\r":
                lines[-1] += re.sub(rb"\x1b\[\dm", b"", part).decode()
        return lines

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.other)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    return Screen()


def line_on(screen: Screen) -> StatusLine:
    return StatusLine(screen.descriptor, screen.write)


def test_it_is_below_what_is_written(screen: Screen) -> None:
    line = line_on(screen)
    line.show("step 1")
    line.pass_on(b"loss 3.2\n")
    line.above(lambda text: bool(screen.write(0, text.encode() + b"\n")), "verdict: none")
    line.show("step 2")
    assert screen.lines() == ["loss 3.2", "verdict: none", "step 2"]
    line.show("")
    assert screen.lines() == ["loss 3.2", "verdict: none", ""]
    screen.close()


def test_there_is_none_in_the_middle_of_a_line(screen: Screen) -> None:
    line = line_on(screen)
    line.pass_on(b"50 %")
    line.show("step 1")
    assert screen.sent == b"50 %"
    line.pass_on(b"\r60 %\n")
    assert screen.lines()[-1] == "step 1"
    screen.close()


def test_there_is_none_in_a_program_of_the_whole_screen(screen: Screen) -> None:
    line = line_on(screen)
    line.pass_on(b"\x1b[?1049h menu\n")
    line.show("step 1")
    assert b"step 1" not in screen.sent
    screen.close()


@given(st.lists(st.tuples(st.binary(max_size=8), st.text(max_size=8))))
def test_all_bytes_of_the_command_are_passed_on_in_order(parts: list[tuple[bytes, str]]) -> None:
    written: list[bytes] = []
    line = StatusLine(-1, lambda _terminal, data: bool(written.append(data)) or True)
    for data, text in parts:
        line.show(text)
        line.pass_on(data)
    assert b"".join(written) == b"".join(data for data, _ in parts)


def test_what_it_says() -> None:
    assert status_text({0: 120, 1: 120}, None, None) == "rankscope: step 120"
    verdict = {"ranks": [2], "cost_throughput_ratio": 0.294}
    assert status_text({0: 1_300, 2: 1_299, 3: 12}, 165.2, verdict) == (
        "rankscope: step 1,300, rank 3 at step 12, 165 ms a step, 29 % of throughput lost, "
        "worst: rank 2"
    )
    many = status_text({rank: 9 for rank in range(8)} | {9: 20}, 2_500.0, None)
    assert many == "rankscope: step 20, ranks 0, 1, 2, 3 and 4 more at step 9, 2.5 s a step"


def test_steps_are_those_of_the_rings(tmp_path: Path) -> None:
    for rank in (0, 3):
        folder = tmp_path / "0" / f"{rank}.1{rank}"
        folder.mkdir(parents=True)
        made = ring.RingWriter(
            folder / COLLECTIVES_RING, ring.COLLECTIVE_SLOT.size, ring.MIN_SLOTS, attempt=0,
            rank=rank, world_size=4, local_rank=rank,
        )  # fmt: skip
        ring.U64.pack_into(made.buffer, ring.STEP_AT, 7 + rank)
    (tmp_path / "0" / "4.14").mkdir()
    assert steps_of(tmp_path) == {0: 7, 3: 10}


def test_a_real_run_has_it_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    clean |= {"TERM": "xterm", "COLUMNS": "200"}
    words = [
        sys.executable, "-m", "rankscope", "run", "--dir", str(tmp_path), "--", "torchrun",
        "--standalone", "--nproc-per-node", "2", "-m", "rankscope_trainer", *SMALL, "--steps", "60",
        "--fault", "slow_data:rank=1,start=1,size=100ms",
    ]  # fmt: skip
    ours, theirs = pty.openpty()
    with subprocess.Popen(words, env=clean, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the last writer has gone
                break
            sent += data
    os.close(ours)
    assert process.returncode == 0, sent
    shown = re.findall(rb"\x1b\[2m(rankscope: step \d+[^\x1b]*)\x1b\[0m\r", sent)
    assert shown
    assert any(b" ms a step" in text for text in shown)
    assert sent.rindex(b"\r\x1b[2K") > sent.rindex(shown[-1])  # it is gone at the end
    piped = subprocess.run(words, env=clean, capture_output=True, timeout=200, check=True)
    assert b"\x1b[2m" not in piped.stdout + piped.stderr
