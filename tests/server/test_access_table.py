"""Every route x role x project x no token, by real requests to a real server.

The routes are those of the app; what each wants is declared once in `api/access/rules.py`. The
expectation is derived from the declaration by a few lines here, and each cell is one request.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from rankscope_server.access.roles import ROLES, included
from rankscope_server.api.access.rules import RULES, Rule
from rankscope_server.api.app import ROUTERS, create_app
from rankscope_server.settings import Settings
from tests.server.conftest import ServerProcess
from tests.server.seed import post_body, seed_run

OPERATOR = "operator of everything"
OURS, THEIRS = "alpha", "beta"
RUN, MARKER, SECRETS = "run-of-alpha", "marker-of-alpha", ("run-of-alpha", "marker-of-alpha")
# These want the preflight's own token whoever asks: the members prove that they were invited.
OWN_TOKEN_ONLY = {
    "POST /api/v1/preflight/runs/{id}/join", "POST /api/v1/preflight/runs/{id}/reports/{node}",
    "POST /api/v1/net/dialback", "POST /api/v1/net/check",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "POST /api/v1/session": {"token": "no"},
    "POST /api/v1/tokens": {"name": "another", "roles": ["read"]},
    "POST /api/v1/tokens/{token}/rotate": {},
    "POST /api/v1/runs/{run}/commands": {"kind": "stacks"},
    "POST /api/v1/preflight/runs": {"num_nodes": 2},
}
QUERIES = {
    "GET /api/v1/search": {"q": MARKER}, "GET /api/v1/net/blob": {"bytes": "1"},
    "GET /api/v1/stream": {"topics": "*"}, "GET /api/v1/runs/{run}/chunks": {"kind": "steps"},
    "GET /api/v1/runs/{run}/rows": {"kind": "ranks"},
}  # fmt: skip


def routes() -> list[str]:
    """Return METHOD PATH of everything that the app answers."""
    found = list(itertools.chain(*(router.routes for router in ROUTERS)))
    found += [route for route in create_app(Settings()).routes if hasattr(route, "methods")]
    names = {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in found
        for method in route.methods  # type: ignore[attr-defined]
    }
    return sorted(name for name in names if not name.startswith("HEAD "))


@dataclass(kw_only=True)
class World:
    """A server with a run and a preflight of one project, and tokens of all kinds."""

    server: ServerProcess
    client: httpx.Client
    tokens: dict[tuple[str, str], str] = field(default_factory=dict)  # by role and project
    ended: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    preflight: str = ""
    own_token: str = ""
    other_own_token: str = ""

    def ask(
        self, name: str, token: str = "", changes: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Send one request of a route; return its status and the beginning of its answer."""
        method, _, path = name.partition(" ")
        changes = changes or {}
        parts = self.parts | changes
        if "/preflight/" in path:
            parts["id"] = changes.get("id", self.preflight)
        elif path.endswith("/acknowledge") or "/findings/" in path:
            parts["id"] = self.parts["finding"]
        query = dict(QUERIES.get(name, {}))
        if path.endswith("/compare"):
            query["before"] = parts["id"] if "/preflight/" in path else parts["run"]
        path = re.sub(r"\{(\w+)(:path)?\}", lambda match: parts[match[1]], path)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = {"json": BODIES[name]} if name in BODIES else {}
        with self.client.stream(method, path, params=query, headers=headers, **body) as reply:
            endless = "event-stream" in reply.headers.get("content-type", "")
            return reply.status_code, "" if endless else reply.read().decode(errors="replace")

    def make(self, role: str, project: str, **more: Any) -> dict[str, str]:
        """Make a token as the operator."""
        asked = {"name": f"{role} of {project}", "roles": [role], "project": project} | more
        reply = self.client.post(
            "/api/v1/tokens", json=asked, headers={"Authorization": f"Bearer {OPERATOR}"}
        )
        assert reply.status_code == 200, reply.text
        made: dict[str, str] = reply.json()
        return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    server = ServerProcess(tmp_path_factory.mktemp("doors"), RANKSCOPE_TOKEN=OPERATOR).start()
    try:
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
            yield fill(World(server=server, client=client))
    finally:
        server.close()


