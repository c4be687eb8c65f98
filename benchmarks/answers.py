"""How long answers take on a large store: CPU of the server process and wall time of each route.

    python benchmarks/answers.py                          # 5 M collectives of 1,024 ranks, SQLite
    nice python benchmarks/answers.py --collectives 50e6 --database postgresql

Builds a run of 1,024 ranks on 128 hosts (40 collectives a step, 300 a second, in tensor-parallel
groups of 8 and one of all) through validation and the store's own writing, or goes on where an
earlier build in `--folder` ended; PostgreSQL gets the rows of that SQLite file. Then starts a real
server on it and asks each route `--repeat` times over HTTP. Prints JSON: p50 and p95 in ms, and
what of the bars was missed (exit status 1).
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.ingest.batch import validate_batch
from rankscope_server.store import tables
from rankscope_server.store.batches import pack_journal, store_batch
from rankscope_server.store.engine import open_engines
from rankscope_server.store.unit import Unit
from tests.server.postgres import Postgres

RUN = "large"
RANKS, RANKS_PER_HOST, COLLECTIVES_PER_STEP = 1_024, 8, 40
HOSTS = RANKS // RANKS_PER_HOST
STEPS_PER_BATCH, STEP_NS = 8, 133_333_333  # a batch a second and host, chunks of 320 collectives
GROUP_COMMIT = 64
SETTLE_SECONDS, IDLE_MS = 120.0, 30.0  # of CPU in a second
AGE_NS = 3 * 3600 * 10**9  # so old that no detector looks at it while answers are timed
START_SECONDS, MS = 120.0, 1_000_000
SAMPLES = "names=memory_used_bytes,cpu_user_us_total"


@dataclass(frozen=True)
class Route:
    """One question, and how many ms of CPU its answer may take at the 95th percentile."""

    name: str
    path: str
    bar_ms: float | None = None


def routes(last_step: int) -> list[Route]:
    """Return what is asked of a run that is at `last_step`."""
    middle, first = last_step // 2, max(last_step - 499, 1)
    run = f"/api/v1/runs/{RUN}"
    return [
        Route("overview", run, 50),
        Route("map 1,024 x 500", f"{run}/map?from={first}&width=500&lanes=1024", 100),
        Route("map of all steps", f"{run}/map?width=600&lanes=256"),
        Route("budget", f"{run}/budget", 100),
        Route("collectives", f"{run}/collectives"),
        Route("collectives of a step", f"{run}/collectives?from={middle}&to={middle}", 150),
        Route("collectives of a rank", f"{run}/collectives?rank=77"),
        Route("collectives of 20 steps", f"{run}/collectives?from={middle}&to={middle + 19}"),
        Route("records", f"{run}/collectives/records"),
        Route("samples of all hosts", f"{run}/samples?kind=host&{SAMPLES}", 300),
        Route("samples of a host", f"{run}/samples?kind=host&host=host-7"),
        Route("last sequences", f"{run}/ranks", 20),
        Route("last sequences of a rank", f"{run}/ranks/77", 20),
        Route("throughput", f"{run}/throughput"),
        Route("metrics", f"{run}/metrics?merged=true"),
        Route("machines", f"{run}/machines"),
        Route("errors", f"{run}/errors"),
        Route("runs", "/api/v1/runs"),
    ]


# --- building -------------------------------------------------------------------------------


class Build:
    """Writes the run, from where it is to its end."""

    def __init__(self, url: str, last_step: int) -> None:
        self._last_step = last_step
        self._writer, self._reader = open_engines(url, "normal")
        self._start_ns = time.time_ns() - AGE_NS
        self._waiting: list[tuple[int, bytes]] = []

    def run(self) -> int:
        """Return how many steps were written."""
        done = self._stored()
        if done == 0:
            self._begin()
        first = done
        while done < self._last_step:
            for host in range(HOSTS):
                self._add(host, done, 2 + done // STEPS_PER_BATCH, self._steps(host, done))
            done += STEPS_PER_BATCH
            if done // STEPS_PER_BATCH % 20 == 0:
                print(f"{done * RANKS * COLLECTIVES_PER_STEP / 1e6:.1f} M", file=sys.stderr)
        self._commit()
        for engine in (self._writer, self._reader):
            engine.dispose()
        return done - first

    def _stored(self) -> int:
        """Return the last step that every host has sent, and when the run began."""
        chunk = tables.chunk.c
        with self._reader.connect() as connection:
            begun = connection.scalar(sa.select(tables.run.c.started_ns))
            steps = connection.execute(
                sa.select(chunk.host, sa.func.max(chunk.step_hi))
                .where(chunk.run_id == RUN, chunk.kind == "collectives")
                .group_by(chunk.host)
            ).all()
        self._start_ns = int(begun or self._start_ns)
        return min(int(step) for _, step in steps) if len(steps) == HOSTS else 0

    def _add(self, host: int, at: int, sequence: int, parts: tuple[list[Any], list[Any]]) -> None:
        records, chunks = parts
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=RUN, producer=f"host-{host}",
            sequence=sequence, host=f"host-{host}", sent_ns=self._time(at),
            records=[msgspec.Raw(schema.encode(one)) for one in records],
            chunks=chunks,
        )  # fmt: skip
        self._waiting.append((self._time(at), schema.encode(batch)))
        if len(self._waiting) >= GROUP_COMMIT:
            self._commit()

    def _commit(self) -> None:
        if not self._waiting:
            return
        batches = [validate_batch(body, "", 1 << 30) for _, body in self._waiting]
        assert not any(batch.refused for batch in batches), batches[0].refused
        newest = max(at for at, _ in self._waiting)
        with self._writer.begin() as connection:
            unit = Unit(connection, clock=lambda: newest)
            for batch in batches:
                store_batch(unit, batch, pack_journal(batch.records))
            unit.flush()
        self._waiting.clear()

    def _time(self, step: int) -> int:
        return self._start_ns + step * STEP_NS

    def _begin(self) -> None:
        now = self._start_ns
        groups = [("default_pg", list(range(RANKS)))]
        groups += [(f"tp_{host}", _ranks(host)) for host in range(HOSTS)]
        for host in range(HOSTS):
            records: list[Any] = []
            if host == 0:
                records += [
                    schema.RunStarted(attempt=0, rank=-1, time_ns=now, name="large", command=[],
                                      world_size=RANKS),
                    *(schema.GroupDefined(attempt=0, rank=-1, time_ns=now, group=name, ranks=ranks,
                                          backend="gloo", description=name)
                      for name, ranks in groups),
                ]  # fmt: skip
            for rank in _ranks(host):
                facts = {f"fact.{number}": f"value of {number}" for number in range(60)}
                records += [
                    schema.RankRegistered(
                        attempt=0, rank=rank, time_ns=now, world_size=RANKS, backend="gloo",
                        local_rank=rank % RANKS_PER_HOST, local_world_size=RANKS_PER_HOST,
                        node_rank=host, host=f"host-{host}", pid=1_000 + rank,
                    ),
                    schema.Environment(attempt=0, rank=rank, time_ns=now, facts=facts),
                ]  # fmt: skip
            self._add(host, 0, 1, (records, []))

    def _steps(self, host: int, done: int) -> tuple[list[Any], list[Any]]:
        rng = np.random.default_rng([host, done])
        records: list[Any] = []
        chunks: list[Any] = []
        for rank in _ranks(host):
            chunks += self._of_rank(rng, host, rank, done)
            records.append(self._state(host, rank, done + STEPS_PER_BATCH))
            if rank == 0:
                records += [
                    schema.Metrics(attempt=0, rank=0, time_ns=self._time(step), step=step,
                                   values={"loss": 4.0 / step, "learning_rate": 3e-4})
                    for step in range(done + 1, done + STEPS_PER_BATCH + 1)
                ]  # fmt: skip
        if done // STEPS_PER_BATCH % 5 == 0:
            chunks.append(self._samples(rng, host, done))
        return records, chunks

    def _of_rank(self, rng: Any, host: int, rank: int, done: int) -> list[schema.Chunk]:
        each, count = COLLECTIVES_PER_STEP, STEPS_PER_BATCH * COLLECTIVES_PER_STEP
        steps = np.repeat(np.arange(done + 1, done + STEPS_PER_BATCH + 1), each)
        place = np.tile(np.arange(each), STEPS_PER_BATCH)
        is_all = place % 5 == 4  # every fifth is of all ranks
        arrived = self._time(0) + (steps - 1) * STEP_NS + place * (STEP_NS // each)
        arrived = arrived + rng.integers(0, 200_000, count)
        sizes = np.where(is_all, 26_214_400 - 1_048_576 * (place % 3), 4_194_304)
        number = (steps - 1) * each + place + 1
        fill = np.zeros(count, np.int64)
        words = {True: "all_reduce", False: "all_gather"}
        columns: dict[str, Column] = {name: fill - 1 for name in schema.COLLECTIVE_COLUMNS}
        columns |= {
            "arrived_ns": arrived, "duration_ns": rng.integers(800_000, 2_200_000, count),
            "returned_ns": fill + 30_000, "blocked_ns": rng.integers(0, 400_000, count),
            "sequence": number, "step": steps, "size_bytes": sizes, "input_bytes": sizes,
            "output_bytes": sizes, "num_tensors": fill + 1, "state": fill + schema.ENDED,
            "flags": fill + schema.FLAG_ASYNC,
            "group": ["default_pg" if one else f"tp_{host}" for one in is_all.tolist()],
            "operation": [words[one] for one in is_all.tolist()],
            **{name: [word] * count for name, word in (
                ("dtype", "bfloat16"), ("reduce_op", "sum"), ("call_site", "train.py:88 step"),
                ("issued_by", "probe"), ("ended_by", "probe"))},
        }  # fmt: skip
        of_steps = np.arange(done + 1, done + STEPS_PER_BATCH + 1)
        times: dict[str, Column] = {
            name: np.zeros(STEPS_PER_BATCH, np.int64) for name in schema.STEP_COLUMNS
        }
        blocked = rng.integers(20, 30, STEPS_PER_BATCH) * MS
        times |= {
            "step": of_steps, "started_ns": self._time(0) + (of_steps - 1) * STEP_NS,
            "duration_ns": np.full(STEPS_PER_BATCH, STEP_NS), "forward_ns": fill[:8] + 40 * MS,
            "backward_ns": fill[:8] + 80 * MS, "backward_blocked_ns": blocked,
            "optimizer_ns": fill[:8] + 10 * MS, "cpu_ns": fill[:8] + 100 * MS,
            "microbatches": fill[:8] + 1, "num_collectives": fill[:8] + each,
        }  # fmt: skip
        return [
            _chunk("collectives", rank, host, "arrived_ns", columns),
            _chunk("steps", rank, host, "started_ns", times),
        ]

    def _state(self, host: int, rank: int, step: int) -> schema.RankState:
        now = self._time(step)
        groups = [
            schema.GroupState(
                group=name, issued=step * share, ended=step * share, operation=operation,
                size_bytes=4_194_304, issued_ns=now, call_site="train.py:88 step",
            )
            for name, share, operation in (
                ("default_pg", 8, "all_reduce"), (f"tp_{host}", 32, "all_gather"),
            )
        ]  # fmt: skip
        return schema.RankState(
            attempt=0, rank=rank, time_ns=now, step=step, phase="backward", phase_since_ns=now,
            heartbeat_ns=now, cpu_seconds=step * 0.1, rss_bytes=2 << 30, groups=groups,
        )  # fmt: skip

    def _samples(self, rng: Any, host: int, done: int) -> schema.Chunk:
        at = self._time(done) + np.arange(5) * 10**9
        columns: dict[str, Column] = {}
        for place, name in enumerate(schema.CHUNK_COLUMNS["host"]):
            is_float = name in schema.FLOAT_COLUMNS
            values = rng.random(5) if is_float else done * 1_000 * place + np.arange(5) * 700
            columns[name] = values.astype(np.float32 if is_float else np.int64)
        columns |= {"time_ns": at, "interval_ns": np.full(5, 10**9)}
        return _chunk("host", schema.NODE_RANK, host, "time_ns", columns)


def _ranks(host: int) -> list[int]:
    return list(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))


def _chunk(
    kind: Any, rank: int, host: int, time_column: str, columns: dict[str, Column]
) -> schema.Chunk:
    at = np.asarray(columns[time_column])
    steps = np.asarray(columns.get("step", [0]))
    return schema.Chunk(
        kind=kind, attempt=0, rank=rank, host=f"host-{host}", count=len(at),
        time_lo_ns=int(at.min()), time_hi_ns=int(at.max()), data=encode_chunk(columns),
        step_lo=int(steps.min()), step_hi=int(steps.max()),
    )  # fmt: skip


def copy_rows(source_url: str, target_url: str) -> None:
    """Give an empty PostgreSQL database every row of an SQLite store."""
    source = sa.create_engine(source_url)
    writer, reader = open_engines(target_url, "normal")
    with source.connect() as reading, writer.begin() as writing:
        driver: Any = writing.connection.driver_connection
        for table in tables.metadata.sorted_tables:
            names = ", ".join(f'"{column.name}"' for column in table.columns)
            command = f'COPY "{table.name}" ({names}) FROM STDIN'
            with driver.cursor() as cursor, cursor.copy(command) as copying:
                for row in reading.execute(sa.select(table)):
                    copying.write_row(tuple(row))
    with writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))
    for engine in (source, writer, reader):
        engine.dispose()


def is_empty(url: str) -> bool:
    """Return whether a store has no run."""
    writer, reader = open_engines(url, "normal")
    with reader.connect() as connection:
        found = connection.scalar(sa.select(tables.run.c.run_id))
    for engine in (writer, reader):
        engine.dispose()
    return found is None


# --- asking ---------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Give (address, process) of a real server on a store."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--database-url", url,
         "--ready-file", str(ready), "--log-level", "error"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"], process.pid
    finally:
        process.terminate()
        process.wait(20)


def cpu_ms(*pids: int) -> float:
    """Return the CPU time of all threads of processes, as exact as the scheduler knows it."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / MS


