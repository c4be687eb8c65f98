"""Collectives per CPU second beside what people log to today: MLflow, TensorBoard, OTLP, JSON rows.

    python -m venv peers; peers/bin/pip install mlflow tensorboard opentelemetry-proto
    python benchmarks/peers.py --peers-python peers/bin/python

The collectives of `benchmarks/ingest.py`, the same for all. Rankscope takes them as collectors send
them (chunks of 5,000, every column, detectors on). The others get less of each: MLflow and
TensorBoard its duration as one point, OTLP a span and JSON rows an object of ten fields, which a
server of the same kind (uvicorn) stores as a row in one SQLite table, bare or with the two indexes
that find a rank or a step. Counted is the CPU time of
the server with its children, from the first request to the last acknowledged one, in rounds that
take turns; TensorBoard has no server, so its writer is counted. What is not installed is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ingest
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ports import free_port

SERVERS = Path(__file__).with_name("peer_servers.py")
ROWS_PER_BODY = 5_000
MLFLOW_PER_BODY = 1_000  # the most that it takes
FIELDS = (
    "step", "sequence", "arrived_ns", "started_ns", "duration_ns", "blocked_ns", "size_bytes",
    "group", "operation",
)  # fmt: skip
START_SECONDS = 90.0
_PROTOBUF = "application/x-protobuf"


class Skipped(Exception):
    """A peer that cannot be measured here, and why."""


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return so many collectives of rank 3, an object each."""
    columns = ingest.Job(64).collectives(3, 0, count, 1_700_000_000 * 10**9)
    values = [np.asarray(columns[name]).tolist() for name in FIELDS]
    return [
        dict(zip(("rank", *FIELDS), (3, *row), strict=True)) for row in zip(*values, strict=True)
    ]


def cpu_seconds(process: psutil.Process) -> float:
    """Return what a process and its children have used."""
    used = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            used += times.user + times.system
    return used


