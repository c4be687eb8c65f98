"""Pipelines that scripts write themselves are known by their exchanges; what else exchanges is not.

Simulation: who waits for whom, and how long, comes out of the run.
"""

from __future__ import annotations

import msgspec
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.stage_table import Place
from rankscope_server.verdict.answers import Look
from rankscope_server.verdict.cost import cost_of
from tests.analysis.simulator import START_NS, Item, apply
from tests.analysis.timeline import Act, Program, Stage, Timeline, attempt_of, data_parallel, noisy

STEPS = 40
NOISE = noisy(5, 16, STEPS, 0.02)


def work(rank: int, step: int) -> float:
    return float(NOISE[rank, step])


def items_of(
    program: Program, num_ranks: int, passes: int = 1, without: tuple[int, ...] = ()
) -> list[Item]:
    """Return what the agents send; `passes` backward passes a step, of some ranks `without`."""
    groups = {"world": tuple(range(num_ranks)), "pp": tuple(range(num_ranks))}
    timeline = Timeline(num_ranks, STEPS, program, groups).run()
    return timeline.items(extra=lambda rank, _: {"microbatches": 0 if rank in without else passes})


def places(items: list[Item]) -> dict[int, Place]:
    attempt = attempt_of(items)
    attempt.window(START_NS + 10**12)
    return attempt.stages.places


def look_at(items: list[Item]) -> Look:
    state = RunState("run")
    apply(state, items)
    return state.look(items[-1][0])


def of_pipeline(look: Look) -> list[Finding]:
    return [finding for finding in look.findings if finding.detector == "pipeline"]


# --- programs ----------------------------------------------------------------------------------


def chain(num_stages: int, microbatches: int, schedule: str, turns: int = 1) -> Program:
    """Return a pipeline; rank = replica * stages + stage. `turns` go through it one by one."""

    def program(rank: int, step: int) -> list[Act]:
        stage = Stage(rank, rank % num_stages, num_stages, 10 * work(rank, step), 0.5)
        stage.acts.append(Act("compute", 0.2, "data"))
        run = stage.gpipe if schedule == "gpipe" else stage.one_forward_one_backward
        for _ in range(turns):
            run(microbatches)
        return [*stage.acts, Act("compute", 2.0, "optimizer")]

    return program


def never_flushed(rank: int, step: int) -> list[Act]:
    """PipeDream on two ranks: the first is a forward ahead, and neither waits for the other."""
    forward, backward = (
        Act("compute", ms * work(rank, step), phase)
        for ms, phase in ((10, "forward"), (20, "backward"))
    )
    if rank:
        receive, send = (Act(kind, 0.5, group="pp", peer=0) for kind in ("recv", "send"))
        return [receive, Act("wait"), forward, backward, send]
    receive, send = (Act(kind, 0.5, group="pp", peer=1) for kind in ("recv", "send"))
    back = [receive, Act("wait", phase="backward"), backward]
    return [forward, send, *back * ((step > 1) + (step == STEPS))]


def exchanges(num_ranks: int, order: str, *, is_ring: bool, layers: int = 3) -> Program:
    """Return ranks that exchange with their neighbours in each layer, forward and backward.

    "at once": all send and receive, then wait; "in turns": even ranks send and then receive, odd
    ones the other way round; "hidden": they compute before they wait.
    """

    def program(rank: int, step: int) -> list[Act]:
        peers = [(rank + shift) % num_ranks for shift in (1, -1)
                 if is_ring or 0 <= rank + shift < num_ranks]  # fmt: skip
        kinds = ["send", "recv"]
        if order == "in turns" and rank % 2:
            peers, kinds = peers[::-1], kinds[::-1]
        acts: list[Act] = []
        for phase, ms in (("forward", 10.0), ("backward", 20.0)):
            compute, wait = Act("compute", ms * work(rank, step) / layers, phase), Act("wait")
            for _ in range(layers):
                for peer in dict.fromkeys(peers):
                    for kind in kinds:
                        acts.append(Act(kind, 0.5, phase, group="pp", peer=peer))
                        acts += [wait] * (order == "in turns")
                acts += [compute, wait] if order == "hidden" else [wait, compute]
        return [*acts, Act("compute", 2.0, "optimizer")]

    return program


def parameter_server(rank: int, step: int) -> list[Act]:
    """Return one worker (rank 0) and its server, which adds up and sends weights back."""
    peer = 1 - rank
    send, receive = (Act(kind, 0.5, group="pp", peer=peer) for kind in ("send", "recv"))
    if rank:
        return [receive, Act("wait"), Act("compute", 15.0, "optimizer"), send, Act("wait")]
    computing = [Act("compute", 10 * work(rank, step)), Act("compute", 20.0, "backward")]
    return [*computing, send, receive, Act("wait", phase="backward")]


def one_way(rank: int, step: int) -> list[Act]:
    """Return a teacher (rank 0) that sends its student what it makes of a batch."""
    computing = [Act("compute", 10 * work(rank, step)), Act("compute", 20.0, "backward")]
    if rank:
        return [Act("recv", 0.5, group="pp", peer=0), Act("wait"), *computing]
    return [*computing, Act("send", 0.5, group="pp", peer=1), Act("wait", phase="backward")]


