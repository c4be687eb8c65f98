"""Sends a message to a channel, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope_server.alerts.channels import (
    AnyTarget,
    Email,
    Otlp,
    PagerDuty,
    Slack,
    Webhook,
    secrets_of,
)
from rankscope_server.alerts.message import Message
from rankscope_server.alerts.send.email import send_email
from rankscope_server.alerts.send.otlp import send_otlp
from rankscope_server.alerts.send.outbound import DeliveryError, Outbound, redacted
from rankscope_server.alerts.send.pagerduty import send_pagerduty
from rankscope_server.alerts.send.slack import send_slack
from rankscope_server.alerts.send.webhook import send_webhook

_SENDERS: dict[type[AnyTarget], Callable[[Any, Message, Outbound], None]] = {
    Webhook: send_webhook,
    Slack: send_slack,
    PagerDuty: send_pagerduty,
    Email: send_email,
    Otlp: send_otlp,
}


def send(target: AnyTarget, message: Message, outbound: Outbound) -> None:
    """Send one message. Raises DeliveryError, whose words hold no secret of the channel."""
    try:
        _SENDERS[type(target)](target, message, outbound)
    except DeliveryError as error:
        text = redacted(str(error), secrets_of(target))
        raise DeliveryError(
            text, is_final=error.is_final, retry_after_seconds=error.retry_after_seconds
        ) from None  # what it came from may name the address
