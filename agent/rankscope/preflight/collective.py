"""When the collective smoke test may start, and on which nodes: the same answer on every node."""

from __future__ import annotations

from importlib.util import find_spec

from rankscope.preflight.board.board import Board
from rankscope.preflight.checking import Run
from rankscope.preflight.checks.collective import CHECKS
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.model import Options
from rankscope.preflight.plan import Plan
from rankscope.preflight.smoke.child import SmokeChild


class Collective:
    """The smoke test of one node: a child that waits until the paths were found open."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._child: SmokeChild | None = None
        self._left_out = _left_out(plan)

    def start(self) -> None:
        """Start the child early: it imports torch while the paths are measured."""
        if not self._left_out:
            self._child = SmokeChild(self._plan.system, self._plan.options)
            self._child.start()

    @property
    def port(self) -> int:
        """Return the port that the child holds for the store; 0: none."""
        return self._child.port if self._child is not None else 0

    async def imported(self) -> None:
        """Wait until the child has imported torch, or has failed to."""
        if self._child is not None:
            await self._child.imported()

    async def run(self, board: Board, run: Run) -> SmokeFacts:
        """Release the child if every path that it needs is open; return what it measured."""
        reason = self._left_out or blocked(run)
        if reason or self._child is None:
            return SmokeFacts(backend=run.backend, skipped=reason)
        names = run.expected
        store = run.reports[run.master]
        address = run.gloo_address(run.master) or next(iter(store.addresses), "127.0.0.1")
        return await self._child.run(
            rank=names.index(board.mine.node), nodes=names, address=address,
            port=store.listening.store, backend=run.backend,
        )  # fmt: skip

    async def stop(self) -> None:
        """Leave no process behind."""
        if self._child is not None:
            await self._child.stop()


def blocked(run: Run) -> str:
    """Return why a collective over all nodes of `run` cannot work; "" if nothing is known."""
    if run.absent:
        return f"skipped: {', '.join(run.absent[:4])} did not report"
    for report in run.present:
        software = report.facts.software
        if software is not None and not software.has_torch:
            return f"skipped: torch is not installed on {report.node}"
        address = run.gloo_address(report.node)
        if address.startswith("127.") or address == "::1":
            return f"skipped: gloo on {report.node} would tell the others {address}"
    if not run.reports[run.master].listening.store:
        return f"skipped: {run.master} has no port for the store"
    for start, end, edge in run.edges():
        failed = [d.outcome for d in edge.ephemeral if d.outcome != "ok"]
        if failed:
            return f"skipped: {start} cannot reach {end} ({failed[0]})"
        if edge.mtu is not None and not edge.mtu.large_ok:
            return f"skipped: large messages from {start} to {end} vanish"
    return ""


def _is_wanted(options: Options) -> bool:
    """Return whether any check of the family is asked for."""
    ids = {check.id for check in CHECKS}
    only, skip = set(options.only), set(options.skip)
    if "collective" in skip or ids <= skip:
        return False
    return not only or bool(only & {"collective", *ids})


def _left_out(plan: Plan) -> str:
    options = plan.options
    if options.tier == "quick":
        return "left out by --quick"
    if not _is_wanted(options):
        return "left out by --only or --skip"
    if plan.who.num_nodes < 2:
        return "one node has no peers"
    if not plan.is_mesh:
        return "this agent opens no port"
    return "" if find_spec("torch") is not None else "torch is not installed here"
