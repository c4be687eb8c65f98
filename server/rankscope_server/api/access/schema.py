"""Answers about tokens and the audit log."""

from __future__ import annotations

from typing import Literal

from rankscope_server.access.roles import Role
from rankscope_server.answers import Schema


class TokenRow(Schema, frozen=True):
    """A token without its secret; `project` is * for all."""

    id: str
    name: str
    project: str
    roles: list[Role]
    state: Literal["active", "expired", "revoked"]
    bytes_per_second: int  # quota; 0: none
    events_per_second: int  # quota of records and events of chunks; 0: none
    created_ms: float
    created_by: str
    expires_ms: float | None
    revoked_ms: float | None
    used_ms: float | None


class Tokens(Schema, frozen=True):
    """The tokens that the sender may see, the newest first."""

    tokens: list[TokenRow]


class SessionRow(Schema, frozen=True):
    """A browser that is signed in; `project` is * for all."""

    id: str  # the start of its key, which is no secret
    name: str  # of the person, or of the token
    by: Literal["issuer", "token", "operator"]
    project: str
    roles: list[Role]
    created_ms: float
    expires_ms: float
    is_own: bool  # of who asks


class Sessions(Schema, frozen=True):
    """The sessions that the sender may see, the newest first."""

    sessions: list[SessionRow]


class TokenMade(Schema, frozen=True):
    """A new token; its text is shown this once and stored nowhere."""

    id: str
    token: str


class AuditRow(Schema, frozen=True):
    """One thing that was done; `count` of equal ones within a minute."""

    id: int
    time_ms: float
    project: str
    who: str
    address: str
    action: str
    target: str
    detail: str
    count: int


class Audit(Schema, frozen=True):
    """A page of the audit log, the newest first; `before` asks for the next one."""

    rows: list[AuditRow]
    before: int | None
