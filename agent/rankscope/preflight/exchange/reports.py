"""The newest report of every node, from whichever carrier brought it first."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from rankscope.preflight.exchange.intake import Intake, RefusedReportError, name
from rankscope.preflight.model import STAGES, Claim, NodeReport, Stage, gone_nodes

Result = TypeVar("Result")

MOST_NODES = 4096  # where it is not known how many there are
MOST_REFUSED = 16  # that are reported


class Exchange:
    """Reports by node. Merging is idempotent: the higher version holds."""

    def __init__(
        self, mine: NodeReport, num_nodes: int = 0,
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        """Take `num_nodes`, 0 if unknown; `on_refused` gets why a report was not taken, once."""
        self._intake, self._on_refused = Intake(num_nodes), on_refused
        self._most = 2 * num_nodes + 64 if num_nodes else MOST_NODES
        self._refused: set[str] = set()  # nodes
        self.mine = mine
        self.reports: dict[str, NodeReport] = {mine.node: mine}
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []

    def publish(self, **fields: object) -> None:
        """Change our own report; all other nodes will get it."""
        changed = msgspec.structs.replace(self.mine, version=self.mine.version + 1, **fields)
        self.mine = self._intake.clean(changed)  # as the others see it
        self.reports[self.mine.node] = self.mine
        self.wake()

    def add(self, report: NodeReport) -> bool:
        """Take a report of another node; return whether it was news."""
        try:
            if report.node not in self.reports and len(self.reports) >= self._most:
                raise RefusedReportError(f"{len(self.reports)} nodes have reported already")
            report = self._intake.take(report)
        except RefusedReportError as error:
            self._refuse(name(report.node), str(error))
            return False
        if report.node == self.mine.node:
            if report.started_unix_s != self.mine.started_unix_s:
                self._note_twins(report, self.mine)
            return False
        before = self.reports.get(report.node)
        if before is not None:
            if before.started_unix_s != report.started_unix_s:
                return self._replace_restarted(before, report)
            if before.version >= report.version:
                return False
        self.reports[report.node] = report
        self.wake()
        return True

    def _refuse(self, node: str, why: str) -> None:
        if node not in self._refused and len(self._refused) < MOST_REFUSED:
            self._refused.add(node)
            self._on_refused(f"the report of {node} is not taken: {why}")

    def _replace_restarted(self, before: NodeReport, report: NodeReport) -> bool:
        """Take the report of an agent that was started again, in place of the older one's."""
        self._note_twins(before, report)
        if report.started_unix_s < before.started_unix_s:
            return False
        self.reports[report.node] = report
        self.wake()
        return True

    def _note_twins(self, first: NodeReport, second: NodeReport) -> None:
        """Publish that two agents go by one name, unless the older one has ended."""
        older, node = min(first, second, key=lambda report: report.started_unix_s), first.node
        claims = {*self.mine.claims.get(node, ()), _claim(first), _claim(second)}
        is_known = len(claims) == len(self.mine.claims.get(node, ()))
        if older.is_leaving or older.stage == "done" or is_known:
            return
        agents = tuple(sorted(claims, key=lambda claim: claim.started_unix_s))
        self.publish(claims={**self.mine.claims, node: agents})

    def have(self) -> dict[str, int]:
        """Return the versions by node."""
        return {node: report.version for node, report in self.reports.items()}

    def newer_than(self, have: Mapping[str, int]) -> list[NodeReport]:
        """Return the reports that are newer than the versions in `have`."""
        return [r for node, r in self.reports.items() if r.version > have.get(node, -1)]

    def watch(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` after every change; the returned function ends that."""
        self._watchers.append(call)
        return lambda: self._watchers.remove(call)

    async def wait(self, is_met: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `is_met`; return whether it was before the limit."""
        try:
            async with asyncio.timeout(None if limit_s == math.inf else max(0.0, limit_s)):
                while not is_met():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_met()
        return True

    async def unless(
        self, is_met: Callable[[], bool], work: Coroutine[Any, Any, Result]
    ) -> Result | None:
        """Do `work` to its end and return what it returns; None if `is_met` came before."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.wait(is_met, math.inf))
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for one in (task, ended):
                one.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    def have_reached(self, stage: Stage) -> bool:
        """Return whether all that reported, and neither left nor are gone, are at `stage`."""
        return not self.behind(stage)

    def behind(self, stage: Stage) -> list[str]:
        """Return the nodes that are to come to `stage` and have not."""
        least, gone = STAGES.index(stage), self.gone()
        return [
            node
            for node, report in self.reports.items()
            if STAGES.index(report.stage) < least and node not in gone
        ]

    def gone(self) -> set[str]:
        """Return the nodes that reported and are not there any more, by most or by us alone."""
        return {*self.mine.gone, *gone_nodes(self.reports)}

    def is_agreed(self) -> bool:
        """Return whether most say, as we do, of whom we miss that it is gone, or it is done."""
        known = gone_nodes(self.reports)
        return all(node in known or self.reports[node].stage == "done" for node in self.mine.gone)

    def wake(self) -> None:
        """Wake all that wait: something that they look at has changed."""
        self._changed.set()
        for call in tuple(self._watchers):
            call()


def _claim(report: NodeReport) -> Claim:
    return Claim(started_unix_s=report.started_unix_s, pid=report.pid, addresses=report.addresses)
