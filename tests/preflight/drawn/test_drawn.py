"""Some draws, from the fault to the remedy; benchmarks/preflight_drawn.py goes through all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.preflight.drawn.catalogue import HEALTHY, KINDS, draw
from tests.preflight.drawn.judge import laboratory
from tests.preflight.drawn.rounds import Round, try_draw

pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip
DRAWS = (
    ("master-closed", 11), ("oneway-used", 12), ("egress-random", 13), ("policy-drop", 14),
    ("hosts-dead", 15), ("master-localhost-all", 16), ("port-differs", 17), ("rank0-swapped", 18),
)  # fmt: skip
HEALTHY_DRAWS = (("open-subnet", 21), ("docker", 22), ("full-names", 23))
EVERY = 9  # of how many kinds one is injected here: the benchmark goes through all


def said(round_: Round) -> str:
    """Return what was wrong with a round, for the reader of a failed test."""
    commands = [f"{e.node}: {e.command} -> {e.exit_code} {e.said}" for e in round_.executed]
    again = [f"still: {finding.id} {finding.title}" for finding in round_.again]
    return "\n".join(
        [round_.draw.case.says, *round_.found.misses, *round_.harm, *commands, *again,
         round_.screen]
    )  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), DRAWS)
def test_a_drawn_fault_is_found_and_mended(name: str, seed: int) -> None:
    round_ = try_draw(draw(KINDS[name], seed))
    assert round_.is_exact, said(round_)
    assert round_.is_mended, said(round_)
    assert not round_.harm, said(round_)


@pytest.mark.parametrize(("name", "seed"), HEALTHY_DRAWS)
def test_a_drawn_healthy_laboratory_passes_clean(name: str, seed: int) -> None:
    round_ = try_draw(draw(HEALTHY[name], seed))
    assert round_.is_exact, said(round_)
    assert set(round_.exits) == {0}


def test_an_injection_ends_with_its_laboratory() -> None:
    before = _machine()
    for kind in [*KINDS.values()][::EVERY]:
        if not kind.needs:
            drawn = draw(kind, 3)
            with laboratory(drawn) as scene:
                drawn.case.inject(scene)
    assert _machine() == before


def _machine() -> list[str]:
    commands = ("hostname", "ip -o link", "ip -4 -o address", "ip rule", "ip route show table all")
    said = [subprocess.check_output(command.split(), text=True) for command in commands]
    rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=False)
    return [*said, rules.stdout, Path("/etc/hosts").read_text()]