def settle(pid: int) -> float:
    """Wait for the end of what a server does at its start; return the CPU seconds of that."""
    deadline, before = time.monotonic() + SETTLE_SECONDS, cpu_ms(pid)
    while time.monotonic() < deadline:
        time.sleep(1.0)
        before, last = cpu_ms(pid), before
        if before - last < IDLE_MS:
            break
    return round(before / 1e3, 1)


def children_of(pid: int) -> list[int]:
    """Return the processes that a database server has made; none for no server."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(number) for number in listed.read_text().split()] if pid else []


def measure(
    address: str, pid: int, database_pid: int, asked: Sequence[Route], repeat: int
) -> dict[str, Any]:
    """Ask each route; return what it took."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
    found: dict[str, Any] = {}
    for route in asked:
        cpu: list[float] = []
        wall: list[float] = []
        of_database: list[float] = []
        size = 0
        for _ in range(repeat + 1):
            backends = children_of(database_pid)
            database_before = cpu_ms(*backends)
            before, started = cpu_ms(pid), time.perf_counter()
            connection.request("GET", route.path, headers={"Accept-Encoding": "gzip"})
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status == 200, (route.path, body[:300])
            wall.append((time.perf_counter() - started) * 1e3)
            cpu.append(cpu_ms(pid) - before)
            of_database.append(cpu_ms(*backends) - database_before)
            size = len(body)
        found[route.name] = {  # the first one warms caches up
            "cpu_ms": _spread(cpu[1:]), "database_cpu_ms": _spread(of_database[1:]),
            "wall_ms": _spread(wall[1:]),
            "first_wall_ms": round(wall[0], 1), "bytes": size, "bar_ms": route.bar_ms,
        }  # fmt: skip
    connection.close()
    return found


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 1), "p95": round(p95, 1)}


