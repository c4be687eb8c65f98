"""Every path by which a program reaches a collective, on real ranks: the record is what it did.

Four ranks over gloo run one program per family of paths and write down what they do. Count,
order, operation, bytes in and out, dtype, group, members, sequence, peer and reduce op of the
record must equal that, exactly, whichever source of collectives is in force; and over all ranks
of a group the n-th collective must be the same one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.native.probe import build
from rankscope.rank.context import HookSkipped
from rankscope.rank.hooks.collectives import SOURCES
from tests import capabilities
from tests.agent import recorded
from tests.matrix.launch import RANKS, Cell, launch, torch_version

pytestmark = pytest.mark.core

FAMILIES = (
    "plain", "functional", "compiled", "ddp", "fsdp", "fsdp2", "dtensor", "pipeline", "p2p",
    "objects", "groups", "works", "coalesced", "again",
)  # fmt: skip
EXACT = (
    "operation", "group", "sequence", "input_bytes", "output_bytes", "dtype", "num_tensors",
    "peer_rank", "is_p2p",
)  # fmt: skip
WITHOUT_FUTURE = frozenset(  # gloo's works of these have none: their end is seen by who waits
    {"reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
     "send", "recv", "recv_any_source"}
)  # fmt: skip
# The hooks know one name for two operations, and in 2.14 one for all forms of a collective.
OFFICIAL_NAMES = {"gather_into_tensor": "gather"}
if torch_version() < (2, 15):
    OFFICIAL_NAMES |= {"all_reduce_coalesced": "all_reduce", "all_to_all_single": "all_to_all"}
    for form in ("into_tensor", "coalesced", "into_tensor_coalesced"):
        OFFICIAL_NAMES[f"all_gather_{form}"] = "all_gather"
    for form in ("tensor", "tensor_coalesced"):
        OFFICIAL_NAMES[f"reduce_scatter_{form}"] = "reduce_scatter"
ENDED_BY = {
    "probe": ("probe", "wait"),
    "official": ("future", "wait"),
    "kernels": ("future", "wait"),
}
LATE_NS = 300_000_000  # how late rank 0 comes in the family `functional`
Launched = Callable[[str], dict[str, list[Cell]]]


def available(source: Any) -> str:
    """Return why a source cannot run here, or nothing; the probe is compiled first."""
    try:
        if source.name == "probe" and build.is_needed():
            build.build()
        source.check()
    except (HookSkipped, build.BuildError) as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Run all families once per source."""
    results: dict[str, dict[str, list[Cell]]] = {}

    def once(source: str) -> dict[str, list[Cell]]:
        if source not in results:
            results[source] = launch(tmp_path_factory.mktemp(source), list(FAMILIES), source)
        return results[source]

    return once


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> str:
    if request.param.name == "probe" and build.is_needed():
        capabilities.need("compiler")
    reason = available(request.param)
    if reason:
        pytest.skip(reason)
    return str(request.param.name)


@pytest.mark.multiproc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_path(launched: Launched, source: str, family: str) -> None:
    cells = launched(source)[family]
    for cell in cells:
        assert not cell.outcome.get("error"), cell.outcome["error"]
        if "skipped" in cell.outcome:
            pytest.skip(cell.outcome["skipped"])
    assert len(cells) == RANKS
    assert any(cell.calls for cell in cells), "the program did nothing"
    for rank, cell in enumerate(cells):
        _same_calls(rank, cell, source)
        for call, slot in zip(cell.calls, cell.slots, strict=True):
            _same_end(call, slot, source)
            if not call["from_callback"]:
                assert f"/{family}.py:" in slot["call_site"], slot
    _same_on_all_ranks(cells)


def _same_calls(rank: int, cell: Cell, source: str) -> None:
    fields = [name for name in EXACT if name != "reduce_op"]
    if source == "official":
        for call in cell.calls:
            call["operation"] = OFFICIAL_NAMES.get(call["operation"], call["operation"])
    did = [_row(call, fields) for call in cell.calls]
    seen = [_row(slot, fields) for slot in cell.slots]
    assert seen == did, f"rank {rank}\n" + _differences(did, seen)
    for call, slot in zip(cell.calls, cell.slots, strict=True):
        known = call["reduce_op"] if _knows_reduce_op(source) else ""
        assert slot["reduce_op"] == known, slot
        if call["is_async"] is not None and torch_version() >= (2, 9):  # older ones do not say
            assert slot["is_async"] == call["is_async"], slot
        assert cell.groups[slot["group"]].ranks == call["members"]
        assert cell.groups[slot["group"]].backend == "gloo"


