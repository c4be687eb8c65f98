"""The connection to the server, and what its answers mean."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec

from rankscope.http import Client, HttpError, json_object
from rankscope.wire import schema

INGEST_PATH = "/api/v1/ingest"
WATERMARK_PATH = "/api/v1/ingest/watermark"
_BATCH_HEADERS = {
    "Content-Type": "application/msgpack",
    "Content-Encoding": "zstd",
    schema.COMMANDS_HEADER: str(schema.COMMANDS_VERSION),
}
TIMEOUT_SECONDS = 5.0
LONGEST_TIMEOUT_SECONDS = 60.0  # of a server that answers late; the same batch comes again
# What is wrong with the batch itself, or its run was deleted (410). Any other answer is of the way
# to the server: a token, a name, a path, a proxy, which are mended while batches wait.
_WRONG_BATCH = frozenset({400, 410, 415, 422})
_TOO_LARGE = 413  # also from a proxy: behind a batch that never passes no other would come through

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerAnswer:
    """What became of one attempt: `status` 0 is a network error."""

    status: int
    text: str
    retry_after_seconds: float = 0.0

    @property
    def is_ours(self) -> bool:
        """It is an answer of ingest, not of some proxy that says 200 to everything."""
        return "accepted_records" in self.fields

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of the answer, empty if it is none."""
        return json_object(self.text)

    @property
    def watermark(self) -> schema.Watermark | None:
        """How far the sender's batches are stored; None where the server says nothing of it."""
        found = self.fields.get("watermark")
        try:
            return None if found is None else msgspec.convert(found, schema.Watermark)
        except msgspec.ValidationError as error:
            logger.info("a watermark of the server is not understood: %s", error)
            return None

    def commands(self) -> list[schema.Command]:
        """Return what the server asks for; kinds that we do not know are left to newer ones."""
        found = self.fields.get("commands", [])
        commands = []
        for command in found if isinstance(found, list) else []:
            try:
                commands.append(msgspec.convert(command, schema.Command))
            except msgspec.ValidationError as error:
                logger.info("a command of the server is not understood: %s", error)
        return commands

    @property
    def reason(self) -> str:
        """Why the server did not take it, in its words, or the start of the text."""
        try:
            error = self.fields["error"]
            return f"{error['what']} ({error['field']}: {error['remedy']})"
        except (KeyError, TypeError):
            return self.text[:200]

    @property
    def is_error(self) -> bool:
        """It is an error of the server, not of a proxy."""
        return isinstance(self.fields.get("error"), dict)

    @property
    def is_refusal(self) -> bool:
        """The server will never take this batch."""
        return self.status == _TOO_LARGE or (self.status in _WRONG_BATCH and self.is_error)


class Server:
    """One keep-alive connection. Raises ValueError for an address that is none.

    The limit of a request is doubled when it was too short, and stays at twice what the last one
    took: a batch that is sent again under the same limit would come no further.
    """

    def __init__(self, url: str, token: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._least_seconds = self._limit_seconds = timeout_seconds
        self._client = Client(
            url, token, timeout_seconds=timeout_seconds, program="rankscope-collector"
        )

    @property
    def url(self) -> str:
        """Return the address, with its scheme."""
        return self._client.address.url

    def post(self, body: bytes, *, has_waited: bool = True, held_from: int = 0) -> ServerAnswer:
        """Send one batch; one that goes past those that wait says so, not how long it waited.

        `held_from`: number of the oldest batch of its producer that is held; 0 holds none.
        """
        waited = {schema.CLOCK_HEADER: str(time.time_ns())}
        more = waited if has_waited else {schema.VITALS_HEADER: "1"}
        if held_from:
            more[schema.HELD_HEADER] = str(held_from)
        return self.send(INGEST_PATH, body, _BATCH_HEADERS | more)

    def ask_watermark(self, run_id: str, producer: str, held_from: int) -> ServerAnswer:
        """Ask how far the batches of a producer are stored."""
        asked = {"run_id": run_id, "producer": producer, "held_from": str(held_from)}
        return self.send(f"{WATERMARK_PATH}?{urlencode(asked)}", b"", {}, "GET")

    def send(
        self, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> ServerAnswer:
        """Send a request. Where the server has closed a kept connection, it tries once more."""
        begun = time.monotonic()
        try:
            answer = self._client.request(
                method, path, body, headers, timeout_seconds=self._limit_seconds
            )
        except HttpError as error:
            if error.is_timeout:
                self._set_limit(2 * self._limit_seconds)
            return ServerAnswer(0, str(error))
        self._set_limit(2 * (time.monotonic() - begun))
        text = answer.moved_to or answer.body.decode(errors="replace")
        return ServerAnswer(answer.status, text, answer.retry_after_seconds)

    def _set_limit(self, seconds: float) -> None:
        self._limit_seconds = max(self._least_seconds, min(seconds, LONGEST_TIMEOUT_SECONDS))

    def close(self) -> None:
        """Close the connection; the next post opens one."""
        self._client.close()