@contextlib.contextmanager
def serving(command: list[str], path: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server on a free port, which stands for `PORT`; yield its address once it answers."""
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in command]
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            _wait(server, port, path)
            yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
        finally:
            for one in psutil.Process(server.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], port: int, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            connection.getresponse().read()
        except OSError:
            time.sleep(0.2)
        else:
            return
        finally:
            connection.close()
    raise Skipped("its server did not start")


def sent(address: str, path: str, bodies: list[bytes], process: psutil.Process) -> float:
    """Post all bodies but the first, which warms up, and return the CPU seconds they took."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)
    headers = {"Content-Type": "application/json" if bodies[0][:1] in b"{[" else _PROTOBUF}
    before = 0.0
    for number, body in enumerate(bodies):
        if number == 1:
            before = cpu_seconds(process)
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {said[:300]!r}")
    connection.close()
    return cpu_seconds(process) - before


def rankscope(count: int, python: str) -> float:
    """Return its collectives per CPU second, detectors on."""
    options = argparse.Namespace(detectors=True, database_url="", connections=8)
    windows = max(3, count // (64 * ROWS_PER_BODY))
    result = ingest.Result(2, "sqlite", True, ROWS_PER_BODY, 64, windows * 64 * ROWS_PER_BODY)
    start_ns = time.time_ns() - windows * ROWS_PER_BODY // ingest.PER_STEP * ingest.STEP_NS
    rows = list(ingest.bodies(ingest.Job(64), "peers", windows, ROWS_PER_BODY, start_ns))
    ingest.measure(options, result, rows)
    return result.millions_per_cpu_second[0] * 1e6


def json_rows(count: int, python: str) -> float:
    """Return rows per CPU second of a server that puts JSON objects into one table."""
    return _rows_per_second("json", sys.executable, count // 8, json.dumps(rows_of(ROWS_PER_BODY)))


def indexed_rows(count: int, python: str) -> float:
    """Return the same where the table has indexes by rank and by step."""
    rows = json.dumps(rows_of(ROWS_PER_BODY))
    return _rows_per_second("json-indexed", sys.executable, count // 20, rows)


def otlp(count: int, python: str) -> float:
    """Return spans per CPU second of a server that puts OTLP spans into one table."""
    _need(python, "opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    made = subprocess.run(
        [python, str(SERVERS), "make-otlp"], input=json.dumps(rows_of(ROWS_PER_BODY)).encode(),
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return _rows_per_second("otlp", python, count // 20, made.stdout)


def _rows_per_second(what: str, python: str, count: int, body: str | bytes) -> float:
    data = body.encode() if isinstance(body, str) else body
    bodies = [data] * (1 + max(1, count // ROWS_PER_BODY))
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(SERVERS), what, "PORT", f"{folder}/rows.db"]
        with serving(command, "/") as (address, process):
            used = sent(address, "/", bodies, process)
    return (len(bodies) - 1) * ROWS_PER_BODY / used


def tensorboard(count: int, python: str) -> float:
    """Return points per CPU second of the process that writes an event file."""
    _need(python, "tensorboard")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, str(SERVERS), "tensorboard", str(count // 20), folder], text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
    return float(done.stdout)


def mlflow(count: int, python: str) -> float:
    """Return points per CPU second of a tracking server with `log-batch`."""
    _need(python, "mlflow")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            python, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/m.db",
            "--default-artifact-root", folder, "--host", "127.0.0.1", "--port", "PORT",
            "--workers", "1",
        ]  # fmt: skip
        with serving(command, "/health") as (address, process):
            made = _post_json(address, "runs/create", {"experiment_id": "0"})
            run_id = made["run"]["info"]["run_id"]
            bodies = []
            for first in range(0, max(2, count // 100 // MLFLOW_PER_BODY) * MLFLOW_PER_BODY,
                               MLFLOW_PER_BODY):  # fmt: skip
                metrics = [
                    {"key": "rank3/duration_ms", "value": row["duration_ns"] / 1e6,
                     "timestamp": row["arrived_ns"] // 1_000_000, "step": first + at}
                    for at, row in enumerate(rows_of(MLFLOW_PER_BODY))
                ]  # fmt: skip
                bodies.append(json.dumps({"run_id": run_id, "metrics": metrics}).encode())
            used = sent(address, "/api/2.0/mlflow/runs/log-batch", bodies, process)
    return (len(bodies) - 1) * MLFLOW_PER_BODY / used


def _post_json(address: str, call: str, values: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/api/2.0/mlflow/{call}", json.dumps(values).encode(), headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {said[:300]!r}")
    return json.loads(said)


def _need(python: str, module: str) -> None:
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    if found.returncode:
        raise Skipped(f"{module} is not installed for {python}")


PEERS: dict[str, Callable[[int, str], float]] = {
    "rankscope": rankscope,
    "JSON rows": json_rows,
    "JSON rows, two indexes": indexed_rows,
    "OTLP": otlp,
    "TensorBoard": tensorboard,
    "MLflow": mlflow,
}


def main() -> None:
    """Measure all in turns and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers-python", default=sys.executable, help="that has their packages")
    parser.add_argument("--events", type=int, default=4_000_000, help="of ours; others get fewer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in PEERS}
    skipped: dict[str, str] = {}
    for _ in range(options.rounds):
        for name, measure in PEERS.items():
            if name in skipped:
                continue
            try:
                figures[name].append(round(measure(options.events, options.peers_python)))
            except Skipped as why:
                skipped[name] = str(why)
    ours = statistics.median(figures["rankscope"])
    rows = [
        {"what": name, "per_cpu_second": sorted(found), "median": statistics.median(found),
         "rankscope_is_times": round(ours / statistics.median(found), 1)}
        for name, found in figures.items() if found
    ]  # fmt: skip
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({"machine": machine, "rows": rows, "skipped": skipped}, indent=1))


if __name__ == "__main__":
    main()
