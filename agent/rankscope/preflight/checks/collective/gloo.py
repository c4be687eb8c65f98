"""coll.gloo: all-reduces of rising sizes over gloo end, and sum rightly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.collective.ends import elsewhere, stalls, wrong_sums
from rankscope.preflight.model import Finding, Scope, Tier


class CollGloo:
    """All-reduces over gloo from 4 B to 64 MB end, and their sums are right."""

    id: ClassVar[str] = "coll.gloo"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "default"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers", "smoke"})

    def judge(self, run: Run) -> Iterable[Finding]:
        """Return wrong sums and collectives that did not end."""
        if other := elsewhere(run, self.id, "gloo"):
            return [other]
        return [*wrong_sums(run, self.id), *stalls(run, self.id)]
