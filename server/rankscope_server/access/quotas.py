"""What a token may send: so many bytes, or events, a second, after a burst.

What comes is taken, and what is beyond the quota is owed: nothing more is taken until it is paid.
Each server process counts for itself.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.access.roles import Principal
from rankscope_server.limits import Buckets
from rankscope_server.problems import Problem

BURST_SECONDS = 10.0  # of a quota that was not used
Unit: TypeAlias = Literal["bytes", "events"]


class Quota:
    """The quotas of all tokens in one unit. From one thread."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._buckets = Buckets()

    def check(self, principal: Principal) -> None:
        """Raise Problem 429 where a token owes."""
        owed_s = self._owed_s(principal, 0)
        if owed_s:
            rate = f"{self._rate(principal):,} {self._unit} per second"
            raise Problem(
                429, f"the quota of this token is {rate}", "Authorization",
                f"send again in {owed_s:.1f} s, or have its quota raised", owed_s,
            )  # fmt: skip

    def count(self, principal: Principal, amount: int) -> None:
        """Count what came."""
        self._owed_s(principal, amount)

    def _owed_s(self, principal: Principal, amount: int) -> float:
        rate = self._rate(principal)
        if not rate:
            return 0.0
        return self._buckets.owed_s(principal.token_id, rate * BURST_SECONDS, rate, amount)

    def _rate(self, principal: Principal) -> int:
        is_bytes = self._unit == "bytes"
        return principal.bytes_per_second if is_bytes else principal.events_per_second
