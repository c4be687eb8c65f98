"""The torch child with real processes: three nodes on loopback, and all that may go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope.preflight.collective import child as smoke
from rankscope.preflight.collective.child import SmokeChild
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.options import Options
from rankscope.preflight.system import System
from tests import fork_server

pytestmark = [pytest.mark.multiproc, pytest.mark.together("agents of preflight"), pytest.mark.core]
NODES = ("node0", "node1", "node2")
IS_FORKED = pytest.mark.usefixtures("forked")  # what is not about starting and killing children
MODULE = ("-m", "rankscope.preflight.collective")
# A child whose all-reduce is spoilt, as a broken machine would spoil it.
SPOILT = """
import sys, time
from rankscope.preflight.collective import __main__ as child
from rankscope.preflight.collective import work
honest = work.all_reduce
def all_reduce(tensor, group=None, op=work.dist.ReduceOp.SUM):
    if tensor.dtype == work.torch.int32 and tensor.numel() > 1:
        {before}
    honest(tensor, group, op)
    if tensor.dtype == work.torch.int32 and tensor.numel() > 1:
        {after}
work.all_reduce = all_reduce
sys.exit(child.main())
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests may be busy: only what a test is about has a short limit."""
    monkeypatch.setattr(smoke, "IMPORT_LIMIT_S", 150.0)
    monkeypatch.setattr(smoke, "STORE_LIMIT_S", 100.0)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the children from where PyTorch is imported."""
    monkeypatch.setattr(smoke, "_COMMAND", (*fork_server.python(), *smoke._COMMAND[1:]))


def torch_gives_up(monkeypatch: pytest.MonkeyPatch, *, after_s: float, limit_s: float) -> None:
    """Leave a busy machine more time to tell of torch's own time-out than the few seconds."""
    margin_s = limit_s - after_s
    monkeypatch.setattr(smoke, "_LEAST_MARGIN_S", margin_s)


def spoilt(tmp_path: Path, before: str = "pass", after: str = "pass") -> Sequence[str]:
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT.format(before=before, after=after))
    return (*smoke._COMMAND[: -len(MODULE)], str(script))


def quick(**more: object) -> SmokeChild:
    wanted: dict[str, Any] = {"limit_s": 60.0, "budget_s": 0.5, **more}
    return SmokeChild(System(), Options(), **wanted)


async def launch(children: Sequence[SmokeChild]) -> list[SmokeFacts]:
    """Run all children as the agents of as many nodes would."""
    for child in children:
        child.start()
    nodes = NODES[: len(children)]
    runs = (
        child.run(
            rank=rank, nodes=nodes, address="127.0.0.1", port=children[0].port, backend="gloo"
        )
        for rank, child in enumerate(children)
    )
    return list(await asyncio.gather(*runs))


def nothing_is_left() -> bool:
    me = psutil.Process()  # the fork server, if it is another's, reaps a little later
    mine = [
        process for process in me.children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE or process.parent() == me
    ]  # fmt: skip
    return not [p for p in mine if "preflight" in " ".join(p.cmdline()) or "spoilt" in p.cmdline()]


@IS_FORKED
def test_three_nodes() -> None:
    told = asyncio.run(launch([quick(budget_s=20.0) for _ in NODES]))
    for facts in told:
        assert (facts.stage, facts.error, facts.world_size) == ("done", "", 3)
        assert [size.size_bytes for size in facts.sizes][:2] == [4, 65_536]
        assert all(size.is_correct and size.elapsed_ms > 0 for size in facts.sizes)
        assert {half.nodes for half in facts.halves} == {
            ("node0", "node1"), ("node0", "node2"), ("node1", "node2")
        }  # fmt: skip
        assert facts.backends[0] == "gloo"
        assert len(facts.gloo) == 1
        assert facts.gloo[0].address
        assert facts.store_ms > 0
    assert told[0].sizes[0].elapsed_ms == told[1].sizes[0].elapsed_ms  # the slowest member's
    assert nothing_is_left()


@IS_FORKED
def test_one_node_alone() -> None:
    (facts,) = asyncio.run(launch([quick()]))
    assert (facts.stage, facts.error, facts.halves) == ("done", "", ())
    assert all(size.is_correct for size in facts.sizes)


@IS_FORKED
def test_a_wrong_sum_is_seen_by_the_node_that_has_it(tmp_path: Path) -> None:
    # on a busy machine the first size alone takes longer than the budget of `quick`
    bad = quick(budget_s=20.0, command=spoilt(tmp_path, after="tensor[5] += 1"))
    told = asyncio.run(launch([quick(budget_s=20.0), bad]))
    assert all(size.is_correct for size in told[0].sizes)
    wrong = {size.size_bytes: size.num_wrong for size in told[1].sizes}
    assert wrong[4] == 0
    assert wrong[65_536] >= 1