def fill(world: World) -> World:
    for role, project in itertools.product(ROLES, (OURS, THEIRS, "*")):
        world.tokens[role, project] = world.make(role, project)["token"]
    make_ended(world)
    ingest = world.tokens["ingest", OURS]
    seed_run(world.server.url, ingest, run_id=RUN, steps=200, end=False, gpus=True)
    post_body(world.server.url, marked_batch(), ingest)
    make_preflights(world)
    find_parts(world)
    return world


def make_ended(world: World) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    for project in (OURS, "*"):
        made = world.make("admin", project)
        world.client.delete(f"/api/v1/tokens/{made['id']}", headers=headers).raise_for_status()
        world.ended[f"revoked {project}"] = made["token"]
    made = world.make("admin", "*", expires_days=5e-6)
    world.ended |= {"expired": made["token"], "wrong": made["token"][:-1] + "_", "none": "no"}


def marked_batch() -> bytes:
    from rankscope.wire import schema, zstd
    from tests.server.conftest import Sender, log_line

    sender = Sender(None, RUN, "marks")  # type: ignore[arg-type]
    started = schema.RunStarted(
        attempt=0, rank=-1, time_ns=1_700_000_000 * 10**9, name=MARKER, world_size=4,
        command=[MARKER], launcher="", tags={},
    )  # fmt: skip
    return zstd.pack(sender.body(started, log_line(MARKER), host=MARKER))


def make_preflights(world: World) -> None:
    found = []
    for key in ("one", "two"):
        reply = world.client.post(
            "/api/v1/preflight/runs", json={"nodes": [MARKER], "key": key, "run_id": RUN},
            headers={"Authorization": f"Bearer {world.tokens['ingest', OURS]}"},
        )  # fmt: skip
        found.append(reply.json())
    world.preflight, world.own_token = found[0]["id"], found[0]["token"]
    world.other_own_token = found[1]["token"]


def find_parts(world: World) -> None:
    """Wait for a finding, and take what paths want to name."""
    token = world.tokens["operate", OURS]
    headers = {"Authorization": f"Bearer {token}"}
    shown: list[Any] = []
    for _ in range(300):
        shown = world.client.get(f"/api/v1/runs/{RUN}/findings", headers=headers).json()["open"]
        if shown:
            break
        world.client.get("/api/v1/runs", headers=headers)
    assert shown, "no finding in the run of the table"
    asked = world.client.post(
        f"/api/v1/runs/{RUN}/commands", json={"kind": "stacks"}, headers=headers
    ).json()
    world.parts = {
        "run": RUN, "rank": "0", "step": "1", "node": MARKER, "version": "v", "path": "x",
        "finding": str(shown[0]["id"]), "id": str(asked["id"]),
        "token": world.make("read", OURS)["id"], "session": sign_in(world),
    }  # fmt: skip


def sign_in(world: World) -> str:
    """Sign in with a token of our project; return the session's name."""
    token = world.make("read", OURS)["token"]
    assert world.client.post("/api/v1/session", json={"token": token}).status_code == 200
    world.client.cookies.clear()
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    return str(world.client.get("/api/v1/sessions", headers=headers).json()["sessions"][0]["id"])


def names_ours(name: str) -> bool:
    """Return whether the path names something of our project."""
    is_preflight = "/preflight/" in name and "{id}" in name
    return "{run}" in name or "{token}" in name or "{session}" in name or is_preflight


