"""The hub: agents of a preflight that meet over this server, by outbound HTTP alone."""

from __future__ import annotations

import dataclasses
import gzip
import re
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from rankscope.preflight.exchange.intake import Intake, RefusedReportError
from rankscope.preflight.model import (
    SCHEMA_VERSION,
    LaunchVerdict,
    NodeReport,
    decode_report,
    encode,
)
from rankscope_server.api.access.rules import sender
from rankscope_server.api.bodies import read, read_body, takes, unreadable
from rankscope_server.api.preflight import queries
from rankscope_server.api.preflight.schema import (
    PreflightAnswer,
    PreflightInvitation,
    PreflightJoined,
    PreflightReports,
    PreflightRoster,
)
from rankscope_server.api.replies import documented, send
from rankscope_server.api.security import bearer, caller
from rankscope_server.api.service import Service, service_of
from rankscope_server.preflight import store
from rankscope_server.preflight.hub import LIFETIME_NS, is_token_of
from rankscope_server.preflight.live import Live, Member
from rankscope_server.problems import Problem, not_found, request_id

router = APIRouter(prefix="/api/v1/preflight/runs", tags=["preflight"])
MAX_ASK_BYTES = 1 << 20
MAX_REPORT_BYTES = 2 << 20  # 64 nodes, each path fully measured: 0.2 MB
MAX_BYTES = 256 << 20  # of all reports of one preflight
MAX_UPLOAD_BYTES = 64 << 20
MAX_NODES = 4_096
_PROXIED = ("forwarded", "x-forwarded-for", "x-real-ip")
MAX_WAIT_S = 25.0  # proxies often end a silent request after 30 s
NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$"
NodeName = Annotated[str, msgspec.Meta(pattern=NODE_NAME)]
RunId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{0,128}$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PreflightId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Node = Annotated[str, Path(pattern=NODE_NAME)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)]
Since = Annotated[int, Query(ge=0, le=1 << 60)]


class NewPreflight(msgspec.Struct):
    """What is known of a preflight before it begins; those who give the same `key` meet."""

    num_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    nodes: Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    key: Annotated[str, msgspec.Meta(max_length=200)] = ""
    run_id: RunId = ""  # the training run that it precedes


