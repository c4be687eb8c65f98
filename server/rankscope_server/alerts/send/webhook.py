"""Webhooks: JSON with a signature over the time and the body, as docs/alerts.md says."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any

import msgspec

from rankscope_server.alerts.channels import Webhook
from rankscope_server.alerts.message import Message, link_of
from rankscope_server.alerts.send.outbound import Outbound, post

SIGNATURE = "Rankscope-Signature"


def send_webhook(target: Webhook, message: Message, outbound: Outbound) -> None:
    """Send a message. Raises DeliveryError."""
    body = msgspec.json.encode(body_of(message, outbound.public_url))
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": message.id,
        SIGNATURE: signature(target.signing_key, int(time.time()), body),
    }
    post(target.url, body, headers, outbound)


def body_of(message: Message, public_url: str) -> dict[str, Any]:
    """Return what a program gets."""
    values: dict[str, Any] = msgspec.to_builtins(message)
    del values["path"]
    return {"version": 1} | values | {"link": link_of(message, public_url)}


def signature(key: str, time_s: int, body: bytes) -> str:
    """Return the value of the header: the time, and the HMAC of time and body."""
    signed = b"%d.%s" % (time_s, body)
    return f"t={time_s},v1={hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()}"
