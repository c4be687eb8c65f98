"""The server's own network checks, and each rule that keeps it from being a port scanner."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope.preflight.key import RunKey
from rankscope.preflight.model import Listening, NodeReport, encode
from rankscope.preflight.probe.listener import Listener
from rankscope_server.api.app import create_app
from rankscope_server.api.preflight import network as net
from rankscope_server.api.preflight import routes as preflight
from rankscope_server.limits import Buckets
from rankscope_server.preflight import dialling, hub
from rankscope_server.preflight.targets import Policy, address_of, own_addresses, refusal
from rankscope_server.problems import Problem
from rankscope_server.settings import Settings, SettingsError, parse
from tests.server.conftest import ServerProcess, TestClient

Start = Callable[..., ServerProcess]
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
RUNS = "/api/v1/preflight/runs"
HELLO = "what the agents of the run share"
# Bound to loopback alone, the server may dial its own host; every other refuses that.
REFUSED = [
    "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "169.254.169.254", "169.254.1.1",
    "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fd20:ce::254",
    "100.100.100.200", "168.63.129.16", "0.0.0.0", "0.1.2.3", "::", "::ffff:0.0.0.0",
    "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "::127.0.0.1", "localhost", "metadata.google.internal", "2130706433", "0x7f.1", "",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_never_dialled(address: str) -> None:
    assert refusal(address, Policy())
    listed = Policy(networks=Settings(preflight_networks="0.0.0.0/0,::/0").networks())
    assert refusal(address, listed)  # not even where the operator lists everything


@pytest.mark.parametrize(
    "address", ["10.0.0.5", "192.168.7.1", "203.0.113.9", "fd12::5", "2001:db9::1"]
)
def test_what_may_be_dialled(address: str) -> None:
    assert refusal(address, Policy()) == ""


def test_a_list_of_networks_is_the_end_of_it() -> None:
    policy = Policy(networks=Settings(preflight_networks="10.0.0.0/8, fd00::/8").networks())
    assert refusal("10.9.9.9", policy) == refusal("::ffff:10.9.9.9", policy) == ""
    assert refusal("fd12::5", policy) == ""
    assert "outside" in refusal("192.168.7.1", policy)
    with pytest.raises(SettingsError, match="preflight_networks"):
        parse(["--preflight-networks", "10.0.0.1/8"], {})


def test_buckets_fill_with_time_and_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    buckets = Buckets(lambda: now[0])
    assert [buckets.wait_s("a", 2, 0.5) for _ in range(3)] == [0.0, 0.0, 2.0]
    now[0] = 2.0
    assert buckets.wait_s("a", 2, 0.5) == 0.0
    assert buckets.wait_s("b", 2, 0.5, amount=3) > 0  # more than a full bucket holds
    monkeypatch.setattr("rankscope_server.limits.MAX_BUCKETS", 4)
    for name in "cdefghij":
        now[0] += 1
        buckets.wait_s(name, 2, 0.5)
    assert len(buckets._buckets) <= 4


def test_the_servers_own_addresses_are_not_dialled_unless_allowed() -> None:
    own = {address_of(text) for text in ("10.1.2.3", "2001:db8::7")}
    policy = Policy(own=lambda: frozenset(own))  # type: ignore[arg-type]
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "2001:db8:0:0::7"):
        assert "the server's own" in refusal(text, policy)
        assert refusal(text, replace(policy, has_own_host=True)) == ""
    listed = Settings(preflight_networks="10.1.2.3/32,2001:db8::/32").networks()
    assert refusal("10.1.2.3", replace(policy, networks=listed)) == ""
    assert refusal("10.1.2.4", policy) == ""
    rows = psutil.net_if_addrs().values()
    found = {
        row.address.partition("%")[0] for one in rows for row in one if row.family in _FAMILIES
    }
    assert found <= {str(address) for address in own_addresses()}
    for text in found:  # those of this machine, as they are
        assert refusal(text, Policy())


class Member:
    """A node of a preflight, speaking through any client."""

    def __init__(self, client: Any, node: str = "node0", **more: Any) -> None:
        self.client, self.node = client, node
        made = client.post(RUNS, json={"num_nodes": 1})
        assert made.status_code == 200, made.text
        self.id, self.token = made.json()["id"], made.json()["token"]
        self.headers = {"Authorization": f"Bearer {self.token}"}
        words = RunKey.of(HELLO, "a run").words_for_server()
        joined = self.post(f"{RUNS}/{self.id}/join", node=node, hello_token=words, **more)
        assert joined.status_code == 200, joined.text

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body, headers=self.headers)

    def dialback(self, port: int, **more: Any) -> Any:
        return self.post("/api/v1/net/dialback", **({"node": self.node, "port": port} | more))

    def check(self, port: int, node: str = "") -> Any:
        asked = {"run": self.id, "node": node or self.node, "port": port}
        return self.post("/api/v1/net/check", **asked)


@contextmanager
def seen_from(tmp_path: Path, address: str, **more: Any) -> Iterator[TestClient]:
    """A server that others can reach, and a client that comes from `address`."""
    settings = Settings(
        data_dir=str(tmp_path / "data"), host="0.0.0.0", insecure_bind=True, look_seconds=3600.0,
        **more,
    )  # fmt: skip
    with TestClient(create_app(settings), client=(address, 50_000)) as client:
        yield client


class ListeningAgent:
    """The real listener of an agent, in a thread of its own."""

    def __init__(self, node: str, token: str = HELLO) -> None:
        self.loop = asyncio.new_event_loop()
        key = RunKey.of(token, "a run")
        self.listener = Listener(key, node, self._nothing)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self._do(self.listener.bind(0))

    async def _nothing(self, node: str, link: Any) -> None:
        """Take no reports."""

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self._do(self.listener.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@contextmanager
def listening(node: str, token: str = HELLO) -> Iterator[int]:
    agent = ListeningAgent(node, token)
    try:
        yield agent.port
    finally:
        agent.close()


class Stranger(threading.Thread):
    """Something else on a port: it says a line to everybody, and counts them."""

    def __init__(self, line: bytes) -> None:
        super().__init__(daemon=True)
        self.line, self.calls = line, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.start()

    def run(self) -> None:
        while True:
            try:
                call, _ = self.socket.accept()
            except OSError:
                return
            self.calls += 1
            with call:
                call.settimeout(5)
                call.recv(4096)
                call.sendall(self.line)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.join(5)


@pytest.fixture
def local(start_server: Start) -> Iterator[Any]:
    """A client of a real server that is bound to loopback and may dial its own host."""
    import httpx

    with httpx.Client(base_url=start_server().url, timeout=30, trust_env=False) as client:
        yield client


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_dialback_tells_the_class_and_the_time_and_nothing_else(local: Any) -> None:
    redirect = Stranger(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/secret-word\r\n\r\n")
    dead = closed_port()
    with listening("node0") as port, listening("node0", "another run") as foreign:
        member = Member(local, ports=[port, foreign, redirect.port, dead])
        good = member.dialback(port).json()
        assert (good["outcome"], good["address"], good["port"]) == ("ok", "127.0.0.1", port)
        assert 0 < good["elapsed_ms"] < 1500
        assert member.dialback(foreign).json()["outcome"] == "other-secret"
        assert member.dialback(dead).json()["outcome"] == "refused"
        answer = member.dialback(redirect.port)
        assert answer.json()["outcome"] == "not-us"
        assert "secret-word" not in answer.text
        assert redirect.calls == 1  # and nobody was sent on
    redirect.close()


def test_only_declared_ports_of_ones_own_address_are_dialled(local: Any) -> None:
    silent = Stranger(b"")
    member = Member(local, ports=[22, 40001])
    for port, says in ((silent.port, "not declared"), (22, "below 1024"), (40002, "not declared")):
        refused = member.dialback(port)
        assert refused.status_code == 403
        assert says in refused.json()["error"]["what"]
        assert refused.json()["error"]["field"] == "port"
    assert Member(local, "localhost", ports=[22]).check(22).status_code == 403
    assert silent.calls == 0
    assert member.dialback(40001, address="10.0.0.1").json()["address"] == "127.0.0.1"
    assert member.dialback(0).status_code == member.dialback(70_000).status_code == 422
    assert member.dialback(40001, node="node9").status_code == 404
    silent.close()


def test_an_address_that_only_a_header_says_is_not_dialled(local: Any) -> None:
    member = Member(local, ports=[40001])
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        member.headers[name] = "203.0.113.9"
        refused = member.dialback(40001)
        assert refused.status_code == 403
        assert "proxy" in refused.json()["error"]["what"]
        shown = local.get("/api/v1/net/whoami", headers={name: "203.0.113.9"}).json()
        assert shown["is_proxied"]
        del member.headers[name]
    joined = {"node": "203.0.113.9", "ports": [40001]}
    headers = member.headers | {"X-Forwarded-For": "203.0.113.9"}
    local.post(f"{RUNS}/{member.id}/join", json=joined, headers=headers)
    assert member.check(40001, node="203.0.113.9").json()["outcome"] == "unresolved"
    assert local.get("/api/v1/net/whoami").json() == {"address": "127.0.0.1", "is_proxied": False}


def test_strangers_and_members_of_other_preflights_get_no_dial(local: Any) -> None:
    one, other = Member(local, ports=[40001]), Member(local, node="node1", ports=[40001])
    assert (
        local.post("/api/v1/net/dialback", json={"node": "node0", "port": 40001}).status_code == 403
    )
    assert other.dialback(40001, node="node0").status_code == 404  # of another preflight
    one.headers = other.headers
    assert one.check(40001).status_code == 403
    one.headers = {"Authorization": "Bearer pf-guessed"}
    assert one.check(40001).status_code == one.dialback(40001).status_code == 403


def test_of_a_claimed_address_only_the_proof_counts(local: Any) -> None:
    """It came from 127.0.0.1; 127.0.0.2 is only what it says, under that very name."""
    dead, stranger = closed_port(), Stranger(b"SSH-2.0-x\r\n")
    with listening("127.0.0.2") as port:
        member = Member(
            local, node="127.0.0.2", addresses=["127.0.0.2"], ports=[port, dead, stranger.port]
        )
        assert member.check(port).json()["outcome"] == "ok"
        started = time.monotonic()
        refused = member.check(dead).json()
        assert time.monotonic() - started >= dialling.SILENT_S * 0.99  # no faster than a silent one
        silent = member.check(stranger.port).json()
        assert {**refused, "port": 0} == {**silent, "port": 0}
        assert refused["outcome"] == "no-answer"
    stranger.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1"])
def test_a_server_that_others_reach_refuses_these_even_as_the_callers_own(
    tmp_path: Path, address: str
) -> None:
    with seen_from(tmp_path, address) as client:
        refused = Member(client, ports=[40001]).dialback(40001)
        assert refused.status_code == 403
        assert refused.json()["error"]["field"] == "address"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"])
def test_addresses_that_a_node_claims_are_refused(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def resolve(name: str) -> tuple[str, ...]:
        asked.append(name)
        return (address,) if len(asked) == 1 else ("203.0.113.9",)

    async def dial(*args: Any, **more: Any) -> Any:
        raise AssertionError("dialled")

    monkeypatch.setattr(net, "resolved", resolve)
    monkeypatch.setattr(dialling, "dial", dial)
    with seen_from(tmp_path, "10.1.1.1") as client:
        refused = Member(client, addresses=[address], ports=[40001]).check(40001)
        assert refused.status_code == 403
        assert asked == ["node0"]


def test_a_name_is_resolved_once_and_that_address_is_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [("198.51.100.7", "10.1.1.1"), ("169.254.169.254",), ("198.51.100.7",)]
    dialled: list[str] = []

    async def resolve(name: str) -> tuple[str, ...]:
        return answers.pop(0)

    async def dial(caller: Any, address: str, port: int, to: str, **more: Any) -> Any:
        from rankscope.preflight.facts.edges import Dial

        dialled.append(address)
        return Dial(outcome="drop", address=address, port=port, elapsed_ms=1500.0), None

    monkeypatch.setattr(net, "resolved", resolve)
    monkeypatch.setattr(dialling, "dial", dial)
    with seen_from(tmp_path, "10.1.1.1") as client:
        member = Member(client, ports=[40001])
        assert member.check(40001).json()["outcome"] == "drop"
        assert dialled == ["10.1.1.1"]  # its own, though the resolver names another first
        assert len(answers) == 2
        for _ in range(2):  # a name that leads elsewhere is dialled nowhere
            assert member.check(40001).json()["outcome"] == "unresolved"
        assert dialled == ["10.1.1.1"]


def test_networks_of_the_operator_are_a_limit(tmp_path: Path) -> None:
    with seen_from(tmp_path, "10.1.1.1", preflight_networks="10.2.0.0/16") as client:
        refused = Member(client, ports=[40001]).dialback(40001)
        assert "preflight_networks" in refused.json()["error"]["what"]


def test_dials_are_rare_per_token_and_per_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seen_from(tmp_path, "127.0.0.1") as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        member = Member(client, ports=[40001])
        live = service.preflights.live(member.id)
        for number in range(dialling.PER_TOKEN_SIZE + dialling.PER_NODE):
            service.dialler.spend(live, f"10.0.0.{number}")
        with pytest.raises(Problem, match="too many"):
            service.dialler.spend(live, "10.0.1.1")
        other = service.preflights.live(Member(client, node="node1").id)
        monkeypatch.setattr(dialling, "PER_TOKEN_SIZE", 10_000)
        monkeypatch.setattr(dialling, "PER_TARGET_S", 1e-3)
        for _ in range(dialling.PER_TARGET_SIZE):
            service.dialler.spend(other, "10.9.9.9")
        with pytest.raises(Problem, match="too many"):
            service.dialler.spend(other, "10.9.9.9")


def test_blobs_have_a_size_and_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with seen_from(tmp_path, "10.1.1.1") as client:
        got = client.get("/api/v1/net/blob?bytes=100000")
        assert len(got.content) == int(got.headers["content-length"]) == 100_000
        assert got.headers["content-encoding"] == "identity"
        put = client.put("/api/v1/net/blob?bytes=100000", content=bytes(100_000)).json()
        assert put["received_bytes"] == 100_000
        assert put["mbit_per_s"] > 0
        assert client.put("/api/v1/net/blob?bytes=10", content=bytes(11)).status_code == 413
        for size in (0, net.MAX_BLOB_BYTES + 1):
            assert client.get(f"/api/v1/net/blob?bytes={size}").status_code == 422
        monkeypatch.setattr(net, "BLOB_SIZE", 100_000)  # less than is asked for, ever
        spent = client.get("/api/v1/net/blob?bytes=16777216")
        assert spent.status_code == 429
        assert spent.json()["error"]["field"] == "bytes"


def test_time_tells_a_clock_that_is_far_off(local: Any) -> None:
    before = time.time_ns()
    told = local.get("/api/v1/net/time").json()
    assert before <= told["received_ns"] <= told["sent_ns"] <= time.time_ns()
    assert local.get("/api/v1/net/time").headers["cache-control"] == "no-store"


def test_a_preflight_expires_and_its_token_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TICK_S", 3600)  # before it is forgotten
    with seen_from(tmp_path, "10.1.1.1") as client:
        member = Member(client, ports=[40001])
        client.app.state.service.preflights.live(member.id).expires_ns = 1  # type: ignore[attr-defined]
        path = f"{RUNS}/{member.id}/reports/node0"
        told = client.post(path, content=b"{}", headers=member.headers)
        assert told.status_code == 410
        assert member.dialback(40001).status_code == 403


def test_reports_are_checked_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with seen_from(tmp_path, "10.1.1.1") as client:
        member = Member(client)
        path = f"{RUNS}/{member.id}/reports/"

        def send(body: bytes, node: str = "node0") -> tuple[int, Any]:
            reply = client.post(path + node, content=body, headers=member.headers)
            return reply.status_code, reply.json().get("error", {}).get("field")

        assert send(encode(NodeReport(node="node0", listening=Listening(mesh=4000)))) == (200, None)
        assert send(encode(NodeReport(node="node1"))) == (422, "node")
        assert send(encode(NodeReport(node="node1")), "node1") == (409, "node")  # not joined
        assert send(encode(NodeReport(node="node0", schema_version=99))) == (422, "schema_version")
        assert send(b'{"node": "node0", "edges": {"a": {"rtt": {"num": "x"}}}}') == (
            422, "edges[...].rtt.num",
        )  # fmt: skip
        assert send(b"\xff\x00") == (422, "body")
        monkeypatch.setattr(preflight, "MAX_REPORT_BYTES", 100)
        assert send(b" " * 101) == (413, "body")
        monkeypatch.setattr(preflight, "MAX_BYTES", 10)
        assert send(encode(NodeReport(node="node0", version=2)))[0] == 413
        monkeypatch.setattr(preflight, "MAX_NODES", 1)
        refused = member.post(f"{RUNS}/{member.id}/join", node="node1")
        assert refused.status_code == 409
        bad = member.post(f"{RUNS}/{member.id}/join", node="../x")
        assert (bad.status_code, bad.json()["error"]["field"]) == (422, "node")
        none = client.post(f"{RUNS}/{member.id}/join", json={"node": "node1"})
        assert none.status_code == 403  # its token alone lets somebody in


def test_new_preflights_of_one_address_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seen_from(tmp_path, "10.1.1.1") as client:
        monkeypatch.setattr(hub, "CREATED_SIZE", 3)
        monkeypatch.setattr(hub, "CREATED_PER_S", 1e-3)
        asked = [{"key": "a"}, {"key": "b"}, {"key": "c"}, {"key": "a"}, {}]
        statuses = [client.post(RUNS, json=one).status_code for one in asked]
        assert statuses == [200, 200, 200, 200, 429]  # who comes to one that is there is free


def test_whoami_over_a_real_connection(start_server: Start) -> None:
    with urllib.request.urlopen(f"{start_server().url}/api/v1/net/whoami", timeout=10) as reply:
        assert b'"127.0.0.1"' in reply.read()
