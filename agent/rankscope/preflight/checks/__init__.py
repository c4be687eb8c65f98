"""All checks, family by family, in run order: this is the catalogue."""

from __future__ import annotations

from types import ModuleType

from rankscope.preflight.checks import (
    clock,
    collective,
    endpoint,
    gpu,
    interfaces,
    launch,
    limits,
    links,
    master_port,
    names,
    paths,
    ports,
    random_ports,
    rdma,
    routes,
    secret,
    software,
    storage,
    variables,
)
from rankscope.preflight.checks.base import BuiltinCheck, Check


def _checks_of(module: ModuleType) -> tuple[Check, ...]:
    """Return the checks that a module defines, in the order in which they stand there."""
    return tuple(
        value()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BuiltinCheck)
        and value.__module__ == module.__name__
        and value.id
    )


FAMILIES: dict[str, tuple[Check, ...]] = {
    "launch": (
        *_checks_of(secret),
        *_checks_of(launch),
        *_checks_of(variables),
        *_checks_of(endpoint),
    ),
    "names": _checks_of(names),
    "interfaces": (*_checks_of(interfaces), *_checks_of(links), *_checks_of(routes)),
    "ports": (*_checks_of(master_port), *_checks_of(random_ports), *_checks_of(ports)),
    "paths": _checks_of(paths),
    "clock": _checks_of(clock),
    "limits": _checks_of(limits),
    "storage": _checks_of(storage),
    "software": _checks_of(software),
    "gpu": _checks_of(gpu),
    "rdma": _checks_of(rdma),
    "collective": _checks_of(collective),
}
CHECKS: tuple[Check, ...] = tuple(check for checks in FAMILIES.values() for check in checks)
