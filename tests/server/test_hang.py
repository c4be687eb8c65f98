"""Hangs: who waits for whom against what was sent, equal ranks folded, stacks merged."""

from __future__ import annotations

import csv
import io
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankscope.wire import schema
from rankscope_server.api.hang import icicle
from rankscope_server.api.hang.ranges import MAX_RANGES, ranges_text
from rankscope_server.api.hang.schema import Frame
from rankscope_server.diagnose.window import Window
from tests.server.conftest import DATABASES, Sender, TestClient, poster, serving, url_of
from tests.server.seed import seed_with

S = 10**9
RANKS, TENSOR = 1_024, 8
CULPRIT = 17


@pytest.fixture(scope="module", params=DATABASES)
def client(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("hang"), url_of(request)) as client:
        yield client


@pytest.fixture
def look(client: TestClient) -> Callable[[], None]:
    looking: Callable[[], None] = client.app.state.service.analysis.look_now  # type: ignore[attr-defined]
    return looking


def ask(client: TestClient, run: str, **asked: Any) -> dict[str, Any]:
    reply = client.get(f"/api/v1/runs/{run}/hang", params=asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def waits(answer: dict[str, Any]) -> list[tuple[int, str, str, list[str]]]:
    """Return (how many, which, state, for whom) of each box of the graph."""
    nodes = {node["id"]: node for node in answer["graph"]["nodes"]}
    targets: dict[int, list[str]] = {number: [] for number in nodes}
    for edge in answer["graph"]["edges"]:
        targets[edge["source"]].append(nodes[edge["target"]]["ranks"]["text"])
    return [
        (one["ranks"]["count"], one["ranks"]["text"], one["standing"], targets[number])
        for number, one in nodes.items()
    ]


def places(answer: dict[str, Any], group: str) -> list[tuple[str, str, int | None, int | None]]:
    """Return (state, ranks, entered, ended) of the rows of a group."""
    (found,) = [one for one in answer["groups"] if one["group"] == group]
    return [
        (row["standing"], row["ranks"]["text"], row["began"], row["ended"]) for row in found["rows"]
    ]


# --- a job of which each rank says where it is -----------------------------------------------


class Job:
    """Ranks of one node each eight, and the groups that they are in."""

    def __init__(self, client: TestClient, run: str, ranks: int, groups: dict[str, list[int]]):
        self.sender = Sender(client, run, f"p-{run}")
        self.ranks, self.groups, self.now_ns = ranks, groups, time.time_ns()
        records: list[Any] = [
            schema.RunStarted(
                attempt=0, rank=-1, time_ns=self.now_ns - 90 * S, name=run, world_size=ranks
            )
        ]
        for rank in range(ranks):
            who: dict[str, Any] = {"attempt": 0, "rank": rank, "time_ns": self.now_ns - 90 * S}
            records.append(
                schema.RankRegistered(
                    **who, world_size=ranks, local_rank=rank % 8, local_world_size=8,
                    node_rank=rank // 8, host=f"node-{rank // 8}", pid=100 + rank, backend="gloo",
                )
            )  # fmt: skip
            records += [
                schema.GroupDefined(
                    **who, group=name, ranks=members, backend="gloo", description=name
                )
                for name, members in groups.items() if rank in members
            ]  # fmt: skip
        self.send(records)

    def send(self, records: list[Any]) -> None:
        for begin in range(0, len(records), 4_000):
            self.sender.send(*records[begin : begin + 4_000])

    def state(
        self, rank: int, since_seconds: float, *groups: schema.GroupState, **more: Any
    ) -> schema.RankState:
        """Return a state of a rank that has not moved for so long."""
        at = self.now_ns - int(since_seconds * S)
        values: dict[str, Any] = {
            "step": 12,
            "phase": "backward",
            "phase_since_ns": at,
            "heartbeat_ns": at,
        }
        return schema.RankState(
            attempt=0, rank=rank, time_ns=self.now_ns, groups=list(groups), **values | more
        )

    def entered(self, group: str, sequence: int, since_seconds: float) -> schema.GroupState:
        """Return that a collective was entered and has not ended."""
        at = self.now_ns - int(since_seconds * S)
        return schema.GroupState(
            group=group, issued=sequence, ended=sequence - 1, operation="all_reduce",
            size_bytes=1 << 20, issued_ns=at, open_sequence=sequence, open_operation="all_reduce",
            open_ns=at, call_site="train.py:88 train_step",
        )  # fmt: skip

    def ended(self, group: str, sequence: int, since_seconds: float) -> schema.GroupState:
        at = self.now_ns - int(since_seconds * S)
        return schema.GroupState(
            group=group, issued=sequence, ended=sequence, operation="all_reduce", issued_ns=at
        )


def mesh() -> dict[str, list[int]]:
    """Return tensor-parallel groups of neighbours, and data-parallel ones across them."""
    groups = {
        f"tp-{first // TENSOR}": list(range(first, first + TENSOR))
        for first in range(0, RANKS, TENSOR)
    }
    return groups | {f"dp-{place}": list(range(place, RANKS, TENSOR)) for place in range(TENSOR)}


def hung_mesh(client: TestClient, run: str) -> Job:
    """Send a mesh of which rank 17 never enters a collective of its tensor-parallel group."""
    job = Job(client, run, RANKS, mesh())
    states = []
    for rank in range(RANKS):
        tensor, data = f"tp-{rank // TENSOR}", f"dp-{rank % TENSOR}"
        if rank == CULPRIT:
            at = job.ended(tensor, 40, 42), job.ended(data, 10, 50)
            states.append(job.state(rank, 41.5, *at, phase="forward"))
        elif rank // TENSOR == CULPRIT // TENSOR:
            at = job.entered(tensor, 41, 41), job.ended(data, 10, 50)
            states.append(job.state(rank, 41, *at))
        else:
            at = job.ended(tensor, 41, 42), job.entered(data, 11, 40)
            states.append(job.state(rank, 40, *at))
    job.send(states)
    return job


def test_a_mesh_of_1024_ranks_folds_to_who_waits_for_whom(
    client: TestClient, look: Callable[[], None]
) -> None:
    hung_mesh(client, "mesh")
    answer = ask(client, "mesh")
    neighbours = "16, 18-23"
    across = sorted(set(range(CULPRIT % TENSOR, RANKS, TENSOR)) - {CULPRIT})
    nodes = answer["graph"]["nodes"]
    assert [(one["depth"], one["is_root"]) for one in nodes] == [
        (0, True), (1, False), (1, False), (2, False),
    ]  # fmt: skip
    root, wide, near, behind = waits(answer)
    assert root == (1, "17", "missing", [])
    assert (wide[0], wide[2:]) == (len(across), ("waiting", ["17"]))
    assert wide[1] == ranges_text(across)
    assert near == (7, neighbours, "waiting", ["17"])
    assert (behind[0], behind[2:]) == (889, ("waiting", [neighbours]))
    assert 1 + wide[0] + near[0] + behind[0] == RANKS
    assert answer["graph"]["num_waiting"] == RANKS - 1
    assert nodes[0]["text"].startswith("has not entered all_reduce #")
    assert nodes[3]["num_groups"] == TENSOR - 1
    assert {edge["text"] for edge in answer["graph"]["edges"]} == {
        "127 ranks wait for rank 17", "7 ranks wait for rank 17", "889 ranks wait for 7 ranks",
    }  # fmt: skip
    first = answer["groups"][0]
    assert first["group"] == "dp-1"  # of the two that lack rank 17 the one in which most wait
    assert places(answer, "tp-2") == [("missing", "17", 40, 40), ("waiting", neighbours, 41, 40)]
    assert answer["num_groups"] == RANKS // TENSOR + TENSOR
    assert answer["groups_capped"] == {"shown": 40, "total": answer["num_groups"]}
    assert answer["state"] == "waiting"
    assert answer["text"] == (
        "1,023 ranks have waited for rank 17 for 41 s; this is not called a hang yet"
    )
    look()
    named = ask(client, "mesh", group="dp-3")
    finding = client.get("/api/v1/runs/mesh/findings").json()["open"][0]
    assert (named["state"], named["text"]) == ("hang", finding["what"])
    assert finding["ranks"] == [CULPRIT]
    assert [one["group"] for one in named["groups"]] == ["dp-3"]
    lacking, waiting = places(named, "dp-3")
    assert lacking == ("elsewhere", "19", 10, 10)
    assert (waiting[0], waiting[2:]) == ("waiting", (11, 10))
    assert len(client.get("/api/v1/runs/mesh/hang").content) < 300_000


def test_the_table_is_there_as_csv(client: TestClient) -> None:
    hung_mesh(client, "mesh-csv")
    reply = client.get("/api/v1/runs/mesh-csv/hang", params={"format": "csv", "group": "tp-2"})
    rows = list(csv.DictReader(io.StringIO(reply.text)))
    assert [(row["group"], row["standing"], row["count"], row["began"]) for row in rows] == [
        ("tp-2", "missing", "1", "40"), ("tp-2", "waiting", "7", "41"),
    ]  # fmt: skip


def test_ranks_that_wait_for_each_other_stay_apart(client: TestClient) -> None:
    job = Job(client, "circle", 2, {"a": [0, 1], "b": [0, 1]})
    job.send([
        job.state(0, 30, job.entered("a", 5, 30), job.ended("b", 4, 31)),
        job.state(1, 30, job.entered("b", 5, 30), job.ended("a", 4, 31)),
    ])  # fmt: skip
    answer = ask(client, "circle")
    assert waits(answer) == [(1, "0", "waiting", ["1"]), (1, "1", "waiting", ["0"])]
    assert all(node["is_root"] for node in answer["graph"]["nodes"])


def test_an_operation_that_all_have_entered_is_no_rank_to_blame(client: TestClient) -> None:
    job = Job(client, "stuck", 4, {"dp": [0, 1, 2, 3]})
    job.send([job.state(rank, 30, job.entered("dp", 9, 30)) for rank in range(4)])
    answer = ask(client, "stuck")
    transfer, inside = answer["graph"]["nodes"]
    assert (transfer["is_transfer"], transfer["ranks"]["count"]) == (True, 0)
    assert "all members have entered it, and it does not end" in transfer["text"]
    assert (inside["ranks"]["text"], inside["is_root"]) == ("0-3", False)
    assert "in an operation that all had entered for 30 s" in answer["text"]
    assert answer["suggested"] == [0]


def test_a_rank_that_is_still_in_what_others_ended_says_so(client: TestClient) -> None:
    job = Job(client, "held", 3, {"tp": [0, 1], "dp": [0, 2]})
    job.send([
        job.state(0, 40, job.entered("tp", 41, 40), job.ended("dp", 10, 50)),
        job.state(1, 0.5, job.ended("tp", 41, 40)),
        job.state(2, 39, job.entered("dp", 11, 39)),
    ])  # fmt: skip
    answer = ask(client, "held")
    assert waits(answer) == [(1, "0", "missing", []), (1, "2", "waiting", ["0"])]
    assert answer["graph"]["nodes"][0]["text"] == (
        "still in all_reduce #41 over tp: ranks 0, 1, which others have ended; ranks in "
        "all_reduce #11 over dp: ranks 0, 2 wait"
    )


@pytest.mark.parametrize(
    ("end", "standing"),
    [
        (schema.RankEnded(attempt=0, rank=2, time_ns=1, reason="clean", exit_code=0), "left"),
        (schema.RankEnded(attempt=0, rank=2, time_ns=1, reason="signal", signal=9), "gone"),
    ],
)
def test_why_a_rank_that_is_waited_for_does_not_come(
    client: TestClient, end: schema.RankEnded, standing: str
) -> None:
    run = f"end-{standing}"
    job = Job(client, run, 4, {"dp": [0, 1, 2, 3]})
    job.send([
        job.state(rank, 20, job.ended("dp", 8, 21) if rank == 2 else job.entered("dp", 9, 20))
        for rank in range(4)
    ])  # fmt: skip
    values = {name: getattr(end, name) for name in ("reason", "exit_code", "signal")}
    at = job.now_ns - 20 * S
    job.sender.send(schema.RankEnded(attempt=0, rank=2, time_ns=at, last_step=11, **values))
    answer = ask(client, run)
    assert waits(answer) == [(1, "2", standing, []), (3, "0-1, 3", "waiting", ["2"])]
    assert places(answer, "dp") == [(standing, "2", 8, 8), ("waiting", "0-1, 3", 9, 8)]


def test_exchanges_name_the_other_end(client: TestClient) -> None:
    job = Job(client, "pipe", 2, {"pp": [0, 1]})
    at = job.now_ns - 20 * S
    receives = schema.GroupState(
        group="pp", issued=0, ended=0, p2p_operation="recv", p2p_peer=0, p2p_issued_ns=at,
        p2p_sequence=3, peers=[schema.PeerState(peer=0, received=3, received_ended=2)],
    )  # fmt: skip
    sent = schema.GroupState(
        group="pp", issued=0, ended=0, peers=[schema.PeerState(peer=1, sent=2, sent_ended=2)]
    )
    job.send([job.state(0, 20, sent, phase="forward"), job.state(1, 20, receives)])
    answer = ask(client, "pipe")
    assert waits(answer) == [(1, "0", "missing", []), (1, "1", "waiting", ["0"])]
    root, waiting = answer["graph"]["nodes"]
    assert root["text"] == "has sent nothing to a rank that waits"
    assert waiting["text"] == "in recv from rank 0"
    (group,) = answer["groups"]
    assert group["rows"][1]["exchange"] == "recv with rank 0"


# --- no hang, and what is not known ----------------------------------------------------------


def test_a_healthy_job_says_that_none_waits(client: TestClient, look: Callable[[], None]) -> None:
    job = Job(client, "well", 4, {"dp": [0, 1, 2, 3]})
    job.send([job.state(rank, 0.1 + rank / 10, job.ended("dp", 9, 0.9)) for rank in range(4)])
    answer = ask(client, "well")
    assert (answer["text"], answer["state"]) == ("No rank waits for another", "none")
    assert answer["detail"].startswith("The rank that was quiet for longest, rank 3, last moved")
    assert answer["graph"]["nodes"] == answer["findings"] == []
    assert places(answer, "dp") == [("moving", "0-3", 9, 9)]
    assert (answer["num_groups"], answer["num_quiet_groups"]) == (1, 1)
    job.send([
        schema.RankEnded(
            attempt=0, rank=rank, time_ns=time.time_ns(), reason="clean", exit_code=0, last_step=12
        )
        for rank in range(4)
    ])  # fmt: skip
    look()
    over = ask(client, "well")
    assert over["is_over"]
    assert over["text"] == "No rank waited for another when the attempt ended"
    assert over["detail"] == "All 4 ranks ended cleanly"
    assert places(over, "dp") == [("finished", "0-3", 9, 9)]


def test_ranks_that_stand_still_outside_of_known_groups_are_unknown(client: TestClient) -> None:
    job = Job(client, "unclear", 2, {})
    job.send([job.state(rank, 50) for rank in range(2)])
    answer = ask(client, "unclear")
    assert (answer["text"], answer["state"]) == ("Whether a rank waits is unknown", "unknown")
    assert "Ranks 0 and 1 have not moved" in answer["detail"]


def test_nothing_heard_and_one_rank(client: TestClient) -> None:
    Job(client, "new", 2, {})
    answer = ask(client, "new")
    assert (answer["state"], answer["detail"]) == ("unknown", "no rank has said yet where it is")
    assert answer["notes"] == ["2 ranks never said where they are"]
    job = Job(client, "alone", 1, {})
    job.send([job.state(0, 50)])
    assert ask(client, "alone")["text"] == "One rank waits for no other"


def test_wrong_ranks_are_refused_and_unknown_ones_left_out(client: TestClient) -> None:
    Job(client, "few", 2, {})
    reply = client.get("/api/v1/runs/few/hang", params={"ranks": "1,x"})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "ranks")
    assert [one["rank"] for one in ask(client, "few", ranks="1,9,1")["stacks"]] == [1]
    assert client.get("/api/v1/runs/no-such/hang").status_code == 404


