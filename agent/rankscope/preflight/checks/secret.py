"""The secret that keeps strangers out: which nodes have another one than the rest."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.commands import command
from rankscope.preflight.checks.pairs import ordered, shortened
from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.model import CheckFinding, Fix

TOKEN = "RANKSCOPE_PREFLIGHT_TOKEN"


class NodeSecret(BuiltinCheck, id="node.secret", scope="all"):
    """All nodes have one secret, so that no stranger takes part or changes the answer."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Name those who differ from most; where it is even, from node 0."""
        seen = refusing(run)
        if not seen:
            return
        here, there = {report.node for report in run.present}, set(seen)
        is_here = len(here) < len(there) or (len(here) == len(there) and run.master in there)
        odd = ordered(run, here if is_here and run.master not in here else there)
        source = next((report.secret_from for report in run.present if report.secret_from), "")
        yield self.fail(
            "another secret than the other nodes have",
            at=odd,
            edges=((start, end) for end, dials in seen.items() for start in dials),
            evidence={"class": "other-secret", "here": sorted(here), "there": sorted(there)},
            lines=shortened(
                [
                    f"from {start}: {end} at {dial.address}:{dial.port} runs preflight, and does "
                    "not know the secret"
                    for end, dials in seen.items()
                    for start, dial in dials.items()
                ]
                + ([f"{listed(ordered(run, here))}: from {source}"] if source else [])
            ),
            fix=_fixes(run, odd, source),
            impact="the job does not use this secret: of these nodes nothing is known",
            unless="other people run a preflight there: then choose another MASTER_PORT",
            confidence="likely",  # who answers so has proven nothing
        )


def refusing(run: Run) -> dict[str, dict[str, Dial]]:
    """Return the nodes that never reported and whose agents do not know our secret, by whom."""
    found: dict[str, dict[str, Dial]] = {}
    for start, end, edge in run.edges():
        for dial in (edge.mesh, *edge.others, edge.master):
            if dial is not None and dial.outcome == "other-secret" and end in run.absent:
                found.setdefault(end, {}).setdefault(start, dial)
    return found


def _fixes(run: Run, odd: tuple[str, ...], source: str) -> tuple[Fix, ...]:
    known = next((node for node in run.expected if node not in odd), "")
    if "RANKSCOPE" in source:  # a variable: the one who set it knows it
        return on_each(odd, f"# set {source} as on {known}: srun passes it on, mpirun with -x")
    if source.startswith("--token-file"):
        return on_each(odd, f"# give it the --token-file of {known}")
    if source.startswith("/"):
        there = command("ssh", known, command("cat", source))
        return on_each(odd, f'export {TOKEN}="$({there})"')
    return on_each(odd, f"# copy the line with {TOKEN} that preflight shows on {known}")
