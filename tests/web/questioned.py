"""The runs that the questions of `docs/tasks.md` are tried on: each holds the answers of some."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import msgspec
import numpy as np

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.paths import NetBandwidth
from rankscope.preflight.facts.edges import Bandwidth
from rankscope.preflight.model import LaunchVerdict, Result
from rankscope.wire import schema, zstd
from tests.preflight.healthy import having, run
from tests.server.jobs_sent import send_job
from tests.server.seed import (
    MS,
    Plan,
    S,
    chunk,
    log,
    post_body,
    sample_columns,
    seed_run,
    wait_until_judged,
)
from tests.simulator.job import Fault, Job

HUNG, HUNG_RANK = "hung", 3
TODAY, YESTERDAY = "today", "yesterday"
STAGES, LINK, MACHINES, LIVE = "stages", "link", "machines", "live"
PREFLIGHT = "before-link"
SLOW_HOST = 5
LINK_JOB = Job(
    data=4, tensor=2, pipeline=4, steps=44, ranks_per_host=4, hosts_per_leaf=2, forward_ms=200.0,
    transfer_ms=20.0, microbatches=12,
    faults=(Fault("slow_link", host=SLOW_HOST, start=16, size=2.0),),
)  # fmt: skip
STAGES_JOB = Job(pipeline=4, data=1, steps=160, microbatches=4, backend="gloo", ranks_per_host=2)
LOSSES = "https://mlflow.example/#/experiments/3/runs/8d1f"
WORD = "waits for shard 17 of web-00012.tar"


def send(url: str, run_id: str, *records: schema.Record, chunks: Any = ()) -> None:
    """Post a batch of a producer of its own."""
    now_ns = time.time_ns()
    body = schema.Batch(
        schema_version=schema.SCHEMA_VERSION, run_id=run_id, producer=f"{run_id}/more/{now_ns}",
        sequence=1, host="node-a", sent_ns=now_ns, chunks=list(chunks),
        records=[msgspec.Raw(schema.encode(record)) for record in records],
    )  # fmt: skip
    assert not post_body(url, zstd.pack(schema.encode(body)))["refused"]


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """Send and receive JSON."""
    data = None if body is None else msgspec.json.encode(body)
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, method=method)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)


def add_questioned(url: str, pager_url: str) -> None:
    """Add the runs, a preflight, a channel of alerts and a report about advice."""
    add_preflight(url)
    send_job(lambda body: post_body(url, body), LINK, LINK_JOB, collectives=True)
    send_job(lambda body: post_body(url, body), STAGES, STAGES_JOB, collectives=True)
    add_hang(url)
    add_days(url)
    add_machines(url)
    seed_run(url, run_id=LIVE, ranks=8, steps=300, slow_rank=5, slow_from=121, slow_factor=1.4,
             steps_per_batch=100, end=False)  # fmt: skip
    add_trackers(url)
    wait_until_judged(url)
    advice = ask(url, "GET", f"runs/{LIVE}/advice")
    report = {"epoch": advice["epoch"], "outcome": "refused", "controller": "night shift",
              "text": "it ends in an hour"}  # fmt: skip
    ask(url, "POST", f"runs/{LIVE}/advice/reports", report)
    target = {"kind": "webhook", "url": pager_url, "signing_key": "a key of some length"}
    ask(url, "POST", "alerts/channels", {"name": "pager of the night", "target": target})


def add_trackers(url: str) -> None:
    """Let a rank say where it logs to: a run with an address, and one that is a folder."""
    said = (
        {"tracker": "mlflow", "run": "8d1f", "name": "quiet-owl", "project": "3", "page": LOSSES},
        {"tracker": "tensorboard", "run": "/nfs/owl", "name": "owl", "store": "/nfs/owl"},
    )
    for fields in said:
        at = time.time_ns()
        event = schema.Event(attempt=0, rank=0, time_ns=at, name=schema.TRACKER, fields=fields)
        send(url, LIVE, event)


def add_preflight(url: str) -> None:
    """Store what was measured before `LINK`: all ways of one node are slow, and checked twice."""
    nodes = tuple(f"node{place}" for place in range(LINK_JOB.num_hosts))
    slow, began = nodes[SLOW_HOST], time.time() - 60
    reports = {}
    for place, (node, report) in enumerate(run({}, nodes).reports.items()):
        edges = {}
        for peer, edge in report.edges.items():
            mbit = 700.0 if slow in (node, peer) else 9_000.0
            speed = Bandwidth(mbit_per_s=mbit, again_mbit_per_s=mbit)
            edges[peer] = msgspec.structs.replace(edge, bandwidth=speed)
        host = LINK_JOB.host(place * LINK_JOB.ranks_per_host)
        named = having("host", hostname=host)(report)
        reports[node] = msgspec.structs.replace(named, edges=edges, started_unix_s=began)
    found = tuple(NetBandwidth().evaluate(Run("x", nodes, reports)))
    result = Result(id=NetBandwidth.id, family="paths", status="warn")
    verdict = LaunchVerdict(
        run_id="x", expected=nodes, reported=nodes, findings=found, results=(result,)
    )
    body = {"verdict": verdict, "reports": list(reports.values()), "run_id": LINK}
    ask(url, "PUT", f"preflight/runs/{PREFLIGHT}", body)


def add_hang(url: str) -> None:
    """Add a run in which a rank says what it waits for, and hangs."""
    seed_run(url, run_id=HUNG, ranks=8, steps=40, fault="hang", slow_rank=HUNG_RANK, slow_from=20,
             hang_seconds=41.0)  # fmt: skip
    send(url, HUNG, log(HUNG_RANK, time.time_ns() - 41 * S, 20, WORD, logger="data"))


def add_days(url: str) -> None:
    """Add a run of yesterday, and the same one of today: another PyTorch, and slow data."""
    now_ns = time.time_ns()
    for name, ago_s, torch, fault in (
        (YESTERDAY, 86_400, "2.12.1", "none"), (TODAY, 600, "2.13.0", "slow_data"),
    ):  # fmt: skip
        seed_run(url, run_id=name, name="gpt-nano", ranks=4, steps=200, steps_per_batch=100,
                 torch=torch, fault=fault, slow_from=1, start_ns=now_ns - ago_s * S)  # fmt: skip


def add_machines(url: str) -> None:
    """Add a run of two nodes: a GPU fell off the bus, and one process has much memory."""
    ranks, seconds = 16, 60
    seed_run(url, run_id=MACHINES, ranks=ranks, ranks_per_node=8, steps=500, fault="none",
             steps_per_batch=250, gpus=True)  # fmt: skip
    plan = Plan(run_id=MACHINES, ranks=ranks, ranks_per_node=8)
    begun = time.time_ns() - seconds * S
    at: Any = begun + np.arange(seconds, dtype=np.int64) * S
    chunks = []
    for node in range(2):
        mine = np.arange(8) + 8 * node
        rank, when = np.tile(mine, seconds), np.repeat(at, 8)
        memory = np.where(rank == 5, 9 << 30, 4 << 30) + rank * MS
        told = {"rank": rank, "pid": 4_000 + rank, "rss_bytes": memory}
        columns = sample_columns("process", when, told)
        host = plan.host_of(8 * node)
        chunks.append(chunk(plan, "process", schema.NODE_RANK, columns, "time_ns", host))
    fields = {"host": "node-b", "gpu": "3", "number": "79", "seen_in": "NVML",
              "meaning": "GPU has fallen off the bus"}  # fmt: skip
    fell = schema.Event(
        attempt=0, rank=schema.NODE_RANK, time_ns=int(at[-1]), name="xid", fields=fields
    )
    send(url, MACHINES, fell, chunks=chunks)
