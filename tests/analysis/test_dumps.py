"""The open Flight Recorder cases: exactly the ranks that were broken, and nobody else."""

from __future__ import annotations

import pytest

from rankscope.chunk import decode_chunk
from rankscope.imports.flight_dumps import read_dumps
from rankscope.imports.flight_records import Imported, convert
from rankscope_server.analysis import Look, RunState
from tests.shared_data import SHARED_DATA

DATA = SHARED_DATA / "flight_recorder"
CASES = {"gpu_error_1st": (12, 14), "gpu_error_2nd": (9, 14)}  # fault_injection.log of each

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")


def look_at(found: Imported) -> Look:
    state = RunState("imported")
    for record in found.records:
        state.apply_record(record)  # type: ignore[arg-type]
    for chunk in found.chunks:
        state.apply_chunk(chunk, decode_chunk(chunk.data))
    return state.look(found.records[-1].time_ns + 10**9)


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_broken_ranks_are_named(case: str) -> None:
    look = look_at(convert(read_dumps([DATA / case])[0]))
    assert {rank for finding in look.findings for rank in finding.ranks} == set(CASES[case])
    (finding,) = look.findings
    assert finding.kind == "hang"
    assert set(finding.victims) == set(range(16)) - set(CASES[case])
    assert look.status == "stuck"
    assert "step 0" not in finding.what + finding.why


@pytest.mark.parametrize("case", CASES)
def test_without_one_dump_no_rank_beyond_the_truth_is_named(case: str) -> None:
    dumps = read_dumps([DATA / case])[0]
    for missing in range(16):
        look = look_at(convert({rank: one for rank, one in dumps.items() if rank != missing}))
        named = {rank for finding in look.findings for rank in finding.ranks}
        assert named <= set(CASES[case]), missing


@pytest.mark.parametrize("case", CASES)
def test_relabelled_ranks_give_the_same_culprits(case: str) -> None:
    """Only the order in which the dumps are read changes: ranks are named inside them."""
    dumps = read_dumps([DATA / case])[0]
    look = look_at(convert(dict(sorted(dumps.items(), reverse=True))))
    assert look.findings[0].ranks == CASES[case]