@contextlib.contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Give the address of a store in a folder, and the process of its server, 0 for none."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'answers.db'}", 0
        return
    server = Postgres("-c", "synchronous_commit=off", "-c", "shared_buffers=512MB",
                      folder=folder / "postgresql").start()  # fmt: skip
    try:
        yield server.url("postgres"), server.pid
    finally:
        server.end()
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=float, default=5e6)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rankscope-answers"))
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--only", default="", help="part of a route's name")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    per_batch = STEPS_PER_BATCH * RANKS * COLLECTIVES_PER_STEP
    last_step = -(-int(chosen.collectives) // per_batch) * STEPS_PER_BATCH
    file = f"sqlite:///{chosen.folder / 'answers.db'}"
    started = time.process_time()
    written = Build(file, last_step).run()
    seconds = time.process_time() - started
    with database(chosen.database, chosen.folder) as (url, database_pid):
        if url != file and is_empty(url):
            copy_rows(file, url)
        with serving(url, chosen.folder) as (address, pid):
            asked = [route for route in routes(last_step) if chosen.only in route.name]
            start_cpu_s = settle(pid)
            answers = measure(address, pid, database_pid, asked, chosen.repeat)
    missed = {
        name: f"{one['cpu_ms']['p95']} of {one['bar_ms']} ms"
        for name, one in answers.items()
        if one["bar_ms"] is not None and one["cpu_ms"]["p95"] > one["bar_ms"]
    }
    result = {
        "database": chosen.database, "collectives": last_step * RANKS * COLLECTIVES_PER_STEP,
        "ranks": RANKS, "steps": last_step, "cores": os.cpu_count(), "repeat": chosen.repeat,
        "load": round(os.getloadavg()[0], 1), "start_cpu_s": start_cpu_s,
        "built_steps": written, "build_cpu_s": round(seconds, 1), "answers": answers,
        "missed": missed,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
