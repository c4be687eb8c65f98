"""The generator of faults: the same seed draws the same, and its own judgement can say no."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rankscope.preflight.model import CheckFinding, LaunchVerdict, Status
from tests.preflight.drawn import harm
from tests.preflight.drawn.catalogue import HEALTHY, KINDS, draw, draws
from tests.preflight.drawn.holes import part
from tests.preflight.drawn.judge import judge
from tests.preflight.drawn.remedies import flaws, is_sentence
from tests.preflight.drawn.world import RANDOM_PORTS, World, at, between, draw_world
from tests.preflight.faults import HEALTHY as NOTHING
from tests.preflight.trial import Answer, Trial

ALL = [*KINDS.values(), *HEALTHY.values()]
SEEDS = range(25)


def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 60
    assert len(HEALTHY) >= 40
    assert not set(KINDS) & set(HEALTHY)


def test_the_same_seed_draws_the_same() -> None:
    for kind in ALL:
        for seed in SEEDS:
            one, other = draw(kind, seed), draw(kind, seed)
            assert (one.world, one.case.says) == (other.world, other.case.says)
            assert one.case.wanted == other.case.wanted


def test_other_seeds_draw_other_places() -> None:
    for kind in KINDS.values():
        worlds = {(d.world, d.case.says) for d in (draw(kind, seed) for seed in SEEDS)}
        assert len(worlds) == len(SEEDS), kind.name


def test_every_kind_comes_once_before_any_comes_twice() -> None:
    names = [d.kind.name for d in draws(len(KINDS), 7, list(KINDS.values()))]
    assert sorted(names) == sorted(KINDS)
    assert len(draws(3, 7, list(KINDS.values()))) == 3
    assert [d.seed for d in draws(9, 7, ALL)] == [d.seed for d in draws(9, 7, ALL)]
    assert [d.seed for d in draws(9, 7, ALL)] != [d.seed for d in draws(9, 8, ALL)]


def test_what_is_wanted_follows_from_what_the_job_does() -> None:
    for kind in KINDS.values():
        for seed in SEEDS:
            want = draw(kind, seed).case.wanted
            if kind.truth in ("breaks", "sometimes"):
                assert want is not None, kind.name
                # that a cache will be written is not known before the job does it
                assert want.statuses == ("fail",) or kind.family == "storage", kind.name
            elif want is not None:
                assert want.statuses != ("fail",), kind.name


def test_places_are_of_the_world() -> None:
    for kind in KINDS.values():
        for seed in SEEDS:
            drawn = draw(kind, seed)
            for place in drawn.case.wanted.places if drawn.case.wanted else ():
                pairs = place.pairs or frozenset()
                named = {*(place.nodes or ()), *(name for pair in pairs for name in pair)}
                assert named
                assert named <= {*drawn.world.names}, kind.name


def test_a_world_knows_who_dials_whom() -> None:
    world = World(3, "10.77.0", (9, 80, 10), 29500, "env")
    assert world.by_address == [0, 2, 1]
    assert (world.dialled, world.dialling) == ([0, 2], [2, 1])
    tails = [draw_world(random.Random(seed)).tails for seed in SEEDS]
    assert any(tail != tuple(sorted(tail)) for tail in tails)


def test_a_part_of_the_ports_is_where_gloo_listens_or_where_it_does_not() -> None:
    low, high = RANDOM_PORTS
    middle = (low + high) // 2
    for share in (2, 3, 7):
        for seed in SEEDS:
            start, end = part(share, random.Random(seed))
            assert low <= start < end <= middle + 1
            start, end = part(share, random.Random(seed), is_high=True)
            assert middle < start < end <= high


FAULT = draw(KINDS["oneway-used"], 3)
EDGES = tuple(
    tuple(sorted(pair)) for place in FAULT.case.wanted.places for pair in place.pairs or ()
) if FAULT.case.wanted else ()  # fmt: skip


def found(
    id: str = "port.oneway", status: Status = "fail", edges: tuple[tuple[str, ...], ...] = EDGES
) -> CheckFinding:
    """Return a finding; without arguments the right one."""
    pairs = tuple((edge[0], edge[1]) for edge in edges)
    return CheckFinding(id=id, status=status, title="closed", edges=pairs)


def answers(*findings: CheckFinding, code: int = 2, odd: CheckFinding | None = None) -> Trial:
    """Return what all nodes answered; the last of them may have found something else."""
    names = FAULT.world.names

    def answer(name: str) -> Answer:
        own = (*findings, odd) if odd is not None and name == names[-1] else findings
        verdict = LaunchVerdict(
            run_id="run", expected=names, reported=names, findings=own, results=()
        )
        return Answer(name, code, 1.0, verdict, "")

    return Trial(NOTHING, tuple(map(answer, names)))


def test_the_right_answer_is_right() -> None:
    judgement = judge(FAULT, answers(found()))
    assert not judgement.misses
    assert not judgement.is_missed


STRAY = found("clock.sync", "warn", ())


@pytest.mark.parametrize(
    ("trial", "word"),
    [
        (answers(code=0), "0 times port.oneway"),
        (answers(found(), code=0), "exit 0, not 2"),
        (answers(found(status="warn")), "warn, not fail"),
        (answers(found(edges=(("node0", "node9"),))), "not (Place"),
        (answers(found(), found()), "2 times port.oneway"),
        (answers(found(), STRAY), "stray"),
        (answers(found(), odd=STRAY), "disagree"),
    ],
)
def test_a_wrong_answer_is_wrong(trial: Trial, word: str) -> None:
    assert any(word in miss for miss in judge(FAULT, trial).misses)


def test_exit_0_where_the_job_breaks_is_a_miss() -> None:
    assert judge(FAULT, answers(code=0)).is_missed
    assert not judge(draw(HEALTHY["plain"], 1), answers(code=0)).is_missed


def test_places() -> None:
    assert at(1).is_of(("node1",), (("node0", "node1"),))
    assert not at(1).is_of(("node1", "node2"), ())
    assert between((0, 2)).is_of((), (("node2", "node0"),))
    assert between((0, 2)).is_of(("node2",), (("node2", "node0"), ("node0", "node2")))
    assert not between((0, 2)).is_of(("node1",), (("node2", "node0"),))
    assert not between((0, 2)).is_of((), (("node2", "node0"), ("node2", "node1")))


@pytest.mark.parametrize("command", ["echo a\nrm -r b", "echo 'cut", "echo \x1b[2J"])
def test_a_command_may_be_unfit_to_be_printed(command: str) -> None:
    assert flaws(command)


def test_a_good_command_is_fit() -> None:
    assert not flaws("sudo sed -i '3s/^/# /' /etc/hosts && echo 'a b'   # don't")
    assert is_sentence("# ask the provider")
    assert not is_sentence("export A=1  # then start again")


NODE = harm.Node(
    ("table inet keep {", "tcp dport 23 drop", "}"), "2: eth0 inet 10.0.0.1/24", "unreachable "
    "198.51.100.0/24", ("127.0.0.1 localhost", "192.0.2.77 storage.example.org storage"), "node0",
    ("10.0.0.1", "10.0.0.2"), ("middle.py 8080 http",),
)  # fmt: skip
OTHER = replace(NODE, addresses="2: eth0 inet 10.0.0.2/24", host_name="node1")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"programs": ()}, "ended another's program"),
        ({"rules": ()}, "removed another's rule"),
        ({"hosts": ("127.0.0.1 localhost",)}, "line of /etc/hosts"),
        ({"routes": ""}, "removed another's route"),
        ({"names": ("10.0.0.1", "10.0.0.1")}, "node1 now leads to 10.0.0.1"),
    ],
)
def test_harm_is_seen(change: dict[str, object], word: str) -> None:
    world = World(2, "10.0.0", (1, 2), 29500, "env")
    after = [replace(NODE, **change), OTHER]  # type: ignore[arg-type]
    assert any(word in harm_done for harm_done in harm.done(world, [NODE, OTHER], after, ["node0"]))
    assert not harm.done(world, [NODE, OTHER], [NODE, OTHER], [])


def test_a_command_for_one_node_may_not_change_another() -> None:
    world = World(2, "10.0.0", (1, 2), 29500, "env")
    after = [NODE, replace(OTHER, host_name="worker")]
    assert harm.done(world, [NODE, OTHER], after, ["node0"])
    assert not harm.done(world, [NODE, OTHER], after, ["node1"])
