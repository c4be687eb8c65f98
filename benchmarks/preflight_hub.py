"""A preflight of 1,000 agents over one server: how long until each has the verdict?

    python benchmarks/preflight_hub.py                       # 1,000 agents, 3 times
    python benchmarks/preflight_hub.py --agents 100 --repeats 1 --json

A real server process (uvicorn, SQLite) and agents that speak HTTP as `board/http.py` does: make
or find the preflight by its key, join, post a report at every stage, read the others' until all
are there, and at the end wait for the verdict. Reports are of full size: facts, and the paths of
the sampled schedule. Nothing is measured between two stages, so what is timed is the hub alone;
`--stages` adds the time that the stages of a real one have (docs of the schedule: 10 s of paths,
10 s of bandwidth, 20 s of collectives). One process plays all agents: it reads an answer that
many of them get once. Exit status 1 where a run takes longer than 60 s or an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec
import psutil

from rankscope.preflight.facts.edges import Bandwidth, Dial, EdgeFacts, PathMtu, Rtt
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.model import STAGES, Facts, Listening, NodeReport, encode
from rankscope.preflight.options import Options
from rankscope.preflight.probe.schedule import pairs_of

RUNS = "/api/v1/preflight/runs"
LIMIT_SECONDS = 60.0
START_SECONDS = 30.0
STAGE_SECONDS = {"pairs": 10.0, "bandwidth": 10.0, "collective": 20.0}
EDGE_STAGES = ("pairs", "bandwidth", "again", "collective", "done")


@dataclass
class Result:
    """One run; `*_seconds` count from its start, the last agent decides."""

    agents: int
    cores: int
    joined_seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    verdict_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    server_peak_mib: float = 0.0
    report_kib: float = 0.0
    requests: int = 0
    received_mib: float = 0.0
    findings: int = 0
    reported: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        is_whole = self.reported == self.agents and not self.errors
        return is_whole and self.verdict_seconds <= LIMIT_SECONDS


class OneReport(msgspec.Struct):
    node: str
    stage: str


class Delta(msgspec.Struct):
    number: int
    pause_ms: float
    is_brief: bool
    reports: list[OneReport]


@lru_cache(maxsize=64)
def read_delta(data: bytes) -> Delta:
    """Agents read on machines of their own; here equal answers are read once."""
    return msgspec.json.decode(gzip.decompress(data), type=Delta)


@lru_cache(maxsize=8)
def read_verdict(data: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(gzip.decompress(data))
    return found


class Connection:
    """One kept HTTP connection; answers come back as (status, body)."""

    def __init__(self, port: int, result: Result) -> None:
        self._port, self._result = port, result
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.token = ""

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAccept-Encoding: gzip\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        data = await reader.readexactly(int(headers["content-length"]))
        self._result.requests += 1
        self._result.received_mib += len(data) / (1 << 20)
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{method} {path}: {lines[0]} {data[:200]!r}")
        is_packed = headers.get("content-encoding") == "gzip"
        return data if is_packed else gzip.compress(data, 0)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Barriers:
    """When the last agent passed each point, and how many did."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.last: dict[str, float] = {}

    def passed(self, point: str) -> None:
        self.last[point] = time.monotonic() - self.started


def report_of(node: str, rank: int, nodes: tuple[str, ...]) -> NodeReport:
    """A healthy node's report with the paths of the sampled schedule."""
    dial = Dial(outcome="ok", address="10.0.0.1", port=29500, elapsed_ms=0.4, answered_by="x" * 8)
    edge = EdgeFacts(
        mesh=dial, ephemeral=(dial, dial, dial), source_address="10.0.0.2",
        rtt=Rtt(num=20, min_ms=0.1, median_ms=0.12, p95_ms=0.2, max_ms=0.4),
        mtu=PathMtu(carried_bytes=1500, interface_bytes=1500),
        bandwidth=Bandwidth(mbit_per_s=9_400.0 + rank % 7, rounds=(9_400.0,)),
    )  # fmt: skip
    return NodeReport(
        node=node, node_rank=rank, started_unix_s=time.time(),
        addresses=(f"10.0.{rank >> 8}.{rank & 255}",),
        options=Options(backend="gloo"), listening=Listening(master=29500, mesh=29500),
        facts=Facts(
            host=HostFacts(hostname=node, num_cores=64, kernel="6.1.0"),
            launch=LaunchFacts(
                launcher="torchrun", master_addr=nodes[0], num_nodes=len(nodes), node_rank=rank,
                nproc_per_node=8, environment={f"NCCL_{i}": "x" * 40 for i in range(40)},
            ),
        ),
        edges=dict.fromkeys(pairs_of(node, nodes, "bench"), edge),
    )  # fmt: skip