# --- stacks ----------------------------------------------------------------------------------

CALLERS = [("main", "train.py", 200), ("train", "train.py", 120), ("train_step", "train.py", 88)]


def dump(*inner: tuple[str, str, int], line: int = 88) -> str:
    """Return stacks as faulthandler writes them: a loader's thread, and the main one."""
    frames = [*CALLERS[:2], ("train_step", "train.py", line), *inner][::-1]
    own = "".join(f'  File "/job/{file}", line {at} in {name}\n' for name, file, at in frames)
    return (
        "Thread 0x01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
        '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
        f'Current thread 0x02 (most recent call first):\n{own}  File "/job/train.py", '
        "line 210 in <module>\n"
    )


def test_stacks_stand_side_by_side_and_merged(client: TestClient, look: Callable[[], None]) -> None:
    run = seed_with(
        poster(client), run_id="stacks", ranks=16, ranks_per_node=8, steps=30, fault="hang",
        slow_rank=5, slow_from=20, hang_seconds=30.0,
    )  # fmt: skip
    sender = Sender(client, run, "p-stacks")
    now = time.time_ns()
    for rank in range(12):
        text = (
            dump(("load", "data.py", 31), ("read", "data.py", 9), line=80)
            if rank == 5
            else dump(("backward", "ddp.py", 72), ("wait", "work.py", 40 + rank % 2))
        )
        sender.send(schema.Stacks(attempt=0, rank=rank, time_ns=now, text=text, reason="stuck"))
    look()
    answer = ask(client, run)
    finding = client.get(f"/api/v1/runs/{run}/findings").json()["open"][0]
    assert answer["text"] == finding["what"]
    assert answer["suggested"] == [5, 0]
    behind, waiting = answer["stacks"]
    assert [frame["function"] for frame in behind["frames"]] == [
        "<module>", "main", "train", "train_step", "load", "read",
    ]  # fmt: skip
    assert (behind["standing"], behind["is_root"], behind["num_shared"]) == ("missing", True, 4)
    assert waiting["frames"][4] == {"function": "backward", "file": "/job/ddp.py", "line": 72}
    assert "_bootstrap" in waiting["text"], "all threads are there"
    merged = answer["merged"]
    assert (merged["num_ranks"], merged["num_depths"]) == (12, 6)
    assert merged["nodes"][merged["parts_at"]]["function"] == "train_step"
    assert merged["text"] == (
        "All were in train_step (train.py:80, 88); from there 1 rank that others wait for was in "
        "load (data.py:31), 11 others were in backward (ddp.py:72)"
    )
    innermost = [node for node in merged["nodes"] if node["depth"] == 5]
    assert [(n["function"], n["start"], n["count"], n["num_roots"]) for n in innermost] == [
        ("read", 0, 1, 1), ("wait", 1, 11, 0),
    ]  # fmt: skip
    assert innermost[1]["lines"] == [40, 41]
    chosen = ask(client, run, ranks="7,13")["stacks"]
    assert [(one["rank"], one["note"]) for one in chosen] == [
        (7, ""), (13, "No stacks of it were taken"),
    ]  # fmt: skip


