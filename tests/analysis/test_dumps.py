"""The open Flight Recorder cases: exactly the ranks that were broken, and nobody else."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path

import msgspec
import pytest

from rankscope.importers.flight_dumps import read_dumps
from rankscope.importers.flight_records import Imported, convert
from rankscope_server.importers import recordings
from rankscope_server.verdict.answers import Look
from tests.shared_data import SHARED_DATA

DATA = SHARED_DATA / "flight_recorder"
CASES = {"gpu_error_1st": (12, 14), "gpu_error_2nd": (9, 14)}  # fault_injection.log of each

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")


def look_at(found: Imported) -> Look:
    return recordings.look_at(recordings.Recording(found))


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


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_said_that_only_a_live_process_could_tell(case: str) -> None:
    (finding,) = look_at(convert(read_dumps([DATA / case])[0])).findings
    named = " and ".join(map(str, CASES[case]))
    assert finding.onset_step is None
    texts = [finding.next, finding.would_be_wrong_if, *finding.ruled_out]
    for words in ("stack", "hook", "checkpoint", "its process is there"):
        assert [text for text in texts if words in text] == [], words
    assert f"what stopped ranks {named} at 2025-09-2" in finding.next
    assert f"A process that had ended: ranks {named} wrote their dumps" in finding.ruled_out
    evidence = " ".join(fact.text for fact in finding.evidence)
    assert "Dumps do not say when they were written" in evidence
    assert finding.why.count("has not moved for 180 s") == 2  # the time-out of their groups


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["json", "packed", "packed json"])
def test_dumps_in_other_forms_say_the_same(case: str, form: str, tmp_path: Path) -> None:
    for path in (DATA / case).glob("_dump_*"):
        data = path.read_bytes()
        if "json" in form:
            data = json.dumps(pickle.loads(data)).encode()  # noqa: S301 - open data of the tests
        if "packed" in form:
            data = gzip.compress(data, 1)
        (tmp_path / f"nccl_trace_rank_{path.name.rpartition('_')[2]}").write_bytes(data)
    recording = recordings.read_recordings([tmp_path])
    assert (recording.left_out, recording.num_ranks) == ([], 16)
    assert [finding.ranks for finding in recordings.look_at(recording).findings] == [CASES[case]]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_whose_dump_lists_nothing_is_not_said_to_stand_since_1970(case: str) -> None:
    dumps = read_dumps([DATA / case])[0]
    culprit = CASES[case][0]
    dumps[culprit] = msgspec.structs.replace(dumps[culprit], entries=[])
    look = look_at(convert(dumps))
    texts = [text for finding in look.findings for text in (finding.what, finding.why)]
    texts += [fact.text for finding in look.findings for fact in finding.evidence]
    times = [float(found) for text in texts for found in re.findall(r"for ([\d.]+) s", text)]
    assert times
    assert max(times) < 1000
    assert {rank for finding in look.findings for rank in finding.ranks} <= set(CASES[case])


def test_a_packed_dump_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "dump_3.gz"
    path.write_bytes(gzip.compress((DATA / "gpu_error_1st" / "_dump_3").read_bytes())[:-20])
    with pytest.raises(recordings.RecordingError, match=r"dump_3\.gz: its gzip is cut short"):
        recordings.read_recordings([path])


def test_dumps_of_two_jobs_are_not_mixed() -> None:
    jobs = recordings.jobs_of([DATA])
    assert sorted(len([path for path in job if "dump" in path.name]) for job in jobs) == [16, 16]
    with pytest.raises(recordings.RecordingError, match="several jobs; name one folder at a time"):
        recordings.read_recordings([DATA])