async def agent(
    rank: int, nodes: tuple[str, ...], port: int, result: Result, barriers: Barriers, stages: bool
) -> None:
    node, connection = nodes[rank], Connection(port, result)
    whole = report_of(node, rank, nodes)
    try:
        wanted = {"key": "bench", "num_nodes": len(nodes)}
        made = json.loads(
            gzip.decompress(await connection.ask("POST", RUNS, json.dumps(wanted).encode()))
        )
        connection.token, path = made["token"], f"{RUNS}/{made['id']}"
        joined = {"node": node, "node_rank": rank, "addresses": list(whole.addresses)}
        await connection.ask("POST", f"{path}/join", json.dumps(joined).encode())
        barriers.passed("joined")
        number, at = 0, dict.fromkeys(nodes, -1)
        for version, stage in enumerate(STAGES[1:], start=1):
            if stages:
                await asyncio.sleep(STAGE_SECONDS.get(stage, 0.0))
            edges = whole.edges if stage in EDGE_STAGES else {}
            told = msgspec.structs.replace(whole, version=version, stage=stage, edges=edges)
            data = encode(told)
            result.report_kib = len(data) / 1024
            answer = await connection.ask("POST", f"{path}/reports/{node}?since={number}", data)
            while min(at.values()) < STAGES.index(stage):
                delta = read_delta(answer)
                number = delta.number
                for one in delta.reports:
                    at[one.node] = STAGES.index(one.stage)
                if min(at.values()) < STAGES.index(stage):
                    await asyncio.sleep(max(0.5, delta.pause_ms / 1e3))  # as the runner asks
                    answer = await connection.ask("GET", f"{path}/reports?since={number}")
            barriers.passed(stage)
        judged = read_verdict(await connection.ask("GET", f"{path}/verdict?wait=20"))
        barriers.passed("verdict")
        verdict = judged["verdict"]
        assert judged["is_settled"]
        assert isinstance(verdict, dict)
        result.reported, result.findings = len(verdict["reported"]), len(verdict["findings"])
    except (OSError, RuntimeError, AssertionError, asyncio.IncompleteReadError) as error:
        result.errors.append(f"{node}: {type(error).__name__}: {error}"[:300])
    finally:
        connection.close()


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--data-dir", str(folder),
         "--ready-file", str(ready), "--log-level", "error"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.05)
    return process, int(json.loads(ready.read_text())["url"].rpartition(":")[2])


async def watch_memory(process: psutil.Process, result: Result) -> None:
    while True:
        result.server_peak_mib = max(result.server_peak_mib, process.memory_info().rss / (1 << 20))
        await asyncio.sleep(0.25)


async def all_agents(num: int, port: int, result: Result, stages: bool, pid: int) -> None:
    nodes = tuple(f"node{rank:04}" for rank in range(num))
    barriers, server = Barriers(), psutil.Process(pid)
    memory = asyncio.create_task(watch_memory(server, result))
    before = sum(server.cpu_times()[:2])
    await asyncio.gather(
        *(agent(rank, nodes, port, result, barriers, stages) for rank in range(num))
    )
    memory.cancel()
    result.server_cpu_seconds = sum(server.cpu_times()[:2]) - before
    result.joined_seconds = barriers.last.get("joined", 0.0)
    result.verdict_seconds = barriers.last.get("verdict", 0.0)
    result.stage_seconds = {
        stage: round(barriers.last[stage], 2) for stage in STAGES if stage in barriers.last
    }


def one_run(num: int, stages: bool) -> Result:
    result = Result(agents=num, cores=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(Path(folder))
        try:
            asyncio.run(all_agents(num, port, result, stages, process.pid))
        finally:
            process.terminate()
            process.wait(20)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", action="store_true", help="give stages the time they have")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = [one_run(asked.agents, asked.stages) for _ in range(asked.repeats)]
    if asked.json:
        print(json.dumps([asdict(one) for one in results]))
    for one in [] if asked.json else results:
        stages = ", ".join(f"{name} {at:.1f}" for name, at in one.stage_seconds.items())
        print(
            f"{one.agents} agents on {one.cores} cores: joined {one.joined_seconds:.1f} s, "
            f"{stages}, verdict {one.verdict_seconds:.1f} s; server {one.server_cpu_seconds:.1f} s "
            f"CPU, {one.server_peak_mib:.0f} MiB; {one.requests} requests, "
            f"{one.received_mib:.0f} MiB answers, report {one.report_kib:.0f} KiB, "
            f"{one.findings} findings"
        )
        print(*one.errors[:5], sep="\n", end="\n" if one.errors else "")
    if not asked.json:
        median = statistics.median(one.verdict_seconds for one in results)
        print(f"median of {len(results)}: verdict at all agents after {median:.1f} s")
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
