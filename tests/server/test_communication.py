"""Communication: every number against one computed in plain Python from the raw calls."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from rankscope.preflight.facts.edges import Bandwidth, EdgeFacts
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.model import Facts, LaunchVerdict, NodeReport
from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope.wire.schema import ENDED, FLAG_END_FROM_WAIT, FLAG_P2P, RETURNED
from rankscope_server.api.app import create_app
from rankscope_server.api.communication import links, words
from rankscope_server.api.communication.calls import NUMBERS, UNSURE, Calls, meetings, transfers
from rankscope_server.api.communication.rows import in_flight_ns, last_of, rows_of
from rankscope_server.settings import Settings
from tests.server.conftest import DATABASES, Sender, TestClient, new_data, poster, url_of
from tests.server.seed import BUCKETS, GROUP, MS, Plan, make_steps, seed_with

NOW = 1_700_000_000 * 10**9
PLAN = Plan(run_id="seeded", ranks=8, steps=120, fault="slow_compute", slow_rank=5, slow_from=2,
            slow_factor=1.5, start_ns=NOW, seed=3)  # fmt: skip


class Call(NamedTuple):
    """One call of one rank; times in ns."""

    rank: int
    group: str
    operation: str
    sequence: int
    size: int
    arrived: int
    duration: int
    step: int = 1
    blocked: int = 0
    device: int = -1
    began: int = -1
    peer: int = -1
    state: int = ENDED
    flags: int = 0


def calls_of(events: list[Call]) -> Calls:
    groups = sorted({one.group for one in events})
    operations = sorted({one.operation for one in events})
    columns = dict(zip(
        NUMBERS,
        np.array([
            (one.step, one.sequence, one.size, one.peer, one.state, one.flags, one.arrived,
             one.duration, one.began, one.device, one.blocked)
            for one in events
        ], np.int64).reshape(-1, len(NUMBERS)).T,
        strict=True,
    ))  # fmt: skip
    return Calls(
        rank=np.array([one.rank for one in events], np.int64),
        group=np.array([groups.index(one.group) for one in events], np.int64),
        operation=np.array([operations.index(one.operation) for one in events], np.int64),
        numbers=columns, groups=groups, operations=operations,
    )  # fmt: skip


def drawn(seed: int) -> list[Call]:
    """Return collectives of two groups, some of them of some members only, in any order."""
    rng = random.Random(seed)
    events = []
    for number in range(1, 60):
        for group, members in (("all", 4), ("pair", 2)):
            operation = rng.choice(("all_reduce", "all_gather_into_tensor", "broadcast"))
            size, start = rng.choice((700, 900, 5000)), number * 10**9
            for rank in range(members):
                arrived = start + rng.randrange(10**8)
                call = Call(rank, group, operation, number, size, arrived,
                            start + 2 * 10**8 - arrived, step=number // 3,
                            blocked=rng.randrange(10**7))  # fmt: skip
                if rng.random() > 0.03:
                    events.append(call)
    rng.shuffle(events)
    return events


# --- who meets, who is last ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_a_plain_computation(seed: int) -> None:
    events, members, host_of = drawn(seed), {"all": 4, "pair": 2}, dict.fromkeys(range(4), "a")
    calls = calls_of(events)
    met = meetings(calls, members, host_of)
    rows = {(row.group, row.operation, row.octave): row for row in rows_of(calls, met, members)}
    by_key: dict[Any, list[Call]] = defaultdict(list)
    by_number: dict[Any, list[Call]] = defaultdict(list)
    for one in events:
        by_key[one.group, one.operation, one.size.bit_length() - 1].append(one)
        by_number[one.group, one.sequence].append(one)
    assert set(rows) == set(by_key)
    whole = [
        found for (group, _), found in by_number.items()
        if len(found) == members[group] and found[0].operation != "broadcast"
    ]  # fmt: skip
    assert met.num_incomplete + len(met.group) == sum(
        found[0].operation != "broadcast" for found in by_number.values()
    )
    for key, row in rows.items():
        mine = by_key[key]
        assert row.count == len(mine)
        assert sorted(row.durations_ms) == pytest.approx(sorted(c.duration / MS for c in mine))
        assert row.blocked_ms == pytest.approx(sum(c.blocked for c in mine) / MS)
        matched = [one for one in whole if (one[0].group, one[0].operation) == key[:2]
                   and one[0].size.bit_length() - 1 == key[2]]  # fmt: skip
        assert row.num_matched == len(matched)
        if not matched:
            assert row.algbw is row.busbw is row.spread_p50_ms is None
            continue
        spreads = [max(c.arrived for c in one) - min(c.arrived for c in one) for one in matched]
        assert row.spread_p50_ms == pytest.approx(np.percentile(spreads, 50) / MS)
        assert row.spread_p95_ms == pytest.approx(np.percentile(spreads, 95) / MS)
        speeds = [one[0].size / min(c.duration for c in one) * 1e9 for one in matched]
        assert row.algbw == pytest.approx(float(np.median(speeds)))
        n = members[key[0]]
        factor = {"all_reduce": 2 * (n - 1) / n, "all_gather_into_tensor": (n - 1) / n}[key[1]]
        assert row.busbw == pytest.approx(factor * float(np.median(speeds)))
        last = [max(one, key=lambda call: call.arrived).rank for one in matched]
        assert {one.rank: one.count for one in row.last} == {r: last.count(r) for r in set(last)}


def test_the_wait_of_a_step_counts_once_for_calls_that_run_at_once() -> None:
    events = [
        Call(rank, "g", "all_reduce", number, 100, 10**9 + late, 10**9 - late, step=7)
        for number, spread in ((1, 30), (2, 50), (3, 40))
        for rank, late in ((0, 0), (1, spread * MS))
    ]
    calls = calls_of(events)
    met = meetings(calls, {"g": 2}, {0: "a", 1: "a"})
    (last,) = last_of(met, np.arange(len(met.group)))
    assert (last.rank, last.count, last.waited_ms) == (1, 3, 50.0)


def test_over_several_hosts_clock_and_duration_have_to_agree() -> None:
    # Rank 1 is 40 ms late. In number 2 a slow link ends rank 0 early, though all came at once.
    late, early = 40 * MS, 60 * MS
    events = [
        Call(0, "g", "all_reduce", 1, 100, NOW, 100 * MS),
        Call(1, "g", "all_reduce", 1, 100, NOW + late, 100 * MS - late),
        Call(0, "g", "all_reduce", 2, 100, NOW, 100 * MS - early),
        Call(1, "g", "all_reduce", 2, 100, NOW + 1, 100 * MS),
    ]
    apart = meetings(calls_of(events), {"g": 2}, {0: "a", 1: "b"})
    assert apart.last_rank.tolist() == [1, UNSURE]
    assert apart.spread_ns.tolist() == [late, 1]
    # With the clock of b 1 s behind, number 1 has no sure answer; none is made up.
    skewed = [one._replace(arrived=one.arrived - 10**9 * one.rank) for one in events]
    found = meetings(calls_of(skewed), {"g": 2}, {0: "a", 1: "b"})
    assert found.last_rank.tolist() == [UNSURE, 0]
    assert found.spread_ns.tolist()[0] == late, "the smaller of both counts"
    # On one host its clock alone says it.
    one_host = meetings(calls_of(events), {"g": 2}, {0: "a", 1: "a"})
    assert one_host.last_rank.tolist() == [1, 1]


def test_devices_are_asked_for_their_own_times() -> None:
    events = [
        Call(0, "g", "all_reduce", 1, 10**6, NOW, 900 * MS, device=30 * MS),
        Call(1, "g", "all_reduce", 1, 10**6, NOW, 900 * MS, device=10 * MS),
    ]
    found = meetings(calls_of(events), {"g": 2}, {0: "a", 1: "b"})
    assert (found.last_rank.tolist(), found.spread_ns.tolist()) == ([1], [20 * MS])
    assert found.transfer_ns.tolist() == [10 * MS]


def test_open_unnumbered_and_late_seen_calls_are_not_matched() -> None:
    good = Call(1, "g", "all_reduce", 1, 100, NOW, 100)
    for bad in (
        Call(0, "g", "all_reduce", 1, 100, NOW, -1, state=RETURNED),
        Call(0, "g", "all_reduce", 0, 100, NOW, 100),
        Call(0, "g", "all_reduce", 1, 100, NOW, 100, flags=FLAG_END_FROM_WAIT),
    ):
        found = meetings(calls_of([bad, good]), {"g": 2}, {})
        assert len(found.group) == 0
    nothing = meetings(calls_of([]), {}, {})
    assert (len(nothing.group), nothing.num_incomplete) == (0, 0)
    assert rows_of(calls_of([]), nothing, {}) == []


@pytest.mark.parametrize("seed", range(5))
def test_time_in_flight_is_that_of_a_plain_union(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = rng.integers(0, 4, 60)
    began = NOW + rng.integers(0, 1_000, 60)
    took = rng.integers(0, 120, 60)
    expected = sum(
        len({t for b, d in zip(began[rank == one], took[rank == one], strict=True)
             for t in range(b, b + d)})
        for one in range(4)
    )  # fmt: skip
    assert in_flight_ns(rank, began, took) == expected
    far = began + rank * (1 << 61)  # beyond one axis of time for all ranks
    assert in_flight_ns(rank, far, took) == expected


# --- links -----------------------------------------------------------------------------------


def message(
    number: int, send: tuple[int, int], receive: tuple[int, int], **more: Any
) -> list[Call]:
    """Return the two calls of a message from rank 0 to rank 1: (arrived, duration) of each."""
    return [
        Call(0, "g", "send", number, 1 << 20, *send, peer=1, flags=FLAG_P2P, **more),
        Call(1, "g", "recv", number, 1 << 20, *receive, peer=0, flags=FLAG_P2P, **more),
    ]


def test_a_message_took_at_most_from_its_send_to_the_end_of_its_receive() -> None:
    # The send returns at once, as the message lies in a buffer; the receive comes late.
    events = message(1, (NOW, MS // 10), (NOW + 90 * MS, 10 * MS))
    found = transfers(calls_of(events), {0: "a", 1: "a"})
    assert (found.took_ns.tolist(), found.is_at_most.tolist()) == ([100 * MS], [True])
    # A clock that is behind makes it no shorter than the quicker call.
    behind = message(1, (NOW, 7 * MS), (NOW - 10**9, 10 * MS))
    found = transfers(calls_of(behind), {0: "a", 1: "b"})
    assert found.took_ns.tolist() == [7 * MS]
    exact = message(1, (NOW, 9 * MS), (NOW, 9 * MS), device=3 * MS)
    found = transfers(calls_of(exact), {0: "a", 1: "b"})
    assert (found.took_ns.tolist(), found.is_at_most.tolist()) == ([3 * MS], [False])


def test_messages_without_their_other_end_show_no_link() -> None:
    events = message(1, (NOW, MS), (NOW, MS))[:1] + message(2, (NOW, MS), (NOW, MS))[1:]
    assert links.links_of_messages(transfers(calls_of(events), {}), {0: "a", 1: "b"}) == {}
    assert len(transfers(calls_of([]), {}).sender) == 0


def test_a_link_is_shown_by_its_largest_messages() -> None:
    small = [
        one._replace(size=100)
        for number in range(50)
        for one in message(number + 1, (NOW, MS), (NOW, MS))
    ]
    large = [one for n in range(9) for one in message(n + 100, (NOW, MS), (NOW, 10 * MS))]
    found = links.links_of_messages(
        transfers(calls_of(small + large), {0: "a", 1: "a"}), {0: "a", 1: "a"}
    )
    assert found["a", "a"] == links.Link((1 << 20) / 0.01, "messages", 9, 1 << 20, True)


def test_the_slowest_measured_link_is_expected() -> None:
    measured = links.links_of_preflight({("a", "b"): 8000.0, ("b", "a"): 800.0, ("a", "c"): 1.0})
    expected = links.expected_of(["b", "a", "a", ""], measured)
    assert expected == links.Expected(1e8, "b", "a", 2, 2)
    dead = links.links_of_preflight({("a", "b"): 0.0, ("b", "a"): 800.0})
    assert links.expected_of(["a", "b"], dead) == links.Expected(0.0, "a", "b", 2, 2)
    assert links.expected_of(["a"], measured) is None
    assert links.expected_of(["x", "y"], measured) is None
    assert "1 of 2 ways" in words.expected_text(links.expected_of(["a", "c"], measured), 2)


def test_a_matrix_that_is_cut_keeps_the_slowest_links() -> None:
    hosts = [f"n{number:02}" for number in range(30)]
    measured = links.links_of_preflight({("n07", "n21"): 1.0, ("n01", "n02"): 900.0})
    shown = links.shown_hosts(hosts, measured, 4)
    assert shown == ["n01", "n02", "n07", "n21"]
    assert links.shown_hosts(hosts, measured, 30) == hosts


def test_every_node_is_listed_by_its_slowest_way_the_worst_first() -> None:
    hosts = [f"n{number:02}" for number in range(50)]
    chance = random.Random(4)
    mbit = {(one, other): chance.uniform(500, 900) for one in hosts[1:] for other in hosts[1:]}
    mbit |= {("n33", "n07"): 20.0, ("n07", "elsewhere"): 1.0}
    found = links.by_node(hosts, links.links_of_preflight(mbit))
    assert len(found) == 49, "of n00 nothing is measured"
    assert [one.node for one in found[:2]] in (["n07", "n33"], ["n33", "n07"])
    assert {(one.start, one.end) for one in found[:2]} == {("n33", "n07")}
    for one in found:
        own = [value for way, value in mbit.items()
               if one.node in way and way[0] != way[1] and "elsewhere" not in way]  # fmt: skip
        assert one.num_measured == len(own) == 96
        assert one.link.bytes_per_second == pytest.approx(min(own) * 1e6 / 8)
        assert one.median_bytes_per_second == pytest.approx(np.median(own) * 1e6 / 8)
    assert links.by_node(hosts, {}) == []


# --- the answer ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DATABASES)
def client(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestClient]:
    url = url_of(request)
    settings = Settings(
        data_dir=new_data(tmp_path_factory.mktemp("communication") / "data", url),
        database_url=url, look_seconds=3600.0, disk_reserve_bytes=0,
    )  # fmt: skip
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        seed_with(poster(client), **vars(PLAN))
        yield client


def ask(client: TestClient, run: str, **asked: Any) -> dict[str, Any]:
    reply = client.get(f"/api/v1/runs/{run}/communication", params=asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_the_answer_is_that_of_the_raw_run(client: TestClient) -> None:
    lo, hi = 31, 100
    steps = make_steps(PLAN)
    arrived, ended = steps.arrived[:, lo - 1 : hi], steps.ended[lo - 1 : hi]
    blocked = steps.backward_blocked[:, lo - 1 : hi] / MS
    answer = ask(client, "seeded", **{"from": lo, "to": hi})
    assert (answer["step_lo"], answer["step_hi"]) == (lo, hi)
    assert answer["count"] == PLAN.ranks * (hi - lo + 1) * len(BUCKETS)
    rows = {row["size_largest"]: row for row in answer["rows"]}
    assert set(rows) == set(BUCKETS)
    for size, row in rows.items():
        which = [bucket for bucket, one in enumerate(BUCKETS) if one == size]
        took = (ended[None] - arrived)[:, :, which] / MS
        for name, share in (("p50_ms", 50), ("p95_ms", 95), ("p99_ms", 99)):
            assert row[name] == pytest.approx(np.percentile(took, share), rel=1e-4)
        shortest = took.min(axis=0).reshape(-1) / 1e3
        speed = float(np.median(size / shortest))
        # chunks hold whole microseconds, and these transfers take about a millisecond
        assert row["algbw_bytes_per_second"] == pytest.approx(speed, rel=2e-3)
        assert row["busbw_bytes_per_second"] == pytest.approx(speed * 2 * 7 / 8, rel=2e-3)
        spread = (arrived.max(axis=0) - arrived.min(axis=0))[:, which] / MS
        assert row["spread_p50_ms"] == pytest.approx(np.percentile(spread, 50), rel=1e-4)
        last = arrived.argmax(axis=0)[:, which]
        top = row["last"][0]
        assert (top["rank"], top["host"]) == (PLAN.slow_rank, PLAN.host_of(PLAN.slow_rank))
        assert top["share"] == pytest.approx((last == PLAN.slow_rank).mean())
        waited = np.where(last == PLAN.slow_rank, spread, 0).max(axis=1).mean()
        assert top["waited_ms_per_step"] == pytest.approx(waited, rel=1e-4)
    exposed = rows[BUCKETS[-1]]["exposed_ms_per_step"]
    assert exposed == pytest.approx(blocked.mean(), rel=1e-4)
    assert answer["last"][0]["rank"] == PLAN.slow_rank
    assert f"rank {PLAN.slow_rank} arrives last in" in answer["text"]
    same = client.get("/api/v1/runs/seeded/collectives", params={"from": lo, "to": hi}).json()
    for row in same["rows"]:
        assert rows[row["size_bytes"]]["count"] == row["count"]
        assert rows[row["size_bytes"]]["exposed_ms_per_step"] == pytest.approx(
            row["exposed_ms_per_step"]
        )


def test_without_a_range_the_newest_steps_count(client: TestClient) -> None:
    answer = ask(client, "seeded")
    assert (answer["step_lo"], answer["step_hi"]) == (71, 120)
    assert answer["links"]["num_messages"] == answer["links"]["num_preflight"] == 0
    assert answer["links"]["text"].startswith("No link was measured")
    assert all(cell["bytes_per_second"] is None for row in answer["links"]["messages"]
               for cell in row)  # fmt: skip
    assert {row["expected_text"] for row in answer["rows"]} == {
        "not known: no preflight of this run measured links of its nodes"
    }


def test_steps_that_are_not_there_say_so(client: TestClient) -> None:
    answer = ask(client, "seeded", **{"from": 900})
    assert answer["rows"] == []
    assert answer["text"].startswith("No call was recorded in")
    sender = Sender(client, "bare", "p-bare")
    sender.send(schema.RunStarted(attempt=0, rank=-1, time_ns=1, name="bare", world_size=1))
    assert ask(client, "bare")["text"] == "One rank: it has no one to communicate with."


def test_links_of_the_preflight_and_of_messages(client: TestClient) -> None:
    hosts = [PLAN.host_of(rank) for rank in range(0, PLAN.ranks, PLAN.ranks_per_node)]
    speeds = {(one, other): 800.0 if (one, other) == (hosts[1], hosts[2]) else 8000.0
              for one in hosts for other in hosts if one != other}  # fmt: skip
    reports = [
        NodeReport(
            node=f"as-launched-{host}", version=3, node_rank=rank, stage="done",
            started_unix_s=time.time(), facts=Facts(host=HostFacts(hostname=host)),
            edges={
                f"as-launched-{peer}": EdgeFacts(bandwidth=Bandwidth(mbit_per_s=speeds[host, peer]))
                for peer in hosts if peer != host
            },
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    names = tuple(report.node for report in reports)
    verdict = LaunchVerdict(run_id="x", expected=names, reported=names, findings=(), results=())
    body = msgspec.json.encode({"verdict": verdict, "reports": reports, "run_id": "seeded"})
    assert client.put("/api/v1/preflight/runs/before", content=body).status_code == 200
    send_messages(client, hosts)
    answer = ask(client, "seeded", **{"from": 130})
    found = answer["links"]
    assert found["nodes"] == hosts
    assert found["messages_by_node"] == found["preflight_by_node"] == [], "the matrix has them all"
    assert (found["num_preflight"], found["num_messages"]) == (12, 1)
    assert found["preflight"][1][2]["bytes_per_second"] == 1e8
    assert found["preflight"][0][0]["bytes_per_second"] is None
    cell = found["messages"][0][1]
    assert cell["bytes_per_second"] == pytest.approx((1 << 20) / 0.004)
    assert (cell["is_at_least"], cell["count"]) == (True, 8)
    assert f"{hosts[1]} to {hosts[2]}, 100 MB/s" in found["text"]
    rows = ask(client, "seeded", **{"from": 100, "to": 120})["rows"]
    assert {row["expected_bytes_per_second"] for row in rows} == {1e8}
    assert hosts[1] in rows[0]["expected_text"]


def send_messages(client: TestClient, hosts: list[str]) -> None:
    """Send messages from rank 0 to rank 2, on the second node, 4 ms each."""
    sender = Sender(client, "seeded", "p-messages")
    count = 8
    chunks = []
    for rank, peer, operation in ((0, 2, "send"), (2, 0, "recv")):
        fill = np.full(count, -1)
        words_of = {name: [""] * count for name in schema.STRING_COLUMNS}
        columns: dict[str, Column] = {
            name: words_of.get(name, fill) for name in schema.COLLECTIVE_COLUMNS
        }
        columns |= {
            "arrived_ns": NOW + np.arange(count) * 10**9, "duration_ns": fill * 0 + 4 * MS,
            "sequence": np.arange(1, count + 1), "step": fill * 0 + 130,
            "size_bytes": fill * 0 + (1 << 20), "peer_rank": fill * 0 + peer,
            "state": fill * 0 + ENDED, "flags": fill * 0 + FLAG_P2P, "blocked_ns": fill * 0,
            "operation": [operation] * count, "group": [GROUP] * count,
        }  # fmt: skip
        chunks.append(schema.Chunk(
            kind="collectives", attempt=0, rank=rank, host=hosts[rank // 2], count=count,
            time_lo_ns=NOW, time_hi_ns=NOW + count * 10**9, step_lo=130, step_hi=130,
            data=encode_chunk(columns),
        ))  # fmt: skip
    sender.send(chunks=chunks)


# --- words -----------------------------------------------------------------------------------


def test_bandwidths_are_in_si_units() -> None:
    assert [words.speed_text(value) for value in (1.98e10, 7.82e4, 12.0)] == [
        "19.8 GB/s", "78.2 kB/s", "12 B/s",
    ]  # fmt: skip


def test_waits_that_another_tool_did_not_give_to_calls_are_not_zero(client: TestClient) -> None:
    sender = Sender(client, "imported", "p-imported")
    started = schema.RunStarted(attempt=0, rank=-1, time_ns=NOW, name="imported", world_size=2,
                                launcher=schema.IMPORTED)  # fmt: skip
    zero, count = np.zeros(5, np.int64), 5
    chunks = []
    for rank in range(2):
        columns: dict[str, Column] = {
            name: [""] * count if name in schema.STRING_COLUMNS else zero - 1
            for name in schema.COLLECTIVE_COLUMNS
        }
        columns |= {
            "arrived_ns": NOW + np.arange(count) * 10**9, "duration_ns": zero + MS,
            "sequence": np.arange(1, count + 1), "step": np.arange(1, count + 1),
            "blocked_ns": zero, "state": zero + ENDED, "flags": zero, "group": ["g"] * count,
            "operation": ["all_reduce"] * count,
        }  # fmt: skip
        chunks.append(schema.Chunk(
            kind="collectives", attempt=0, rank=rank, host="h", count=count, time_lo_ns=NOW,
            time_hi_ns=NOW + count * 10**9, step_lo=1, step_hi=count, data=encode_chunk(columns),
        ))  # fmt: skip
    sender.send(started, chunks=chunks)
    answer = ask(client, "imported")
    (row,) = answer["rows"]
    assert (row["exposed_ms_per_step"], row["overlapped_ms_per_step"]) == (None, None)
    assert "is not known" in answer["text"]
    assert row["size_hi"] == 0
    assert row["busbw_bytes_per_second"] is None
    same = client.get("/api/v1/runs/imported/collectives").json()
    assert [one["exposed_ms_per_step"] for one in same["rows"]] == [None]
