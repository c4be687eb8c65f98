"""Logs of NCCL: wordings of several versions become facts, events, lines and errors of ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.wire import schema
from rankscope_server.importers.recordings import RecordingError, look_at, read_recordings

SECRET = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"


def lines_of(rank: int, *, network: str = "IB", version: str = "2.21.5+cuda12.4") -> list[str]:
    """Return what a rank of four on two hosts writes while it comes up."""
    host, device, pid = f"node-{rank // 2}", rank % 2, 4000 + rank
    head = f"{host}:{pid}:{pid + 90} [{device}] NCCL INFO"
    nics = "[0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB" if network == "IB" else ""
    return [
        f"{head} Bootstrap : Using eth0:10.0.0.{rank + 1}<0>",
        f"{head} NCCL version {version}",
        f"{head} NCCL_IB_TIMEOUT set by environment to 22.",
        f"{head} NET/IB : Using {nics} eth0:10.0.0.{rank + 1}<0>" if nics
        else f"{head} NET/Socket : Using [0]eth0:10.0.0.{rank + 1}<0>",
        f"{head} Using network {network}",
        f"{head} ncclCommInitRank comm 0x55{rank} rank {rank} nranks 4 cudaDev {device} nvmlDev "
        f"{device} busId 8{device}000 commId 0x49bb - Init START",
        f"{head} Pattern 4, crossNic 0, nChannels 2, speed 21.000000/21.000000, type NVL/PIX",
        f"{head} Channel 00/02 :    0   1   2   3",
        f"{head} Trees [0] 1/-1/-1->{rank}->-1 [1] -1/-1/-1->{rank}->2",
        f"{head} Channel 00/0 : {rank}[{device}] -> {(rank + 1) % 4}[0] [send] via "
        f"NET/{network}/{device}/GDRDMA",
        f"{head} Channel 01/0 : {rank}[{device}] -> {(rank + 1) % 4}[0] via P2P/CUMEM",
        f"{head} 2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels",
        f"{head} 805306368 Bytes -> Algo 1 proto 2 time 3970.683594",
        f"{head} Init timings: rank {rank} nranks 4 total 1.08 (kernels 0.51, bootstrap 0.22)",
        # a smaller communicator of the same process: its numbers are not those of the job
        f"{head} comm 0x66{rank} rank {device} nranks 2 cudaDev {device} - Init COMPLETE",
        f"{head} token {SECRET}",
    ]  # fmt: skip


def write(path: Path, *parts: list[str]) -> Path:
    path.write_text("\n".join(line for part in parts for line in part) + "\n")
    return path


def of(records: list[schema.Record], kind: type[Any], rank: int) -> list[Any]:
    return [record for record in records if isinstance(record, kind) and record.rank == rank]


def test_one_log_of_all_ranks(tmp_path: Path) -> None:
    mixed = [line for group in zip(*(lines_of(rank) for rank in range(4)), strict=True)
             for line in group]  # fmt: skip
    recording = read_recordings([write(tmp_path / "job.log", mixed)])
    assert (recording.formats, recording.num_ranks) == ({"nccl-log": 1}, 4)
    records = recording.found.records
    (rank,) = of(records, schema.RankRegistered, 3)
    assert (rank.host, rank.pid, rank.local_rank, rank.world_size) == ("node-1", 4003, 1, 4)
    (environment,) = of(records, schema.Environment, 3)
    assert environment.facts == {
        "nccl.version": "2.21.5+cuda12.4", "nccl.network": "IB", "nccl.interfaces": "eth0",
        "nccl.nics": "[0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]", "env.NCCL_IB_TIMEOUT": "22",
        "nccl.channels": "2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels",
    }  # fmt: skip
    topology, init = of(records, schema.Event, 3)
    assert topology.fields["rings"] == "00: 0 1 2 3"
    assert topology.fields["trees"] == "[0] 1/-1/-1->3->-1; [1] -1/-1/-1->3->2"
    assert topology.fields["transports"] == "NET/IB/GDRDMA; P2P/CUMEM"
    assert topology.fields["algorithms"] == "Ring/Simple"
    assert topology.fields["graphs"].startswith("Pattern 4")
    assert init.fields["seconds"] == "1.08"
    assert SECRET not in json.dumps([one.message for one in of(records, schema.LogLine, 3)])
    look = look_at(recording)
    assert [finding for finding in look.findings if finding.severity != "info"] == []


def test_a_rank_on_another_network_is_named_by_drift(tmp_path: Path) -> None:
    for rank in range(4):
        network = "Socket" if rank == 3 else "IB"
        text = "\n".join(lines_of(rank, network=network)).encode()
        (tmp_path / f"nccl.{rank}.log.gz").write_bytes(gzip.compress(text))
    look = look_at(read_recordings([tmp_path]))
    drifts = [finding for finding in look.findings if finding.detector == "drift"]
    assert {rank for drift in drifts for rank in drift.ranks} == {3}
    assert "nccl" in " ".join(drift.what + drift.why for drift in drifts)


def test_the_fault_of_one_rank_comes_before_its_echoes(tmp_path: Path) -> None:
    cause = "node-1:4002:4092 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"
    parts = [lines_of(rank) for rank in range(4)]
    parts[2].append(cause)
    for rank in (0, 1, 3):
        head = f"node-{rank // 2}:{4000 + rank}:{4090 + rank} [{rank % 2}]"
        parts[rank].append(
            f"{head} misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer "
            f"node-1<{51000 + rank}>"
        )
        parts[rank].append(f"{head} NCCL INFO misc/socket.cc:749 -> 6")
    recording = read_recordings([write(tmp_path / "job.log", *parts)])
    errors = of(recording.found.records, schema.ErrorRaised, 2)
    assert [error.where for error in errors] == ["main"]
    assert [one.where for one in of(recording.found.records, schema.ErrorRaised, 0)] == [
        "collective"
    ]
    levels = [one.level for one in of(recording.found.records, schema.LogLine, 0)]
    assert levels[-2:] == [30, 30]
    look = look_at(recording)
    assert look.verdict is not None
    assert look.verdict.ranks == (2,)


def test_ranks_are_told_by_files_where_lines_do_not(tmp_path: Path) -> None:
    """What a job prints that dies before it has a communicator; also times, and no host."""
    for rank in range(2):
        write(tmp_path / f"rank_{rank}.log", [
            f"[2026-05-01 10:11:1{rank}] [0] NCCL INFO Bootstrap : Using ib0:10.0.0.{rank}<0>",
            f"[2026-05-01 10:11:2{rank}] [0] misc/socket.cc:1 NCCL WARN something of no book",
        ])  # fmt: skip
    records = read_recordings([tmp_path]).found.records
    assert [one.time_ns for one in of(records, schema.LogLine, 1)] == [
        1_777_630_271 * 10**9, 1_777_630_281 * 10**9,
    ]  # fmt: skip
    assert of(records, schema.Environment, 1)[0].facts == {"nccl.interfaces": "ib0"}


def test_what_tells_no_rank_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "job.log", ["h:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"])
    with pytest.raises(RecordingError, match=r"job\.log: no line names a rank.*rank_3\.log"):
        read_recordings([path])
    plain = write(tmp_path / "plain.log", ["nothing of it"])
    with pytest.raises(RecordingError, match="no format that is known"):
        read_recordings([plain])
    with pytest.raises(RecordingError, match="run with NCCL_DEBUG=INFO"):
        read_recordings([plain], "nccl-log")


def test_a_chatty_rank_is_cut_and_counted(tmp_path: Path) -> None:
    many = [f"node-0:4000:4090 [0] NCCL INFO chatter {number}" for number in range(6_000)]
    records = read_recordings([write(tmp_path / "a.log", lines_of(0), many)]).found.records
    (loss,) = of(records, schema.Loss, 0)
    assert loss.count + len(of(records, schema.LogLine, 0)) == 6_000 + 10