@IS_FORKED
def test_a_slow_member_is_in_the_slow_pairs(tmp_path: Path) -> None:
    spoiler = spoilt(tmp_path, before="time.sleep(0.25)")
    children = [quick(budget_s=60.0, **more) for more in ({}, {"command": spoiler}, {})]
    told = asyncio.run(launch(children))
    took = {half.nodes: half.elapsed_ms for half in told[0].halves}
    assert took["node0", "node2"] < min(took["node0", "node1"], took["node1", "node2"])
    assert min(took["node0", "node1"], took["node1", "node2"]) >= 250


@IS_FORKED
def test_a_child_that_hangs_is_killed_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_gives_up(monkeypatch, after_s=3.0, limit_s=60.0)
    hang = spoilt(tmp_path, before="import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    children = [quick(budget_s=20.0), quick(budget_s=20.0, limit_s=10.0, command=hang)]
    told = asyncio.run(launch(children))
    assert told[1].error == "killed in stage collectives at 65536 B, where it did not get on"
    assert told[1].sizes[-1].elapsed_ms == -1
    assert "Timed out waiting 3000ms" in told[0].error
    assert nothing_is_left()


@IS_FORKED
def test_a_child_that_dies_is_told_from_the_one_that_loses_it(tmp_path: Path) -> None:
    dies = spoilt(tmp_path, before="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    told = asyncio.run(launch([quick(budget_s=20.0), quick(budget_s=20.0, command=dies)]))
    assert told[1].error == "ended with signal SIGKILL in stage collectives at 65536 B"
    assert told[0].ended_by == "raised"
    assert "by peer" in told[0].error  # closed or reset, and no time-out


@IS_FORKED
def test_a_master_that_never_comes_ends_by_the_explicit_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_gives_up(monkeypatch, after_s=3.0, limit_s=100.0)

    async def alone() -> SmokeFacts:
        child = quick()
        child.start()
        return await child.run(  # nobody listens on port 1
            rank=1, nodes=NODES, address="127.0.0.1", port=1, backend="gloo"
        )

    facts = asyncio.run(alone())
    assert facts.stage == "imported"
    assert "timed out after 3000ms" in facts.error
    assert "127.0.0.1" in facts.error


@pytest.mark.parametrize("pause_s", [None, 0.0, 0.3])
def test_stop_before_the_release_leaves_nothing(pause_s: float | None) -> None:
    async def interrupted() -> SmokeFacts:
        child = quick()
        child.start()
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        await child.stop()
        return child.facts()

    assert asyncio.run(interrupted()).stage == "not started"
    assert nothing_is_left()


def test_cancelling_and_stopping_leaves_nothing(tmp_path: Path) -> None:
    async def interrupted() -> None:
        hangs = quick(command=spoilt(tmp_path, before="time.sleep(60)"))
        work = asyncio.create_task(launch([hangs]))
        while hangs.facts().stage != "collectives":
            await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await hangs.stop()

    asyncio.run(interrupted())
    assert nothing_is_left()


def test_the_child_dies_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import asyncio, os, signal\n"
        "from rankscope.preflight.model import Options\n"
        "from rankscope.preflight.collective.child import SmokeChild\n"
        "from rankscope.preflight.system import System\n"
        "async def main():\n"
        "    child = SmokeChild(System(), Options())\n"
        "    child.start()\n"
        "    await child._starting\n"
        "    print(child._child.pid, flush=True)\n"
        "    await child.imported()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )

    async def watched() -> int:
        agent = await asyncio.create_subprocess_exec(
            sys.executable, str(script), stdout=asyncio.subprocess.PIPE
        )
        assert agent.stdout is not None
        pid = int(await agent.stdout.readline())
        assert await agent.wait() == -signal.SIGKILL
        return pid

    pid = asyncio.run(watched())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        os.sched_yield()
        signal.sigtimedwait([], 0.05)
    else:
        pytest.fail("the child outlived its agent")


def test_a_program_that_cannot_start_is_an_error_not_a_skip() -> None:
    (facts,) = asyncio.run(launch([quick(command=("/does/not/exist",))]))
    assert "could not be started" in facts.error
    assert facts.skipped == ""


def test_without_torch_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (facts,) = asyncio.run(launch([quick()]))
    assert (facts.skipped, facts.error) == ("torch is not installed", "")


def test_a_torch_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
    before = os.environ.get("PYTHONPATH", "")
    system = System(environ={**os.environ, "PYTHONPATH": f"{tmp_path}:{before}"})

    async def broken() -> SmokeFacts:
        child = SmokeChild(system, Options())
        child.start()
        return await child.run(rank=0, nodes=NODES, address="::1", port=child.port, backend="gloo")

    facts = asyncio.run(broken())
    assert (facts.stage, facts.error) == ("not started", "OSError: libtorch.so: cannot open")


def test_the_parent_never_imports_torch() -> None:
    code = "import sys, rankscope.preflight.collective.child as p; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
