"""Preflight in a drawn laboratory, and what is wrong with its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.preflight.model import CheckFinding
from tests.preflight.drawn.catalogue import Draw
from tests.preflight.drawn.world import Case, Wanted
from tests.preflight.faults import Fault
from tests.preflight.nslab import Lab
from tests.preflight.scene import Scene, base_environment
from tests.preflight.trial import Answer, Trial, Way, ask_all, describe

_SECRET = {"RANKSCOPE_PREFLIGHT_TOKEN": "4f7d1f0b9c2ae64355a1c8e0f2b94d6a"}
# What a crowded machine cannot time.
TIMED = ("net.latency", "net.jitter", "net.loss", "net.bandwidth")


@dataclass(frozen=True)
class Judgement:
    """What preflight made of one draw."""

    is_missed: bool  # exit 0 or no word of it, where the job breaks
    misses: tuple[str, ...]  # none: exact
    findings: tuple[CheckFinding, ...]  # of all nodes, each once


@contextlib.contextmanager
def laboratory(draw: Draw, *, num_threads: int = 1) -> Iterator[Scene]:
    """Build the laboratory of a draw, healthy."""
    base = {**_SECRET, **base_environment(), "OMP_NUM_THREADS": str(num_threads)}
    with Lab(
        draw.world.num_hosts, wire=draw.case.wire, mtu=draw.case.mtu, net=draw.world.net,
        tails=draw.world.tails, base=base,
    ) as lab:  # fmt: skip
        yield Scene(lab, draw.world.mode, master_port=draw.world.master_port)


def ask(scene: Scene, draw: Draw, *, is_quick: bool = True, is_crowded: bool = True) -> Trial:
    """Run preflight on all nodes, without torch."""
    case = draw.case
    options = "--quick" if is_quick and not case.is_default else ""
    fault = Fault(draw.kind.name, case.says, case.inject, (), options=case.options)
    skip = TIMED if is_crowded and not draw.kind.is_timed else ()
    way = Way(has_torch=case.has_torch, is_user=case.is_user, options=options, skip=skip)
    return ask_all(scene, fault, way)


def judge(draw: Draw, trial: Trial) -> Judgement:
    """Compare the answers with what is wanted."""
    case, wrong = draw.case, []
    for answer in trial.answers:
        if answer.verdict is None:
            if not _is_excused(case, answer):
                said = answer.screen[-800:]
                wrong.append(f"{answer.node}: no verdict, exit {answer.exit_code}: {said}")
            continue
        wrong += [f"{answer.node}: {text}" for text in _unlike(case, answer)]
    essences = {_essence(answer) for answer in trial.answers if answer.verdict is not None}
    if case.agree and len(essences) > 1:
        wrong.append(f"the nodes disagree: {sorted(essences)}")
    return Judgement(_is_missed(draw, trial), tuple(wrong), _findings(trial))


def _is_excused(case: Case, answer: Answer) -> bool:
    return answer.exit_code == 64 and case.wanted is None


def _unlike(case: Case, answer: Answer) -> Iterator[str]:
    loud = answer.loud
    for finding in loud:
        if not _is_wanted(case, finding) and not _is_beside(case, finding):
            yield f"stray: {describe(finding)}"
    same = [finding for finding in loud if case.wanted and finding.id in case.wanted.ids]
    if case.wanted is not None:
        yield from _unlike_wanted(case.wanted, same, [finding.id for finding in loud])
    code = _code(case, answer)
    if answer.exit_code != code:
        yield f"exit {answer.exit_code}, not {code}"


def _is_wanted(case: Case, finding: CheckFinding) -> bool:
    return case.wanted is not None and finding.id in case.wanted.ids


def _is_beside(case: Case, finding: CheckFinding) -> bool:
    return finding.id in case.also and finding.status == "warn"


def _unlike_wanted(want: Wanted, same: list[CheckFinding], told: list[str]) -> Iterator[str]:
    if not same and want.is_optional:
        return
    if len(same) != 1:
        yield f"{len(same)} times {' or '.join(sorted(want.ids))} among {told}"
        return
    (finding,) = same
    if finding.status not in want.statuses:
        yield f"{finding.id} is {finding.status}, not {' or '.join(want.statuses)}"
    if want.places and not any(p.is_of(finding.nodes, finding.edges) for p in want.places):
        yield f"{finding.id} is about {finding.nodes} {finding.edges}, not {want.places}"


def _code(case: Case, answer: Answer) -> int:
    """Return the exit code that is right for what is wanted, and for how it was told."""
    want = case.wanted
    if want is None:
        return 0
    failed = {f.id for f in answer.loud if f.status == "fail"}
    must_fail = "warn" not in want.statuses
    if not failed and not must_fail:
        return 0
    return 3 if (failed or want.ids) <= {"node.absent"} else 2


def _is_missed(draw: Draw, trial: Trial) -> bool:
    want = draw.case.wanted
    if draw.kind.truth not in ("breaks", "sometimes") or want is None:
        return False
    if "warn" in want.statuses:
        return any(not want.ids & {f.id for f in answer.loud} for answer in trial.answers)
    return any(answer.exit_code == 0 for answer in trial.answers)


def _essence(answer: Answer) -> str:
    return "; ".join(
        sorted(f"{f.id} {f.status} {','.join(f.nodes)} {sorted(f.edges)}" for f in answer.loud)
    )


def _findings(trial: Trial) -> tuple[CheckFinding, ...]:
    found: dict[tuple[str, str], CheckFinding] = {}
    for answer in trial.answers:
        for finding in answer.loud:
            found.setdefault((finding.id, finding.title), finding)
    return tuple(found.values())
