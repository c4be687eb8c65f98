"""Incoming webhooks of Slack, and of what takes the same (Mattermost, Rocket.Chat)."""

from __future__ import annotations

import msgspec

from rankscope_server.alerts.channels import Slack
from rankscope_server.alerts.message import Message, lines_of, plain
from rankscope_server.alerts.send.outbound import Outbound, post

_MARKS = {
    "critical": ":red_circle:",
    "warning": ":large_orange_circle:",
    "info": ":information_source:",
}
_OVER = ":white_check_mark:"
_MOST_LINE = 600


def send_slack(target: Slack, message: Message, outbound: Outbound) -> None:
    """Send a message. Raises DeliveryError."""
    body = msgspec.json.encode({"text": text_of(message, outbound.public_url)})
    post(target.url, body, {"Content-Type": "application/json"}, outbound)


def text_of(message: Message, public_url: str) -> str:
    """Return the message in Slack's markup; text of a run mentions no user and makes no link."""
    what, *more = (_escaped(line) for line in lines_of(message, public_url))
    mark = _OVER if message.event == "recovered" else _MARKS[message.severity]
    head = message.title.removesuffix(message.what)
    return "\n".join([f"{mark} *{head}{what}*", *more])


def _escaped(line: str) -> str:
    text = plain(line, _MOST_LINE).replace("&", "&amp;")
    return text.replace("<", "&lt;").replace(">", "&gt;")
