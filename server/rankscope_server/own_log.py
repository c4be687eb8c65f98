"""The server's own log: as text, or one JSON object a line; each line with its request's id."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

_request_id: ContextVar[str] = ContextVar("rankscope_request_id", default="")
_PLAIN = logging.LogRecord("", 0, "", 0, "", (), None).__dict__.keys() | {
    "message", "asctime", "request_id", "taskName", "color_message",
}  # fmt: skip


def begin_request(identity: str) -> None:
    """Name the request that this task, and the threads it starts, work for."""
    _request_id.set(identity)


def configure(level: str, form: str) -> None:
    """Send the log to standard error. `form` is text or json."""
    handler = logging.StreamHandler()
    handler.addFilter(_with_request)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _with_request(record: logging.LogRecord) -> bool:
    record.request_id = _request_id.get()
    return True


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        identity = getattr(record, "request_id", "")
        return f"{text} [request {identity}]" if identity else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the line: no newline is in it, whatever a message or traceback holds."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identity := getattr(record, "request_id", ""):
            line["request_id"] = identity
        line |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
