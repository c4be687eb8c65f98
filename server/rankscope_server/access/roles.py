"""Roles, what they include, and who sends a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rankscope_server.store.tables import DEFAULT_PROJECT

Role: TypeAlias = Literal["ingest", "read", "operate", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # the same as in `settings.py`, which imports nothing
ALL_PROJECTS = "*"
# A collector's token lies on every node of a job: it can send, and can read nothing.
_INCLUDED: dict[Role, tuple[Role, ...]] = {
    "ingest": ("ingest",),
    "read": ("read",),
    "operate": ("operate", "read"),
    "admin": ROLES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who sends a request; `roles` with those that they include."""

    name: str  # as the audit log shows it
    roles: frozenset[Role]
    project: str = ALL_PROJECTS
    token_id: str = ""
    bytes_per_second: int = 0  # quota; 0: none
    events_per_second: int = 0
    expires_ns: int | None = None
    preflight: str = ""  # the id of the one preflight whose own token was sent

    @property
    def only_project(self) -> str | None:
        """Return the one project that it sees; None for all."""
        return None if self.project == ALL_PROJECTS else self.project

    @property
    def sends_to(self) -> str:
        """Return the project of a run that it sends first."""
        return self.only_project or DEFAULT_PROJECT

    def sees(self, project: str) -> bool:
        """Return whether it may know of what belongs to a project."""
        return self.project in (project, ALL_PROJECTS)


ANYONE = Principal(name="anyone", roles=frozenset(ROLES))  # of a server without tokens
OPERATOR = Principal(name="RANKSCOPE_TOKEN", roles=frozenset(ROLES))


def included(roles: Iterable[Role]) -> frozenset[Role]:
    """Return roles with those that they include."""
    return frozenset(one for role in roles for one in _INCLUDED[role])
