"""Processes that begin anew, groups that come and go, ranks without a handler for stacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.files import ring, run_directory
from rankscope.files.run_directory import rank_directories
from rankscope.node.processes.asking import StackAsker, find_pyspy
from rankscope.process.family import process_start_ticks
from rankscope.wire import schema
from tests.agent import recorded
from tests.agent.collector.processes import collector_pid, is_alive, wait_for
from tests.agent.collector.receiver import Receiver

TIMES = 100


@pytest.mark.multiproc
def test_a_hundred_worlds(tmp_path: Path) -> None:
    done = recorded.run(tmp_path, "many_groups.py", str(tmp_path), str(TIMES), ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rankscope:" not in done.stderr
    for rank in recorded.read(tmp_path):
        names = {"0", *(f"0#{number}" for number in range(2, TIMES + 1))}
        worlds = [group for group in rank.of(schema.GroupDefined) if group.group in names]
        assert len(worlds) == TIMES
        seen = rank.operations()
        assert seen["all_reduce"] == 3 * TIMES
        assert seen["broadcast"] == TIMES
        for name in names:
            of_group = [
                slot["sequence"] for slot in rank.collectives
                if rank.groups[slot["group_id"]] == name
                and schema.OPERATIONS[slot["operation"]] == "all_reduce"
            ]  # fmt: skip
            assert of_group == [1, 2, 3], name
        early, late = map(int, (tmp_path / f"memory.{rank.rank}").read_text().split())
        assert late - early < 32 << 20  # gloo itself keeps a little of each world


@pytest.mark.multiproc
@pytest.mark.parametrize("source", ["auto", "kernels"])
def test_a_rank_that_forks_a_rank(tmp_path: Path, source: str) -> None:
    """Each records its own calls, all with their ends, though a fork leaves without `atexit`."""
    done = recorded.run(tmp_path, "forks_a_rank.py", RANKSCOPE_COLLECTIVES=source)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    both = recorded.read(tmp_path)
    assert len(both) == 2
    for rank in both:
        assert rank.operations()["all_reduce"] == 8  # 4 by hand, 4 of the model
        assert set(rank.collectives["state"]) == {schema.ENDED}
        assert list(rank.collectives["sequence"]) == list(range(1, len(rank.collectives) + 1))


@pytest.mark.multiproc
@pytest.mark.parametrize("source", ["auto", "kernels"])
def test_threads_that_call_at_once(tmp_path: Path, source: str) -> None:
    """Each synchronous call has its end, although others begin before its caller waits for it."""
    done = recorded.run(tmp_path, "threads.py", "100", ranks=2, RANKSCOPE_COLLECTIVES=source)
    assert done.returncode == 0, done.stderr
    for rank in recorded.read(tmp_path):
        assert rank.operations()["all_reduce"] == 400
        assert set(rank.collectives["state"]) == {schema.ENDED}


AGAIN = """
import os, sys, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
for _ in range(3):
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
print("life", sys.argv[1], flush=True)
if sys.argv[1] == "1":
    os.execv(sys.executable, [sys.executable, __file__, "2"])
sys.exit(5)
"""


def test_a_process_that_re_executes_itself_goes_on(tmp_path: Path) -> None:
    receiver = Receiver()
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    environment = recorded.environment(
        tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RANKSCOPE_COLLECTOR="1",
        RANKSCOPE_SERVER=receiver.url,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), "1"], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "life 1\nlife 2\n")
    assert "rankscope:" not in done.stderr
    wait_for(lambda: receiver.records(schema.RankEnded), 60)
    (ended,) = receiver.records(schema.RankEnded)
    assert (ended.reason, ended.exit_code) == ("exit_code", 5)
    assert sorted(step for _, step in receiver.rows("steps", "step")) == [1, 1, 2, 2, 3, 3]
    receiver.close()


def test_a_process_number_that_comes_again_is_another_process(tmp_path: Path) -> None:
    directory = run_directory.rank_directory(tmp_path, 0, 3, os.getpid(), ring.is_of_another)
    directory.mkdir(parents=True)
    path = directory / run_directory.COLLECTIVES_RING
    ring.RingWriter(path, 64, 1024, attempt=0, rank=3, world_size=4, local_rank=3)
    # its own one, found again behind an exec
    assert (
        run_directory.rank_directory(tmp_path, 0, 3, os.getpid(), ring.is_of_another) == directory
    )
    with path.open("r+b") as file:  # as a process of another time left it
        head = bytearray(file.read(ring.IDENTITY.size))
        fields = list(ring.IDENTITY.unpack(head))
        fields[-2] += 1
        file.seek(0)
        file.write(ring.IDENTITY.pack(*fields))
    fresh = run_directory.rank_directory(tmp_path, 0, 3, os.getpid(), ring.is_of_another)
    assert fresh.name == f"3.{os.getpid()}.2"
    fresh.mkdir()
    assert rank_directories(tmp_path) == [f"0/{directory.name}", f"0/{fresh.name}"]


ORPHAN = """
import os, sys, time, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
parent, left = os.getppid(), 3
open(sys.argv[1], "w").write(str(os.getpid()))
while left:
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    left -= os.getppid() != parent
    time.sleep(0.01)
os._exit(7)
"""


def test_the_end_of_a_rank_whose_launcher_was_killed(tmp_path: Path) -> None:
    receiver = Receiver()
    script, pid_file = tmp_path / "orphan.py", tmp_path / "pid"
    script.write_text(ORPHAN)
    environment = recorded.environment(
        tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RANKSCOPE_COLLECTOR="1"
    )
    for name in ("RANKSCOPE", "RANKSCOPE_RUN_ID", "PYTHONPATH"):
        environment.pop(name)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "rankscope", "run", "--server", receiver.url, "--run-id", "test",
         "--", sys.executable, str(script), str(pid_file)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: receiver.rows("steps", "step"), 60)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: receiver.records(schema.RankEnded), 60)
    (ended,) = receiver.records(schema.RankEnded)
    assert (ended.reason, ended.exit_code) == ("exit_code", 7), ended.detail
    state = receiver.records(schema.RankState)[-1]
    assert state.cpu_seconds > 0
    assert state.rss_bytes > 0
    wait_for(lambda: not is_alive(collector_pid(tmp_path / "test")), 60)
    receiver.close()


@pytest.mark.skipif(not find_pyspy(), reason="py-spy is not installed")
def test_stacks_of_a_rank_without_a_handler(tmp_path: Path) -> None:
    code = (
        "import time\ndef sits_here():\n    print('up', flush=True); time.sleep(600)\nsits_here()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    asker = StackAsker(tmp_path / "stacks")
    assert asker.has_fallback
    assert not asker(process.pid, 1, 0)  # another process than the one that was meant
    assert asker(process.pid, process_start_ticks(process.pid), 0)
    wait_for(lambda: "sits_here" in (tmp_path / "stacks").read_text(), 60)
    wait_for(lambda: not asker._is_busy())
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_without_pyspy_nothing_is_asked(tmp_path: Path) -> None:
    asker = StackAsker(tmp_path / "stacks", program=shutil.which("false") or "/bin/false")
    assert not asker(0, 1, 0)
    begun = time.monotonic()
    assert asker(1, process_start_ticks(1), 0) is (process_start_ticks(1) != 0)
    assert time.monotonic() - begun < 5
    wait_for(lambda: not asker._is_busy())
    assert (tmp_path / "stacks").read_bytes() == b""