# --- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "microbatches", "schedule", "replicas"),
    [
        (2, 1, "gpipe", 1), (4, 1, "gpipe", 1), (2, 8, "gpipe", 1), (4, 8, "1f1b", 1),
        (3, 2, "gpipe", 1), (4, 8, "1f1b", 4), (2, 1, "gpipe", 4),
    ],
)  # fmt: skip
def test_stages_follow_from_what_ranks_send(
    num_stages: int, microbatches: int, schedule: str, replicas: int
) -> None:
    program = chain(num_stages, microbatches, schedule)
    found = places(items_of(program, num_stages * replicas, microbatches))
    assert found == {
        rank: Place(rank % num_stages, num_stages, microbatches)
        for rank in range(num_stages * replicas)
    }


def test_microbatches_that_go_through_one_by_one_count_as_one() -> None:
    items = items_of(chain(2, 1, "gpipe", turns=4), 2, passes=4)
    assert places(items) == {0: Place(0, 2, 1), 1: Place(1, 2, 1)}
    (finding,) = of_pipeline(look_at(items))
    assert finding.kind == "no_pipelining"
    assert "(4 microbatches, each alone in the pipeline)" in finding.what


@pytest.mark.parametrize(
    ("program", "num_ranks"),
    [
        (data_parallel(10, 20, 3, 2.0, work), 4),
        *((exchanges(n, order, is_ring=is_ring), n)
          for n in (2, 3, 4)
          for order in ("at once", "in turns", "hidden")
          for is_ring in (True, False)
          if not (is_ring and n == 3 and order == "in turns")),  # odd rings wait for themselves
        (exchanges(2, "in turns", is_ring=True, layers=1), 2),
        (one_way, 2),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_not_taken_for_one(program: Program, num_ranks: int) -> None:
    items = items_of(program, num_ranks)
    assert places(items) == {}
    assert of_pipeline(look_at(items)) == []


def test_a_server_of_parameters_is_no_stage() -> None:
    found = places(items_of(parameter_server, 2, without=(1,)))
    assert {rank: (one.stage, one.role) for rank, one in found.items()} == {1: (-1, "server")}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_that_work_one_after_the_other_are_advised_to_pipeline(num_stages: int) -> None:
    (finding,) = of_pipeline(look_at(items_of(chain(num_stages, 1, "gpipe"), num_stages)))
    idle = (num_stages - 1) / num_stages
    assert (finding.kind, finding.severity, finding.ranks) == ("no_pipelining", "info", ())
    assert finding.cost_throughput_ratio == pytest.approx(idle, abs=0.05)
    assert f"{num_stages} stages work one after the other (1 microbatch)" in finding.what
    # 30 ms a stage; with 4 and 8 microbatches (p - 1) / (m + p - 1) of a step idles
    assert f"4 would idle {100 * (num_stages - 1) / (num_stages + 3):.0f} % of a step" in (
        finding.next.replace(".0 %", " %")
    )


def test_what_stages_wait_for_each_other_is_no_communication() -> None:
    attempt = attempt_of(items_of(chain(2, 1, "gpipe"), 2))
    cost = cost_of(attempt.window(START_NS + 10**12))
    assert cost is not None
    waits = {name: cost.parts[name] for name in ("bubble", "waiting", "communication")}
    assert waits["bubble"] > 0.9 * sum(waits.values())
    # of 62 ms a step each rank takes part in two transfers of half a millisecond
    assert 0.0 < waits["communication"] < 0.06 * waits["bubble"]


def test_enough_microbatches_are_left_alone() -> None:
    assert of_pipeline(look_at(items_of(chain(2, 8, "1f1b"), 2, passes=8))) == []


def test_a_pipeline_that_never_runs_empty_idles_nothing() -> None:
    items = items_of(never_flushed, 2)
    assert set(places(items)) == {0, 1}
    assert of_pipeline(look_at(items)) == []


def test_what_ranks_say_comes_first() -> None:
    attempt = attempt_of(items_of(chain(2, 1, "gpipe"), 2))
    said = attempt.ranks[0]
    attempt.apply_record(msgspec.structs.replace(
        said, time_ns=said.time_ns + 1, stage=0, num_stages=2, num_microbatches=6,
    ))  # fmt: skip
    ranks = attempt.window(START_NS + 10**12).ranks
    assert [ranks[n].num_microbatches for n in (0, 1)] == [6, 1]
    assert [ranks[n].stage for n in (0, 1)] == [0, 1]


def test_a_new_process_has_no_place_yet() -> None:
    attempt: AttemptState = attempt_of(items_of(chain(2, 1, "gpipe"), 2))
    attempt.window(START_NS + 10**12)
    assert attempt.stages.places
    known = attempt.ranks[0]
    attempt.apply_record(msgspec.structs.replace(known, time_ns=known.time_ns + 1, pid=7))
    assert not attempt.stages.places


def test_over_nccl_the_host_does_not_know() -> None:
    items: list[Item] = [
        (at, msgspec.structs.replace(what, backend="nccl"))
        if isinstance(what, schema.RankRegistered)
        else (at, what)
        for at, what in items_of(chain(2, 1, "gpipe"), 2)
    ]
    assert places(items) == {}
