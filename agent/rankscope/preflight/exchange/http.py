"""Reports travel over a rankscope server: outbound HTTP alone, every other port may be closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import quote

import msgspec

from rankscope.address import AddressError
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.model import LaunchVerdict, NodeReport, encode

RUNS = "/api/v1/preflight/runs"
OWN_TOKEN = "pf-"  # begins the token of one preflight, which came with its id
MAX_ANSWER_BYTES = 256 << 20  # all reports of 1,000 nodes
_MOST_RUN, _PROOF = 160, 32  # characters of a key
MAX_VERDICT_WAIT_S = 20.0  # of one request: proxies often end a silent one after 30 s
T = TypeVar("T")


class _Delta(msgspec.Struct, frozen=True):
    number: int
    pause_ms: float
    is_brief: bool
    reports: list[NodeReport]


class _Settled(msgspec.Struct, frozen=True):
    is_settled: bool
    verdict: LaunchVerdict | None


# Made at import: two threads that are the first to use a type crash msgspec.
_DELTAS = msgspec.json.Decoder(_Delta)
_VERDICTS = msgspec.json.Decoder(_Settled)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What all nodes of a run say alike, and this node of itself."""

    run: str  # all nodes that give the same meet; or the id of a preflight that was made before
    node: str
    node_rank: int = -1
    num_nodes: int = 0  # 0: not known
    nodes: Sequence[str] = ()
    proof: str = ""  # of the run's secret: those with another one meet elsewhere
    hello_token: str = ""  # for the listener on this node: with it the server can only knock
    training_run: str = ""  # the run that this preflight precedes