class Join(msgspec.Struct):
    """A node that takes part: what it is called, where it listens."""

    node: NodeName
    node_rank: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 20)] = -1
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=16)] = ()
    # what the agent's listener wants to hear from us: never stored, never shown
    hello_token: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Upload(msgspec.Struct):
    """A preflight that was coordinated otherwise, with the reports of its nodes."""

    verdict: LaunchVerdict
    reports: Annotated[tuple[NodeReport, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    run_id: RunId = ""


@router.post("", openapi_extra=takes(NewPreflight), **documented(PreflightInvitation))
async def create(request: Request) -> Response:
    """Make a preflight, or return the one under way that has the same key."""
    service = service_of(request)
    asked = await read(request, NewPreflight, MAX_ASK_BYTES)
    num_nodes = max(asked.num_nodes, len(asked.nodes))
    hub = service.preflights
    project = sender(request).sends_to
    live = hub.under_way(asked.key, project)
    if live is None:
        hub.spend_new(caller(request))
        live = hub.create(num_nodes, asked.nodes, asked.key, asked.run_id, project)
    command = (
        f"RANKSCOPE_TOKEN={live.token} rankscope preflight "
        f"--server {str(request.base_url).rstrip('/')} --run {live.id}"
    )
    body = PreflightInvitation(
        id=live.id,
        token=live.token,
        command=command,
        expires_ms=live.expires_ns / 1e6,
        num_apart=hub.num_apart(asked.key, project),
    )
    answer = send(request, body)
    answer.headers["Cache-Control"] = "no-store"  # it holds a token
    return answer


@router.post("/{id}/join", openapi_extra=takes(Join), **documented(PreflightJoined))
async def join(request: Request, id: PreflightId) -> Response:
    """Take part; a node that joins again takes the place of the one before."""
    live = member_of(request, id)
    asked = await read(request, Join, MAX_ASK_BYTES)
    if asked.node not in live.members and len(live.members) >= MAX_NODES:
        raise Problem(409, f"a preflight takes {MAX_NODES} nodes", "node", "split the job")
    live.join(
        Member(
            node=asked.node, observed=caller(request), node_rank=asked.node_rank,
            addresses=asked.addresses, ports=asked.ports, joined_ns=time.time_ns(),
            hello_token=asked.hello_token, is_proxied=is_proxied(request),
        )
    )  # fmt: skip
    num_joined = len(live.members)
    body = PreflightJoined(
        id=live.id, num_joined=num_joined, pause_ms=live.pause_s * 1e3,
        num_expected=max(live.num_nodes, len(live.nodes), num_joined),
    )  # fmt: skip
    return send(request, body)


@router.get("/{id}/roster", **documented(PreflightRoster))
async def roster(request: Request, id: PreflightId, wait: Wait = 0.0) -> Response:
    """Return who is there; with `wait` after all are, or so many seconds."""
    hub = service_of(request).preflights
    live = await hub.find(id)
    known = set(live.members)

    def is_news() -> bool:
        return hub.is_closed or bool(live.finished_ns) or set(live.members) != known

    is_full = bool(live.members) and not any(name not in known for name in live.expected)
    if not is_full:
        await live.wait(is_news, wait)
    body = queries.roster(live)
    return send(request, body, body.nodes)


@router.post(
    "/{id}/reports/{node}", openapi_extra=takes(NodeReport), **documented(PreflightReports)
)
async def report(request: Request, id: PreflightId, node: Node, since: Since = 0) -> Response:
    """Take a node's newest report and return what is newer than `since`."""
    live = member_of(request, id)
    data = await read_body(request, MAX_REPORT_BYTES)
    node_report = read_report(data, node)
    member = live.members.get(node)
    if member is None:
        raise Problem(
            409, f"{node} has not joined", "node", f"POST {router.prefix}/{id}/join first"
        )
    if live.num_bytes + len(data) > MAX_BYTES:
        raise Problem(413, f"the reports are larger than {MAX_BYTES} bytes", "body", "test fewer")
    if live.put(node_report, encode(node_report)):  # encoded anew: only what is understood
        live.members[node] = dataclasses.replace(
            member, addresses=node_report.addresses or member.addresses,
            ports=store.declared(node_report) or member.ports,
            node_rank=node_report.node_rank if node_report.node_rank >= 0 else member.node_rank,
        )  # fmt: skip
    return _packed(request, live.delta(since, not live.is_brief))


@router.get("/{id}/reports", **documented(PreflightReports))
async def reports(
    request: Request, id: PreflightId, since: Since = 0, wait: Wait = 0.0
) -> Response:
    """Return the reports newer than number `since`; with `wait` as soon as there are any."""
    hub = service_of(request).preflights
    live = await hub.find(id)
    await live.wait(lambda: live.shown > since or hub.is_closed, wait)
    return _packed(request, live.delta(since, not live.is_brief))


@router.get("/{id}/verdict", **documented(PreflightAnswer))
async def verdict(request: Request, id: PreflightId, wait: Wait = 0.0) -> Response:
    """Return the verdict over what came by now; with `wait` after all have ended, or so long."""
    hub = service_of(request).preflights
    live = await hub.find(id)

    def is_over() -> bool:
        return hub.is_closed or bool(live.finished_ns) or live.is_settled

    await live.wait(is_over, wait)
    found = live.verdict
    if live.stored and live.coordinated == "server" and not hub.is_closed:
        found = await hub.verdict(live)
    is_json = request.query_params.get("format", "json") == "json"
    if live.is_settled and live.evaluated_number == live.number and is_json:
        data = live.packed("verdict", lambda: msgspec.json.encode(queries.answer(live, found)))
        return _packed(request, data)  # made once for the thousand that ask at the same moment
    body = await run_in_threadpool(queries.answer, live, found)
    return send(request, body, body.verdict.findings if body.verdict is not None else [])


@router.put("/{id}", openapi_extra=takes(Upload), **documented(PreflightAnswer))
async def upload(request: Request, id: PreflightId) -> Response:
    """Keep a preflight that was coordinated otherwise; a repeat takes the place of the first."""
    service = service_of(request)
    asked = await read(request, Upload, MAX_UPLOAD_BYTES)
    live = await run_in_threadpool(_keep, service, id, asked, sender(request).sends_to)
    return send(request, queries.answer(live, live.verdict))


def _keep(service: Service, id: str, asked: Upload, project: str) -> Live:
    with service.preflights.read() as connection:
        before = store.find(connection, id)
    is_ours = before is not None and before.coordinated == "server"
    if is_ours or service.preflights.live(id) is not None:
        raise Problem(409, f"preflight {id} was coordinated here", "id", "upload under another id")
    now = time.time_ns()
    begun = min((report.started_unix_s for report in asked.reports), default=0.0)
    live = Live(
        id=id, token="", expires_ns=now, finished_ns=now,
        created_ns=int(begun * 1e9) if 0 < begun < now / 1e9 else now,
        run_id=asked.run_id, coordinated="upload", nodes=asked.verdict.expected,
        verdict=asked.verdict, project=project if before is None else before.project,
    )  # fmt: skip
    intake = Intake(MAX_NODES)
    for report in asked.reports:
        if not re.fullmatch(NODE_NAME, report.node):
            raise Problem(
                422, f"{report.node[:100]!r} is no name of a node", "reports", "rename it"
            )
        live.join(
            Member(
                node=report.node,
                observed="",
                node_rank=report.node_rank,
                addresses=report.addresses,
            )
        )
        report = _taken(intake, report)
        live.put(report, encode(report))
    live.evaluated_number = live.number
    service.preflights.upload(live)
    return live


def read_report(data: bytes, node: str) -> NodeReport:
    """Return a node's report. Raises Problem, which names the field."""
    try:
        node_report = _taken(Intake(MAX_NODES), decode_report(data))
    except (msgspec.MsgspecError, ValueError) as error:
        raise unreadable(error, NodeReport) from error
    if node_report.node != node:
        raise Problem(
            422, f"the report is of {node_report.node[:100]!r}", "node", f"send it as {node}"
        )
    if node_report.schema_version > SCHEMA_VERSION:
        raise Problem(
            422, f"schema version {node_report.schema_version} is newer than this server's",
            "schema_version", "bring the server up to date",
        )  # fmt: skip
    return node_report


def _taken(intake: Intake, report: NodeReport) -> NodeReport:
    """Return a report with nothing in it that acts. Raises Problem."""
    try:
        return intake.take(report)
    except RefusedReportError as error:
        raise Problem(413, f"this report is not taken: {error}", "body", "send less") from error


def member_of(request: Request, id: str) -> Live:
    """Return the preflight whose token the request carries. Raises Problem 403, 404, 410, 503."""
    service_of(request).preflights.check_here()
    live = service_of(request).preflights.live(id)
    if live is None:
        raise not_found(
            f"no preflight {id[:64]!r} is under way",
            f"it has ended, or it lived {LIFETIME_NS // 60 // 10**9} min: POST {router.prefix}",
            "id",
        )
    if time.time_ns() >= live.expires_ns:
        raise Problem(
            410, "this preflight has expired", "id", f"POST {router.prefix} for a new one"
        )
    if not is_token_of(live, bearer(request.headers)):
        raise Problem(
            403, "this is not the token of this preflight", "Authorization",
            "send Authorization: Bearer with the token that came with its id",
        )  # fmt: skip
    return live


def is_proxied(request: Request) -> bool:
    """Return whether the caller's address is only what a header says."""
    return any(name in request.headers for name in _PROXIED)


def _packed(request: Request, data: bytes) -> Response:
    headers = {
        "X-Request-Id": request_id(request), "Cache-Control": "no-store",
        "Vary": "Accept-Encoding",
    }  # fmt: skip
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        data = gzip.decompress(data)
    return Response(data, 200, headers, media_type="application/json")
