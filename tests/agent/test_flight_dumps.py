"""Dumps of the Flight Recorder: read without executing them, and turned into records."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rankscope.files.flight_recorder import DumpError
from rankscope.importers import pickle_budget
from rankscope.importers.flight_dumps import parse_dump, rank_of, read_dump, read_dumps
from rankscope.importers.flight_records import convert
from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk
from tests.agent.dumps import dump, entry
from tests.shared_data import SHARED_DATA

DATA = SHARED_DATA / "flight_recorder"


class Boom:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "was_here"
    evil = tmp_path / "dump_0"
    evil.write_bytes(pickle.dumps(dump([entry(0)]) | {"entries": [Boom(marker)]}))
    with pytest.raises(DumpError, match="plain values only"):
        read_dump(evil)
    assert not marker.exists()
    pickle.loads(evil.read_bytes())  # noqa: S301 - it would have: the test proves something
    assert marker.exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("what", [print, Path("x"), Exception("x"), bytearray(b"x"), {1}, 1j])
def test_every_way_to_a_global_is_closed(protocol: int, what: object) -> None:
    data = pickle.dumps(dump([entry(0, state=what)]), protocol)
    with pytest.raises(DumpError):
        parse_dump(data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\x80", b"\x80\x04.", b"not a dump", b"\x80\x04\x82\x01.", b"\x80\x04]\x94.",
        b"\x80\x02cos\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x04Pid\n.",
        b"\x80\x02(I1\nt(I2\nttR.", b"\x80\x04h\x00.", b"{}", b"\x80\x04}.",
        pickle.dumps({"entries": [{}]}), pickle.dumps(dump([entry(0, record_id="x")])),
        pickle.dumps(dump([entry(0, time_created_ns=1 << 70)])),
        pickle.dumps(dump([entry(0, collective_seq_id=-5)])),
        pickle.dumps(dump([]) | {"pg_status": {"first": {}}}),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_an_error_with_a_reason(data: bytes) -> None:
    with pytest.raises(DumpError, match=r"\w"):
        parse_dump(data)


def shared(width: int, depth: int) -> list[Any]:
    """Return a list that holds one list `width` times, which holds one `width` times, and so on."""
    values: list[Any] = list(range(width))
    for _ in range(depth):
        values = [values] * width
    return values


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle.dumps(dump([entry(0, input_sizes=shared(1000, 1))] * 1000)), "values"),
        (pickle.dumps(dump([]) | {"entries": shared(1000, 3)}), "values"),
        (pickle.dumps(dump([entry(0)]) | {"more": shared(2, 20)}), "16 deep"),
        (b"\x80\x02]r\xff\xff\xff\x7f.", "memo has place 2147483647"),
        (b"\x80\x02]p99999999999999\n.", "memo has place"),
        (b"\x80\x02](]]r\xff\xff\xff\x00.", "memo has place"),
    ],
)
def test_a_small_pickle_that_would_take_gigabytes_is_refused_at_little_cost(
    data: bytes, reason: str
) -> None:
    assert len(data) < 11_000
    begun = time.process_time()  # not of others that have the processors
    with pytest.raises(DumpError, match=f"refused: .*{reason}.*; no dump does"):
        parse_dump(data)
    assert time.process_time() - begun < 10
    tracemalloc.start()  # makes it several times slower
    with pytest.raises(DumpError):
        parse_dump(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_a_list_that_holds_itself_is_refused() -> None:
    values: list[Any] = []
    values.append(values)
    with pytest.raises(DumpError, match="16 deep"):
        parse_dump(pickle.dumps(dump([entry(0, input_sizes=values)])))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_operation_is_counted_as_the_unpickler_reads_it(protocol: int) -> None:
    values: list[Any] = [1, -1, 300, 1 << 40, 1 << 3000, 0.5, None, True, "x" * 300, "", [], {}]
    values += [b"y" * 300, bytearray(b"z"), {1}] if protocol == 5 else []
    data = pickle.dumps(dump([entry(n, more=values[:]) for n in range(400)]), protocol)
    positions = [position for *_, position in pickletools.genops(data)]
    ends = [*positions[1:], len(data)]
    for place, end in zip(positions, ends, strict=True):
        assert place + pickle_budget.step_at(data, place, 1 << 30) == end


def test_cut_and_flipped_pickles_never_do_anything_else(tmp_path: Path) -> None:
    whole = pickle.dumps(dump([entry(n) for n in range(3)]))
    assert len(parse_dump(whole).entries) == 3
    for end in range(len(whole)):
        with pytest.raises(DumpError):
            parse_dump(whole[:end])
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        try:
            parse_dump(bytes(damaged))
        except DumpError:
            continue


def test_pickle_and_json_say_the_same() -> None:
    one = dump([entry(0), entry(1, state="started", retired=False)])
    assert parse_dump(pickle.dumps(one, 2)) == parse_dump(json.dumps(one).encode())
    assert any(code.name == "PROTO" for code, *_ in pickletools.genops(pickle.dumps(one, 2)))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12), ("_dump_3", 3), ("rank7.json", 7), ("dump2_rank_9.pickle", 9),
        ("5.8811/flight_recorder.2.json", 5),
    ],
)  # fmt: skip
def test_the_rank_is_in_the_name(name: str, rank: int) -> None:
    assert rank_of(Path("somewhere") / name) == rank


def test_what_cannot_be_read_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(pickle.dumps(dump([entry(0)])))
    (tmp_path / "trace_1.json").write_text(json.dumps(dump([entry(0)])))
    (tmp_path / "old_1.json").write_text(json.dumps(dump([entry(0, time_created_ns=5)])))
    (tmp_path / "trace_2").write_bytes(b"torn")
    (tmp_path / "readme").write_text("no rank")
    dumps, left_out = read_dumps([tmp_path])
    assert sorted(dumps) == [0, 1]
    assert dumps[1].entries[0].time_created_ns == 10**18
    assert len(left_out) == 3
    assert read_dumps([tmp_path / "absent_3"])[1]


def test_open_operations_counters_and_sizes_are_carried_over() -> None:
    entries = [
        entry(0),
        entry(1, state="started", retired=False, input_dtypes=["BFloat16"], input_sizes=[[16]],
              profiling_name="nccl:_all_gather_base", output_sizes=[[32]],
              output_dtypes=["BFloat16"]),
        entry(2, state="scheduled", retired=False, is_p2p=True, collective_seq_id=2, p2p_seq_id=9,
              profiling_name="nccl:recv 0<-1", pg_id=1, process_group=("4", "PP")),
    ]  # fmt: skip
    one = dump(entries, last_enqueued_collective=2, last_completed_collective=1)
    one["pg_config"]["4"] = {"name": "4", "desc": "PP", "ranks": "[0, 1]"}
    one["pg_status"]["1"] = {"last_enqueued_collective": 9, "last_completed_collective": 8}
    found = convert({0: parse_dump(pickle.dumps(one))})
    assert found.world_size == 2
    assert found.num_open == 2
    (state,) = [r for r in found.records if isinstance(r, schema.RankState)]
    world, pipeline = state.groups
    assert (world.group, world.issued, world.ended) == ("0", 2, 1)
    assert (world.open_operation, world.open_bytes) == ("all_gather_into_tensor", 64)
    assert (pipeline.group, pipeline.issued, pipeline.ended) == ("PP 4", 2, 2)
    assert (pipeline.p2p_operation, pipeline.p2p_peer) == ("recv", 1)
    assert pipeline.peers == [schema.PeerState(peer=1, received=1)]
    # written when the oldest open operation ran out of its 600 s
    assert state.time_ns == entries[1]["time_created_ns"] + 600 * 10**9
    columns = decode_chunk(found.chunks[0].data)
    assert columns["dtype"] == ["float32", "bfloat16", "float32"]
    assert list(columns["size_bytes"]) == [128, 64, 128]
    assert list(columns["state"]) == [schema.ENDED, schema.ISSUED, schema.ISSUED]


def test_gloo_tells_no_members_and_its_ends_by_retired_alone() -> None:
    """As written by torch 2.13: every state is "scheduled", pg_config is one empty entry."""
    entries = [
        entry(n, state="scheduled", retired=n < 2, profiling_name="gloo:all_reduce",
              time_discovered_started_ns=0, time_discovered_completed_ns=0)
        for n in range(3)
    ]  # fmt: skip
    one = dump(entries) | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}}
    one["pg_status"] = {"0": {name: str(n) for name, n in one["pg_status"]["0"].items()}}
    found = convert({rank: parse_dump(json.dumps(one).encode()) for rank in (0, 1, 2)})
    groups = [r for r in found.records if isinstance(r, schema.GroupDefined)]
    assert [group.ranks for group in groups] == [[0, 1, 2]] * 3
    states = [r for r in found.records if isinstance(r, schema.RankState)]
    assert [(s.groups[0].issued, s.groups[0].ended) for s in states] == [(3, 2)] * 3


@pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")
@pytest.mark.parametrize("case", ["gpu_error_1st", "gpu_error_2nd"])
def test_recorded_dumps_are_read_whole(case: str) -> None:
    dumps, left_out = read_dumps([DATA / case])
    assert (sorted(dumps), left_out) == (list(range(16)), [])
    found = convert(dumps)
    assert found.num_open == sum(len(dump.entries) for dump in dumps.values())
    assert sum(chunk.count for chunk in found.chunks) == found.num_open
