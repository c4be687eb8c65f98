"""A message to people: what, why, next, and where to look. The same for all channels."""

from __future__ import annotations

import unicodedata

import msgspec

from rankscope_server.alerts.changes import Event
from rankscope_server.findings.finding import Severity

_MOST_TEXT = 1_000
_HEADS: dict[Event, str] = {
    "opened": "", "changed": "Changed: ", "recovered": "Recovered: ", "closed": "Closed: ",
    "test": "",
}  # fmt: skip


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent. `id` is the same in every attempt: a receiver takes each once."""

    id: str
    event: Event
    alert: str  # the same in all messages about one problem
    rule: str
    severity: Severity
    run_id: str = ""
    run_name: str = ""
    what: str
    why: str = ""
    next: str = ""
    note: str = ""  # why it is over
    path: str = ""  # of the page, relative to the dashboard's root
    opened_ms: float = 0.0
    time_ms: float = 0.0

    @property
    def title(self) -> str:
        """Return the first line."""
        return f"{_HEADS[self.event]}{self.what}"

    @property
    def is_over(self) -> bool:
        """Return whether the problem is over with it."""
        return self.event in ("recovered", "closed")


def link_of(message: Message, public_url: str) -> str:
    """Return the address of the page; the path alone where the server's own is not known."""
    return f"{public_url.rstrip('/')}/{message.path}" if public_url else message.path


def lines_of(message: Message, public_url: str) -> list[str]:
    """Return the body: the three lines of the verdict, how it ended, where to look."""
    lines = [message.what]
    lines += [f"Why: {message.why}"] * bool(message.why)
    lines += [f"Next: {message.next}"] * (bool(message.next) and not message.is_over)
    lines += [f"Over: {message.note}"] * bool(message.note)
    return [*lines, link_of(message, public_url)]


def plain(text: str, most: int = _MOST_TEXT) -> str:
    """Return a text of one line without what a terminal or a mail program would act on."""
    cleaned = "".join(" " if unicodedata.category(c)[0] == "C" else c for c in text[: 4 * most])
    line = " ".join(cleaned.split())
    return line if len(line) <= most else line[: most - 1] + "…"
