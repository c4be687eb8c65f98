"""HAProxy and nginx as `deploy/` has them, before real servers: streams, batches, addresses."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rankscope.http import CA_VARIABLE, Client
from rankscope_server.settings import Settings
from tests.capabilities import need
from tests.ports import free_port
from tests.server.balancers import DEPLOY, KINDS, NAME, Balancer, balancing
from tests.server.conftest import Sender, ServerProcess, log_line
from tests.server.postgres import Postgres
from tests.server.receivers import wait_for
from tests.server.streams import Stream

TOKEN = "the operator's own words"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BEHIND = ("--allowed-hosts", NAME, "--trusted-proxies", "127.0.0.1")
MIB = 1 << 20
Start = Callable[..., ServerProcess]


@dataclass(frozen=True)
class Site:
    """A load balancer that trusts one server to be up, and whose other one is down."""

    balancer: Balancer
    server: ServerProcess

    def client(self, **more: Any) -> httpx.Client:
        """Return a client that believes the balancer's certificate."""
        context = ssl.create_default_context(cafile=str(self.balancer.authority))
        transport = httpx.HTTPTransport(verify=context, **more)
        return httpx.Client(
            base_url=self.balancer.url, transport=transport, headers=AUTHORIZED, timeout=30
        )


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.needs(kind)) for kind in KINDS])
def site(request: pytest.FixtureRequest, start_server: Start, tmp_path: Path) -> Iterator[Site]:
    """One server behind a load balancer, and the address of another that does not answer."""
    server = start_server(*BEHIND, RANKSCOPE_TOKEN=TOKEN)
    down = f"http://127.0.0.1:{free_port()}"
    with balancing(request.param, tmp_path / "balancer", (server.url, down)) as balancer:
        found = Site(balancer, server)
        with found.client() as client:
            wait_for(lambda: client.get("/api/v1/ready").status_code == 200, "it is found ready")
        yield found


def batch_of(size_bytes: int) -> bytes:
    """Return a batch of a line and a field that no server knows, which nothing makes smaller."""
    return Sender(None).body(log_line("x"), later=secrets.token_bytes(size_bytes))  # type: ignore[arg-type]


def test_a_stream_and_large_batches_pass(site: Site) -> None:
    with site.client() as client:
        stream = Stream(
            f"{site.balancer.url}/api/v1/stream?topics=runs", headers=AUTHORIZED,
            authority=site.balancer.authority,
        )  # fmt: skip
        wait_for(lambda: stream.headers, "the stream is open")
        reply = client.post("/api/v1/ingest", content=batch_of(15 * MIB))
        assert reply.status_code == 200, reply.text
        assert (reply.json()["refused"], reply.json()["duplicate"]) == ([], False)
        stream.wait_for(lambda events: any(event["event"] == "change" for event in events))
        assert client.post("/api/v1/ingest", content=batch_of(17 * MIB)).status_code == 413


def test_the_event_stream_may_miss_a_heartbeat() -> None:
    """What waits no longer than one would close streams of which nothing is to be said."""
    texts = [path.read_text() for path in (DEPLOY / "haproxy" / "rankscope.cfg",
                                           DEPLOY / "nginx" / "rankscope.conf")]  # fmt: skip
    limits = re.findall(r"(?:timeout (?:client|server)|proxy_read_timeout) +(\d+)s", "".join(texts))
    assert len(limits) == 3
    assert all(int(limit) > 2 * Settings().heartbeat_seconds for limit in limits)


def test_spans_reach_the_server_that_is_up(site: Site) -> None:
    """They go by address, whichever server that means, and to the other one where it is down."""
    with site.client() as client:
        for path in ("/v1/logs", "/rankscope/v1/logs"):
            reply = client.post(path, json={"resourceLogs": []})
            assert (reply.status_code, reply.json()) == (200, {}), path


@pytest.mark.needs("haproxy")
def test_what_collectors_send_goes_to_gateways(start_server: Start, tmp_path: Path) -> None:
    gateway, web = (
        start_server(*BEHIND, "--data-dir", str(tmp_path / name), RANKSCOPE_TOKEN=TOKEN)
        for name in ("gateway", "web")
    )
    down = f"http://127.0.0.1:{free_port()}"
    addresses = ((web.url, down), (gateway.url, down))
    with (
        balancing("haproxy", tmp_path / "balancer", *addresses) as balancer,
        Site(balancer, web).client() as client,
    ):
        wait_for(lambda: client.get("/api/v1/ready").status_code == 200, "it is found ready")
        batch = Sender(None).body(log_line("x"))  # type: ignore[arg-type]
        wait_for(
            lambda: client.post("/rankscope/api/v1/ingest", content=batch).status_code == 200,
            "the gateway is found ready",
        )
        assert client.post("/api/v1/clock").status_code == 200
        line = {"body": {"stringValue": "x"}}
        named = {"key": "service.name", "value": {"stringValue": "spans"}}
        logs = {"resource": {"attributes": [named]}, "scopeLogs": [{"logRecords": [line]}]}
        assert client.post("/v1/logs", json={"resourceLogs": [logs]}).json() == {}
        trace = client.put("/api/v1/runs/run/commands/7/ranks/0/trace", content=b"x")
        assert trace.status_code != 503
        assert client.get("/api/v1/runs").json()["total"] == 0  # which the web server answers
    assert httpx.get(f"{gateway.url}/api/v1/runs", headers=AUTHORIZED).json()["total"] == 2


