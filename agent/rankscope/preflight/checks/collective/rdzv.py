"""coll.rdzv: the members find each other in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.collective.ends import began
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier

# Connecting and reading one key per member takes 3 ms on loopback and some round trips elsewhere;
# a name server that does not answer costs 5 s per question (resolv.conf(5), `timeout`).
SLOW_MS = 5000.0
_WOULD = {
    "static": "ranks wait in init_process_group and give up after 15 min",
    "env": "ranks wait in init_process_group and give up after 30 min",
    "c10d": "the rendezvous fails after 10 min with RendezvousTimeoutError",
}


class CollRdzv:
    """The torch processes of all nodes start, and meet in a TCPStore within 5 s."""

    id: ClassVar[str] = "coll.rdzv"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "smoke"})

    def judge(self, run: Run) -> Iterable[Finding]:
        """Return whose torch does not start, who did not meet, and who met slowly."""
        members = began(run)
        broken = {n: s for n, s in members.items() if s.stage == "not started" and s.error}
        if broken:
            yield from self._broken(broken)
            return  # the others waited for these
        missed = {n: s for n, s in members.items() if s.stage == "imported" and s.error}
        if missed:
            yield self._missed(run, missed, members)
        slow = {n: s.store_ms for n, s in members.items() if s.store_ms > SLOW_MS}
        if slow:
            yield self._slow(run, slow)

    def _broken(self, broken: dict[str, SmokeFacts]) -> Iterator[Finding]:
        for node, smoke in broken.items():
            has_tried = smoke.ended_by in ("raised", "died")
            line = (smoke.error.splitlines() or [""])[-1][:160]
            yield Finding(
                id=self.id,
                status="fail" if has_tried else "unknown",
                title=f"torch cannot be imported on {node}: {line}" if has_tried
                else f"{node}: {smoke.error}",
                nodes=(node,),
                evidence={"error": smoke.error, "ended_by": smoke.ended_by},
                told=tuple(smoke.output_tail.splitlines()[-5:]),
                fix=(Fix(node=node, command='python -c "import torch"'),) if has_tried else (),
                would=f"the ranks of {node} die at `import torch`, the others wait for them",
                wrong_if="training runs in another Python environment than this command",
            )  # fmt: skip

    def _missed(
        self, run: Run, missed: dict[str, SmokeFacts], members: dict[str, SmokeFacts]
    ) -> Finding:
        master = members.get(run.master)
        port = master.port if master is not None else 0
        is_all = len(missed) == len(members)  # nobody met anybody: then it is the store's side
        address = next(iter(run.reports[run.master].addresses), run.master) if master else ""
        return Finding(
            id=self.id,
            status="fail",
            title=f"{'no node' if is_all else ', '.join(missed)} "
            f"{'reached' if is_all else 'did not reach'} the store of {run.master}",
            nodes=(run.master,) if is_all else tuple(missed),
            edges=tuple((node, run.master) for node in missed if node != run.master),
            evidence={"port": port, "errors": {n: s.error for n, s in missed.items()}},
            told=tuple(f"{n}: {s.error.splitlines()[0][:200]}" for n, s in missed.items()),
            fix=tuple(
                Fix(node=node, command=f"python -c \"import socket; "
                    f"print(socket.create_connection(('{address}', {run.master_port}), 5))\"")
                for node in missed if node != run.master and address
            ),
            would=_WOULD[run.mode],
            wrong_if="these machines were too busy to import torch in time",
            confidence="likely",
        )  # fmt: skip

    def _slow(self, run: Run, slow: dict[str, float]) -> Finding:
        worst = max(slow, key=lambda node: slow[node])
        return Finding(
            id=self.id,
            status="warn",
            title=f"{worst} needs {slow[worst] / 1e3:.1f} s to meet in the store of {run.master}",
            nodes=tuple(slow),
            evidence={"store_ms": slow},
            told=tuple(f"{node}: {ms / 1e3:.1f} s" for node, ms in slow.items()),
            fix=tuple(
                Fix(node=node, command=f"time getent hosts {run.master}; "
                    f"time getent hosts {next(iter(run.reports[run.master].addresses), '')}")
                for node in slow
            ),
            would="each start and each new process group waits that long; training itself does not",
            wrong_if="the machine was busy with something else just then",
        )  # fmt: skip
