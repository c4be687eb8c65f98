"""Events API v2 of PagerDuty, and of what takes the same: an incident for each alert."""

from __future__ import annotations

from typing import Any

import msgspec

from rankscope_server.alerts.channels import PagerDuty
from rankscope_server.alerts.message import Message, lines_of, link_of, plain
from rankscope_server.alerts.send.outbound import Outbound, post

_MOST_SUMMARY = 1_024


def send_pagerduty(target: PagerDuty, message: Message, outbound: Outbound) -> None:
    """Send a message. Raises DeliveryError."""
    body = msgspec.json.encode(event_of(target, message, outbound.public_url))
    post(target.url, body, {"Content-Type": "application/json"}, outbound)


def event_of(target: PagerDuty, message: Message, public_url: str) -> dict[str, Any]:
    """Return the event: a trigger, or the end of the incident with the same key."""
    link = link_of(message, public_url)
    page: dict[str, Any] = {}
    if public_url:
        page = {"client_url": link, "links": [{"href": link, "text": "Rankscope"}]}
    return page | {
        "routing_key": target.routing_key,
        "event_action": "resolve" if message.is_over else "trigger",
        "dedup_key": f"rankscope-{message.alert}",
        "client": "Rankscope",
        "payload": {
            "summary": plain(message.title, _MOST_SUMMARY),
            "source": message.run_name or message.run_id or "rankscope",
            "severity": message.severity,
            "component": message.run_id or "server",
            "class": message.rule,
            "custom_details": {
                "why": message.why, "next": message.next, "note": message.note,
                "text": "\n".join(lines_of(message, public_url)),
            },
        },
    }  # fmt: skip
