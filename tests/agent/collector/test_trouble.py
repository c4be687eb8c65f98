"""What the collector does when the server, the disk or a file does not do its part."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.files.journal import RECORD, JournalWriter
from rankscope.node.ranks.launchers import FINISHED, own_directory
from rankscope.node.ranks.leftovers import DELIVERED
from rankscope.wire import schema
from tests import capabilities
from tests.agent.collector import processes
from tests.agent.collector.complete import assert_complete
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import ensure, is_alive, start_rank, stop, wait_for
from tests.agent.collector.receiver import Receiver
from tests.agent.collector.spooled import spooled
from tests.ports import free_port

LAST_LINE = schema.LogLine(
    attempt=0, rank=schema.NODE_RANK, time_ns=1, level=20, message="of the launcher, at its end"
)


def test_server_away_then_there_everything_is_complete(run: Path) -> None:
    port = free_port()
    rank = start_rank(run, 0, 500, 250)
    wait_for(lambda: list(run.glob("0/*/steps.ring")))
    assert ensure(run, server=f"http://127.0.0.1:{port}", flush_seconds=0.2)
    assert rank.wait(30) == 0
    stop(rank)
    wait_for(lambda: len(spooled(run)) > 3)
    receiver = Receiver(port)
    try:
        wait_for(lambda: receiver.records(schema.RankEnded))
        wait_for(lambda: not spooled(run))
        assert_complete(receiver, 1, 500)
    finally:
        receiver.close()


@pytest.mark.parametrize("status", [401, 408, 429, 500, 503])
def test_what_may_pass_is_tried_again(run: Path, receiver: Receiver, status: int) -> None:
    receiver.answer = (status, "not now")
    fake = FakeRank(run, 0)
    fake.say("patience")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.num_posts >= 2)
    assert not receiver.batches
    receiver.answer = None
    wait_for(lambda: receiver.records(schema.LogLine))
    assert not receiver.losses()


def test_a_refused_batch_is_counted_and_the_next_goes_on(run: Path, receiver: Receiver) -> None:
    receiver.answer = (400, '{"error": {"what": "not a batch", "field": "x", "remedy": "mend"}}')
    fake = FakeRank(run, 0)
    fake.say("refused")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.num_posts >= 1)
    receiver.answer = None
    fake.say("kept")
    wait_for(lambda: receiver.losses())
    ((source, reason),) = receiver.losses()
    assert (source, reason) == ("upload", "HTTP 400: not a batch (x: mend)")
    wait_for(lambda: receiver.records(schema.LogLine))
    assert [line.message for line in receiver.records(schema.LogLine)] == ["kept"]
    assert "refused for good" in (run / "node" / "collector.log").read_text()


def test_the_loss_of_the_very_last_batch_is_sent_before_the_collector_ends(
    run: Path, receiver: Receiver
) -> None:
    launcher = own_directory(run)
    launcher.mkdir(parents=True)
    assert ensure(run, server=receiver.url)
    rank = start_rank(run, 0, 100, 500)
    assert rank.wait(30) == 0
    stop(rank)
    wait_for(lambda: receiver.records(schema.RankEnded))
    receiver.answer, before = (413, "<html>too large</html>"), receiver.num_posts
    (launcher / FINISHED).touch()
    JournalWriter(launcher).append(RECORD, schema.encode(LAST_LINE))
    wait_for(lambda: receiver.num_posts > before)
    receiver.answer = None
    pid = processes.collector_pid(run)
    wait_for(lambda: not is_alive(pid))
    assert ("upload", "HTTP 413") in receiver.losses()
    assert (run / DELIVERED).exists()


def test_a_collector_whose_run_directory_was_deleted_ends(run: Path, receiver: Receiver) -> None:
    FakeRank(run, 0).say("before")
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.records(schema.LogLine))
    pid = processes.collector_pid(run)
    shutil.rmtree(run)
    FakeRank(run, 1).say("of the next run of this name")
    assert ensure(run, server=receiver.url)  # its lock is a new file
    wait_for(lambda: not is_alive(pid))
    wait_for(lambda: len(receiver.records(schema.LogLine)) == 2)
    assert is_alive(processes.collector_pid(run))


def test_the_spool_is_bounded_and_says_what_went(run: Path) -> None:
    port = free_port()
    fake = FakeRank(run, 0)
    limit = 60_000
    assert ensure(run, server=f"http://127.0.0.1:{port}", flush_seconds=0.2, spool_bytes=limit)
    wait_for(lambda: spooled(run))  # or all would be one batch, and the newest stays
    noise = random.Random(1)
    for number in range(30):
        newest = spooled(run)[-1:]
        fake.say(f"line {number} " + noise.randbytes(6000).hex())
        wait_for(lambda newest=newest: spooled(run)[-1:] != newest)  # each is a batch of its own
    wait_for(lambda: sum(path.stat().st_size for path in spooled(run)) <= limit)
    receiver = Receiver(port)
    try:
        wait_for(lambda: ("spool", "spool full") in receiver.losses())
        wait_for(
            lambda: any("line 29" in line.message for line in receiver.records(schema.LogLine))
        )
        numbers = [int(line.message.split()[1]) for line in receiver.records(schema.LogLine)]
        assert numbers == sorted(numbers)
        assert 0 < len(numbers) < 30  # the oldest went
        lost = receiver.losses()["spool", "spool full"]
        assert lost >= 30 - len(numbers)  # states and samples of the same batches count too
    finally:
        receiver.close()


def test_a_slow_server_holds_nothing_up(run: Path, receiver: Receiver) -> None:
    receiver.delay_seconds = 1.0
    rank = start_rank(run, 0, 500, 250)
    wait_for(lambda: list(run.glob("0/*/steps.ring")))
    assert ensure(run, server=receiver.url, flush_seconds=0.5)
    assert rank.wait(30) == 0
    stop(rank)
    wait_for(lambda: receiver.records(schema.RankEnded))
    assert_complete(receiver, 1, 500)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_damaged_ring_is_left_alone_and_told_once(
    run: Path, receiver: Receiver, seed: int
) -> None:
    good = FakeRank(run, 0)
    bad = FakeRank(run, 1)
    noise = random.Random(seed)
    if seed == 1:  # a header that is none
        bad.ring.buffer[0:64] = noise.randbytes(64)
    elif seed == 2:  # a head that the slots cannot have
        ring.U64.pack_into(bad.ring.buffer, ring.HEAD_AT, 1 << 60)
    else:  # a file that is too short
        os.truncate(bad.ring.path, 10_000)
    bad.say("the journal is sound")
    good.end(good.issue())
    assert ensure(run, server=receiver.url, flush_seconds=0.2)
    wait_for(lambda: receiver.rows("collectives", "sequence"))
    wait_for(lambda: [e for e in receiver.records(schema.Event) if e.name == "ring damaged"])
    for number in (1, 2, 3):  # it looks at that rank again each time
        wait_for(lambda number=number: len(receiver.records(schema.LogLine)) == number)
        bad.say("it is still sound")
    wait_for(lambda: len(receiver.records(schema.LogLine)) == 4)
    events = [e for e in receiver.records(schema.Event) if e.name == "ring damaged"]
    assert len(events) == 1
    assert "1." in events[0].fields["file"]
    assert receiver.losses() == {("collectives", "ring damaged"): 1}
    assert is_alive(processes.collector_pid(run))


def test_noise_in_the_slots_costs_those_slots_only(run: Path, receiver: Receiver) -> None:
    fake = FakeRank(run, 0)
    noise = random.Random(4)
    for number in range(200):
        fake.end(fake.issue())
        if number % 2:
            at = fake.ring.offset(number) + 8  # everything but the commit mark
            fake.ring.buffer[at : at + 72] = noise.randbytes(72)
    fake.says_ended(ring.CLEAN)
    assert ensure(run, server=receiver.url)
    even = set(range(1, 200, 2))
    wait_for(lambda: even <= {s for _, s in receiver.rows("collectives", "sequence")})
    assert is_alive(processes.collector_pid(run))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    capabilities.need("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Write until the disk takes no more."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_said_once_and_batches_go_through_memory(
    small_disk: Path, receiver: Receiver
) -> None:
    run = small_disk / "test-run"
    fake = FakeRank(run, 0, num_slots=1024)
    assert ensure(run, server=receiver.url, flush_seconds=0.2)
    wait_for(lambda: receiver.records(schema.RankState))
    ballast = small_disk / "ballast"
    fill(ballast)
    for _ in range(5):
        fake.end(fake.issue())
        time.sleep(0.4)
    wait_for(lambda: len(receiver.rows("collectives", "sequence")) == 5)
    assert len({producer for producer, _ in receiver.batches}) == 2  # one is known in memory only
    (event,) = [e for e in receiver.records(schema.Event) if "cannot write" in e.name]
    assert "No space" in event.fields["reason"]
    ballast.unlink()
    fake.end(fake.issue())
    wait_for(lambda: len(receiver.rows("collectives", "sequence")) == 6)
    log = (run / "node" / "collector.log").read_text()
    assert log.count("no batch can be written") <= 1
    pid = processes.collector_pid(run)
    os.kill(pid, 15)
    wait_for(lambda: not is_alive(pid))
    rows = sorted(receiver.rows("collectives", "sequence"))
    assert rows == [(0, number) for number in range(1, 7)]


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup that allows 60 MiB."""
    capabilities.need("memory-cgroup")
    root = capabilities.memory_cgroup()
    assert root is not None
    group = root / f"rankscope-test-{os.getpid()}"
    group.mkdir()
    capabilities.limit_memory(group, 60 << 20)
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_the_kernels_oom_killer_is_named(run: Path, receiver: Receiver, memory_group: Path) -> None:
    rank = start_rank(run, 0, 2500, 500, "out_of_memory")  # long enough to be sampled
    (memory_group / "cgroup.procs").write_text(str(rank.pid))
    assert ensure(run, server=receiver.url)
    wait_for(lambda: receiver.records(schema.RankEnded))
    (ended,) = receiver.records(schema.RankEnded)
    stop(rank)
    assert (ended.reason, ended.signal) == ("signal", 9)
    assert ended.detail.endswith("the cgroup's OOM killer fired")

    def kills() -> dict[str, schema.Event]:
        events = [event for event in receiver.records(schema.Event) if event.name == "oom kill"]
        return {event.fields["seen_in"]: event for event in events}

    wait_for(lambda: "cgroup" in kills())
    # below the controller's own mount in version 1, "memory", and below the one of all in version 2
    place = str(memory_group).removeprefix("/sys/fs/cgroup").removeprefix("/memory")
    assert kills()["cgroup"].fields["cgroup"] == place
    states = next(e for e in receiver.records(schema.Event) if e.name == "machine sources")
    if states.fields["source.kernel-log"] == "works" and Path("/dev/kmsg").exists():
        wait_for(lambda: "kernel log" in kills())
        told = kills()["kernel log"]
        assert (told.rank, told.fields["pid"]) == (0, str(rank.pid))


def test_of_eight_callers_one_starts_a_collector(run: Path, receiver: Receiver) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from rankscope.files.start_collector import ensure_collector\n"
        "print(ensure_collector(Path(sys.argv[1]), os.environ))"
    )
    environment = processes.environment(server=receiver.url)
    FakeRank(run, 0)
    callers = [
        subprocess.Popen(
            [processes.sys.executable, "-c", script, str(run)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    answers = [caller.communicate(timeout=60)[0].strip() for caller in callers]
    assert sorted(answers) == ["False"] * 7 + ["True"]
    wait_for(lambda: receiver.batches)
    assert len({producer for producer, _ in receiver.batches}) == 1
    # nobody's child, in a session of its own, with no terminal and no descriptor of the caller's
    pid = processes.collector_pid(run)
    assert os.getsid(pid) != os.getsid(0)
    opened = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert not [path for path in opened if path.startswith("/dev/pts")]
    assert processes.start_collector(run, server=receiver.url).wait(30) == 0  # there is one