def test_after_victims_gave_up_the_finding_is_drawn_in_the_past(
    client: TestClient, look: Callable[[], None]
) -> None:
    job = Job(client, "given-up", 4, {"dp": [0, 1, 2, 3]})
    job.send([
        job.state(rank, 40, job.ended("dp", 8, 41) if rank == 1 else job.entered("dp", 9, 40))
        for rank in range(4)
    ])  # fmt: skip
    job.sender.send(
        schema.Stacks(attempt=0, rank=1, time_ns=job.now_ns, text=dump(("f", "f.py", 1)))
    )
    look()
    job.now_ns = time.time_ns()
    job.send([job.state(rank, 0.1, job.ended("dp", 9, 0.1)) for rank in (0, 2, 3)])
    job.send([
        schema.RankEnded(
            attempt=0, rank=rank, time_ns=job.now_ns, reason="signal", signal=15, last_step=11
        )
        for rank in range(4)
    ])  # fmt: skip
    look()
    answer = ask(client, "given-up")
    assert answer["is_over"]
    assert answer["state"] == "hang"
    assert answer["graph"]["is_of_finding"]
    assert waits(answer) == [(1, "1", "missing", []), (3, "0, 2-3", "waiting", ["1"])]
    assert [edge["text"] for edge in answer["graph"]["edges"]] == [
        "Ranks 0, 2 and 3 waited for rank 1"
    ]
    assert places(answer, "dp")[0] == ("missing", "1", 8, 8)
    assert answer["notes"][0].startswith("The last records of the ranks no longer show all")
    assert answer["stacks"][0]["note"] == "", "taken while it hung, though it moved to its end"


