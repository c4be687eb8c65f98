"""One round with a drawn fault: break, ask preflight, do what it says, ask again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rankscope.preflight.model import CheckFinding
from tests.preflight.drawn import harm
from tests.preflight.drawn.catalogue import Draw
from tests.preflight.drawn.judge import Judgement, ask, judge, laboratory
from tests.preflight.drawn.remedies import Executed, execute, flaws
from tests.preflight.scene import Scene

# By a command; by what a person must do, as it says; not at all; "-": nothing was to be mended.
Mended = Literal["command", "person", "no", "-"]


@dataclass
class Round:
    """What became of one draw."""

    draw: Draw
    found: Judgement
    exits: list[int | None]
    answer_s: float
    screen: str
    elapsed_s: float = 0.0
    executed: list[Executed] = field(default_factory=list)
    again: tuple[CheckFinding, ...] = ()  # found after the remedies
    harm: list[str] = field(default_factory=list)
    mended: Mended = "-"
    job_works: bool | None = None  # after the remedies; None: not tried

    @property
    def is_exact(self) -> bool:
        """Return whether the answer was right: cause, place, status, exit code, on all nodes."""
        return not self.found.misses

    @property
    def is_mended(self) -> bool:
        """Return whether the remedy was one, as good as it can be for this kind."""
        wanted = self.draw.kind.remedy
        return self.mended in (("-", "command") if wanted == "command" else (
            "-", "command", "person"
        ))  # fmt: skip


def try_draw(
    draw: Draw, *, is_quick: bool = True, is_crowded: bool = True,
    job: Callable[[Scene], bool] | None = None,
) -> Round:  # fmt: skip
    """Go through one round; `job`, if given, is tried after remedies that mended."""
    started = time.monotonic()
    with laboratory(draw) as scene:
        draw.case.inject(scene)
        harm.plant(scene)
        trial = ask(scene, draw, is_quick=is_quick, is_crowded=is_crowded)
        round_ = Round(
            draw, judge(draw, trial), [answer.exit_code for answer in trial.answers],
            trial.elapsed_s, trial.answers[0].screen,
        )  # fmt: skip
        if round_.found.findings:
            _mend(scene, round_)
        if job is not None and round_.mended == "command" and draw.kind.truth in _BROKEN:
            round_.job_works = job(scene)
            round_.mended = "command" if round_.job_works else "no"
    round_.elapsed_s = time.monotonic() - started
    return round_


_BROKEN = ("breaks", "sometimes")


def _mend(scene: Scene, round_: Round) -> None:
    draw, findings = round_.draw, round_.found.findings
    before = harm.look(scene)
    round_.executed = execute(scene, findings)
    named = {one.node for one in round_.executed if not one.is_person}
    round_.harm = harm.done(draw.world, before, harm.look(scene), named)
    round_.harm += [
        flaw for finding in findings for fix in finding.fix for flaw in flaws(fix.command)
    ]
    round_.again = judge(draw, ask(scene, draw)).findings
    ids = {finding.id for finding in findings}
    fails = {finding.id for finding in round_.again if finding.status == "fail"}
    other_faces = draw.case.wanted.ids if draw.case.wanted else frozenset()
    round_.harm += [f"a new failure: {id}" for id in sorted(fails - ids - other_faces)]
    if not fails and not ids & {finding.id for finding in round_.again}:
        round_.mended = "command"
    else:
        round_.mended = "person" if any(one.is_person for one in round_.executed) else "no"
