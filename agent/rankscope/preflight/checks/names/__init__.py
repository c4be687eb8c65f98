"""Names and addresses: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checking import Check
from rankscope.preflight.checks.names.family import DnsFamily
from rankscope.preflight.checks.names.loopback import DnsLoopback
from rankscope.preflight.checks.names.wrong import DnsWrong

CHECKS: tuple[Check, ...] = (
    DnsLoopback(),
    DnsWrong(),
    DnsFamily(),
)
