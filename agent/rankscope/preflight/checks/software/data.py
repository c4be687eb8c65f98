"""sw.data: the same files below the data directory."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured, odd_ones
from rankscope.preflight.facts.software import DATA_SECONDS, MAX_DATA_FILES, DataFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class SwData:
    """The data directory holds the same files, by name and size, on all nodes.

    Looks at the first 20,000 files in sorted order; contents are not read.
    """

    id: ClassVar[str] = "sw.data"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Warn where names or sizes differ."""
        if not run.options.data_dir:
            yield Finding(id=self.id, status="skipped", title="no data directory was named")
            return
        yield from not_measured(self.id, run, "software")
        data = {
            report.node: report.facts.software.data
            for report in run.present
            if report.facts.software is not None and report.facts.software.data is not None
        }
        late = [n for n, one in data.items() if one.cut == "time" or one.error]
        if late:
            title = f"{listed(late)}: not all read in {DATA_SECONDS:g} s: not compared"
            yield Finding(id=self.id, status="unknown", nodes=tuple(late), title=title)
        whole = {n: one for n, one in data.items() if n not in late}
        odd = odd_ones({node: one.digest for node, one in whole.items()})
        if odd:
            yield self._finding(run.options.data_dir, odd, whole)

    def _finding(self, path: str, odd: tuple[str, ...], data: dict[str, DataFacts]) -> Finding:
        counts = {node: f"{one.count} files, {one.bytes} bytes" for node, one in data.items()}
        usual = next((counts[node] for node in data if node not in odd), "")
        title = f"{listed(odd)}: {path} holds {counts[odd[0]]}"
        return Finding(
            id=self.id,
            status="warn",
            nodes=odd,
            title=f"{title}; elsewhere {usual}" if usual else f"{path} differs between nodes",
            evidence={
                "count": {node: one.count for node, one in data.items()},
                "bytes": {node: one.bytes for node, one in data.items()},
            },
            told=tuple(f"{node}: {counts[node]}, {data[node].digest[:12]}" for node in data)[:16],
            fix=tuple(
                Fix(node=node, command=f"find {quote(path)} -type f | wc -l; du -sb {quote(path)}")
                for node in odd
            ),
            would="ranks take different numbers of batches: one leaves, the others hang",
            wrong_if=f"each node is meant to hold its own shard, or files beyond {MAX_DATA_FILES} "
            "matter",
        )