class ServerCarrier:
    """Reports by way of a server. Above 64 nodes without facts: the server evaluates."""

    name: ClassVar[str] = "server"

    def __init__(
        self, server: str, meeting: Meeting, token: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self._client = _client(server, environ)
        self.server = self._client.address.url
        self._meeting = meeting
        self._asked_token = token  # of the server, or of one preflight
        self._token = self._id = ""
        self._num_apart = 0  # preflights of our name there whose nodes have another secret
        self._number = 0  # of the newest report that we have
        self._sent = -1
        self._next_s = 0.0
        self.is_evaluator = False  # whether the verdict must come from the server
        # One thread: a connection is used by one request at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="preflight-server")

    @property
    def route(self) -> str:
        """Return the server, the proxy before it, and the preflight there."""
        return f"{self._client.route}, preflight {self._id}" if self._id else self._client.route

    @property
    def id(self) -> str:
        """Return the id of the preflight on the server; empty before the first exchange."""
        return self._id

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Hand over our newest report and return what is new. Raises CarrierError."""
        is_last = (mine.stage == "done" or mine.is_leaving) and mine.version != self._sent
        if time.monotonic() < self._next_s and not is_last:
            return []
        return await self._work(lambda: self._exchange(mine))

    async def verdict(self, limit_s: float) -> LaunchVerdict | None:
        """Return the server's verdict, after all have ended or `limit_s`. Raises CarrierError."""
        return await self._work(lambda: self._verdict(time.monotonic() + limit_s))

    async def close(self) -> None:
        """Close the connection; a request that still waits ends with it."""
        self._client.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except HttpError as error:
            raise CarrierError(f"{self._client.route}: {error}") from error
        except msgspec.MsgspecError as error:
            raise CarrierError(
                f"{self._client.route}: no rankscope server of this version: {error}"
            ) from error

    def _exchange(self, mine: NodeReport) -> list[NodeReport]:
        if self._num_apart:
            self._num_apart = 0
            raise CarrierError(
                f"{self._client.route}: other nodes meet there under the name "
                f"{self._meeting.run} with another secret than ours"
            )
        if not self._id:
            self._begin(mine)
        path, since = f"/{self._id}/reports", f"?since={self._number}"
        if mine.version == self._sent:
            answer = self._ask("GET", path + since)
        else:
            answer = self._ask("POST", f"{path}/{quote(mine.node)}{since}", encode(mine))
            self._sent = mine.version
        delta = _DELTAS.decode(answer.body)
        self._number, self.is_evaluator = delta.number, delta.is_brief
        self._next_s = time.monotonic() + delta.pause_ms / 1e3
        return [
            report
            for report in delta.reports
            if report.node != mine.node or report.started_unix_s != mine.started_unix_s
        ]

    def _begin(self, mine: NodeReport) -> None:
        meeting, id = self._meeting, self._meeting.run
        self._token = self._asked_token
        if not self._token.startswith(OWN_TOKEN):
            wanted = {
                "key": _key(meeting), "num_nodes": meeting.num_nodes, "nodes": list(meeting.nodes),
                "run_id": meeting.training_run,
            }  # fmt: skip
            made = self._ask("POST", "", msgspec.json.encode(wanted)).fields
            apart = made.get("num_apart", 0)
            self._num_apart = apart if isinstance(apart, int) else 0
            id, self._token = str(made.get("id", "")), str(made.get("token", ""))
            if not id or not self._token:
                raise CarrierError(f"{self._client.route}: no rankscope server answers there")
        joined = {
            "node": mine.node, "node_rank": meeting.node_rank, "addresses": list(mine.addresses),
            "hello_token": meeting.hello_token,
        }  # fmt: skip
        self._ask("POST", f"/{id}/join", msgspec.json.encode(joined))
        self._id, self._number, self._sent = id, 0, -1

    def _verdict(self, end_s: float) -> LaunchVerdict | None:
        settled = None
        while self._id and (settled is None or not settled.is_settled):
            wait_s = min(MAX_VERDICT_WAIT_S, end_s - time.monotonic())
            if wait_s <= 0 and settled is not None:
                break
            path = f"/{self._id}/verdict?wait={max(0.0, wait_s):.1f}"
            answer = self._ask("GET", path, timeout_s=max(0.0, wait_s) + 15.0)
            settled = _VERDICTS.decode(answer.body)
        return settled.verdict if settled is not None else None

    def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 0.0
    ) -> HttpAnswer:
        answer = self._client.request(
            method, RUNS + path, body, _headers(body), token=self._token, timeout_seconds=timeout_s
        )
        if answer.status == 200:
            return answer
        if answer.status in (404, 409, 410):
            self._id = ""  # the server has forgotten us: join anew
        raise CarrierError(f"{self._client.route}: {answer.why()}")


def upload(
    server: str,
    id: str,
    verdict: LaunchVerdict,
    reports: Sequence[NodeReport],
    training_run: str = "",
    token: str = "",
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Keep a preflight that was coordinated otherwise on a server; return where it is.

    Raises CarrierError.
    """
    client = _client(server, environ)
    body = {"verdict": verdict, "reports": list(reports), "run_id": training_run}
    path = f"{RUNS}/{quote(id)}"
    try:
        with contextlib.closing(client):
            data = msgspec.json.encode(body)
            answer = client.request(
                "PUT", path, data, _headers(data), token=token, timeout_seconds=15.0
            )
    except HttpError as error:
        raise CarrierError(f"{client.route}: {error}") from error
    if answer.status != 200:
        raise CarrierError(f"{client.route}: {answer.why()}")
    return f"{client.address.url}{path}/verdict"


def _key(meeting: Meeting) -> str:
    """Return by what nodes find each other there: the run's name, and that they may know it."""
    return f"{meeting.run[:_MOST_RUN]} {meeting.proof[:_PROOF]}".strip()


def _client(server: str, environ: Mapping[str, str]) -> Client:
    try:
        return Client(
            server, max_answer_bytes=MAX_ANSWER_BYTES, program="rankscope-preflight",
            environ=environ,
        )  # fmt: skip
    except AddressError as error:
        raise CarrierError(str(error)) from error


def _headers(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}
