"""What-if answers of the API and of the command: of a stored run, combined, refused, unknown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from rankscope.wire import schema
from tests.api import get
from tests.command_server import run
from tests.ports import free_port
from tests.server.conftest import Sender, ServerProcess
from tests.server.seed import seed_run, wait_until_judged

SLOW = 2


@pytest.fixture
def looked(seeded: Sender) -> Sender:
    seeded.client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    return seeded


def refused(sender: Sender, **asked: object) -> tuple[int, str, str]:
    reply = sender.client.get(f"/api/v1/runs/{sender.run_id}/what-if", params=asked)  # type: ignore[arg-type]
    error = reply.json()["error"]
    return reply.status_code, error["field"], error["remedy"]


def test_without_a_question_all_that_makes_sense_is_answered_best_first(looked: Sender) -> None:
    shown = looked.get("/what-if")
    assert shown["now"]["text"] == "4 ranks on 2 nodes, DDP, 1 microbatch"
    assert sum(shown["now"]["parts"].values()) == pytest.approx(shown["now"]["step_ms"], rel=1e-3)
    known = [one for one in shown["answers"] if one["step_ms"] is not None]
    worth = [one["throughput_ratio"] * 4 / one["ranks"] for one in known]
    assert worth == sorted(worth, reverse=True)
    assert known[0]["key"] == f"without={SLOW}"
    assert known[0]["by"] == "replay"
    assert shown["text"].startswith(f"Of {len(known)} changes one gives most: Rank {SLOW} as fast")
    assert known[0]["throughput_ratio"] > 1.2, "rank 2 is slow from step 40 on"
    for one in known:
        assert one["step_low_ms"] <= one["step_ms"] <= one["step_high_ms"], one["label"]
        assert one["throughput_low"] <= one["throughput_ratio"] <= one["throughput_high"]
        assert one["assumptions"]
        assert one["band"]
        again = looked.get("/what-if", **dict(parse_qsl(one["key"])))["answers"]
        assert again == [one], "its key asks for it alone"
    (unknown,) = (one for one in shown["answers"] if one["key"] == "strategy=fsdp")
    assert (unknown["step_ms"], unknown["memory_bytes"], unknown["by"]) == (None, None, "")
    assert unknown["why_not"] == "how many weights the model has is not recorded"
    sources = {row["name"]: (row["value"], row["source"]) for row in shown["inputs"]}
    assert sources["parameters"] == (None, "no optimizer reported them")
    assert sources["memory_bytes"][0] is None
    assert sources["gradient_bytes"][0] == pytest.approx(61_865_984)
    assert [one["name"] for one in shown["factors"]] == ["overlap", "shown", "kept_ms"]
    table = looked.client.get(f"/api/v1/runs/{looked.run_id}/what-if?format=csv").text
    assert len(table.splitlines()) == 1 + len(shown["answers"])


def test_changes_are_made_together(looked: Sender) -> None:
    (faster,) = looked.get("/what-if", link_times=4)["answers"]
    (alone,) = looked.get("/what-if", without=SLOW)["answers"]
    shown = looked.get("/what-if", link_times=4, without=SLOW)
    (both,) = shown["answers"]
    assert both["by"] == "both"
    assert both["step_ms"] <= min(faster["step_ms"], alone["step_ms"]) + 1e-6
    assert both["throughput_ratio"] == pytest.approx(
        faster["throughput_ratio"] * alone["throughput_ratio"]
    )
    (more,) = looked.get("/what-if", add_nodes=2)["answers"]
    assert more["ranks"] == 8
    now = shown["now"]["step_ms"]
    assert more["throughput_ratio"] == pytest.approx(2 * now / more["step_ms"])
    (bucket,) = looked.get("/what-if", bucket_mib=25)["answers"]
    assert bucket["by"] == "replay"
    (other,) = looked.get("/what-if", bucket_mib=17)["answers"]
    assert other["by"] == "planner"


def test_what_is_so_already_changes_nothing(looked: Sender) -> None:
    (same,) = looked.get("/what-if", strategy="ddp", microbatches=1, ranks_per_node=2)["answers"]
    assert (same["label"], same["by"]) == ("As it is", "planner")
    assert same["throughput_ratio"] == pytest.approx(1.0)


def test_a_replay_knows_some_ranks_and_says_which(looked: Sender) -> None:
    shown = looked.get("/what-if", without="1,3")
    assert shown["text"].startswith("Not known: a replay is made without")
    assert shown["answers"][0]["step_ms"] is None


def test_what_cannot_be_is_refused_with_its_field(looked: Sender) -> None:
    assert refused(looked, strategy="zorro")[:2] == (422, "strategy")
    assert refused(looked, add_nodes=-2) == (422, "add_nodes", "Take at most 1 away")
    assert refused(looked, without="4") == (422, "without", "ranks are 0 to 3")
    assert refused(looked, without="x")[:2] == (422, "without")
    assert refused(looked, link_times=0)[:2] == (422, "link_times")
    assert refused(looked, bucket_mib=-1)[:2] == (422, "bucket_mib")
    assert refused(looked, between="fast")[:2] == (422, "between")
    assert refused(looked, strategy="fsdp", bucket_mib=25)[:2] == (422, "bucket_mib")
    assert looked.client.get("/api/v1/runs/nothing/what-if").status_code == 404


def test_of_a_run_without_steps_nothing_is_known(sender: Sender) -> None:
    sender.send(
        schema.RunStarted(
            attempt=0, rank=-1, time_ns=time.time_ns(), name="x", world_size=2, command=["x"]
        )
    )
    shown = sender.get("/what-if")
    assert shown["text"] == (
        "Not known: of no step is known how long ranks worked and how long they waited"
    )
    assert shown["now"]["step_ms"] is None
    assert not any(one["step_ms"] for one in shown["answers"])


# --- the command -----------------------------------------------------------------------------


def what_if(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    return run([sys.executable, "-m", "rankscope", "what-if", *arguments],
               env=environ | {"COLUMNS": "160"})  # fmt: skip


def test_the_command_says_what_the_server_answers(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server()
    seed_run(server.url, run_id="slow", ranks=2, steps=60, fault="none")
    wait_until_judged(server.url)
    at = ("--server", server.url)
    done = what_if("slow", *at)
    assert done.returncode == 0, done.stderr
    answer = get(f"{server.url}/api/v1/runs/slow/what-if")
    assert done.stdout.splitlines()[0] == answer["text"]
    assert "FSDP in place of DDP: how many weights the model has is not recorded" in done.stdout
    one = what_if("slow", "--link-times", "2", "--microbatches", "4", *at)
    assert one.returncode == 0, one.stderr
    assert "assumed: the latency of a message stays as it is" in one.stdout
    assert "calibrated: share of a backward that hides messages" in one.stdout
    printed = what_if("slow", "--link-times", "2", "--json", *at)
    assert json.loads(printed.stdout) == get(
        f"{server.url}/api/v1/runs/slow/what-if?link_times=2.0"
    )
    unknown = what_if("slow", "--strategy", "fsdp", *at)
    assert unknown.returncode == 1
    assert "how many weights" in unknown.stdout
    wrong = what_if("slow", "--strategy", "zorro", *at)
    assert (wrong.returncode, "give one of ddp" in wrong.stderr) == (64, True)
    lost = what_if("no-such", *at)
    assert (lost.returncode, "no run 'no-such'" in lost.stderr) == (2, True)
    away = what_if("slow", "--server", f"127.0.0.1:{free_port()}")
    assert (away.returncode, "does not answer" in away.stderr) == (2, True)
    stored = what_if(str(server.folder), "--link-times", "2", "--json")
    assert json.loads(stored.stdout) == json.loads(printed.stdout), "and without the server"
    empty = what_if(str(tmp_path / "ready.json"))
    assert (empty.returncode, "holds no run" in empty.stderr) == (2, True)
