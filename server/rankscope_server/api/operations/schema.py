"""Answers of ingest, health, settings and sign-in."""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope.wire.schema import Command
from rankscope_server.answers import Shape
from rankscope_server.ingest.records import Refused


class IngestAnswer(Shape, frozen=True):
    """What was stored of a batch."""

    accepted_records: int
    accepted_chunks: int
    duplicate: bool
    refused: list[Refused] = msgspec.field(default_factory=list)
    # for the ranks whose states the batch brought; only to a sender that says it takes them
    commands: list[Command] = msgspec.field(default_factory=list)


class Health(Shape, frozen=True):
    """The server answers."""

    status: Literal["ok"]
    version: str


class Clock(Shape, frozen=True):
    """When a request came and when it was answered, by the server's wall clock."""

    received_ns: int
    sent_ns: int


class SettingValue(Shape, frozen=True):
    """One setting in force."""

    name: str
    value: str | int | float | bool
    default: str | int | float | bool
    flag: str
    variable: str
    text: str


class SettingsAnswer(Shape, frozen=True):
    """All settings; secrets say only whether they are set."""

    settings: list[SettingValue]


class Session(Shape, frozen=True):
    """Whether this server wants a token, and whether this request carried it."""

    required: bool
    signed_in: bool
