"""Sources are asked in their own time, at a bounded cost, and again after errors."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rankscope.node.sources import samples
from rankscope.node.sources.base import News, RankProcess, Row, Skipped
from rankscope.node.sources.machine import Lane, Machine
from rankscope.node.sources.samples import BUDGET_RATIO, LaneThread, Slot
from rankscope.node.sources.sampling import CHUNK_SECONDS, START_SECONDS, Sampling
from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from rankscope.wire.sample_columns import SAMPLE_COLUMNS
from rankscope.wire.schema import ChunkKind
from tests.agent.collector.steady_source import Steady


@dataclass
class Bench:
    """A slot with a clock and a CPU clock that the test moves."""

    cost_ms: float = 0.0
    now: float = 100.0
    source: Steady = field(default_factory=lambda: Steady(Machine()))
    spent: int = 0

    def __post_init__(self) -> None:
        self.slot = Slot(self.source, 1.0, lambda: int(self.now * 1e9), self.cpu_ns)

    def cpu_ns(self) -> int:
        self.spent += int(self.cost_ms * 1e6)
        return self.spent

    def pass_seconds(self, seconds: float) -> int:
        """Turn ten times a second; return how many rows there were."""
        end = self.now + seconds
        count = 0
        while self.now < end - 1e-9:
            self.slot.turn(self.now)
            count += len(self.slot.take_rows())
            self.now += 0.1
        return count


def test_a_cheap_source_is_asked_once_a_second() -> None:
    bench = Bench(cost_ms=1.0)
    assert bench.pass_seconds(60) in (59, 60, 61)
    assert bench.slot.state == "works"
    assert bench.slot.interval_seconds == 1.0


def test_samples_do_not_walk_in_step_with_what_comes_and_goes_at_an_even_rate() -> None:
    steady = Slot(Steady(Machine()), 0.02)
    lane = LaneThread("kernel", [steady])
    lane.start()
    wait_until(lambda: len(steady.rows) >= 60)
    lane.stop()
    waits = np.diff([int(row["time_ns"]) for row in steady.take_rows()]) / 1e6
    assert np.mean(np.abs(waits - 20.0) > 0.5) > 0.3  # evenly spread over 18 to 22 ms
    assert 19.0 < np.median(waits) < 24.0


def test_a_pause_of_the_collector_is_noticed_when_it_is_over() -> None:
    """A real process that is stopped for 4 s, asked twice a second."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.agent.collector.steady_source"],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        assert 3.0 < float(process.stdout.readline()) < 6.0  # nothing before it
        process.kill()


@pytest.mark.parametrize(
    ("waited", "overslept"), [((0.0, 0.0), [8.0]), ((0.0, 7.0), []), ((None, 0.0), [])]
)
def test_time_without_a_processor_is_no_pause(
    monkeypatch: pytest.MonkeyPatch, waited: tuple[float | None, float], overslept: list[float]
) -> None:
    source = Steady(Machine())
    heard: list[float] = []
    monkeypatch.setattr(source, "overslept", heard.append)
    monkeypatch.setattr(samples, "uptime_seconds", iter((100.0, 109.0)).__next__)
    monkeypatch.setattr(samples, "waited_seconds", iter(waited).__next__)
    lane = LaneThread("kernel", [Slot(source, 1.0)])
    lane._ending.set()  # the wait itself is over at once
    lane._sleep(1.0)
    assert heard == overslept


def test_a_dear_source_is_asked_less_often_until_it_costs_its_share() -> None:
    bench = Bench(cost_ms=20.0)  # 2 % of a processor at one a second
    bench.pass_seconds(120)
    assert bench.slot.interval_seconds == 4.0
    assert 0.020 / bench.slot.interval_seconds <= BUDGET_RATIO
    assert bench.slot.state == (
        "slowed: asked every 4 s in place of 1 s, it costs more than 0.5% of a processor"
    )
    bench.slot.turn(bench.now + 10)
    assert bench.slot.take_rows()[-1]["interval_ns"] == 4 * 10**9
    bench.cost_ms = 0.1
    bench.pass_seconds(120)
    assert (bench.slot.interval_seconds, bench.slot.state) == (1.0, "works")


