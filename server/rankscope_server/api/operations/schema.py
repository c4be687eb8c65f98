"""Answers of ingest, health, settings and sign-in."""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope_server.access.roles import Role
from rankscope_server.answers import Schema


class Health(Schema, frozen=True):
    """The server answers."""

    status: Literal["ok"]
    version: str


class ReadyPart(Schema, frozen=True):
    """One thing that the server rests on."""

    part: str
    ready: bool
    reason: str  # why it is not


class Ready(Schema, frozen=True):
    """The server can do what it is for; 503 names the parts that cannot."""

    status: Literal["ok"]
    version: str
    parts: list[ReadyPart]


class Clock(Schema, frozen=True):
    """When a request came and when it was answered, by the server's wall clock."""

    received_ns: int
    sent_ns: int


class SettingValue(Schema, frozen=True):
    """One setting in force."""

    name: str
    value: str | int | float | bool
    default: str | int | float | bool
    flag: str
    variable: str
    text: str
    source: Literal["default", "file", "environment", "flag"]
    where: str  # the flag, the variable, or the file and its key; empty for a default


class SettingsAnswer(Schema, frozen=True):
    """All settings; secrets say only whether they are set."""

    settings: list[SettingValue]


class Session(Schema, frozen=True):
    """Whether this server wants a token, and whether this request carried it."""

    required: bool
    signed_in: bool
    name: str = ""  # of the token
    roles: list[Role] = msgspec.field(default_factory=list)  # with those that they include
    project: str | None = None  # * for all
    expires_ms: float | None = None  # of a token that ends
    has_issuer: bool = False  # to sign in with: `GET /session/oidc`
