"""What is handed out of a run is what was sent, whole, in Python, SQL and files."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import rankscope
from rankscope.data.batches import batch_of_rows, batches_of
from rankscope.data.kinds import KINDS, DataError, schema_of
from rankscope.data.run import Run, open_run
from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope.wire.stored import ChunkPage, RowPage, StoredChunk
from rankscope_server.api.data import queries
from tests.api import get
from tests.command_server import run as run_command
from tests.server.conftest import Sender, ServerProcess
from tests.server.raw_run import RawRun, make_run
from tests.server.raw_run import batches_of as raw_batches_of
from tests.server.seed import seed_run

RUN = "measured"


def pages(sender: Sender, path: str, decode: Callable[[bytes], Any], **asked: Any) -> Iterator[Any]:
    """Yield all pages of an answer."""
    after = None
    while True:
        params = asked | ({} if after is None else {"after": after})
        reply = sender.client.get(f"/api/v1/runs/{sender.run_id}{path}", params=params)
        assert reply.status_code == 200, reply.text
        page = decode(reply.content)
        yield page
        after = page.after
        if after is None:
            return


def chunks_of(sender: Sender, kind: str, **asked: Any) -> list[ChunkPage]:
    decode = msgspec.msgpack.Decoder(ChunkPage).decode
    return list(pages(sender, "/chunks", decode, kind=kind, **asked))


def rows_of(sender: Sender, kind: str, **asked: Any) -> list[dict[str, Any]]:
    found = []
    for page in pages(sender, "/rows", msgspec.json.Decoder(RowPage).decode, kind=kind, **asked):
        found += batch_of_rows(kind, page).to_pylist()
    return found


def table_of(kind: str, found: Sequence[ChunkPage], steps: Any = None, ranks: Any = ()) -> pa.Table:
    chunks = [chunk for page in found for chunk in page.chunks]
    return pa.Table.from_batches(batches_of(kind, chunks, steps, ranks), schema_of(kind))


def events_in(run: RawRun, steps: Any = None, ranks: Any = ()) -> Counter[tuple[Any, ...]]:
    """Return the collectives of some steps and ranks, and how often each is there."""
    return Counter(
        (one.attempt, one.rank, one.step, one.operation, one.group, one.size, one.arrived_ns,
         None if one.duration_ns < 0 else one.duration_ns, schema.STATES[one.state])
        for one in run.collectives
        if (steps is None or steps[0] <= one.step <= steps[1])
        and (not ranks or any(lo <= one.rank <= hi for lo, hi in ranks))
    )  # fmt: skip


def events_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    names = (
        "attempt", "rank", "step", "operation", "group", "size_bytes", "arrived_ns", "duration_ns",
        "state",
    )  # fmt: skip
    return Counter(tuple(row[name] for name in names) for row in table.to_pylist())


def test_all_that_was_sent_comes_back_page_by_page(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(seed=19, ranks=5, spans=[(1, 30), (21, 50)], per_step=3, repeats=2)
    for records, chunks in raw_batches_of(run, seed=4):
        sender.send(*records, chunks=chunks)
    monkeypatch.setattr(queries, "PAGE_BYTES", 2_000)
    monkeypatch.setattr(queries, "_CHUNKS_AT_ONCE", 3)
    found = chunks_of(sender, "collectives")
    assert len(found) > 3
    assert found[0].num_events == len(run.collectives)
    assert [page.num_events for page in found[1:]] == [None] * (len(found) - 1)
    assert events_of(table_of("collectives", found)) == events_in(run)
    random_ranges = random.Random(7)
    for _ in range(10):
        steps = tuple(sorted(random_ranges.choices(range(52), k=2)))
        ranks = [(random_ranges.randrange(3), random_ranges.randrange(3, 6))]
        asked = {"from": steps[0], "to": steps[1], "ranks": f"{ranks[0][0]}-{ranks[0][1]}"}
        table = table_of("collectives", chunks_of(sender, "collectives", **asked), steps, ranks)
        assert events_of(table) == events_in(run, steps, ranks)
    of_first = table_of("collectives", chunks_of(sender, "collectives", attempt=0))
    assert set(of_first["attempt"].to_pylist()) == {0}
    measured = table_of("steps", chunks_of(sender, "steps"))
    assert sum(measured["duration_ns"].to_pylist()) == sum(one.duration_ns for one in run.steps)
    samples = table_of("host", chunks_of(sender, "host"))
    assert sorted(samples["time_ns"].to_pylist()) == sorted(one.time_ns for one in run.samples)
    assert samples["load_1m"].null_count == samples.num_rows > 0, "-1 is not known"
    metrics = rows_of(sender, "metrics", limit=7)
    assert len(metrics) == len(sender.get("/rows", kind="metrics")["rows"])
    assert {row["name"] for row in metrics} == {name for one in run.metrics for name in one.values}
    assert [row["attempt"] for row in rows_of(sender, "attempts", limit=1)] == [0, 1]
    assert len(rows_of(sender, "ranks", limit=3)) == 10


def test_what_cannot_be_asked_is_refused_by_name(sender: Sender) -> None:
    sender.send(schema.RunStarted(attempt=0, rank=0, time_ns=1, name="x"))
    for path, asked, field in (
        ("chunks", {"kind": "calls"}, "kind"),
        ("chunks", {"kind": "steps", "ranks": "7-3"}, "ranks"),
        ("rows", {"kind": "steps"}, "kind"),
        ("rows", {"kind": "metrics", "after": "x"}, "after"),
        ("rows", {"kind": "metrics", "after": '["a", 1]'}, "after"),
        ("rows", {"kind": "metrics", "after": '["a", true, 1, 0]'}, "after"),
        ("rows", {"kind": "events", "after": "[9223372036854775808]"}, "after"),
    ):
        reply = sender.client.get(f"/api/v1/runs/{sender.run_id}/{path}", params=asked)
        assert (reply.status_code, reply.json()["error"]["field"]) == (422, field), (path, asked)
    assert sender.client.get("/api/v1/runs/none/chunks?kind=steps").status_code == 404


def test_every_kind_of_the_wire_has_a_schema() -> None:
    for kind in KINDS:
        assert len(schema_of(kind)) > 3
    for kind, columns in schema.CHUNK_COLUMNS.items():
        assert set(columns) <= set(schema_of(kind).names)
    with pytest.raises(DataError, match="no table 'calls'; there are collectives, steps"):
        schema_of("calls")


# --- with a real server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = ServerProcess(tmp_path_factory.mktemp("data")).start()
    seed_run(found.url, run_id=RUN, ranks=4, steps=60, fault="slow_compute", slow_from=20)
    yield found
    found.close()


@pytest.fixture
def run(server: ServerProcess) -> Iterator[Run]:
    with rankscope.open(RUN, server=server.url) as found:
        yield found


def command(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return run_command(
        [sys.executable, "-m", "rankscope", words[0], RUN, *words[1:], "--server", server.url],
        env=environ | {"COLUMNS": "160"},
    )


def test_a_run_opens_as_arrow_pandas_polars_and_sql(server: ServerProcess, run: Run) -> None:
    calls = get(f"{server.url}/api/v1/runs/{RUN}/collectives")["rows"]
    table = run.arrow("collectives")
    assert table.num_rows == sum(row["count"] for row in calls)
    frame = run.pandas("collectives", steps=(11, 20), ranks=[2])
    assert isinstance(frame, pd.DataFrame)
    assert (set(frame["rank"]), frame["step"].min(), frame["step"].max()) == ({2}, 11, 20)
    lazy = run.polars("steps")
    assert isinstance(lazy, pl.DataFrame)
    assert lazy.height == 4 * 60
    slowest = run.sql("""
        select rank, median(forward_ns + backward_ns - backward_blocked_ns) as own_ns
        from steps where step > 20 group by rank order by own_ns desc
    """)
    assert slowest["rank"][0].as_py() == 2, "the slow one of the seed"
    assert run.verdict == get(f"{server.url}/api/v1/runs/{RUN}")["answer"]["text"]
    joined = run.sql("select count(*) n from steps join ranks using (attempt, rank)")
    assert joined["n"][0].as_py() == 4 * 60
    lines = run.arrow("logs")
    logs = get(f"{server.url}/api/v1/runs/{RUN}/logs?fold=false")
    assert lines.num_rows == logs["total"]
    assert lines["message"][0].as_py() == logs["lines"][0]["message"]


def test_a_run_that_is_not_there_is_said_when_it_is_opened(server: ServerProcess) -> None:
    with pytest.raises(DataError, match="absent"):
        open_run("absent", server=server.url)
    with pytest.raises(DataError, match="does not answer"):
        open_run(RUN, server="http://127.0.0.1:9")
    with pytest.raises(DataError, match="server"):
        open_run(RUN, server="ftp://x")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("copy steps to '/tmp/rankscope-copy.csv'", "one SELECT"),
        ("select 1; drop table steps", "one SELECT"),
        ("delete from steps", "one SELECT"),
        ("attach '/tmp/x.db'", "one SELECT|disabled"),
        ("set memory_limit = '1TB'", "one SELECT"),
        ("select * from read_csv('/etc/passwd')", "disabled"),
        ("select * from read_text('/etc/hostname')", "disabled"),
        ("select * from glob('/*')", "disabled"),
        ("select * from read_parquet('http://127.0.0.1:1/x')", "disabled|httpfs"),
        ("select nothing from steps", "nothing"),
        ("select * from calls", "calls"),
        ("selec 1", "syntax error at or near"),
        ("", "one SELECT"),
    ],
)
def test_a_query_only_reads_the_tables(run: Run, query: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        run.sql(query)


def test_an_endless_query_is_stopped_and_a_large_one_spills(run: Run) -> None:
    with pytest.raises(DataError, match="longer than 1 s; narrow it"):
        run.sql("select count(*) from range(1000000000) a, range(1000000000) b", seconds=1)
    # what the first one left behind does not hold up the next
    assert run.sql("select 1 as one")["one"].to_pylist() == [1]


def test_the_command_prints_writes_and_refuses(server: ServerProcess, tmp_path: Path) -> None:
    query = "select rank, count(*) as n, null as nothing from steps group by rank order by rank"
    done = command(server, "sql", query)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["rank", "n", "nothing"], *([str(rank), "60", "-"] for rank in range(4)),
    ]  # fmt: skip
    cut = command(server, "sql", query, "--limit", "1")
    assert "the first 1 of 4 rows" in cut.stderr
    said = json.loads(command(server, "sql", query, "--json", "--steps", "1-10").stdout)
    assert said == {"columns": ["rank", "n", "nothing"],
                    "rows": [[rank, 10, None] for rank in range(4)]}  # fmt: skip
    infinite = json.loads(command(server, "sql", "select 'inf'::double as x", "--json").stdout)
    assert infinite["rows"] == [[None]]
    target = tmp_path / "own.csv"
    done = command(server, "sql", query, "--out", str(target))
    assert done.returncode == 0, done.stderr
    assert csv_rows(target)[3] == {"rank": "3", "n": "60", "nothing": ""}
    listed = command(server, "sql", "show tables").stdout.split()
    assert set(KINDS) <= set(listed)
    for words, code, says in (
        (("sql", "select x from steps"), 2, '"x" not found'),
        (("sql", query, "--out", str(tmp_path / "x.xlsx")), 2, "end its name with one of .parquet"),
        (("sql", query, "--steps", "9-3"), 64, "'9-3' is no range"),
        (("sql", query, "--seconds", "0"), 64, "--seconds above 0"),
        (("export", "--tables", "calls", "--out", str(tmp_path / "y")), 64, "no table 'calls'"),
    ):
        refused = command(server, *words)
        assert (refused.returncode, says in refused.stderr) == (code, True), refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own.csv"]


def test_exported_files_hold_the_same_in_every_engine(
    server: ServerProcess, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    done = command(server, "export", "--out", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    files = {row["table"]: row for row in json.loads(done.stdout)["files"]}
    assert {"collectives", "steps", "ranks", "logs", "findings", "metrics"} <= set(files)
    assert json.loads((folder / "run.json").read_text())["answer"]["text"] == run.verdict
    for name, row in files.items():
        assert pq.read_metadata(folder / f"{name}.parquet").num_rows == row["rows"] > 0
    total = sum(run.arrow("steps")["duration_ns"].to_pylist())
    path = str(folder / "steps.parquet")
    with duckdb.connect() as engine:
        summed = engine.execute("select sum(duration_ns) from read_parquet(?)", [path]).fetchone()
    assert summed == (total,)
    assert pl.read_parquet(path)["duration_ns"].sum() == total
    assert pd.read_parquet(path)["duration_ns"].sum() == total
    for name, read in READERS.items():
        other = tmp_path / name
        asked = ("export", "--tables", "steps", "--steps", "5-6", "--ranks", "1", "--format", name)
        done = command(server, *asked, "--out", str(other))
        assert done.returncode == 0, done.stderr
        rows = read(other / f"steps.{name}")
        assert [(int(row["rank"]), int(row["step"])) for row in rows] == [(1, 5), (1, 6)]
    again = command(server, "export", "--out", str(folder))
    assert (again.returncode, "is there already" in again.stderr) == (64, True)
    assert command(server, "export", "--out", str(folder), "--overwrite").returncode == 0


def csv_rows(path: Path) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "csv": csv_rows,
    "jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
    "arrow": lambda path: ipc.open_file(str(path)).read_all().to_pylist(),
}


def test_without_the_engines_it_says_what_to_install(server: ServerProcess) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import rankscope\n"
        "assert 'open' not in rankscope.__all__\n"
        "try: rankscope.open\n"
        "except ImportError as error: print(error)\n"
        "from rankscope.cli import main\n"
        "print(main(['sql', 'x', 'select 1']), main(['export', 'x', '--out', 'y']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rankscope.open needs pyarrow: pip install 'rankscope[data]'", "64 64",
    ]  # fmt: skip
    assert done.stderr.count("pip install 'rankscope[data]'") == 2


def test_a_chunk_of_an_older_agent_lacks_columns() -> None:
    """A column that a sender did not know is null, not zero."""
    columns = {"step": np.array([1, 2]), "duration_ns": np.array([5_000, -1])}
    (batch,) = batches_of(
        "steps", [StoredChunk(0, 3, "node-a", 2, encode_chunk(columns))], None, ()
    )
    assert batch["duration_ns"].to_pylist() == [5_000, None]
    assert batch["forward_ns"].to_pylist() == [None, None]
    assert batch["rank"].to_pylist() == [3, 3]
