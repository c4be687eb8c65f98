"""Servers that all workers wait for are advice with its cost; workers are no peers of theirs."""

from __future__ import annotations

import pytest

from rankscope.wire import schema
from rankscope.wire.formulas import exchange_ratio
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.shared.comparison import roles_of
from rankscope_server.findings.finding import Finding
from tests.analysis.simulator import START_NS, Item, apply
from tests.analysis.timeline import Act, Program, Timeline, attempt_of, noisy

STEPS = 60
NOISE = noisy(7, 8, STEPS, 0.02)


def job(
    workers: int, transfer_ms: float, apply_ms: float, slow: float = 1.0, servers: int = 1
) -> Program:
    """Return workers (first ranks) and servers that take their gradients one after the other.

    The last worker takes `slow` times as long.
    """

    def program(rank: int, step: int) -> list[Act]:
        piece_ms = transfer_ms / servers
        if rank >= workers:
            acts = []
            for kind in ("recv", "send"):
                for worker in range(workers):
                    acts.append(Act(kind, piece_ms, "other", group="pp", peer=worker))
                    acts.append(Act("wait", phase="other"))
                if kind == "recv":
                    acts.append(Act("compute", apply_ms / servers, "optimizer"))
            return acts
        longer = float(NOISE[rank, step]) * (slow if rank == workers - 1 else 1.0)
        computing = [Act("compute", 20 * longer), Act("compute", 40 * longer, "backward")]
        exchange = [
            Act(kind, piece_ms, "other", group="pp", peer=workers + server)
            for kind in ("send", "recv")
            for server in range(servers)
        ]
        return [*computing, *exchange, Act("wait", phase="other")]

    return program


def items_of(
    program: Program, workers: int, servers: int, totals: bool = True, **more: int
) -> list[Item]:
    """Return what agents send; servers run no backward and report `totals` of their shards.

    `more` are columns of the steps: collectives in the first one alone, say.
    """
    world = workers + servers
    groups = {"world": tuple(range(world)), "pp": tuple(range(world))}
    items = Timeline(world, STEPS, program, groups).run().items(
        extra=lambda rank, step: {"microbatches": int(rank < workers)}
        | {name: value * (step == 1) for name, value in more.items()}
    )  # fmt: skip
    for server in range(servers if totals else 0):
        name = f"shard_{server}"
        items.append((items[-1][0], schema.Metrics(
            attempt=0, rank=workers + server, time_ns=START_NS + STEPS, step=STEPS,
            values={f"{name}_requests": 60.0 * workers, f"{name}_bytes": 60e6 * workers,
                    f"{name}_queue_seconds": 1.8 * workers, f"{name}_busy_seconds": 3.0},
        )))  # fmt: skip
    return items


def found(items: list[Item]) -> list[Finding]:
    state = RunState("run")
    apply(state, items)
    look = state.look(items[-1][0])
    return [finding for finding in look.findings if finding.kind == "server_bottleneck"]


def test_the_wait_that_no_worker_is_spared_is_the_cost() -> None:
    (finding,) = found(items_of(job(3, 10.0, 15.0), 3, 1))
    assert (finding.severity, finding.ranks) == ("info", ())
    assert "for 1 parameter server" in finding.what
    assert "2 servers with even shards" in finding.next
    assert "all_reduce of all 4 ranks" in finding.next
    (_, load) = finding.evidence
    assert load.text.startswith("Shard 0: 977 KiB for each gradient and its answer, gradients wait")
    assert "30.0 ms until it takes them" in load.text


def test_so_it_is_where_workers_call_the_server_and_only_began_with_a_collective() -> None:
    """Waits for remote calls are known, and no collective is counted in their steps."""
    (by_messages,) = found(items_of(job(3, 10.0, 15.0), 3, 1))
    (by_calls,) = found(items_of(job(3, 10.0, 15.0), 3, 1, num_collectives=1))
    assert by_calls.cost_throughput_ratio == pytest.approx(by_messages.cost_throughput_ratio)


def test_the_cost_is_what_servers_without_a_delay_would_save() -> None:
    slow, quick = job(3, 10.0, 15.0), job(3, 0.0, 0.0)
    groups = {"world": (0, 1, 2, 3), "pp": (0, 1, 2, 3)}
    now, without = (Timeline(4, STEPS, one, groups).run().step_ms() for one in (slow, quick))
    (finding,) = found(items_of(slow, 3, 1))
    assert finding.cost_throughput_ratio == pytest.approx(1 - without / now, abs=0.05)


@pytest.mark.parametrize(
    ("program", "workers", "servers", "totals"),
    [
        (job(3, 0.5, 1.0), 3, 1, True),  # quick servers
        (job(3, 0.5, 1.0, slow=2.5), 3, 1, True),  # workers wait for one of them
        (job(2, 2.0, 2.0, servers=2), 2, 2, True),
        (job(3, 10.0, 15.0), 3, 1, False),  # no rank says that it is a server
    ],
)
def test_it_is_silent_where_servers_hold_up_nobody_or_are_not_known(
    program: Program, workers: int, servers: int, totals: bool
) -> None:
    assert found(items_of(program, workers, servers, totals)) == []


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_have_a_role_of_their_own(servers: int) -> None:
    items = items_of(job(3, 10.0, 15.0, servers=servers), 3, servers, totals=False)
    window = attempt_of(items).window(START_NS + 10**12)
    roles = roles_of(window)
    assert {window.ranks[rank].role for rank in range(3)} == {""}
    assert {window.ranks[rank].role for rank in range(3, 3 + servers)} == {"server"}
    assert roles[0] == roles[1] != roles[3]


@pytest.mark.parametrize("totals", [True, False])
def test_a_server_that_is_called_is_known_by_what_it_reports(totals: bool) -> None:
    """Calls of torch.distributed.rpc are no exchanges; who reports nothing has no role."""
    items = items_of(job(3, 10.0, 15.0), 3, 1, totals)
    items = [
        item for item in items
        if not (isinstance(item[1], tuple) and item[1][0].kind == "collectives")
    ]  # fmt: skip
    window = attempt_of(items).window(START_NS + 10**12)
    roles = [window.ranks[rank].role for rank in range(4)]
    assert roles == ["", "", "", "server" if totals else ""]
    assert len(found(items)) == totals


def test_a_server_that_works_longer_than_workers_is_not_accused() -> None:
    items = items_of(job(3, 1.0, 200.0), 3, 1)
    state = RunState("run")
    apply(state, items)
    look = state.look(items[-1][0])
    assert not [finding for finding in look.findings if 3 in finding.ranks]


def test_the_fullest_link_is_a_servers_or_where_there_are_more_of_them_a_workers() -> None:
    assert exchange_ratio(8, 1) == 8.0
    assert exchange_ratio(8, 4) == 2.0
    assert exchange_ratio(2, 4) == 1.0
    assert exchange_ratio(4) == 0.75  # of a ring: (n - 1) / n
