"""A log record of OpenTelemetry for each message: its protocol over HTTP, in JSON.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

import rankscope
from rankscope_server.alerts.channels import Otlp, headers_of
from rankscope_server.alerts.message import Message, lines_of, link_of
from rankscope_server.alerts.send.outbound import DeliveryError, Outbound, post

_PATH = "/v1/logs"
_NS_PER_MS = 1_000_000
_SEVERITY = {"info": (9, "INFO"), "warning": (13, "WARN"), "critical": (17, "ERROR")}
_OVER = _SEVERITY["info"]


class _Partial(msgspec.Struct):
    rejected: int | str = msgspec.field(default=0, name="rejectedLogRecords")
    text: str = msgspec.field(default="", name="errorMessage")


class _Answer(msgspec.Struct):
    partial: _Partial = msgspec.field(default_factory=_Partial, name="partialSuccess")


def send_otlp(target: Otlp, message: Message, outbound: Outbound) -> None:
    """Send a message. Raises DeliveryError, also where it was taken and not kept."""
    body = msgspec.json.encode(request_of(message, outbound.public_url))
    headers = {"Content-Type": "application/json", **headers_of(target.headers)}
    answer = post(address_of(target.url), body, headers, outbound)
    try:
        partial = msgspec.json.decode(answer.body or b"{}", type=_Answer).partial
    except (msgspec.MsgspecError, ValueError):
        return  # taken; what it says beside is none of the protocol
    if int(partial.rejected or 0):
        raise DeliveryError(f"it was not kept: {partial.text}", is_final=True)


def address_of(url: str) -> str:
    """Return where logs go: below a base, as OTEL_EXPORTER_OTLP_ENDPOINT has it, or as it is."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


def request_of(message: Message, public_url: str) -> dict[str, Any]:
    """Return an ExportLogsServiceRequest as JSON has it."""
    number, text = _OVER if message.is_over else _SEVERITY[message.severity]
    said = {
        "event": message.event, "alert": message.alert, "rule": message.rule,
        "severity": message.severity, "what": message.what, "why": message.why,
        "next": message.next, "note": message.note, "run_name": message.run_name,
        "link": link_of(message, public_url), "message_id": message.id,
    }  # fmt: skip
    about = {
        "service.name": "rankscope", "service.version": rankscope.__version__,
        "rankscope.run": message.run_id,
    }  # fmt: skip
    record = {
        "timeUnixNano": str(int(message.time_ms * _NS_PER_MS)),
        "observedTimeUnixNano": str(int(message.time_ms * _NS_PER_MS)),
        "severityNumber": number, "severityText": text, "eventName": "rankscope.alert",
        "body": {"stringValue": "\n".join([message.title, *lines_of(message, public_url)[1:]])},
        "attributes": _attributes({f"rankscope.{name}": value for name, value in said.items()}),
    }  # fmt: skip
    scope = {"name": "rankscope.alerts", "version": rankscope.__version__}
    return {
        "resourceLogs": [
            {
                "resource": {"attributes": _attributes(about)},
                "scopeLogs": [{"scope": scope, "logRecords": [record]}],
            }
        ]
    }


def _attributes(values: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"stringValue": value}} for name, value in values.items() if value
    ]
