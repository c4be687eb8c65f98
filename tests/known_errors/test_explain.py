"""`rankscope explain` as people call it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rankscope.cli import main
from rankscope.wire import zstd
from tests.agent.dumps import dump, entry
from tests.shared_data import SHARED_DATA, named

ECHO = "RuntimeError: Connection closed by peer [10.0.0.{0}]:{0}\n"
CAUSE = "OSError: [Errno 28] No space left on device: '/scratch/x'\n"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def explain(*arguments: str, text: str = "") -> Done:
    """Run the command in this process, with 80 columns and no terminal."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(["explain", *arguments])
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def answer(*arguments: str, text: str = "") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(explain("--json", *arguments, text=text).stdout)
    return document


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_as_a_program_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "explain", "-"],
        input=CAUSE, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "disk_full" in done.stdout


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in range(4):
        (folder / f"rank_{rank}.log").write_text(
            "start\n" + (CAUSE if rank == 2 else ECHO.format(rank))
        )
    return folder


def test_the_contract_of_json(logs: Path) -> None:
    document = answer(str(logs))
    root = document["root"]
    assert {"family", "ranks", "signal", "cause", "remedy", "confidence"} <= set(root)
    assert (root["family"], root["ranks"], root["signal"]) == ("disk_full", [2], CAUSE.strip())
    assert 0 < root["confidence"] <= 1
    for finding in document["findings"]:
        assert {"family", "role", "ranks", "signal", "count"} <= set(finding)
    assert [(f["role"], f["ranks"], f["count"]) for f in document["findings"]] == [
        ("initiating", [2], 1), ("cascade", [0, 1, 3], 3),
    ]  # fmt: skip


def test_compressed_logs_are_read_as_they_are(logs: Path) -> None:
    for path in list(logs.iterdir()):
        data = path.read_bytes()
        path.unlink()
        if path.name == "rank_2.log":
            (logs / "rank_2.log.zst").write_bytes(zstd.pack(data))
        else:
            (logs / f"{path.name}.gz").write_bytes(gzip.compress(data))
    root = answer(str(logs))["root"]
    assert (root["family"], root["ranks"]) == ("disk_full", [2])


def test_a_compressed_log_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log.gz"
    path.write_bytes(gzip.compress((CAUSE + "step\n" * 50_000).encode())[:-40])
    assert answer(str(path))["root"]["family"] == "disk_full"


def test_standard_input() -> None:
    root = answer("-", text=f"[rank1]: {ECHO.format(1)}[rank0]: {CAUSE}")["root"]
    assert (root["family"], root["ranks"]) == ("disk_full", [0])


