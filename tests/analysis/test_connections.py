"""Connections between ranks: whose link is slow, loses packets or carries nothing, or silence."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from rankscope.wire.schema import GroupState, RankRegistered, RankState
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.shared.connections import LinkLocation, slower_link, stuck_link
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.connection_table import (
    NUM_STRETCHES,
    STRETCH_SECONDS,
    ConnectionTable,
)
from rankscope_server.observe.sample_table import SampleTable
from rankscope_server.verdict.answers import Look
from tests.analysis.records import grouped, registered
from tests.simulator.connections import (
    HELD,
    LOSSY,
    MB,
    ONSET_S,
    SLOW,
    START_S,
    STUCK,
    Net,
    Pair,
    Traffic,
    everybody,
    ring,
)
from tests.simulator.delivery import apply, deliver
from tests.simulator.job import Fault, Job
from tests.simulator.records import START_NS, Recording

COST = 0.4  # of the throughput


@dataclass
class Links(Net):
    """Connections, and what is said of them alone."""

    def window(self, order: int | None = None) -> Window:
        table = SampleTable()
        chunks = list(self.chunks())
        if order is not None:
            random.Random(order).shuffle(chunks)
        for host, columns in chunks:
            table.add(host, "connections", columns)
        return Window(
            run_id="r", attempt=0, now_ns=0, world_size=self.ranks, samples=table,
            ranks={rank: _registered(rank, self.host(rank)) for rank in range(self.ranks)},
        )  # fmt: skip

    def slower(self, order: int | None = None) -> LinkLocation | None:
        return slower_link(self.window(order), (START_S + ONSET_S) * 1e3, COST)

    def stuck(self) -> LinkLocation | None:
        return stuck_link(self.window(), (START_S + ONSET_S) * 1e3)


def _registered(rank: int, host: str) -> RankRegistered:
    return registered(rank, 0, time_ns=0, local_rank=0, local_world_size=1, host=host, pid=1)


def of(pairs: Iterable[Pair], traffic: Traffic) -> Mapping[Pair, Traffic]:
    return dict.fromkeys(pairs, traffic)


@pytest.mark.parametrize("n", [4, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_rank_whose_sendings_are_slow(n: int, seed: int) -> None:
    rank = random.Random(seed).randrange(n)
    pairs = everybody(n) if n < 64 else [(a, (a + d) % n) for a in range(n) for d in (1, 2, 4, 8)]
    bad = of([pair for pair in pairs if pair[0] == rank], SLOW)
    place = Links(n, pairs, bad=dict(bad), seed=seed).slower()
    assert place is not None
    assert (place.ranks, place.symptom, place.way) == ((rank,), "slow", "sends")


@pytest.mark.parametrize("seed", range(3))
def test_the_rank_to_which_everything_comes_slowly(seed: int) -> None:
    bad = of([(a, 5) for a in range(8) if a != 5], SLOW)
    place = Links(8, everybody(8), bad=dict(bad), seed=seed).slower()
    assert place is not None
    assert (place.ranks, place.way) == ((5,), "receives")


@pytest.mark.parametrize("n", [3, 4, 64])
@pytest.mark.parametrize("seed", range(3))
def test_who_loses_what_is_sent_to_it_in_a_ring(n: int, seed: int) -> None:
    """Large messages go one way round, small ones the other, as with gloo."""
    rank = random.Random(seed).randrange(n)
    before, after = (rank - 1) % n, (rank + 1) % n
    small = frozenset((b, a) for a, b in ring(n))
    pairs = [*ring(n), *small]
    little = Traffic(num_bytes=4000.0, busy=0.26, segments=80.0, lost=0.09)
    bad = {(before, rank): LOSSY, (after, rank): little}
    place = Links(n, pairs, bad=bad, small=small, seed=seed).slower()
    assert place is not None
    assert (place.ranks, place.symptom, place.way) == ((rank,), "loses", "receives")


def test_of_one_way_alone_both_ends_may_be_at_fault() -> None:
    for traffic, symptom in ((LOSSY, "loses"), (SLOW, "slow")):
        place = Links(4, ring(4), bad={(1, 2): traffic}).slower()
        assert place is not None
        assert (place.ranks, place.symptom) == ((), symptom)
        assert [(flow.sender, flow.receiver) for flow in place.bad] == [(1, 2)]


def test_data_that_waits_while_nothing_is_under_way_is_held_by_its_sender() -> None:
    place = Links(4, ring(4), bad={(1, 2): HELD}).slower()
    assert place is not None
    assert (place.ranks, place.by) == ((1,), "sender")


def test_what_the_kernel_of_the_receiver_threw_away_is_lost_there() -> None:
    place = Links(4, ring(4), bad={(1, 2): replace(LOSSY, dropped=0.08)}).slower()
    assert place is not None
    assert (place.ranks, place.by) == ((2,), "receiver")


def test_what_every_kernel_throws_away_says_nothing_of_one() -> None:
    class Careless(Links):
        def usual(self, pair: Pair) -> Traffic:
            return Traffic(dropped=0.07)

    place = Careless(4, ring(4), bad={(1, 2): replace(LOSSY, dropped=0.08)}).slower()
    assert place is not None
    assert place.ranks == ()


def test_a_host_whose_ranks_share_a_slow_adapter() -> None:
    pairs = [(a, b) for a, b in everybody(16) if a // 4 != b // 4]
    bad = of([pair for pair in pairs if pair[0] // 4 == 2], SLOW)
    place = Links(16, pairs, bad=dict(bad)).slower()
    assert place is not None
    assert place.ranks == (8, 9, 10, 11)


@pytest.mark.parametrize("seed", range(10))
def test_healthy_connections_are_silent(seed: int) -> None:
    """Steps may become slower for another reason; a few segments are always sent again."""
    pairs = ring(8) if seed % 2 else everybody(8)
    some = of(random.Random(seed).sample(pairs, 4), Traffic(lost=0.002))
    net = Links(8, pairs, seed=seed, bad=dict(some), lost_samples=0.1)
    assert net.slower() is None
    assert net.stuck() is None


def test_ways_that_were_slow_before_are_not_the_cause() -> None:
    net = Links(4, ring(4), bad={(1, 2): SLOW})
    window = net.window()
    later = (START_S + ONSET_S + 24) * 1e3  # the steps became slower when nothing changed here
    assert slower_link(window, later, COST) is None


def test_losses_that_cost_no_time_are_not_the_cause() -> None:
    net = Links(
        4, ring(4), bad={(1, 2): replace(LOSSY, busy=0.06), (0, 1): replace(LOSSY, busy=0.1)}
    )
    assert net.slower() is None


def test_a_receiver_that_reads_late_is_no_slow_link() -> None:
    late = Traffic(num_bytes=2.0 * MB, busy=0.8, limited=0.78)
    assert Links(8, everybody(8), bad={(a, 3): late for a in range(8) if a != 3}).slower() is None


def test_two_places_at_once_are_not_one() -> None:
    bad = of([(0, 1), (2, 3)], LOSSY)
    assert Links(8, ring(8), bad=dict(bad)).slower() is None


def test_who_explains_only_some_of_its_ways_is_not_named() -> None:
    """Two of fourteen ways of rank 3 lose packets: two links, not that of the rank."""
    bad = of([(3, 1), (6, 3)], LOSSY)
    assert Links(8, everybody(8), bad=dict(bad)).slower() is None


@pytest.mark.parametrize("seed", range(3))
def test_order_and_lost_samples_change_nothing(seed: int) -> None:
    bad = of([(5, b) for b in range(8) if b != 5], SLOW)
    net = Links(8, everybody(8), bad=dict(bad), seed=seed, lost_samples=0.3)
    place, shuffled = net.slower(), net.slower(order=seed)
    assert place is not None
    assert place.ranks == (5,)
    assert place == shuffled


def test_too_few_ranks_that_are_sampled_say_nothing() -> None:
    bad = of([(5, b) for b in range(8) if b != 5], SLOW)
    net = Links(8, everybody(8), bad=dict(bad), silent=frozenset({0, 1, 2}))
    assert net.slower() is None
    place = replace(net, silent=frozenset({0})).slower()
    assert place is not None
    assert place.ranks == (5,)


def test_translated_addresses_match_nobody() -> None:
    def behind(rank: int, peer: int, is_remote: bool) -> str:
        return f"{'203.0.113.1' if is_remote else '10.0.0.1'}:{1000 + 100 * rank + peer}"

    bad = of([(1, b) for b in range(4) if b != 1], SLOW)
    net = Links(4, everybody(4), bad=dict(bad), address=behind)
    assert net.window().samples.connections.ranks == frozenset()
    assert net.slower() is None


def test_loopback_addresses_of_two_hosts_are_two_connections() -> None:
    def same(rank: int, peer: int, is_remote: bool) -> str:
        return f"127.0.0.1:{1000 + 10 * (rank % 2) + peer % 2}"

    net = Links(4, [(0, 1), (2, 3)], per_host=2, address=same)
    flows = net.window().samples.connections.flows(0, 1e19)
    assert {(flow.sender, flow.receiver) for flow in flows} == {(0, 1), (1, 0), (2, 3), (3, 2)}


@pytest.mark.parametrize("n", [3, 4, 64])
def test_who_carries_nothing_any_more(n: int) -> None:
    bad = {(1, 2): STUCK, (2, 3 % n): STUCK}
    rest = {pair: Traffic(0, 0, 0, 0) for pair in ring(n) if pair not in bad}
    place = Links(n, ring(n), bad=bad | rest).stuck()
    assert place is not None
    assert (place.ranks, place.symptom, place.way) == ((2,), "stuck", "both")


def test_a_stuck_way_between_two_is_the_way() -> None:
    place = Links(4, ring(4), bad={(1, 2): STUCK}).stuck()
    assert place is not None
    assert place.ranks == ()
    assert place.bad[0].stuck_seconds > 30


def test_an_answer_that_is_late_once_is_not_stuck() -> None:
    assert Links(4, ring(4), bad={(1, 2): replace(SLOW, lost=0.3)}).stuck() is None
    first_wait = Traffic(num_bytes=0.0, busy=1.0, waits=1.0, flying=3, segments=0.0)
    assert Links(4, ring(4), bad={(1, 2): first_wait}).stuck() is None


def test_a_counter_that_began_anew_is_not_known() -> None:
    table = ConnectionTable()
    net = Links(2, [(0, 1)], per_host=2)
    for host, columns in net.chunks():
        table.add(host, columns)
    ((_, columns),) = list(net.chunks())[-1:]
    columns["time_ns"] = np.asarray(columns["time_ns"]) + 10**10
    columns["acknowledged_bytes_total"] = np.zeros(len(columns["rank"]), np.int64)
    assert len(table.flows(0, 1e19)) == 2
    table.add("node0", columns)
    assert {flow.sender for flow in table.flows(0, 1e19)} == {1}


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope_server.observe.connection_table.MAX_ENDS", 100)
    table = ConnectionTable()
    (first, *_) = list(Links(2, [(0, 1)], per_host=2).chunks())
    count = len(np.asarray(first[1]["rank"]))
    for number in range(200):
        columns = dict(first[1])
        columns["local"] = [f"10.0.0.1:{2 * number + place}" for place in range(count)]
        columns["time_ns"] = np.asarray(first[1]["time_ns"]) + number * 10**10
        table.add("h", columns)
    assert len(table._row_of) <= 100
    assert table._cells.shape[1] <= 128
    newest = max(int(np.asarray(columns["time_ns"]).max()), 0)
    assert table.newest_ns == newest
    oldest = np.where(table._cells[0] > 0, table._cells[0], newest).min()
    assert newest - oldest < 4 * NUM_STRETCHES * STRETCH_SECONDS * 10**9


# --- through the whole analysis ------------------------------------------------------------------

JOB = Job(
    data=8, steps=150, forward_ms=80.0, transfer_ms=10.0, ranks_per_host=4, backend="gloo", seed=3,
    faults=(Fault("slow_link", rank=5, start=90, size=20.0),),
)  # fmt: skip


def look(job: Job, traffic: Links | None, seed: int | None = None) -> Look:
    """Return the analysis of a job whose connections are those of `traffic` from the onset on."""
    recording = Recording(job)
    state = RunState("connections")
    items = list(recording.items())
    apply(state, items if seed is None else deliver(items, seed, lost=0.0))
    at_ms = recording.stopped_ms() + 1
    apply(state, recording.states(at_ms))
    if traffic is not None:
        net = replace(traffic, start_s=START_NS / 1e9, end_s=at_ms / 1e3,
                      onset_s=recording.began_ms[90] / 1e3)  # fmt: skip
        sampled = list(net.items())
        if seed is not None:
            random.Random(seed).shuffle(sampled)
        apply(state, [*sampled, *sampled])  # twice: sent again after an outage
    return state.look(START_NS + int(at_ms * 1e6) + 10**9)


def slow_links(found: Look) -> list[Finding]:
    return [finding for finding in found.findings if finding.detector == "slow-link"]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_of_a_single_group_the_connections_name_the_rank(seed: int | None) -> None:
    net = Links(8, ring(8), bad={(5, 6): HELD})
    found = look(JOB, net, seed)
    (finding,) = slow_links(found)
    assert (finding.ranks, finding.severity) == ((5,), "critical")
    assert finding.what.startswith("What rank 5 (")
    assert "not known" not in finding.what
    assert finding.hosts == (JOB.host(5),)
    assert 5 not in finding.victims
    assert "From rank 5 to rank 6" in finding.evidence[0].text
    assert finding.cost_throughput_ratio is not None
    assert found.verdict is not None
    assert found.verdict.ranks == (5,)


def test_without_connections_the_place_stays_unknown() -> None:
    nat = Links(8, ring(8), bad={(5, 6): HELD}, silent=frozenset(range(8)))
    for net in (None, nat):
        (finding,) = slow_links(look(JOB, net))
        assert finding.ranks == ()
        assert finding.what.endswith("which link is not known")


def test_connections_are_no_finding_of_their_own() -> None:
    """Nobody became slower: a link may be as slow as it likes."""
    net = Links(8, ring(8), bad={(5, 6): HELD, (4, 5): LOSSY})
    assert slow_links(look(replace(JOB, faults=()), net)) == []


def test_a_slow_rank_stays_a_slow_rank() -> None:
    slow = replace(JOB, faults=(Fault("slow_compute", rank=2, start=90, size=1.0),))
    assert slow_links(look(slow, Links(8, ring(8), bad={(5, 6): HELD}))) == []


def stuck_state(rank: int, now_s: float) -> RankState:
    since = int((START_S + ONSET_S) * 1e9)
    state = GroupState(
        group="world", issued=40, ended=39, operation="all_reduce", size_bytes=1 << 20,
        issued_ns=since, open_sequence=40, open_operation="all_reduce", open_bytes=1 << 20,
        open_ns=since,
    )  # fmt: skip
    return RankState(
        attempt=0, rank=rank, time_ns=int((START_S + now_s) * 1e9), step=20, phase="backward",
        phase_since_ns=since, heartbeat_ns=since, groups=[state],
    )  # fmt: skip


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_transfer_that_is_stuck_names_the_rank_that_nothing_reaches(is_sampled: bool) -> None:
    state = RunState("stuck")
    for rank in range(4):
        known = replace_registered(rank)
        state.apply_record(known)
        state.apply_record(
            grouped(rank, [0, 1, 2, 3], time_ns=1, group="world")
        )  # fmt: skip
        state.apply_record(stuck_state(rank, 60.0))
    quiet = {pair: Traffic(0, 0, 0, 0) for pair in ring(4)}
    net = Links(4, ring(4), end_s=60.0, bad=quiet | {(1, 2): STUCK, (2, 3): STUCK})
    apply(state, net.items() if is_sampled else ())
    found = state.look(int((START_S + 60) * 1e9))
    (finding,) = [one for one in found.findings if one.kind == "hang"]
    assert finding.severity == "critical"
    assert "ll_reduce #40" in finding.what
    if is_sampled:
        assert finding.ranks == (2,)
        assert finding.what.startswith("The link of rank 2 (node0) carries nothing any more")
        assert set(finding.victims) == {0, 1, 3}
    else:
        assert finding.ranks == ()


def replace_registered(rank: int) -> RankRegistered:
    return msgspec.structs.replace(_registered(rank, "node0"), world_size=4, time_ns=1)
