"""Answers about alerts. No answer holds a secret of a channel."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from rankscope_server.alerts.quiet import QuietHours
from rankscope_server.alerts.rules import AnyWhen
from rankscope_server.answers import Capped, Schema

AlertState: TypeAlias = Literal["open", "recovered", "closed"]
AlertEvent: TypeAlias = Literal["opened", "changed", "recovered", "closed", "test"]
DeliveryState: TypeAlias = Literal["pending", "sent", "given_up", "dropped", "skipped"]
AlertSeverity: TypeAlias = Literal["critical", "warning", "info"]


class AlertRow(Schema, frozen=True):
    """One problem that a rule found, while it lasts and afterwards."""

    id: int
    state: AlertState
    severity: AlertSeverity
    rule_id: int
    rule_name: str
    run_id: str  # empty: the server itself
    run_name: str
    what: str
    why: str
    next: str
    path: str  # relative to the dashboard's root
    opened_ms: float
    updated_ms: float
    ended_ms: float | None
    end_reason: str
    num_sent: int
    num_waiting: int
    num_given_up: int


class Alerts(Schema, frozen=True):
    """Alerts, open ones first, then the newest."""

    num_open: int
    alerts: list[AlertRow]
    capped: Capped | None


class RuleRow(Schema, frozen=True):
    """A rule."""

    id: int
    name: str
    when: AnyWhen
    runs: str
    project: str
    tags: dict[str, str]
    channels: list[int]
    is_enabled: bool
    is_from_file: bool  # of the server: it can be changed there alone
    never: str  # why it can open no alert on this server; else empty


class Rules(Schema, frozen=True):
    """All rules."""

    rules: list[RuleRow]


class ChannelRow(Schema, frozen=True):
    """A channel; of its secrets only whether they are set."""

    id: int
    name: str
    kind: Literal["webhook", "slack", "pagerduty", "email", "otlp"]
    place: str
    target: dict[str, Any]
    quiet: QuietHours | None
    is_enabled: bool
    is_from_file: bool  # of the server: it can be changed there alone
    last_state: DeliveryState | None = None  # of the newest message
    last_ms: float | None = None
    last_note: str = ""


class Channels(Schema, frozen=True):
    """All channels."""

    channels: list[ChannelRow]


class DeliveryRow(Schema, frozen=True):
    """One message to one channel."""

    id: int
    alert_id: int  # 0: a test
    channel_id: int
    channel_name: str
    event: AlertEvent
    state: DeliveryState
    severity: AlertSeverity
    what: str
    attempts: int
    created_ms: float
    next_ms: float
    ended_ms: float | None
    note: str


class Deliveries(Schema, frozen=True):
    """Messages, the newest first."""

    deliveries: list[DeliveryRow]
    capped: Capped | None


class DeadMan(Schema, frozen=True):
    """The dead-man switch: whether the outside service is asked."""

    is_set: bool
    pause_seconds: float
    asked_ms: float | None
    problem: str


class AlertStatus(Schema, frozen=True):
    """How alerting itself is."""

    deadman: DeadMan
    problem: str  # why the last look at the rules failed, empty where it did not
    public_url: str  # empty: links in messages are paths
    num_open: int
    num_waiting: int
    num_given_up: int
    behind_seconds: float


class Deleted(Schema, frozen=True):
    """What was deleted."""

    id: int
