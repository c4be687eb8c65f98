"""What a server stores and what its retention would remove, as text: for `doctor` and `runs`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rankscope.http import Client, HttpError

MAX_ANSWER_BYTES = 64 << 20
TIMEOUT_SECONDS = 60.0  # to count much takes a while
_MOST_ROWS = 20


class StorageFailed(Exception):
    """The server did not answer, or refused; the message says why. `status` 0: no answer.

    `field` is the one that is wrong, `at` says which characters of it.
    """

    def __init__(
        self, text: str, status: int = 0, at: tuple[int, int] | None = None, field: str = ""
    ) -> None:
        super().__init__(text)
        self.status, self.at, self.field = status, at, field


class StorageClient:
    """Asks one server about its storage."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """Return the answer to a request. Raises StorageFailed."""
        try:
            answer = self._client.request(method, f"/api/v1{path}")
        except HttpError as error:
            url = self._client.address.url
            raise StorageFailed(f"{url} does not answer: {error}") from error
        if answer.status != 200:
            said = answer.fields.get("error", {})
            at, field = said.get("at"), said.get("field") or ""
            raise StorageFailed(
                answer.why(), answer.status, at and (int(at[0]), int(at[1])), str(field)
            )
        if not answer.fields:
            raise StorageFailed(f"{self._client.address.url}: no rankscope server answers there")
        return answer.fields


def client_of(url: str, token: str) -> Client:
    """Return a client with the limits of this kind of question. Raises AddressError."""
    return Client(url, token, timeout_seconds=TIMEOUT_SECONDS, max_answer_bytes=MAX_ANSWER_BYTES)


def kinds_table(storage: dict[str, Any]) -> Table:
    """Return the sizes by kind, and how long each is kept."""
    table = _table("kind", "size", "rows", "kept")
    for row in storage["kinds"]:
        limits = []
        if row["keep_days"]:
            limits.append(f"{row['keep_days']:g} days")
        if row["keep_bytes"]:
            limits.append(f"{size(row['keep_bytes'])}")
        table.add_row(
            row["label"], size(row["bytes"]), f"{row['rows']:,}", " or ".join(limits) or "for ever"
        )
    return table


def runs_table(storage: dict[str, Any], most: int = _MOST_ROWS) -> Table:
    """Return the largest runs."""
    table = _table("run", "size", "rows", "status", "")
    for row in storage["runs"][:most]:
        marks = [word for word, is_so in (("live", row["is_live"]), ("pinned", row["is_pinned"]))
                 if is_so]  # fmt: skip
        table.add_row(
            row["run_id"], size(row["bytes"]), f"{row['rows']:,}", row["status"], ", ".join(marks)
        )
    return table


def plan_table(retention: dict[str, Any], most: int = _MOST_ROWS) -> Table:
    """Return what retention would remove now."""
    table = _table("would go", "of run", "size", "rows", "because of its")
    for row in retention["planned"][:most]:
        kind = "everything" if row["kind"] == "run" else row["kind"]
        table.add_row(kind, row["run_id"], size(row["bytes"]), f"{row['rows']:,}", row["reason"])
    return table


def size(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_number = heading in ("size", "rows")
        table.add_column(heading, overflow="fold", justify="right" if is_number else "left")
    return table