def test_main_threads_are_found_in_what_both_tools_write() -> None:
    names = [frame.function for frame in icicle.frames_of(dump(("f", "f.py", 3)))]
    assert names == ["<module>", "main", "train", "train_step", "f"]
    py_spy = (
        "Process 12: python train.py\nPython v3.11\n\nThread 12 (active): \"MainThread\"\n"
        "    wait (work.py:40)\n    train (job/train.py:9)\n    <module> (job/train.py:20)\n"
        "Thread 30 (idle): \"loader\"\n    get (queue.py:171)\n    _bootstrap (threading.py:973)\n"
    )  # fmt: skip
    assert icicle.frames_of(py_spy) == [
        Frame(function="<module>", file="job/train.py", line=20),
        Frame(function="train", file="job/train.py", line=9),
        Frame(function="wait", file="work.py", line=40),
    ]
    assert icicle.frames_of("no stack at all") == icicle.frames_of("") == []


@pytest.mark.parametrize("seed", range(4))
def test_the_layout_holds_every_rank_once_in_each_depth(seed: int) -> None:
    chance = random.Random(seed)
    stacks = {
        rank: [
            Frame(function=f"f{chance.randrange(1 + depth)}", file="a.py", line=chance.randrange(9))
            for depth in range(chance.randrange(1, 7))
        ]
        for rank in chance.sample(range(100), 40)
    }
    roots = frozenset(chance.sample(sorted(stacks), 3))
    window = Window(run_id="r", attempt=0, now_ns=0, world_size=100)
    found = icicle.merged(window, stacks, dict.fromkeys(stacks, 1.0), roots, len(stacks))
    assert found.num_ranks == len(stacks)
    for depth in range(found.num_depths):
        row = sorted((n for n in found.nodes if n.depth == depth), key=lambda node: node.start)
        assert sum(node.count for node in row) == sum(len(s) > depth for s in stacks.values())
        assert all(a.start + a.count <= b.start for a, b in itertools.pairwise(row))
    for node in found.nodes:
        paths = [
            rank for rank, frames in stacks.items()
            if len(frames) > node.depth and frames[node.depth].function == node.function
        ]  # fmt: skip
        assert node.count == node.ranks.count <= len(paths)
        assert node.num_roots <= len(roots)
        if node.depth:
            (above,) = [
                one for one in found.nodes
                if one.depth == node.depth - 1
                and one.start <= node.start < one.start + one.count
            ]  # fmt: skip
            assert node.start + node.count <= above.start + above.count


def test_ranks_as_ranges() -> None:
    assert ranges_text([]) == ""
    assert ranges_text([3]) == "3"
    assert ranges_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    many = list(range(0, 2 * MAX_RANGES + 20, 2))
    assert ranges_text(many).endswith(f", {2 * MAX_RANGES - 2} and 10 more")
