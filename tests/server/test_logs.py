"""Log search against a plain scan of the same lines; paging, tail, histogram, facets, folding."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from rankscope.wire import schema
from rankscope_server.store import search
from rankscope_server.store.lines import LINES_PER_BLOCK
from tests.server.conftest import Sender, TestClient, log_line

START_NS = 1_700_000_000 * 10**9
WORDS = (
    "step", "loss", "ncclRemoteError", "grad.norm=12.7", "CUDA", "out", "of", "memory",
    "h\u00e9llo", "checkpoint", "epoch", "42", "/data/shard-0042.tar", "Traceback",
    "rank_3", "'quoted'", '"q"',
)  # fmt: skip
LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}


def make_lines(count: int, seed: int = 3) -> list[schema.LogLine]:
    draw = random.Random(seed)
    return [
        log_line(
            f"{' '.join(draw.choices(WORDS, k=draw.randint(1, 9)))} #{number}",
            rank=draw.randrange(8),
            level=draw.choice(list(LEVELS)),
            time_ns=START_NS + number * 50_000_000 + draw.randrange(10**9),
            logger=draw.choice(["train", "train.data", "torch"]),
            stream=draw.choice(["logging", "stdout", "stderr"]),
            step=number,
            fields={"shard": f"s{number % 7}"} if number % 3 else {},
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def lines() -> list[schema.LogLine]:
    return make_lines(3 * LINES_PER_BLOCK + 100)


@pytest.fixture
def filled(sender: Sender, lines: list[schema.LogLine]) -> Sender:
    draw = random.Random(1)
    at = 0
    while at < len(lines):
        size = draw.randint(1, 400)
        sender.send(*lines[at : at + size])
        at += size
    return sender


def holds(line: schema.LogLine, text: str) -> bool:
    fields = "\n".join(f"{key}={value}" for key, value in line.fields.items())
    return text in f"{line.message}\n{fields}".lower()


def test_search_agrees_with_a_plain_scan(filled: Sender, lines: list[schema.LogLine]) -> None:
    for text in (
        "nccl", "moteerr", "ncclremoteerror", "12.7", "shard-0042", "h\u00e9llo", "#17", "of", "x",
        "out of", "s3", "shard=s3", "nothing-like", "'quoted'", "%", "1", "/data/",
    ):  # fmt: skip
        wanted = sum(holds(line, text) for line in lines)
        answer = filled.get("/logs", q=f'*"{text}"*')
        assert (answer["total"], answer["is_at_least"]) == (wanted, False), text


@pytest.mark.parametrize(
    ("params", "keep"),
    [
        ({"rank": "3"}, lambda line: line.rank == 3),
        ({"rank": "0,5-6"}, lambda line: line.rank in {0, 5, 6}),
        ({"level": "ERROR,INFO"}, lambda line: line.level in {40, 20}),
        ({"min_level": "warning"}, lambda line: line.level >= 30),
        ({"stream": "stdout"}, lambda line: line.stream == "stdout"),
        ({"logger": "torch"}, lambda line: line.logger == "torch"),
        ({"host": "elsewhere"}, lambda line: False),
        ({"from_ms": START_NS / 1e6 + 9e3, "to_ms": START_NS / 1e6 + 2e4},
         lambda line: START_NS + 9 * 10**9 <= line.time_ns <= START_NS + 20 * 10**9),
        ({"rank": "1", "level": "DEBUG", "q": "cuda"},
         lambda line: line.rank == 1 and line.level == 10 and "cuda" in line.message.lower()),
    ],
)  # fmt: skip
def test_filters_agree_with_a_plain_scan(
    filled: Sender, lines: list[schema.LogLine], params: dict[str, Any], keep: Any
) -> None:
    answer = filled.get("/logs", **params, fold=False, limit=5000)
    wanted = {line.step for line in lines if keep(line)}
    assert {line["step"] for line in answer["lines"]} == wanted
    assert answer["total"] == len(wanted)


def test_pages_hold_every_line_once_newest_first(
    filled: Sender, lines: list[schema.LogLine]
) -> None:
    steps, times, cursor = [], [], None
    while True:
        page = filled.get("/logs", limit=333, fold=False, **({"cursor": cursor} if cursor else {}))
        steps += [line["step"] for line in page["lines"]]
        times += [line["time_ms"] for line in page["lines"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(steps) == [line.step for line in lines]
    assert times == sorted(times, reverse=True)


@pytest.mark.core
def test_histogram_and_facets_count_everything(filled: Sender, lines: list[schema.LogLine]) -> None:
    answer = filled.get("/logs", limit=1)
    histogram = answer["histogram"]
    by_level = Counter(LEVELS[line.level] for line in lines)
    assert {name: sum(counts) for name, counts in histogram["levels"].items()} == by_level
    lengths = {len(counts) for counts in histogram["levels"].values()}
    assert lengths == {round((histogram["to_ms"] - histogram["from_ms"]) / histogram["bucket_ms"])}
    facets = {name: dict(map(tuple, values)) for name, values in answer["facets"].items()}
    assert facets["rank"] == Counter(line.rank for line in lines)
    assert facets["level"] == by_level
    assert facets["logger"] == Counter(line.logger for line in lines)
    # A facet leaves its own filter out, so that a person can choose another value.
    chosen = filled.get("/logs", rank="3", stream="stdout", limit=1)["facets"]
    by_rank = Counter(line.rank for line in lines if line.stream == "stdout")
    assert dict(map(tuple, chosen["rank"])) == by_rank
    by_stream = Counter(line.stream for line in lines if line.rank == 3)
    assert dict(map(tuple, chosen["stream"])) == by_stream


@pytest.mark.core
def test_tail_gives_each_new_line_once_in_order(sender: Sender) -> None:
    sender.send(log_line("old", time_ns=START_NS))
    last = sender.get("/logs")["last_id"]
    assert sender.get("/logs", after=last)["lines"] == []
    fresh = make_lines(LINES_PER_BLOCK + 10)
    for at in range(0, len(fresh), 100):
        sender.send(*fresh[at : at + 100])
    seen: list[int] = []
    while True:
        page = sender.get("/logs", after=last, limit=77)
        if not page["lines"]:
            break
        seen += [line["step"] for line in page["lines"]]
        last = page["last_id"]
    assert seen == [line.step for line in fresh]


def test_tail_with_a_filter_moves_on(sender: Sender) -> None:
    sender.send(log_line("one"), log_line("two"))
    page = sender.get("/logs", after=0, q="one", limit=10)
    assert [line["message"] for line in page["lines"]] == ["one"]
    assert page["last_id"] == sender.get("/logs")["last_id"]


def test_lines_that_ranks_write_alike_fold_into_one(sender: Sender) -> None:
    for rank in range(4):
        sender.send(log_line("same text", rank=rank, time_ns=START_NS + rank * 10**8))
    sender.send(log_line("same text", rank=1, time_ns=START_NS + 60 * 10**9))
    answer = sender.get("/logs")
    assert answer["total"] == 5
    assert [(line["count"], line["ranks"]) for line in answer["lines"]] == [
        (1, [1]),
        (4, [0, 1, 2, 3]),
    ]


@pytest.mark.parametrize("is_all_runs", [False, True])
def test_events_errors_and_findings_are_searchable(sender: Sender, is_all_runs: bool) -> None:
    path = "/api/v1/search" if is_all_runs else f"/api/v1/runs/{sender.run_id}/logs"

    def found(**asked: Any) -> Any:
        return sender.client.get(path, params=asked).json()

    base = {"attempt": 0, "rank": 0, "time_ns": START_NS}
    sender.send(
        schema.Event(name="checkpoint", step=7, fields={"path": "a/7.pt"}, **base),
        schema.ErrorRaised(type="OSError", message="disk quota", traceback="Traceback ...", **base),
        schema.RankEnded(reason="signal", signal=9, **base),
    )
    assert found(q="7.pt")["lines"][0]["stream"] == "event"
    (error,) = found(q="quota", stream="error")["lines"]
    assert error["level"] == "ERROR"
    assert found(q="ended signal")["total"] == 1
    app: Any = sender.client.app
    app.state.service.analysis.look_now()
    (finding,) = sender.get("/findings")["open"]
    (line,) = found(q="stream:finding")["lines"]
    assert finding["what"] in line["message"]
    assert found(q="stream:finding -quota")["total"] == ("quota" not in line["message"])
    streams = dict(found()["facets"]["stream"])
    assert (streams["error"], streams["finding"]) == (1, 1)
    assert streams["event"] >= 2


def test_one_search_over_all_runs(client: TestClient) -> None:
    for run in ("a", "b"):
        Sender(client, run).send(log_line(f"needle in {run}"), log_line("hay"))
    Sender(client, "b", "other").send(log_line("a second needle"))
    found = client.get("/api/v1/search", params={"q": "needle"}).json()
    assert {line["run_id"] for line in found["lines"]} == {"a", "b"}
    assert found["total"] == 3
    assert [(run["run_id"], run["name"], run["lines"]) for run in found["runs"]] == [
        ("b", "b", 2), ("a", "a", 1),
    ]  # fmt: skip
    everything = client.get("/api/v1/search").json()
    assert everything["total"] == 5
    facets = everything["facets"]
    assert facets["run"] == [["b", 3], ["a", 2]]
    assert facets["project"] == [["default", 5]]
    assert sum(everything["histogram"]["levels"]["INFO"]) == 5
    of_b = client.get("/api/v1/search", params={"run": "b"}).json()  # its own filter left out
    assert (of_b["total"], of_b["facets"]["run"]) == (3, [["b", 3], ["a", 2]])


def test_new_lines_of_all_runs_come_once_in_order(client: TestClient) -> None:
    senders = [Sender(client, run) for run in ("a", "b")]
    senders[0].send(log_line("old"))
    last = client.get("/api/v1/search").json()["last_id"]
    came = []
    for number in range(4):
        senders[number % 2].send(log_line(f"new {number}", time_ns=START_NS - number))
        page = client.get("/api/v1/search", params={"q": "new", "after": last}).json()
        last = page["last_id"]
        came += [(line["run_id"], line["message"]) for line in page["lines"]]
    assert came == [(("a", "b")[number % 2], f"new {number}") for number in range(4)]
    assert client.get("/api/v1/search", params={"after": last}).json()["lines"] == []


def test_lines_are_folded_or_not(client: TestClient) -> None:
    for run in ("a", "b"):
        sender = Sender(client, run)
        sender.send(*(log_line("same", rank=rank, time_ns=START_NS + rank) for rank in range(4)))
    folded = client.get("/api/v1/search", params={"q": "same"}).json()
    assert [(line["run_id"], line["count"]) for line in folded["lines"]] == [("b", 4), ("a", 4)]
    plain = client.get("/api/v1/search", params={"q": "same", "fold": "false"}).json()
    assert len(plain["lines"]) == 8


def test_an_answer_looks_at_a_number_of_blocks_and_goes_on_there(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(search, "_MOST_ROWS", 2)
    monkeypatch.setattr(search, "MAX_BLOCKS", 4)
    for number in range(12):
        line = log_line(f"line {number}", time_ns=START_NS + number * 10**9, rank=number % 3)
        Sender(client, f"run-{number}").send(line)
    asked: dict[str, Any] = {"rank": 1, "limit": 100}
    page = client.get("/api/v1/search", params=asked).json()
    assert (page["is_at_least"], page["searched_to_ms"]) == (True, START_NS / 1e6 + 7_000)
    found = [line["message"] for line in page["lines"]]
    pages = 1
    while page["next_cursor"] is not None:
        page = client.get("/api/v1/search", params={**asked, "cursor": page["next_cursor"]}).json()
        found += [line["message"] for line in page["lines"]]
        pages += 1
    assert found == [f"line {number}" for number in (10, 7, 4, 1)]
    assert pages == 3


def test_one_very_long_batch_is_cut_into_blocks(sender: Sender) -> None:
    sender.send(*(log_line("x" * 60_000 + str(number), step=number) for number in range(60)))
    answer = sender.get("/logs", limit=100, fold=False)
    assert sorted(line["step"] for line in answer["lines"]) == list(range(60))
    assert sender.get("/logs", q="*x59*")["total"] == 1


def test_a_mistake_in_the_search_points_at_its_character(sender: Sender) -> None:
    sender.send(log_line("x"))
    for path in (f"/api/v1/runs/{sender.run_id}/logs", "/api/v1/search"):
        reply = sender.client.get(path, params={"q": "loss levle:error"})
        error = reply.json()["error"]
        assert (reply.status_code, error["field"], error["at"]) == (422, "q", [5, 11])
        assert "level:" in error["remedy"]


def test_a_group_is_searched_by_its_name_and_must_be_there(sender: Sender) -> None:
    group = schema.GroupDefined(
        attempt=0, rank=0, time_ns=START_NS, group="tp_0", ranks=[1, 2], backend="nccl",
        description="tensor_parallel",
    )  # fmt: skip
    sender.send(group, *(log_line(f"hello {rank}", rank=rank) for rank in range(4)))
    for name in ("tp_0", "TENSOR_PARALLEL", "tp*"):
        found = sender.get("/logs", q=f"group:{name} hello")
        assert {line["rank"] for line in found["lines"]} == {1, 2}
    for path, what in (
        (f"/api/v1/runs/{sender.run_id}/logs", "the run has no group"),
        ("/api/v1/search", "no run has a group"),
    ):
        reply = sender.client.get(path, params={"q": "hello group:other"})
        error = reply.json()["error"]
        assert (reply.status_code, error["at"]) == (422, [6, 17])
        assert error["what"].startswith(what)


def test_a_time_ago_counts_from_now_and_of_an_ended_run_from_its_end(sender: Sender) -> None:
    now_ns = time.time_ns()
    sender.send(
        log_line("old", time_ns=now_ns - 3600 * 10**9), log_line("new", time_ns=now_ns - 10**9)
    )
    messages = [line["message"] for line in sender.get("/logs", q="since:-10m")["lines"]]
    assert messages == ["new"]
    ended = Sender(sender.client, "ended")
    ended.send(
        log_line("old", time_ns=START_NS),
        log_line("new", time_ns=START_NS + 3600 * 10**9),
        schema.RankEnded(
            attempt=0, rank=0, time_ns=START_NS + 3601 * 10**9, reason="clean", exit_code=0
        ),
    )
    app: Any = sender.client.app
    app.state.service.analysis.look_now()
    assert ended.get("")["run"]["status"] == "ended"
    messages = [line["message"] for line in ended.get("/logs", q="since:-10m old OR new")["lines"]]
    assert "new" in messages


def test_what_is_no_word_is_suggested_within_words(sender: Sender) -> None:
    sender.send(log_line("ncclRemoteError: peer 3 left"))
    assert sender.get("/logs", q="moteerr pee")["suggestion"] == "*moteerr* *pee*"
    assert sender.get("/logs", q='"peer 3 le"')["suggestion"] == '*"peer 3 le"*'
    assert sender.get("/logs", q="absent")["suggestion"] is None
    assert sender.get("/logs", q="remote")["suggestion"] is None


def test_lines_around_one_of_its_rank_and_of_all(sender: Sender) -> None:
    lines = [
        log_line(f"line {number}", rank=number % 4, time_ns=START_NS + number * 10**6, step=number)
        for number in range(400)
    ]
    for at in range(0, len(lines), 150):
        sender.send(*lines[at : at + 150])
    (line,) = sender.get("/logs", q='"line 202"')["lines"]
    own = sender.get(f"/logs/{line['id']}/context", lines=3)
    assert own["line"]["step"] == 202
    assert [row["step"] for row in own["lines"]] == [190, 194, 198, 202, 206, 210, 214]
    everyone = sender.get(f"/logs/{line['id']}/context", lines=3, everyone=True)
    assert [row["step"] for row in everyone["lines"]] == [199, 200, 201, 202, 203, 204, 205]
    alone = sender.get(f"/logs/{line['id']}/context", lines=0, everyone=True)
    assert [row["step"] for row in alone["lines"]] == [202]
    gone = sender.client.get(f"/api/v1/runs/{sender.run_id}/logs/{1 << 40}/context")
    assert (gone.status_code, gone.json()["error"]["field"]) == (404, "id")


def test_ids_stay_while_small_blocks_are_joined(sender: Sender) -> None:
    sender.send(log_line("the first"))
    (first,) = sender.get("/logs")["lines"]
    for number in range(LINES_PER_BLOCK // 50 + 2):
        sender.send(*(log_line(f"more {number}") for _ in range(50)))
    (again,) = sender.get("/logs", q='"the first"')["lines"]
    assert again["id"] == first["id"]
    assert sender.get(f"/logs/{first['id']}/context")["line"]["message"] == "the first"


def test_a_search_in_much_text_stops_and_goes_on_where_it_was(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(log_line("needle 1", time_ns=START_NS))
    for number in range(1, 9):
        at_ns = START_NS + number * 10**9
        sender.send(*(log_line(f"hay {n}", time_ns=at_ns + n) for n in range(LINES_PER_BLOCK)))
    monkeypatch.setattr(search, "MAX_READ_BYTES", 20_000)
    answer = sender.get("/logs", q="-hay")
    pages = 1
    assert answer["is_at_least"]
    while answer["next_cursor"] is not None:
        assert answer["searched_to_ms"] is not None
        assert answer["lines"] == []
        answer = sender.get("/logs", q="-hay", cursor=answer["next_cursor"])
        pages += 1
    assert [line["message"] for line in answer["lines"]] == ["needle 1"]
    assert 2 < pages < 9


def test_a_common_word_is_counted_for_a_while_only(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        at_ns = START_NS + number * 10**9
        sender.send(*(log_line(f"step {n}", time_ns=at_ns + n) for n in range(LINES_PER_BLOCK)))
    monkeypatch.setattr(search, "COUNT_LINES", LINES_PER_BLOCK)
    answer = sender.get("/logs", q="step", limit=10)
    assert answer["is_at_least"]
    assert LINES_PER_BLOCK <= answer["total"] < 6 * LINES_PER_BLOCK
    assert sum(answer["histogram"]["levels"]["INFO"]) == answer["total"]
    exact = sender.get("/logs", limit=10)
    assert (exact["total"], exact["is_at_least"]) == (6 * LINES_PER_BLOCK, False)


def test_a_tail_that_is_far_behind_begins_anew(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(log_line("old"))
    last = sender.get("/logs")["last_id"]
    for number in range(4):
        sender.send(*(log_line(f"{number} {n}") for n in range(LINES_PER_BLOCK)))
    monkeypatch.setattr(search, "MAX_TAIL_BLOCKS", 2)
    page = sender.get("/logs", after=last)
    assert (page["lines"], page["is_behind"]) == ([], True)
    assert page["last_id"] == sender.get("/logs")["last_id"]
    sender.send(log_line("new"))
    fresh = sender.get("/logs", after=page["last_id"])
    assert [line["message"] for line in fresh["lines"]] == ["new"]
