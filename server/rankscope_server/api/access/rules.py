"""What each route wants of who asks, declared once; enforced here, before the route runs.

A route that is not in `RULES` refuses all. One that has `{run}` or the `{id}` of a preflight in
its path answers for what the sender's project may see; lists ask `of_project` for theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa
from fastapi import Request
from starlette.concurrency import run_in_threadpool

from rankscope_server.access.audit import Deed
from rankscope_server.access.roles import Principal, Role
from rankscope_server.api import deeds
from rankscope_server.api.security import caller, principal_of
from rankscope_server.api.service import service_of
from rankscope_server.preflight.live import Live
from rankscope_server.problems import Problem, no_preflight, no_run
from rankscope_server.store import tables
from rankscope_server.store.projects import project_of


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route wants; `role` None: any token will do."""

    role: Role | None = None
    is_open: bool = False  # also to those without a token
    wants_all_projects: bool = False  # it shows what is not of one project
    is_by_preflight: bool = False  # a preflight's own token opens it, for itself
    deed: str = ""  # what the audit log calls it

    @property
    def is_audited(self) -> bool:
        """Return whether what succeeds is written down."""
        return bool(self.deed)


OPEN = Rule(is_open=True)
ANY = Rule()
INGEST, READ, OPERATE, ADMIN = (
    Rule("ingest"), Rule("read"), Rule("operate"), Rule("admin"),
)  # fmt: skip
READ_ALL = replace(READ, wants_all_projects=True)
OPERATE_ALL = replace(OPERATE, wants_all_projects=True)
ADMIN_ALL = replace(ADMIN, wants_all_projects=True)
OF_PREFLIGHT = replace(READ, is_by_preflight=True)
BY_NODE = replace(INGEST, is_by_preflight=True)
NETWORK = replace(ANY, is_by_preflight=True)

