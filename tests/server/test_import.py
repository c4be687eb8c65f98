"""`rankscope import` against a server: dumps become a run with a verdict."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import cli
from rankscope.importers.flight_dumps import read_dumps
from tests.agent.dumps import dump, entry
from tests.analysis.horovod_files import TimelineFile
from tests.server.conftest import ServerProcess
from tests.server.seed import wait_until_judged
from tests.shared_data import SHARED_DATA, named

DATA = SHARED_DATA / "flight_recorder" / "gpu_error_2nd"
TRACE = SHARED_DATA / "traces" / "trace-AR.parquet"


@pytest.mark.core
@pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")
def test_imported_dumps_get_a_verdict_and_pages(
    start_server: Callable[..., ServerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--look-seconds", "0.2")
    code = cli.main(["import", str(DATA), "--run", "second", "--server", server.url, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 0, said
    assert (said["ranks"], said["world_size"]) == (16, 16)
    deadline = time.monotonic() + 20
    while True:
        address = f"{server.url}/api/v1/runs/second/findings"
        with urllib.request.urlopen(address, timeout=10) as reply:
            found = json.load(reply)["open"]
        if found:
            break
        assert time.monotonic() < deadline, "no finding"
        time.sleep(0.2)
    assert [finding["ranks"] for finding in found] == [[9, 14]]
    with urllib.request.urlopen(f"{server.url}/api/v1/runs/second/ranks", timeout=10) as reply:
        assert reply.status == 200


@pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")
def test_dumps_of_two_jobs_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", str(DATA.parent)]) == 1
    said = capsys.readouterr().err
    assert "several jobs; name one folder at a time" in said
    assert "gpu_error_1st" in said
    assert "gpu_error_2nd" in said


def test_what_cannot_be_imported_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump_0").write_bytes(b"torn")
    assert cli.main(["import", str(tmp_path)]) == 1
    assert "dump_0" in capsys.readouterr().err
    (tmp_path / "dump_1.json").write_text(json.dumps(dump([entry(0)])))
    assert sorted(read_dumps([tmp_path])[0]) == [1]
    nobody = "http://127.0.0.1:9"
    assert cli.main(["import", str(tmp_path), "--server", nobody]) == 2
    assert cli.main(["import", str(tmp_path), "--server", "ftp://x"]) == 64


BENCHMARK = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5
# Using devices
#  Rank  0 Group  0 Pid  41 on     node-a device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  41 on     node-a device  1 [0x08] NVIDIA H100 80GB HBM3
# all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    27.76   37.78   37.78      0
     4194304       1048576     float     sum      -1    60.00   69.91   69.91      0
"""


def fetch(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/api/v1/runs/{path}", timeout=10) as reply:
        return json.load(reply)


def test_a_benchmark_becomes_a_run(
    start_server: Callable[..., ServerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--look-seconds", "0.2")
    (tmp_path / "bench.txt").write_text(BENCHMARK)
    code = cli.main(["import", str(tmp_path), "--run", "b", "--server", server.url, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code, said["formats"], said["world_size"]) == (0, {"nccl-tests": 1}, 2)
    rows = fetch(server, "b/collectives")["rows"]
    assert {row["size_bytes"]: row["p50_ms"] for row in rows} == pytest.approx(
        {1048576: 0.02776, 4194304: 0.06}, rel=0.1
    )
    lines = [line["message"] for line in fetch(server, "b/logs")["lines"]]
    assert any("bus bandwidth 69.91 GB/s" in line for line in lines)
    wait_until_judged(server.url)
    assert fetch(server, "b/findings")["open"] == []  # nobody is accused by a benchmark
    (tmp_path / "torn.txt").write_text(BENCHMARK[:400])
    assert cli.main(["import", str(tmp_path / "torn.txt"), "--server", server.url]) == 1
    assert "torn.txt: no row of results" in capsys.readouterr().err
    forced = ["import", str(tmp_path / "bench.txt"), "--server", server.url]
    assert cli.main([*forced, "--format", "flight-recorder"]) == 1
    assert cli.main([*forced, "--format", "odd"]) == 64


def test_a_timeline_of_horovod_becomes_a_run_with_its_slow_rank(
    start_server: Callable[..., ServerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--look-seconds", "0.2")
    file, began = TimelineFile(), 0
    for step in range(80):
        ready = {rank: began + 40_000 + 20_000 * (rank == 2 and step > 30) for rank in range(4)}
        began = file.reduce("gradients", ready, 2_000)
    path = tmp_path / "timeline.json"
    path.write_text(file.text())
    code = cli.main(["import", str(path), "--run", "h", "--server", server.url, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code, said["formats"], said["world_size"]) == (0, {"horovod": 1}, 4)
    wait_until_judged(server.url)
    assert [one["ranks"] for one in fetch(server, "h/findings")["open"]] == [[2]]
    (row,) = fetch(server, "h/collectives")["rows"]
    assert (row["operation"], row["size_bytes"], row["count"]) == ("all_reduce", 1024, 320)


def test_the_open_trace_becomes_a_run(
    start_server: Callable[..., ServerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="reading Parquet needs the extra `traces`")
    if not TRACE.exists():
        pytest.skip(f"the open trace is not there: {named(TRACE)}")
    server = start_server("--look-seconds", "0.5")
    code = cli.main(["import", str(TRACE), "--run", "ar", "--server", server.url, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code, said["ranks"]) == (0, 16)
    deadline = time.monotonic() + 120
    while not (found := fetch(server, "ar")["verdict"]):
        assert time.monotonic() < deadline, "no verdict"
        time.sleep(0.5)
    assert found["ranks"] == [0]
    assert "S = 1.975" in found["why"]
    assert fetch(server, "ar")["run"]["status"] == "ended"
    report = fetch(server, "ar/report")
    assert "is waiting for others" in report["budget"]["text"]
    assert "is communication" not in report["budget"]["text"]
    told = [*report["not_measured"], *found["ruled_out"], *report["notes"]]
    for words in ("no messages of", "no rank failed", "worker-", " yet"):
        assert [text for text in told if words in text] == [], words
    assert any(note.startswith("S = 1.975") for note in report["notes"])
    assert report["coverage"]["text"] == "16 of 16 ranks recorded"
