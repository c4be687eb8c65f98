"""Names and addresses: the checks of this family, in run order."""

from __future__ import annotations

from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.names.digits import DnsDigits
from rankscope.preflight.checks.names.family import DnsFamily
from rankscope.preflight.checks.names.host_dup import HostDup
from rankscope.preflight.checks.names.loopback import DnsLoopback
from rankscope.preflight.checks.names.master import DnsMaster
from rankscope.preflight.checks.names.reverse import DnsReverse
from rankscope.preflight.checks.names.self_loopback import DnsSelfLoopback
from rankscope.preflight.checks.names.wrong import DnsWrong

CHECKS: tuple[Check, ...] = (
    DnsMaster(),
    DnsDigits(),
    DnsLoopback(),
    DnsSelfLoopback(),
    DnsWrong(),
    DnsFamily(),
    DnsReverse(),
    HostDup(),
)
