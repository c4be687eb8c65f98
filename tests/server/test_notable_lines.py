"""Stored lines tell what an end meant, also after a restart; what earlier runs said is usual."""

from __future__ import annotations

from pathlib import Path

from rankscope.wire import schema
from rankscope_server.analysis.baselines import earlier_runs
from rankscope_server.analysis.notable_lines import notable_lines, usual_lines
from rankscope_server.api.app import create_app
from rankscope_server.observe.line_table import key_of
from rankscope_server.settings import Settings
from tests.server.conftest import Sender, TestClient, log_line
from tests.server.runs_sent import NOW, send_run

FAULT = "node-a:41 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x, " \
    "error: No space left on device (28)"  # fmt: skip


def end(sender: Sender, number: int, rank: int, code: int) -> None:
    time_ns = NOW + number * 10**12 + 40 * 10**9
    if code:
        sender.send(log_line(FAULT, rank=rank, level=30, time_ns=time_ns - 10**9))
    reason = "exit_code" if code else "clean"
    sender.send(schema.RankEnded(
        attempt=0, rank=rank, time_ns=time_ns, reason=reason, exit_code=code, last_step=300,
    ))  # fmt: skip


def test_a_restarted_server_still_knows_what_a_rank_said(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), look_seconds=3600.0)
    told = []
    for starts in range(2):
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
            if not starts:
                sender = send_run(client, "run", 1, 100.0, "train.py", "2.27.3")
                end(sender, 1, rank=1, code=1)
                sender.send(*(log_line(f"step {n}", time_ns=NOW) for n in range(600)))
            sender = Sender(client, run_id="run", producer="late")
            sender.send(log_line("loss 0.1"))
            client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
            told.append(sender.get("")["verdict"])
    assert told[0]["ranks"] == [1]
    assert "/dev/shm" in told[0]["what"]
    assert (told[1]["what"], told[1]["next"]) == (told[0]["what"], told[0]["next"])


def test_the_plain_line_by_which_a_command_failed_is_known_from_the_first_look_on(
    client: TestClient,
) -> None:
    sender = Sender(client, run_id="refused", producer="node")
    who = {"attempt": 0, "rank": schema.NODE_RANK, "time_ns": NOW}
    sender.send(
        schema.RunStarted(**who, name="x", command=["x"], launcher="python"),
        log_line("sh: 1: nosuch: not found", rank=schema.NODE_RANK, level=20, time_ns=NOW),
        schema.Event(**who, name=schema.COMMAND_ENDED, fields={"exit_code": "127"}),
        schema.Event(**who, name="failed to unpack"),  # stored as a line, but no output
    )
    client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    answer = sender.get("")
    assert answer["answer"]["text"].endswith("before any rank began: sh: 1: nosuch: not found")
    assert answer["run"]["status"] == "failed"


def test_what_runs_that_ended_well_said_is_usual(client: TestClient) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    for number, code in ((0, 0), (1, 1)):
        sender = send_run(client, f"old-{number}", number, 100.0, "train.py", "2.27.3")
        word = FAULT if code == 0 else "RuntimeError: CUDA error: uncorrectable ECC error"
        sender.send(log_line(word, level=40, time_ns=NOW + number * 10**12))
        for rank in range(2):
            end(sender, number, rank, code)
        service.analysis.look_now()
    send_run(client, "new", 7, 100.0, "train.py", "2.27.3")
    with service.reader.connect() as connection:
        earlier = earlier_runs(connection, "new")
        assert [one.run_id for one in earlier] == ["old-0", "old-1"]
        assert usual_lines(connection, earlier) == {key_of(30, FAULT)}
        assert usual_lines(connection, ()) == frozenset()
        (line,) = notable_lines(connection, "old-0")
        assert (line.rank, line.level, line.message) == (0, 40, FAULT)