_RUN = "/api/v1/runs/{run}"
_PREFLIGHT = "/api/v1/preflight/runs"
RULES: dict[str, Rule] = {
    "GET /api/v1/health": OPEN,
    "GET /api/v1/ready": OPEN,
    "GET /api/v1/session": OPEN,
    "POST /api/v1/session": OPEN,
    "DELETE /api/v1/session": OPEN,
    "GET /api/v1/session/oidc": OPEN,
    "GET /api/v1/session/oidc/callback": OPEN,
    "GET /static/{version}/{path:path}": OPEN,
    "GET /{path:path}": OPEN,
    "GET /api/v1/openapi.json": NETWORK,  # no route of FastAPI's: the Guard alone is before it
    "GET /api/v1/settings": READ_ALL,
    "GET /api/v1/server": READ_ALL,
    "GET /metrics": READ_ALL,
    "POST /api/v1/clock": ANY,
    "POST /api/v1/ingest": INGEST,
    "GET /api/v1/ingest/watermark": INGEST,
    "POST /v1/traces": INGEST,
    "POST /v1/logs": INGEST,
    "POST /v1/metrics": INGEST,
    "GET /api/v1/runs": READ,
    "GET /api/v1/fleet": READ,
    "GET /api/v1/search": READ,
    "GET /api/v1/stream": READ,
    f"GET {_RUN}": READ,
    **{
        f"GET {_RUN}/{part}": READ
        for part in (
            "agent",
            "budget",
            "cell",
            "cell/worst",
            "chunks",
            "collectives",
            "collectives/records",
            "commands",
            "commands/{id}",
            "commands/{id}/ranks/{rank}/trace",
            "communication",
            "compare",
            "cost",
            "environment",
            "errors",
            "findings",
            "findings/{id}",
            "findings/{id}/picture",
            "hang",
            "logs",
            "machines",
            "map",
            "metrics",
            "parallelism",
            "ranks",
            "ranks/{rank}",
            "ranks/{rank}/steps",
            "report",
            "resources",
            "rows",
            "samples",
            "selection",
            "steps",
            "steps/{step}",
            "steps/{step}/trace",
            "throughput",
            "what-if",
        )
    },
    f"POST {_RUN}/findings/{{id}}/acknowledge": replace(OPERATE, deed="acknowledge finding"),
    f"POST {_RUN}/commands": replace(OPERATE, deed="command"),
    f"POST {_RUN}/commands/{{id}}/ranks/{{rank}}/trace": INGEST,
    f"POST {_PREFLIGHT}": INGEST,
    f"GET {_PREFLIGHT}": READ,
    f"PUT {_PREFLIGHT}/{{id}}": INGEST,
    f"GET {_PREFLIGHT}/{{id}}": READ,
    f"POST {_PREFLIGHT}/{{id}}/check": replace(OPERATE, deed="call a node"),
    f"POST {_PREFLIGHT}/{{id}}/join": BY_NODE,
    f"POST {_PREFLIGHT}/{{id}}/reports/{{node}}": BY_NODE,
    f"GET {_PREFLIGHT}/{{id}}/roster": OF_PREFLIGHT,
    f"GET {_PREFLIGHT}/{{id}}/reports": OF_PREFLIGHT,
    f"GET {_PREFLIGHT}/{{id}}/verdict": OF_PREFLIGHT,
    f"GET {_PREFLIGHT}/{{id}}/matrix": OF_PREFLIGHT,
    f"GET {_PREFLIGHT}/{{id}}/compare": OF_PREFLIGHT,
    "GET /api/v1/preflight/nodes/{node}": READ,
    "GET /api/v1/net/whoami": NETWORK,
    "GET /api/v1/net/time": NETWORK,
    "POST /api/v1/net/dialback": NETWORK,
    "POST /api/v1/net/check": NETWORK,
    "GET /api/v1/net/blob": NETWORK,
    "PUT /api/v1/net/blob": NETWORK,
    "GET /api/v1/alerts": READ,
    # what the server itself is: of all projects
    "GET /api/v1/storage": READ_ALL,
    "GET /api/v1/retention": READ_ALL,
    "POST /api/v1/retention": replace(ADMIN_ALL, deed="begin retention"),
    f"DELETE {_RUN}": replace(ADMIN, deed="delete run"),
    f"PUT {_RUN}/pin": replace(OPERATE, deed="pin run"),
    f"DELETE {_RUN}/pin": replace(OPERATE, deed="unpin run"),
    "GET /api/v1/deletions/{run}": READ_ALL,
    "DELETE /api/v1/deletions/{run}": replace(ADMIN_ALL, deed="release run id"),
    **{
        f"GET /api/v1/alerts{part}": READ_ALL
        for part in ("/status", "/rules", "/channels", "/deliveries")
    },
    **{
        f"{method} /api/v1/alerts/{thing}s{part}": replace(ADMIN_ALL, deed=f"{verb} alert {thing}")
        for thing in ("rule", "channel")
        for method, part, verb in (
            ("POST", "", "add"),
            ("PUT", "/{id}", "change"),
            ("DELETE", "/{id}", "delete"),
        )
    },
    "POST /api/v1/alerts/channels/{id}/test": replace(OPERATE_ALL, deed="try alert channel"),
    "POST /api/v1/alerts/deliveries/{id}/send": replace(OPERATE_ALL, deed="send alert again"),
    "POST /api/v1/alerts/{id}/close": replace(OPERATE_ALL, deed="close alert"),
    f"GET {_RUN}/logs/{{id}}/context": READ,
    **{
        f"{way} /api/v1/{what}{one}": replace(READ, deed=deed and f"{deed} {thing}")
        for what, thing in (("searches", "saved search"), ("views", "saved view"))
        for way, one, deed in (("GET", "", ""), ("POST", "", "keep"), ("DELETE", "/{id}", "delete"))
    },
    f"GET {_RUN}/advice": READ,
    f"GET {_RUN}/advice/history": READ,
    f"POST {_RUN}/advice/reports": replace(OPERATE, deed="report what was done"),
    "GET /api/v1/tokens": ADMIN,
    "POST /api/v1/tokens": replace(ADMIN, deed="create token"),
    "POST /api/v1/tokens/{token}/rotate": replace(ADMIN, deed="rotate token"),
    "DELETE /api/v1/tokens/{token}": replace(ADMIN, deed="revoke token"),
    "GET /api/v1/sessions": ADMIN,
    "DELETE /api/v1/sessions/{session}": replace(ADMIN, deed="end session"),
    "GET /api/v1/audit": ADMIN,
}
_SAME_AS_GET = {"HEAD": "GET"}