def _knows_reduce_op(source: str) -> bool:
    """The official hooks are not told; older versions cannot open the box that kernels get."""
    return source == "probe" or (source == "kernels" and torch_version() >= (2, 13))


def _row(call: dict[str, Any], fields: list[str]) -> tuple[Any, ...]:
    return tuple(call[name] for name in fields)


def _differences(did: list[Any], seen: list[Any]) -> str:
    """Return the first place where two lists differ, with a little of what surrounds it."""
    at = next(
        (n for n, (a, b) in enumerate(zip(did, seen, strict=False)) if a != b),
        min(len(did), len(seen)),
    )
    lines = [f"program {len(did)}, record {len(seen)}; they part at {at}"]
    for name, rows in (("program", did), ("record", seen)):
        lines += [f"{name} {n}: {rows[n]}" for n in range(max(0, at - 2), min(len(rows), at + 6))]
    return "\n".join(lines)


def _same_end(call: dict[str, Any], slot: dict[str, Any], source: str) -> None:
    assert slot["issued_by"], slot
    if call["state"] == "failed":
        assert (slot["state"], slot["ended_by"]) == ("failed", "error"), slot
        return
    unseen = call["operation"] in WITHOUT_FUTURE and call["waited"] == "nobody"
    if unseen:  # nobody can tell; the record says so
        assert (slot["state"], slot["ended_by"]) == ("returned", ""), slot
        return
    if call["waited"] == "inside" and slot["state"] == "returned":
        assert call["operation"] in WITHOUT_FUTURE, slot
        assert slot["ended_by"] == "", slot
        return
    assert slot["state"] == "ended", slot
    assert slot["ended_by"] in ENDED_BY[source], slot
    assert slot["arrived_ns"] <= slot["returned_ns"], slot
    assert slot["arrived_ns"] <= slot["ended_ns"], slot


def _same_on_all_ranks(cells: list[Cell]) -> None:
    """The n-th collective of a group is one operation, of one size, on every member."""
    by_key: dict[tuple[str, int], dict[int, Any]] = {}
    for rank, cell in enumerate(cells):
        for slot in cell.slots:
            if not slot["is_p2p"]:
                one_sided = slot["operation"] in ("gather", "scatter", "gather_into_tensor")
                size_bytes = max(slot["input_bytes"], slot["output_bytes"])
                members = tuple(cell.groups[slot["group"]].ranks)
                what = (
                    slot["operation"], 0 if one_sided else size_bytes, slot["dtype"],
                    slot["reduce_op"], members,
                )  # fmt: skip
                by_key.setdefault((slot["group"], slot["sequence"]), {})[rank] = what
    for key, by_rank in by_key.items():
        assert len(set(by_rank.values())) == 1, (key, by_rank)
        members = next(iter(by_rank.values()))[-1]
        assert sorted(by_rank) == sorted(members), key


@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_waiting_in_cpp_is_seen(launched: Launched, source: str) -> None:
    """Rank 0 comes late, four times: the others are blocked in wait_tensor, rank 0 is not."""
    cells = launched(source)["functional"]
    for rank, cell in enumerate(cells):
        blocked = [slot["blocked_ns"] for slot in cell.slots[-6:] if slot["operation"] != "barrier"]
        assert len(blocked) == 4
        if rank:
            assert min(blocked) > LATE_NS / 3, (rank, blocked)
        else:
            assert max(blocked) < LATE_NS / 2, (rank, blocked)


# A forked child that leaves by `sys.exit` hangs in older versions, with the agent or without it.
ENDS = [("", 0), ("exit", 3), ("raise", 1), *([("fork", 4)] if torch_version() >= (2, 14) else [])]


@pytest.mark.multiproc
@pytest.mark.parametrize(("how", "code"), ENDS)
def test_groups_that_no_script_destroys_end_as_without_the_agent(
    tmp_path: Path, source: str, how: str, code: int
) -> None:
    """torch lets go of them when Python is gone: no hook may be in them then."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("undestroyed.py"), how],
        env=recorded.environment(
            tmp_path, RANKSCOPE_COLLECTIVES=source, MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo", **rank
        ),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    (seen,) = recorded.read(tmp_path)
    assert seen.operations()["all_reduce"] == 4