def test_there_is_a_longest_interval_and_no_swinging() -> None:
    bench = Bench(cost_ms=10_000.0)
    bench.pass_seconds(1000)
    assert bench.slot.interval_seconds == samples.MAX_INTERVAL_SECONDS
    edge = Bench(cost_ms=5.1)  # just above the budget: two seconds, and there it stays
    edge.pass_seconds(30)
    for _ in range(60):
        edge.pass_seconds(1)
        assert edge.slot.interval_seconds == 2.0


def test_a_source_that_fails_is_tried_again_later_and_later() -> None:
    bench = Bench()
    bench.pass_seconds(5)
    bench.source.failure = ValueError("strange /proc")
    assert bench.pass_seconds(2000) == 0
    assert bench.slot.state == "fails: ValueError: strange /proc"
    tries = bench.slot.failures
    assert 9 <= tries <= 13  # 2, 4, 8 ... 512, 600, 600
    bench.source.failure = None
    assert bench.pass_seconds(700) > 50
    assert (bench.slot.state, bench.slot.failures) == ("works", 0)
    assert bench.source.opened >= 2  # opened again: a device may have come back


def test_a_skipped_source_says_why_and_may_come_later() -> None:
    bench = Bench()
    bench.source.failure = Skipped("no adapter")
    assert bench.pass_seconds(10) == 0
    assert bench.slot.state == "skipped: no adapter"
    bench.source.failure = None
    assert bench.pass_seconds(20) > 0
    assert bench.slot.state == "works"


def test_rows_that_nobody_takes_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_ROWS", 3)
    bench = Bench()
    for second in range(5):
        bench.slot.turn(100.0 + 2 * second)
    assert len(bench.slot.take_rows()) == 3
    assert (bench.slot.take_dropped(), bench.slot.take_dropped()) == (2, 0)


def test_a_hanging_source_is_stuck_and_only_its_lane_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "STUCK_SECONDS", 0.05)
    release = threading.Event()

    class Hanging(Steady):
        """Waits for a driver that does not answer."""

        name: ClassVar[str] = "hanging"
        lane: ClassVar[Lane] = "driver"

        def sample(self) -> Iterable[Row]:
            release.wait(30)
            return super().sample()

    hanging = Slot(Hanging(Machine()), 0.02)
    steady = Slot(Steady(Machine()), 0.02)
    lanes = [LaneThread("driver", [hanging]), LaneThread("kernel", [steady])]
    for lane in lanes:
        lane.start()
    wait_until(lambda: lanes[0].look() or hanging.state.startswith("stuck"))
    assert hanging.state == "stuck: no answer for 0.05 s; its thread waits for it"
    steady.take_rows()
    wait_until(lambda: len(steady.take_rows()) > 0)
    release.set()
    wait_until(lambda: hanging.state == "works")
    for lane in lanes:
        lane.stop(10)
        assert not lane.is_alive()
    assert isinstance(steady.source, Steady)
    assert steady.source.closed == 1


def wait_until(question: Any) -> None:
    deadline = time.monotonic() + 20
    while not question():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- all of them together ------------------------------------------------------------------


class Broken(Steady):
    """Fails at once."""

    name: ClassVar[str] = "broken"
    kind: ClassVar[ChunkKind | None] = "disk"

    def sample(self) -> Iterable[Row]:
        raise ValueError("strange")


class Absent(Steady):
    """Is not there."""

    name: ClassVar[str] = "absent"
    kind: ClassVar[ChunkKind | None] = "infiniband"

    def open(self) -> None:
        raise Skipped("no adapter")


class Telling(Steady):
    """Tells news of whoever lives here."""

    name: ClassVar[str] = "telling"
    kind: ClassVar[ChunkKind | None] = None

    def sample(self) -> Iterable[Row]:
        for rank in self.machine.ranks():
            self.machine.report_of("xid", {"number": "79"}, rank.pid, 5)
        return ()