async def authorize(request: Request) -> None:
    """Let a request through to its route, or raise Problem 401, 403, 404. For every route."""
    method = _SAME_AS_GET.get(request.method, request.method)
    rule = RULES.get(f"{method} {request.scope['route'].path}")
    if rule is None:
        raise Problem(
            403, "this address has no rule who may use it", None, "report it: a route was added"
        )
    principal = principal_of(request)
    project = ""
    if not rule.is_open:
        if principal is None:
            raise Problem(401, "this server wants a token", "Authorization", "sign in")
        _check_role(rule, principal)
        project = await _check_path(request, rule, principal)
    if rule.is_audited and principal is not None:
        deeds.begin(
            request,
            Deed(
                action=rule.deed, who=principal.name, project=project or principal.project,
                address=caller(request), target=" ".join(request.path_params.values()),
            ),
        )  # fmt: skip


def sender(request: Request) -> Principal:
    """Return who sends a request that was let through."""
    principal = principal_of(request)
    if principal is None:
        raise Problem(401, "this server wants a token", "Authorization", "sign in")
    return principal


async def preflight_of(request: Request, id: str) -> Live:
    """Return a preflight that the sender may see. Raises Problem 404."""
    live = await service_of(request).preflights.find(id)
    if not sender(request).sees(live.project):
        raise no_preflight(id)
    return live


def _check_role(rule: Rule, principal: Principal) -> None:
    if principal.preflight:
        if not rule.is_by_preflight:
            raise Problem(
                401, "the token of a preflight opens that preflight alone", "Authorization",
                "send a token of this server",
            )  # fmt: skip
        return
    if rule.role is not None and rule.role not in principal.roles:
        raise Problem(
            403, f"this wants the role {rule.role}", "Authorization",
            f"use a token with it: {principal.name} has {', '.join(sorted(principal.roles))}",
        )  # fmt: skip
    if rule.wants_all_projects and principal.only_project is not None:
        raise Problem(
            403, "this shows what is not of one project", "Authorization",
            "use a token of all projects",
        )  # fmt: skip


async def _check_path(request: Request, rule: Rule, principal: Principal) -> str:
    """Return the project of what a path names, empty where it names none. Raises Problem 404."""
    run, id = request.path_params.get("run"), request.path_params.get("id")
    is_preflight = run is None and request.scope["route"].path.startswith(_PREFLIGHT)
    if principal.preflight and id is not None and id != principal.preflight:
        raise Problem(
            401, "this is the token of another preflight", "Authorization", "send its own token"
        )
    if principal.only_project is None and not rule.is_audited:
        return ""
    table, name = (tables.preflight, id) if is_preflight else (tables.run, run)
    if name is None:
        return ""
    live = service_of(request).preflights.live(name) if is_preflight else None
    found = live.project if live is not None else await run_in_threadpool(_project, request, table)
    if found is None and (principal.only_project is None or request.method == "PUT"):
        return ""  # the route says that it is not there, or makes it
    if found is None or not principal.sees(found):
        raise no_preflight(name) if is_preflight else no_run(name)
    return found


def _project(request: Request, table: sa.Table) -> str | None:
    name = request.path_params["id" if table is tables.preflight else "run"]
    with service_of(request).read() as connection:
        return project_of(connection, table, name)
