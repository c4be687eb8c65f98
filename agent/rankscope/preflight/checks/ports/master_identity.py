"""port.master.identity: who answers on MASTER_PORT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed
from rankscope.preflight.checks.pairs import shortened
from rankscope.preflight.facts.edges import Dial, EdgeFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class PortMasterIdentity:
    """Who answers on MASTER_PORT is the node that holds it, and no other program.

    A store that talks to a web server waits without a word: c10d printed nothing for 33 minutes.
    """

    id: ClassVar[str] = "port.master.identity"
    scope: ClassVar[Scope] = "pair"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Group by what answered, and where."""
        groups: dict[tuple[str, str, str], dict[str, Dial]] = defaultdict(dict)
        for report in run.present:
            dial = report.edges.get(run.master, EdgeFacts()).master
            if dial is not None and dial.outcome in ("not-us", "wrong-host"):
                who = dial.answered_by if dial.outcome == "wrong-host" else ""
                groups[dial.outcome, dial.address, who][report.node] = dial
        for (outcome, address, who), dials in groups.items():
            one = next(iter(dials.values()))
            where = f"{address}:{one.port}"
            if outcome == "wrong-host":
                title = f"{where} is answered by {who}, not by {run.master}"
                fix = Fix(node=who, command=f"ip -br address | grep -w {address}")
            else:
                said = f": {one.banner!r}" if one.banner else ""
                title = f"another program answers on {where} of {run.master}{said}"
                fix = Fix(node=run.master, command=f"sudo ss -ltnp 'sport = :{one.port}'")
            yield Finding(
                id=self.id,
                status="fail",
                title=title,
                nodes=(who or run.master,),
                edges=tuple((node, run.master) for node in dials),
                evidence={
                    "class": outcome, "address": address, "port": one.port, "answered_by": who,
                    "banner": one.banner,
                },
                told=shortened([f"seen from {listed(list(dials))}"]),
                fix=(fix, Fix(command=f"export MASTER_PORT={_other(run, one.port)}")),
                wrong_if="a proxy in between answers before it has reached the node",
            )  # fmt: skip


def _other(run: Run, port: int) -> int:
    """Return a port beside the taken one, which is below every usual range of random ports."""
    taken = {port} | {r.listening.mesh for r in run.present}
    return next(other for other in range(29400, 30000) if other not in taken)