def expected(name: str, rule: Rule, role: str, project: str) -> set[int] | None:
    """Return the statuses that the doors give; None: they let it through."""
    if rule.is_open:
        return None
    if rule.role is not None and rule.role not in included([role]):  # type: ignore[list-item]
        return {403}
    if rule.wants_all_projects and project != "*":
        return {403}
    if project == THEIRS and names_ours(name):
        return {404}
    return {403} if name in OWN_TOKEN_ONLY and "/net/" not in name else None


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    assert routes() == sorted(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_without_a_token_and_with_ended_ones(world: World, name: str) -> None:
    rule = RULES[name]
    tokens = {"nothing": ""} | world.ended | {"preflight": "pf-unknown"}
    for what, token in tokens.items():
        status, text = world.ask(name, token)
        if rule.is_open:
            assert status not in (403, 429), (what, text)
        else:
            assert status == 401, (what, status, text[:300])
            assert not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize("name", sorted(RULES))
def test_roles_and_projects(world: World, name: str) -> None:
    rule = RULES[name]
    for (role, project), token in world.tokens.items():
        if "/tokens/" in name:  # each may end the token of the path
            world.parts["token"] = world.make("read", OURS)["id"]
        if "/sessions/" in name:
            world.parts["session"] = sign_in(world)
        status, text = world.ask(name, token)
        wanted = expected(name, rule, role, project)
        who = f"{role} of {project}: {status} {text[:300]}"
        if wanted is not None:
            assert status in wanted, who
        elif name not in OWN_TOKEN_ONLY:
            # the trace of a rank that made none is not there for anyone, as anyone is told; nor
            # are alerts, their rules, saved searches, views and deleted runs in this server
            is_saved = "/searches/" in name or "/views/" in name
            is_of_none = (rule.wants_all_projects or is_saved) and "{" in name
            is_of_none |= name.endswith("/context")
            is_missing = name.endswith("/trace") or rule.is_open or is_of_none
            assert status not in (401, 403) or rule.is_open, who
            assert status != 404 or is_missing, who
        if project == THEIRS and not names_ours(name):
            text = text.replace(f'"node":"{MARKER}"', "")  # what was asked for, given back
            assert not any(secret in text for secret in SECRETS), who


@pytest.mark.parametrize("name", sorted(name for name in RULES if names_ours(name)))
def test_what_is_of_another_project_is_like_what_is_not_there(world: World, name: str) -> None:
    rule, there = RULES[name], world.parts["token"]
    if rule.role is None or name.startswith("PUT /api/v1/preflight"):  # it makes what is not there
        return
    if rule.wants_all_projects:  # none of this is for the token of one project
        return
    token = world.tokens["admin", THEIRS]
    nothing = {"run": "no-such-run", "token": "0" * 12} | in_preflight(name)
    foreign, gone = world.ask(name, token), world.ask(name, token, nothing)
    assert foreign[0] == gone[0] == 404
    named = {RUN: "no-such-run", there: "0" * 12, world.preflight: "no-such-one"}
    left, right = (json.loads(text)["error"] for _, text in (foreign, gone))
    for before, after in named.items():
        left["what"] = left["what"].replace(before, after)
    if name not in OWN_TOKEN_ONLY:
        assert (left["what"], left["field"]) == (right["what"], right["field"])


def in_preflight(name: str) -> dict[str, str]:
    return {"id": "no-such-one"} if "/preflight/" in name else {}


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_own_token_of_a_preflight(world: World, name: str) -> None:
    rule = RULES[name]
    status, text = world.ask(name, world.own_token)
    if rule.is_by_preflight:
        assert status not in (401, 403), (status, text[:300])
    elif not rule.is_open:
        assert status == 401, (status, text[:300])
    if rule.is_by_preflight and "{id}" in name:
        assert world.ask(name, world.other_own_token)[0] == 401


def test_a_run_of_another_project_takes_no_batch(world: World) -> None:
    for project, status in ((THEIRS, 404), (OURS, 200), ("*", 200)):
        reply = world.client.post(
            "/api/v1/ingest", content=marked_batch(),
            headers={
                "Authorization": f"Bearer {world.tokens['ingest', project]}",
                "Content-Encoding": "zstd",
            },
        )  # fmt: skip
        assert reply.status_code == status, reply.text


def test_the_run_to_compare_with_is_of_the_senders_project_too(world: World) -> None:
    own = "run-of-beta"
    seed_run(world.server.url, world.tokens["ingest", THEIRS], run_id=own, ranks=2, steps=20)
    headers = {"Authorization": f"Bearer {world.tokens['read', THEIRS]}"}

    def compared(before: str) -> httpx.Response:
        path = f"/api/v1/runs/{own}/compare"
        return world.client.get(path, params={"before": before}, headers=headers)

    assert compared(own).status_code == 200
    foreign, gone = compared(RUN), compared("no-such-run")
    assert foreign.status_code == gone.status_code == 404
    left, right = (reply.json()["error"]["what"] for reply in (foreign, gone))
    assert left.replace(RUN, "no-such-run") == right
    nothing = world.client.get(f"/api/v1/runs/{own}/compare", headers=headers)
    assert nothing.json()["before"] is None, "the run before is one of the same project"