def test_a_prefix_of_the_path_is_enough(site: Site) -> None:
    with site.client() as client:
        to = client.get("/rankscope")
        assert to.status_code in range(301, 309)
        assert to.headers["location"].endswith("/rankscope/")
        page = client.get("/rankscope/runs/some-run")
        assert page.status_code == 200
        named = re.findall(r'(?:src|href)="((?:\.\./)*static/[^"]+)"', page.text)
        base = re.search(r'<base href="([^"]+)"', page.text)
        assert base is not None
        root = httpx.URL(f"{site.balancer.url}/rankscope/runs/some-run").join(base[1])
        assert root.path == "/rankscope/"
        assert named
        assert {client.get(root.join(name)).status_code for name in named} == {200}
    environ = {CA_VARIABLE: str(site.balancer.authority)}
    agent = Client(f"{site.balancer.url}/rankscope", TOKEN, environ=environ)
    with contextlib.closing(agent):
        assert agent.request("GET", "/api/v1/runs").fields["total"] == 0


def test_plain_http_leads_to_https(site: Site) -> None:
    reply = httpx.get(f"{site.balancer.plain_url}/runs?q=x", trust_env=False)
    assert reply.status_code == 308
    assert re.fullmatch(r"https://127\.0\.0\.1(:\d+)?/runs\?q=x", reply.headers["location"])


def test_the_server_hears_of_the_callers_own_address_alone(site: Site) -> None:
    forged = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "http"}
    with site.client(local_address="127.0.0.2") as client:
        for number in range(2):
            wrong = forged | {"Authorization": f"Bearer guess {number}"}
            assert client.get("/api/v1/runs", headers=wrong).status_code == 401
        rows = client.get("/api/v1/audit").json()["rows"]
        assert rows[0]["address"] == "127.0.0.2"
        signed_in = client.post("/api/v1/session", json={"token": TOKEN}, headers=forged)
        assert "Secure" in signed_in.headers["set-cookie"]


@pytest.fixture(params=KINDS)
def two(
    request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path
) -> Iterator[tuple[Site, list[ServerProcess]]]:
    """Two servers on one PostgreSQL behind a load balancer."""
    need(request.param)
    flags = (*BEHIND, "--database-url", postgres.create_migrated())
    servers = [ServerProcess(tmp_path / name, *flags, RANKSCOPE_TOKEN=TOKEN) for name in ("a", "b")]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.folder.mkdir()
            server.start()
        urls = [server.url for server in servers]
        balancer = stack.enter_context(balancing(request.param, tmp_path / "balancer", urls))
        yield Site(balancer, servers[0]), servers


def test_a_server_that_is_killed_is_not_noticed(two: tuple[Site, list[ServerProcess]]) -> None:
    site, servers = two
    with site.client() as client:
        sender = Sender(None)  # type: ignore[arg-type]
        for number in range(40):
            if number == 20:
                servers[0].end(signal.SIGKILL)
            sent = client.post("/api/v1/ingest", content=sender.body(log_line(f"line {number}")))
            assert (sent.status_code, client.get("/api/v1/runs").status_code) == (200, 200)
        assert client.get("/api/v1/runs/run/logs").json()["total"] == 40


def test_preflights_reach_the_server_that_coordinates_them(
    two: tuple[Site, list[ServerProcess]],
) -> None:
    site, servers = two
    with site.client() as client:
        made = client.post("/api/v1/preflight/runs", json={"num_nodes": 9}).json()
        member = {"Authorization": f"Bearer {made['token']}"}
        path = f"/api/v1/preflight/runs/{made['id']}/join"
        wanted = [httpx.post(server.url + path, headers=member, content=json.dumps({"node": "a"}),
                             trust_env=False).status_code for server in servers]  # fmt: skip
        assert sorted(wanted) == [200, 503]  # one of them does not know of it
        for node in "bcdefghi":
            assert client.post(path, headers=member, json={"node": node}).status_code == 200