def test_a_healthy_log_has_no_root(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1 loss 2.0\nnode:1:2 [0] NCCL INFO NET/Plugin: No plugin found\ndone\n")
    done = explain("--json", str(path))
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["root"] is None
    assert [finding["role"] for finding in document["findings"]] == ["benign"]
    assert "No fault found" in explain(str(path)).stdout


def test_everything_is_on_one_screen(logs: Path) -> None:
    for number in range(30):
        with (logs / "rank_0.log").open("a") as file:
            file.write(f"ERROR {chr(97 + number % 26) * (number + 3)} went wrong\n")
    done = explain(str(logs))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    for word in (
        "What",
        "Why",
        "Next",
        "Cost",
        "Sure",
        "disproved if",
        "rank 2",
        "--all shows them",
    ):
        assert word in done.stdout, word
    assert lines[0].startswith("╭─ The first cause")
    assert len(explain("--all", str(logs)).stdout.splitlines()) > 30


def test_an_entry_of_ones_own(logs: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    ours.write_text(
        '[[entry]]\nid = "ours"\nfamily = "other"\nstrength = 3\npatterns = ["quorum lost"]\n'
        'cause = "The store lost its quorum"\nremedy = "Restart the store"\n'
    )
    (logs / "rank_2.log").write_text("ERROR quorum lost\n")
    assert answer(str(logs), "--book", str(ours))["root"]["remedy"] == "Restart the store"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file; give log files"),
        (b"\x7fELF\0\0", "is no text but binary data; give the text that the ranks wrote"),
        (b"\x80\x04\x95\0\0", "its name does not end with a rank; call it dump_3 for rank 3"),
        (b'{"schemaVersion": 1, "traceEvents": []}', "does not say its rank"),
    ],
)
def test_what_is_no_log_is_refused_with_a_way_out(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "thing"
    if content is not None:
        path.write_bytes(content)
    done = explain(str(path))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not done.stdout


def test_an_empty_folder_and_a_wrong_book(tmp_path: Path, logs: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no files" in explain(str(empty)).stderr
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[entry]]\nid = "x"\nfamily = "nonsense"\n')
    done = explain(str(logs), "--book", str(wrong))
    assert done.returncode == 2
    assert "field 'family' is 'nonsense'" in done.stderr


def test_what_is_no_log_in_a_folder_is_left_out_and_named(logs: Path) -> None:
    (logs / "model.pt").write_bytes(b"PK\x03\x04\0\0\0")
    document = answer(str(logs))
    assert document["skipped"] == [
        {"name": str(logs / "model.pt"), "reason": "is no text but binary data"}
    ]
    assert document["root"]["family"] == "disk_full"


def test_usage() -> None:
    assert explain().returncode == 64
    done = explain("--help")
    assert "Exit codes" in done.stdout
    assert "kubectl logs" in done.stdout


DUMPS = SHARED_DATA / "flight_recorder"


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
@pytest.mark.parametrize(
    ("case", "ranks"), [("gpu_error_1st", [12, 14]), ("gpu_error_2nd", [9, 14])]
)
def test_a_folder_of_dumps_names_exactly_the_broken_ranks(case: str, ranks: list[int]) -> None:
    found = answer(str(DUMPS / case))
    root = found["root"]
    assert root["ranks"] == ranks
    assert (root["family"], root["signal"]) == ("collective_timeout_hang", None)
    assert {"cause", "remedy", "confidence"} <= set(root)
    assert [one["ranks"] for one in found["findings"]] == [ranks]
    assert {"family", "role", "ranks", "signal", "count"} <= set(found["findings"][0])
    shown = explain(str(DUMPS / case)).stdout
    assert "collective_timeout_hang on ranks" in shown
    assert "in 16 dumps or traces and" in shown.splitlines()[0]


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
def test_dumps_of_two_jobs_in_one_folder_are_explained_apart() -> None:
    found = answer(str(DUMPS))
    (other,) = found["other_jobs"]
    assert sorted([found["root"]["ranks"], other["root"]["ranks"]]) == [[9, 14], [12, 14]]
    shown = explain(str(DUMPS)).stdout
    assert "on ranks 12 and 14" in shown
    assert "on ranks 9 and 14" in shown


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
def test_what_is_missing_or_torn_is_said_beside_the_verdict(tmp_path: Path) -> None:
    for path in (DUMPS / "gpu_error_2nd").glob("_dump_*"):
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            data[: len(data) // 2] if path.name == "_dump_3" else data
        )
    done = explain(str(tmp_path))
    assert "ranks 9 and 14 hang" in " ".join(done.stdout.replace("│", " ").split()).lower()
    assert "15 of 16 ranks recorded; rank 3 not among them" in done.stdout
    assert "_dump_3: the pickle was refused: pickle data was truncated" in done.stderr


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
def test_no_verdict_is_not_called_no_fault() -> None:
    path = DUMPS / "gpu_error_1st" / "_dump_14"
    done = explain(str(path))
    assert done.returncode == 0
    assert "No fault found" not in done.stdout
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "No verdict in" in text
    assert "1 of 16 ranks recorded" in text
    assert "the files of the other ranks: import them together with these" in text
    found = answer(str(path))
    assert (found["root"], found["recorded"]["state"]) == (None, "unknown")


@pytest.mark.skipif(not DUMPS.is_dir(), reason="recorded dumps are not on this machine")
def test_a_log_that_names_the_cause_comes_before_what_dumps_show(tmp_path: Path) -> None:
    for path in (DUMPS / "gpu_error_2nd").glob("_dump_*"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "rank_9.log").write_text("[rank9]: " + CAUSE)
    root = answer(str(tmp_path))["root"]
    assert (root["family"], root["ranks"]) == ("disk_full", [9])
    assert root["rivals"][-1]["ranks"] == [9, 14]
    (tmp_path / "rank_9.log").write_text("[rank0]: " + ECHO.format(1))
    root = answer(str(tmp_path))["root"]
    assert (root["family"], root["ranks"]) == ("collective_timeout_hang", [9, 14])


def test_the_open_trace_names_its_straggler() -> None:
    pytest.importorskip("pyarrow", reason="reading Parquet needs the extra `traces`")
    trace = SHARED_DATA / "traces" / "trace-AR.parquet"
    if not trace.exists():
        pytest.skip(f"the open trace is not there: {named(trace)}")
    found = answer(str(trace))
    assert found["root"]["ranks"] == [0]
    assert (found["root"]["family"], found["root"]["kind"]) == ("other", "slow_compute")
    assert all(one["ranks"] == [0] for one in found["findings"])
    assert any(note.startswith("S = 1.975") for note in found["recorded"]["notes"])


def test_json_dumps_of_gloo_name_the_rank_that_did_not_come(tmp_path: Path) -> None:
    """As gloo's recorder writes them: no members of groups, no starts, entries before the rest."""
    for rank in range(4):
        calls = 41 if rank == 2 else 42
        entries = [
            entry(n, collective_seq_id=n + 1, profiling_name="gloo:all_reduce", retired=n < 41,
                  state="scheduled", time_created_ns=10**18 + n * 10**6)
            for n in range(calls)
        ]  # fmt: skip
        whole = dump(entries) | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}}
        whole = {"entries": whole.pop("entries"), **whole}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(whole, indent=1))
    found = answer(str(tmp_path))
    assert found["skipped"] == []
    assert (found["root"]["ranks"], found["root"]["kind"]) == ([2], "hang")


def test_a_dump_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "dump_3").write_bytes(b"\x80\x04torn\0")
    done = explain(str(tmp_path))
    assert done.returncode == 2
    assert "dump_3" in done.stderr
    assert "pickle" in done.stderr
