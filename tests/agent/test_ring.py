from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.files import ring
from rankscope.process.family import process_start_ticks
from tests.agent.collector.processes import wait_for
from tests.damage import damaged


def make(path: Path, num_slots: int = 1024) -> ring.RingWriter:
    return ring.RingWriter(
        path,
        ring.COLLECTIVE_SLOT.size,
        num_slots,
        attempt=0,
        rank=3,
        world_size=4,
        local_rank=1,
    )


def write(writer: ring.RingWriter, number: int) -> None:
    values = [0] * len(ring.COLLECTIVE_FIELDS)
    values[0] = number + 1
    values[[name for name, _, _ in ring.COLLECTIVE_FIELDS].index("sequence")] = number
    ring.COLLECTIVE_SLOT.pack_into(writer.buffer, writer.offset(number), *values)
    ring.U64.pack_into(writer.buffer, ring.HEAD_AT, number + 1)


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    writer = make(tmp_path / "r")
    for number in range(10):
        write(writer, number)
    reader = ring.RingReader(tmp_path / "r", ring.COLLECTIVE_FIELDS)
    slots, state = reader.read(np.arange(12))
    assert state.tolist() == [1] * 10 + [0, 0]
    assert slots["sequence"][:10].tolist() == list(range(10))
    assert (reader.rank, reader.world_size, reader.local_rank) == (3, 4, 1)
    assert reader.pid_start_ticks == process_start_ticks(reader.pid)


def test_says_what_was_overwritten(tmp_path: Path) -> None:
    writer = make(tmp_path / "r")
    for number in range(1500):
        write(writer, number)
    reader = ring.RingReader(tmp_path / "r", ring.COLLECTIVE_FIELDS)
    _, state = reader.read(np.arange(1500))
    assert (state[: 1500 - 1024] == -1).all()
    assert (state[1500 - 1024 :] == 1).all()


def test_a_slot_that_is_overwritten_while_it_is_copied_is_not_whole(tmp_path: Path) -> None:
    writer = make(tmp_path / "r")
    for number in range(3):
        write(writer, number)
    reader = ring.RingReader(tmp_path / "r", ring.COLLECTIVE_FIELDS)

    class Overtaken:
        """The slots; while they are copied the writer, one round ahead, begins to fill slot 1."""

        def __init__(self, slots: Any) -> None:
            self.slots = slots

        def __getitem__(self, key: Any) -> Any:
            if not isinstance(key, str):
                ring.U64.pack_into(writer.buffer, writer.offset(1), 0)
            return self.slots[key]

    reader._slots = Overtaken(reader._slots)
    assert reader.read(np.arange(3))[1].tolist() == [1, 0, 1]


def test_clock_pair_converts_to_wall_time(tmp_path: Path) -> None:
    writer = make(tmp_path / "r")
    reader = ring.RingReader(tmp_path / "r", ring.COLLECTIVE_FIELDS)
    monotonic, wall = reader.clock()
    assert abs((time.time_ns() - wall) - (time.monotonic_ns() - monotonic)) < 50_000_000
    writer.renew_clock()
    assert reader.clock()[0] > monotonic


def test_survives_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from rankscope.files import ring\n"
        "w = ring.RingWriter(Path(sys.argv[1]), ring.COLLECTIVE_SLOT.size, 1024, attempt=0,"
        " rank=0, world_size=1, local_rank=0)\n"
        "for n in range(500):\n"
        "    v = [0] * len(ring.COLLECTIVE_FIELDS); v[0] = n + 1\n"
        "    ring.COLLECTIVE_SLOT.pack_into(w.buffer, w.offset(n), *v)\n"
        "    ring.U64.pack_into(w.buffer, ring.HEAD_AT, n + 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "r"
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9
    reader = ring.RingReader(path, ring.COLLECTIVE_FIELDS)
    assert reader.u64(ring.HEAD_AT) == 500
    assert (reader.read(np.arange(500))[1] == 1).all()


def test_a_reader_can_tell_whether_the_writer_or_its_child_lives(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from rankscope.files import ring\n"
        "w = ring.RingWriter(Path(sys.argv[1]), ring.COLLECTIVE_SLOT.size, 1024, attempt=0,"
        " rank=0, world_size=1, local_rank=0)\n"
        "child = os.fork()\n"
        "print(child or '', flush=True, end='\\n' if child else '')\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "ring"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE,
                          text=True) as writer:  # fmt: skip
        assert writer.stdout is not None
        child = int(writer.stdout.readline())
        reader = ring.RingReader(path, ring.COLLECTIVE_FIELDS)
        assert reader.u64(ring.PID_NAMESPACE_AT) == ring.pid_namespace() != 0
        assert reader.is_held()
        writer.kill()
        writer.wait()
        assert reader.is_held()
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: reader.is_held() is False)


def test_shrinks_and_then_refuses_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 4096 * ring.COLLECTIVE_SLOT.size + ring.HEADER_BYTES

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if length > room:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring.os, "posix_fallocate", fallocate)
    descriptor, num_slots = ring._allocate(tmp_path / "a", ring.COLLECTIVE_SLOT.size, 16384)
    ring.os.close(descriptor)
    assert num_slots == 4096
    room = 0
    with pytest.raises(ring.RingFull, match="no room"):
        ring._allocate(tmp_path / "b", ring.COLLECTIVE_SLOT.size, 16384)
    assert not (tmp_path / "b").exists()


@given(st.data())
def test_damaged_bytes_are_refused_not_believed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "good"
    if not path.exists():
        make(path)
    (tmp_path / "bad").write_bytes(data.draw(damaged(path.read_bytes()[:8192], reach=64)))
    with contextlib.suppress(ring.RingDamaged):
        ring.RingReader(tmp_path / "bad", ring.COLLECTIVE_FIELDS).read(np.arange(5))


def test_goes_on_in_its_own_ring_and_never_in_another(tmp_path: Path) -> None:
    """A program that replaces itself (exec) keeps its process, and so its ring."""
    path = tmp_path / "r"
    who = {"attempt": 0, "rank": 0, "world_size": 1, "local_rank": 0}
    before = ring.RingWriter(path, ring.COLLECTIVE_SLOT.size, 1024, **who)
    ring.U64.pack_into(before.buffer, ring.HEAD_AT, 7)
    after = ring.RingWriter(path, ring.COLLECTIVE_SLOT.size, 2048, **who)
    assert (before.begun, after.begun, after.num_slots) == (0, 7, 1024)
    ring.U64.pack_into(after.buffer, ring.HEAD_AT, 8)
    assert ring.U64.unpack_from(before.buffer, ring.HEAD_AT) == (8,)  # one file
    script = (
        "import sys; from pathlib import Path; from rankscope.files import ring\n"
        f"ring.RingWriter(Path(sys.argv[1]), ring.COLLECTIVE_SLOT.size, 1024, **{who!r})\n"
    )
    other = subprocess.run([sys.executable, "-c", script, str(path)], stderr=subprocess.PIPE,
                           check=False)  # fmt: skip
    assert b"FileExistsError" in other.stderr
