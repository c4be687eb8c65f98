"""The native hot path of steps does what its twin in Python does, and is what was committed."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.files import ring
from rankscope.native import hotpath
from rankscope.native.binaries import MANIFEST, SWITCH, unsupported
from rankscope.native.hotpath import native
from rankscope.native.hotpath.clock import (
    BACKWARD,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
    ClockCore,
)
from rankscope.native.hotpath.waits import MOST_LOOKED_AT, WaitCore
from rankscope.wire import schema
from tests.agent.clocks import CORES, SECOND, pass_time, ring_in, rings_in, seconds
from tests.agent.shipped import builder

__all__ = ["builder"]

SHIPPED = pytest.mark.skipif(
    bool(unsupported()) or os.uname().machine not in ("x86_64", "aarch64"),
    reason=unsupported() or "no binary is shipped for this machine",
)
MS = 1_000_000
WORDS = {name: at for at, (name, _, _) in enumerate(ring.COLLECTIVE_FIELDS)}


# --- the clock ----------------------------------------------------------------------------------


class OneClock:
    """A clock of either kind on rings of its own, whose phases last whole seconds."""

    def __init__(self, core: type[Any], folder: Path) -> None:
        folder.mkdir()
        self.rings = rings_in(folder)
        self.heard: list[int] = []
        self.said: list[Any] = []
        clock = self.clock = core()
        clock.phase, clock.step, clock.explicit, clock.flags = OTHER, 1, 0, schema.STEP_FIRST
        clock.thread = threading.get_ident()
        clock.num_backwards = clock.blocked_seen_ns = 0
        clock.sees_data = clock.forward_is_explicit = False
        clock.on_phase = None
        clock.since_ns = time.monotonic_ns()
        clock.restart()
        clock.attach(*self.rings)

    def do(self, name: str, *arguments: Any) -> None:
        if name == "pass_time":
            pass_time(self.clock, *arguments)
        elif name == "block":
            self.rings[0].words[ring.BLOCKED_AT // 8] += arguments[0] * SECOND
        elif name == "hear":
            self.clock.on_phase = self.heard.append if arguments[0] else None
        elif name == "move_all":
            source = arguments[0]
            spent_ns, blocked_ns = self.clock.spent()[source], self.clock.blocked()[source]
            self.clock.move(*arguments, spent_ns, blocked_ns)
        elif name == "set":
            setattr(self.clock, *arguments)
        else:
            answer = getattr(self.clock, name)(*arguments)
            if name == "close":
                step, duration_ns, *others = answer
                answer = step, seconds(duration_ns), *others
            self.said.append(answer)

    def state(self) -> dict[str, Any]:
        clock = self.clock
        names = ("phase", "step", "microbatches", "flags", "explicit", "num_backwards",
                 "saw_backward", "past_first", "sees_data", "forward_is_explicit")  # fmt: skip
        return {name: getattr(clock, name) for name in names} | {
            "gap": seconds(clock.gap_ns), "gap_blocked": seconds(clock.gap_blocked_ns),
            "spent": seconds(clock.spent()), "blocked": seconds(clock.blocked()),
            "phase in the ring": self.rings[0].buffer[ring.PHASE_AT],
        }  # fmt: skip

    def slots(self) -> Any:
        written = self.rings[1].words[ring.HEAD_AT // 8]
        reader = ring.RingReader(self.rings[1].path, ring.STEP_FIELDS)
        slots, state = reader.read(np.arange(written))
        assert (state == 1).all()
        return slots


def some_call(draw: random.Random) -> tuple[Any, ...]:
    phase = draw.randrange(7)
    return draw.choice([
        ("pass_time", draw.randrange(1, 9)), ("pass_time", draw.randrange(1, 9)),
        ("enter", phase), ("enter", phase), ("enter", BACKWARD), ("enter", OTHER),
        ("enter", BACKWARD, False), ("switch", phase), ("account",), ("block", draw.randrange(5)),
        ("add_blocked", draw.randrange(4) * SECOND), ("set", "explicit", draw.randrange(2)),
        ("set", "sees_data", draw.random() < 0.5),
        ("set", "forward_is_explicit", draw.random() < 0.3), ("hear", draw.random() < 0.5),
        ("move_all", DATA, EVALUATION), ("move_all", OPTIMIZER, FORWARD),
        ("take_counters",), ("is_ours",), ("close", 3, 0), ("close", 3, schema.STEP_THINNED),
        ("close", -1, 0), ("restart",), ("detach",), ("set", "gc_ns", draw.randrange(10**6)),
    ])  # fmt: skip


@SHIPPED
@pytest.mark.parametrize("seed", range(20))
def test_both_clocks_do_the_same(tmp_path: Path, seed: int) -> None:
    assert hotpath.ORIGIN == "native"
    draw = random.Random(seed)
    python, twin = OneClock(ClockCore, tmp_path / "a"), OneClock(hotpath.ClockCore, tmp_path / "b")
    for _ in range(300):
        call = some_call(draw)
        for one in (python, twin):
            one.do(*call)
            if call[0] == "detach":  # and on again, on the same rings
                one.clock.attach(*one.rings)
        assert python.state() == twin.state(), call
    assert python.heard == twin.heard
    assert python.said == twin.said
    slots, same = python.slots(), twin.slots()
    assert len(slots) == len(same) > 5
    for name in ("number", "gc_ns", "copy_ns", "step", "microbatches", "num_collectives", "flags"):
        assert (slots[name] == same[name]).all(), name
    for name in (n for n in slots.dtype.names if n.endswith("_ns") and "cpu" not in n):
        difference = slots[name].astype(np.int64) - same[name].astype(np.int64)
        assert (np.abs(difference) < SECOND / 2).all(), name
    for found in (slots, same):
        spent = sum(found[f"{phase}_ns"].astype(np.int64) for phase in schema.PHASES)
        assert (found["process_cpu_ns"] < 60 * SECOND).all()
        assert (found["cpu_ns"] <= found["process_cpu_ns"] + SECOND).all()
        assert (found["minor_faults"] < 10**6).all()
        assert len(spent) == len(found)


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
class TestEachClock:
    def test_phases_add_up_to_the_step(self, tmp_path: Path, core: type[Any]) -> None:
        one = OneClock(core, tmp_path / "a")
        for phase in (DATA, FORWARD, BACKWARD, OTHER, FORWARD, BACKWARD, OTHER):
            one.clock.enter(phase)
        assert one.clock.close(2, 0)[0] == 1
        (slot,) = one.slots()
        spent = sum(int(slot[f"{phase}_ns"]) for phase in schema.PHASES)
        assert spent == slot["ended_ns"] - slot["started_ns"]
        assert slot["microbatches"] == 2

    def test_another_thread_changes_nothing(self, tmp_path: Path, core: type[Any]) -> None:
        one = OneClock(core, tmp_path / "a")
        seen: list[bool] = []

        def elsewhere() -> None:
            seen.append(one.clock.is_ours())
            one.clock.enter(FORWARD)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [False]
        assert one.clock.phase == OTHER

    def test_what_a_listener_raises_comes_out(self, tmp_path: Path, core: type[Any]) -> None:
        one = OneClock(core, tmp_path / "a")

        def fails(phase: int) -> None:
            raise KeyError(phase)

        one.clock.on_phase = fails
        with pytest.raises(KeyError):
            one.clock.enter(FORWARD)

    def test_it_goes_on_in_a_ring_that_has_slots(self, tmp_path: Path, core: type[Any]) -> None:
        one = OneClock(core, tmp_path / "a")
        one.clock.close(0, 0)
        again = core()
        again.phase, again.step, again.thread = OTHER, 7, threading.get_ident()
        again.since_ns = time.monotonic_ns()
        again.blocked_seen_ns = again.explicit = 0
        again.on_phase = None
        again.restart()
        again.attach(*one.rings)
        again.close(0, 0)
        assert list(one.slots()["step"]) == [1, 7]


@SHIPPED
def test_what_is_no_ring_is_an_error(tmp_path: Path) -> None:
    one = OneClock(hotpath.ClockCore, tmp_path / "a")
    with pytest.raises(AttributeError, match="buffer"):
        one.clock.attach(tmp_path, one.rings[1])
    with pytest.raises(ValueError, match="not a ring"):
        one.clock.attach(SimpleNamespace(buffer=bytearray(100)), one.rings[1])


# --- what DDP waits -------------------------------------------------------------------------------


def write(writer: ring.RingWriter, number: int, **values: int) -> None:
    slot = [values.get(name, 0) for name, _, _ in ring.COLLECTIVE_FIELDS]
    slot[WORDS["number"]] = number + 1
    ring.COLLECTIVE_SLOT.pack_into(writer.buffer, writer.offset(number), *slot)
    writer.words[ring.HEAD_AT // 8] = number + 1


def a_pass(draw: random.Random, writer: ring.RingWriter, number: int, now: int) -> tuple[int, int]:
    """Write the collectives of a backward pass; return the next number and when it is over."""
    for _ in range(draw.choice((0, 1, 2, 5, MOST_LOOKED_AT + 3))):
        now += draw.randrange(1, 20) * MS
        by_engine = draw.random() < 0.9
        write(
            writer, number, arrived_ns=now, input_bytes=draw.choice((0, 10**3, 10**6, 10**7)),
            flags=schema.FLAG_BY_ENGINE if by_engine else 0,
            state=schema.ENDED if draw.random() < 0.8 else schema.RETURNED,
        )  # fmt: skip
        if by_engine:
            writer.words[ring.ENGINE_NUMBER_AT // 8] = number + 1
            writer.words[ring.ENGINE_ARRIVED_AT // 8] = now
        now += draw.randrange(30) * MS
        writer.words[ring.LATEST_END_AT // 8] = now
        number += 1
    return number, now + draw.randrange(10) * MS - draw.choice((0, 0, 20 * MS))


@pytest.mark.parametrize("seed", range(20))
def test_both_find_the_same_waits(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rings = [ring_in(tmp_path, name, ring.COLLECTIVE_SLOT.size) for name in ("a", "b")]
    cores: list[Any] = [WaitCore(rings[0]), hotpath.WaitCore(rings[1])]
    number, now, found = 0, 10**12, []
    for _ in range(60):
        state, start = draw.getstate(), (number, now)
        is_thinned = draw.random() < 0.1
        answers = []
        for core, writer in zip(cores, rings, strict=True):
            draw.setstate(state)
            core.begin()
            number, now = a_pass(draw, writer, *start)
            writer.buffer[ring.THINNED_AT] = is_thinned
            answers.append(core.end_of_engine(now))
            if draw.random() < 0.2 and number:
                answers[-1] = core.end_of(number - 1, now - MS, draw.random() < 0.5, 0.5, now)
        assert answers[0] == answers[1]
        assert [core.after_ns for core in cores] == [cores[0].after_ns] * 2
        assert [core.num_known for core in cores] == [cores[0].num_known] * 2
        found.append(answers[0])
    assert rings[0].buffer[ring.HEADER_BYTES :] == rings[1].buffer[ring.HEADER_BYTES :]
    assert len(set(found)) > 10


# --- where it is loaded ---------------------------------------------------------------------------


def test_what_is_committed_fits_its_sources_and_recipe(builder: ModuleType) -> None:
    manifest = msgspec.json.decode((native.DIRECTORY / MANIFEST).read_bytes(), type=native.Manifest)
    advice = "the hot path was changed: run `make probes` and commit what it makes"
    assert manifest.sources_sha256 == native.sources_digest(), advice
    assert manifest.recipe_sha256 == builder.hotpath_recipe(), advice
    assert set(manifest.binaries) == set(builder.COMPILERS)
    there = {path.name for path in native.DIRECTORY.iterdir()}
    assert there == {MANIFEST, *map(native.file_of, manifest.binaries)}
    for machine, digest in manifest.binaries.items():
        content = (native.DIRECTORY / native.file_of(machine)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert {62: "x86_64", 183: "aarch64"}[content[18]] == machine
        assert builder.newer_than_allowed(content) == []
        assert b"libstdc++" not in content


def damaged(folder: Path) -> None:
    path = folder / native.file_of(os.uname().machine)
    content = path.read_bytes()
    path.unlink()  # this process has the file mapped
    path.write_bytes(content + b"more")


def of_other_sources(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace(native.sources_digest(), "0" * 64))


def of_another_machine(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace(os.uname().machine, "sparc"))


@SHIPPED
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damaged, "not the file that the manifest names"),
        (of_other_sources, "made from other sources"),
        (of_another_machine, "there is none for"),
        (shutil.rmtree, "No such file"),
    ],
)
def test_what_does_not_fit_is_not_loaded(
    tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "ready"
    shutil.copytree(native.DIRECTORY, folder)
    assert native.load({}, folder) is not None
    harm(folder)
    with pytest.raises(native.Unfit, match=reason):
        native.load({}, folder)


def test_it_can_be_switched_off() -> None:
    says = (
        "from rankscope.native import hotpath; print(hotpath.ORIGIN, hotpath.ClockCore.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", says], env=os.environ | {SWITCH: "0"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[:2] == ["in", "Python:"]
    assert done.stdout.split()[-1] == "rankscope.native.hotpath.clock"