def test_one_broken_source_stops_no_other_and_all_states_are_told(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, 0.02, "node-1", sources=(Steady, Broken, Absent))
    sampling.start()
    try:
        told: list[News] = []
        wait_until(lambda: told.extend(sampling.news()) or told)
        wait_until(lambda: sampling.take_chunks())
        assert (told[0].name, told[0].fields) == (
            "machine sources",
            {
                "host": "node-1", "source.steady": "works",
                "source.broken": "fails: ValueError: strange",
                "source.absent": "skipped: no adapter",
            },
        )  # fmt: skip
        assert sampling.news() == []  # told once
        chunks: list[schema.Chunk] = []
        wait_until(lambda: chunks.extend(sampling.take_chunks()) or chunks)
        assert {chunk.kind for chunk in chunks} == {"tcp"}
        assert (chunks[0].rank, chunks[0].host) == (schema.NODE_RANK, "node-1")
        columns = decode_chunk(chunks[0].data)
        assert set(columns) == set(SAMPLE_COLUMNS["tcp"])
        assert set(columns["connections"]) == {7}
        assert set(columns["sent_segments_total"]) == {-1}  # not told: never zero
    finally:
        sampling.stop()


def test_news_carry_the_host_and_the_rank(tmp_path: Path) -> None:
    sampling = Sampling(tmp_path, 0.02, "node-1", sources=(Telling,))
    sampling.watch([RankProcess(2, 5, 4711)])
    sampling.start()
    try:
        told: list[News] = []
        wait_until(lambda: told.extend(sampling.news()) or [n for n in told if n.name == "xid"])
        xid = next(news for news in told if news.name == "xid")
        assert xid == News("xid", {"host": "node-1", "number": "79"}, 5, 2, 5)
    finally:
        sampling.stop()


def test_rows_share_chunks_unless_all_are_wanted(tmp_path: Path) -> None:
    now = [0.0]
    sampling = Sampling(tmp_path, 1.0, "node-1", sources=(Steady,), monotonic=lambda: now[0])
    ((_, slot),) = sampling._slots
    slot.turn(10.0)
    slot.turn(20.0)
    now[0] = CHUNK_SECONDS - 1
    assert sampling.take_chunks(all_of_them=False) == []
    now[0] = CHUNK_SECONDS
    (chunk,) = sampling.take_chunks(all_of_them=False)
    assert chunk.count == 2
    slot.turn(30.0)
    assert [chunk.count for chunk in sampling.take_chunks()] == [1]


def test_a_source_that_hangs_at_the_start_does_not_hide_the_others(tmp_path: Path) -> None:
    now = [0.0]
    sampling = Sampling(tmp_path, 1.0, "node-1", sources=(Steady, Absent), monotonic=lambda: now[0])
    (_, slot), _ = sampling._slots
    slot.turn(10.0)
    assert sampling.news() == []
    now[0] = START_SECONDS
    (news,) = sampling.news()
    assert news.fields["source.absent"] == "starting"
    assert news.fields["source.steady"] == "works"


def test_what_a_chunk_cannot_hold_is_not_known() -> None:
    from rankscope.node.columns import sample_chunk

    row: dict[str, float | str] = {
        "time_ns": 10**18, "interval_ns": 10**9, "interface": "eth0", "sent_bytes_total": 1 << 63,
        "received_bytes_total": -5, "link_mbps": "fast",
    }  # fmt: skip
    columns = decode_chunk(sample_chunk("nic", [row], "n").data)
    values = {name: columns[name][0] for name in row}
    assert (values["sent_bytes_total"], values["received_bytes_total"]) == (-1, -1)
    assert (values["interface"], values["link_mbps"]) == ("eth0", -1)


def test_this_machine_costs_little() -> None:
    """All sources of this machine together: a bound ten times of what was measured."""
    from rankscope.node.sources import SOURCES

    machine = Machine(ranks=lambda: (RankProcess(0, 0, threading.get_native_id()),))
    slots = [Slot(make(machine), 1.0) for make in SOURCES if make.lane == "kernel"]
    for second in range(5):
        for slot in slots:
            slot.turn(1e9 + second * 1e4)
    began = time.thread_time()
    for second in range(5, 25):
        for slot in slots:
            slot.turn(1e9 + second * 1e4)
    spent = time.thread_time() - began
    for slot in slots:
        slot.source.close()
    assert spent / 20 < 0.01
