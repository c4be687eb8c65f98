"""The endpoint as one node believes it: MASTER_ADDR and MASTER_PORT, and who answers there."""

from __future__ import annotations

import ipaddress

import msgspec

from rankscope.preflight.facts.edges import Dial
from rankscope.preflight.system import Resolved


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where this node expects the job to meet."""

    name: str = ""
    port: int = 0
    is_said: bool = False  # by the launch or an option; else node 0 was assumed
    addresses: tuple[str, ...] = ()  # of the name, as this node resolves it
    dial: Dial | None = None  # to it, when all had reported: the first that an agent answered
    workers: Resolved | None = None  # in c10d mode, the name by which rank 0's workers are called


class NodeList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The nodes as this node was given them, in their order."""

    num: int
    digest: str  # of all names: equal lists have equal ones
    names: tuple[str, ...] = ()  # none where there are more than travel with each report
    how: str = ""  # "--nodes", "SLURM_STEP_NODELIST"


def opens_store(name: str, hostname: str, own: Resolved, endpoint: Resolved | None) -> bool | None:
    """Return whether torchrun on this node will host the store of a c10d rendezvous at `name`.

    These are the rules of `_matches_machine_hostname` of torch 2.13, which compares names and what
    the own name resolves to, and never looks at the interfaces. None: it ends with an error there.
    """
    if name == "localhost" or name == hostname or _is_loopback(name):
        return True
    if own.error:
        return None
    if own.canonical and own.canonical == name:
        return True
    meant = {name, *(endpoint.addresses if endpoint is not None else ())}
    return bool(meant & set(own.addresses))


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
