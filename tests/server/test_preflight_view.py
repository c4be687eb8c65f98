"""One preflight as its page shows it: the sentence, checks by family, nodes, the last good one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.model import (
    CheckFinding,
    Facts,
    Fix,
    LaunchVerdict,
    NodeReport,
    Result,
    Status,
)
from rankscope_server.api.preflight.view import checks, verdict_sentence
from rankscope_server.preflight.hub import LIFETIME_NS
from tests.server.conftest import TestClient

RUNS = "/api/v1/preflight/runs"
NODES = ("node0", "node1", "node2")
CLOSED = CheckFinding(
    id="port.ephemeral", status="fail", title="node1 drops random ports; only 29500 is open",
    nodes=("node1",), edges=(("node0", "node1"),), explains=("coll.gloo: no answer",),
    fix=(Fix(node="node1", command="sudo ufw allow 32768:60999/tcp", owner="admin"),),
)  # fmt: skip
FEW = CheckFinding(id="lim.nofile", status="warn", title="node2: 1024 files", nodes=("node2",))
ABSENT = CheckFinding(id="node.absent", status="fail", title="node2 did not report")
PASSED = Result(id="net.routes", family="routes", status="ok")


def said(*findings: CheckFinding, results: tuple[Result, ...] = (PASSED,), **more: Any) -> Any:
    given = {"expected": NODES, "reported": NODES} | more
    return LaunchVerdict(run_id="x", findings=findings, results=results, **given)


def reports(nodes: tuple[str, ...] = NODES, began: float = 0.0) -> list[NodeReport]:
    return [
        NodeReport(
            node=node, version=3, node_rank=rank, stage="done", started_unix_s=began,
            facts=Facts(host=HostFacts(hostname=f"{node}.cluster")), addresses=(f"10.0.0.{rank}",),
        )
        for rank, node in enumerate(nodes)
    ]  # fmt: skip


def put(client: TestClient, id: str, verdict: LaunchVerdict, told: list[NodeReport]) -> None:
    body = msgspec.json.encode({"verdict": verdict, "reports": told})
    assert client.put(f"{RUNS}/{id}", content=body).status_code == 200


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (None, "Not known whether it would launch: nothing was evaluated"),
        (said(), "Ready to launch: 1 check passed on 3 nodes"),
        (said(FEW), "Would launch, with a warning: node2: 1024 files"),
        (said(FEW, CLOSED), f"Do not launch yet: {CLOSED.title}"),
        (said(ABSENT, CLOSED), f"Do not launch yet: {CLOSED.title}, and 1 more failure"),
        (
            said(CLOSED, msgspec.structs.replace(CLOSED, id="dns.master", title="other")),
            f"Do not launch yet: {CLOSED.title}, and 1 more failure",
        ),
        (
            said(FEW, is_partial=True),
            "Not known whether it would launch: some of its nodes had not ended",
        ),
        (said(results=()), "Not known whether it would launch: no check could be evaluated"),
        (
            said(ABSENT, reported=NODES[:2], is_partial=True),
            "Not known whether it would launch: node2 did not report",
        ),
        (
            said(reported=NODES[:1], is_partial=True),
            "Not known whether it would launch: node1 has not reported, and 1 more node",
        ),
        (
            said(
                results=(
                    PASSED,
                    Result(
                        id="port.oneway", family="ports", status="unknown", reason="no answer came"
                    ),
                )
            ),
            "Not known whether it would launch: no answer to port.oneway (no answer came)",
        ),
        # nothing that a launch rests on: it is shown and neither passed nor failed
        (
            said(
                results=(
                    PASSED, Result(id="gpu.ecc", family="gpu", status="skipped", reason="no GPU")
                )
            ),
            "Ready to launch: 1 check passed on 3 nodes",
        ),
    ],
)  # fmt: skip
def test_the_sentence(verdict: LaunchVerdict | None, text: str) -> None:
    assert verdict_sentence(verdict) == text


def test_checks_come_by_family_and_worst_first() -> None:
    statuses: tuple[tuple[str, Status], ...] = (
        ("names", "ok"), ("names", "skipped"), ("ports", "ok"), ("ports", "fail"),
        ("clock", "ok"), ("limits", "unknown"), ("limits", "warn"),
    )  # fmt: skip
    given = [
        Result(id=f"{family}.{at}", family=family, status=status, reason="why")
        for at, (family, status) in enumerate(statuses)
    ]
    shown = checks(given)
    assert [(one.family, one.status) for one in shown] == [
        ("ports", "fail"), ("ports", "ok"), ("limits", "warn"), ("limits", "unknown"),
        ("names", "skipped"), ("names", "ok"), ("clock", "ok"),
    ]  # fmt: skip
    assert sorted(one.id for one in shown) == sorted(one.id for one in given)


def test_a_check_is_shown_with_its_sentence() -> None:
    for family, known in FAMILIES.items():
        for check in known:
            (shown,) = checks([Result(id=check.id, family=family, status="ok")])
            assert shown.what
            assert (check.__doc__ or "").startswith(shown.what)


def test_the_view_agrees_with_the_verdict_it_comes_from(client: TestClient) -> None:
    put(client, "job", said(FEW, CLOSED), reports())
    shown = client.get(f"{RUNS}/job").json()
    verdict = client.get(f"{RUNS}/job/verdict").json()
    assert shown["summary"] == verdict["summary"]
    assert [one["status"] for one in shown["findings"]] == ["fail", "warn"]
    assert sorted(shown["findings"], key=str) == sorted(verdict["verdict"]["findings"], key=str)
    assert {one["id"]: one["status"] for one in shown["checks"]} == {
        one["id"]: one["status"] for one in verdict["verdict"]["results"]
    }
    assert shown["text"] == f"Do not launch yet: {CLOSED.title}"
    assert shown["command"] == "rankscope preflight --nodes node0,node1,node2"
    assert (shown["is_settled"], shown["is_under_way"], shown["last_good"]) == (True, False, None)
    # a path that fails names both of its ends where no node is the culprit; here node1 is
    assert [(one["node"], one["status"], one["findings"]) for one in shown["nodes"]] == [
        ("node1", "fail", ["port.ephemeral"]), ("node2", "warn", ["lim.nofile"]),
        ("node0", "ok", []),
    ]  # fmt: skip
    for row in shown["nodes"]:
        history = client.get(f"/api/v1/preflight/nodes/{row['node']}").json()["preflights"]
        assert (history[0]["status"], history[0]["findings"]) == (row["status"], row["findings"])


def test_a_node_that_never_reported_is_missing_and_not_fine(client: TestClient) -> None:
    put(client, "half", said(reported=NODES[:2], is_partial=True), reports(NODES[:2]))
    shown = client.get(f"{RUNS}/half").json()
    assert [one["status"] for one in shown["nodes"]] == ["missing", "ok", "ok"]
    assert shown["text"].startswith("Not known whether it would launch: node2")


def test_the_last_good_one_met_a_node_and_let_a_launch_go(client: TestClient) -> None:
    good, now = said(), 1_700_000_000.0
    put(client, "elsewhere", good, reports(("node8",), now + 4))
    put(client, "older", good, reports(began=now + 1))
    put(client, "good", said(FEW), reports(("node1", "node9"), now + 2))
    put(client, "bad", said(CLOSED), reports(began=now + 3))
    put(client, "half", said(FEW, is_partial=True), reports(began=now + 3.5))
    open_question = Result(id="port.oneway", family="ports", status="unknown")
    put(client, "open", said(FEW, results=(PASSED, open_question)), reports(began=now + 3.6))
    put(client, "now", said(CLOSED), reports(began=now + 5))
    put(client, "later", good, reports(began=now + 6))
    assert client.get(f"{RUNS}/now").json()["last_good"]["id"] == "good"
    assert client.get(f"{RUNS}/good").json()["last_good"]["id"] == "older"
    assert client.get(f"{RUNS}/older").json()["last_good"] is None


def test_one_under_way_says_who_is_awaited(client: TestClient) -> None:
    made = client.post(RUNS, json={"nodes": ["node0", "node1"]}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    client.post(f"{RUNS}/{made['id']}/join", json={"node": "node0"}, headers=headers)
    shown = client.get(f"{RUNS}/{made['id']}").json()
    assert shown["text"] == "Still under way: 0 of 2 nodes ended"
    assert (shown["is_under_way"], shown["waiting_for"]) == (True, ["node0", "node1"])
    assert made["token"] not in client.get(f"{RUNS}/{made['id']}").text
    announced = client.post(RUNS, json={"num_nodes": 3}).json()["id"]
    assert client.get(f"{RUNS}/{announced}").json()["command"] == ""  # no name is known


def test_a_person_has_the_server_call_what_was_declared_and_nothing_else(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.post(RUNS, json={"num_nodes": 1}).json()
    at, headers = f"{RUNS}/{made['id']}", {"Authorization": f"Bearer {made['token']}"}
    joined = {"node": "node0", "ports": [40001]}
    client.post(f"{at}/join", json=joined, headers=headers)

    def call(port: int, node: str = "node0") -> Any:
        return client.post(f"{at}/check", json={"node": node, "port": port})

    async def resolve(name: str) -> tuple[str, ...]:
        return ("10.9.9.9",)  # no address of that node

    monkeypatch.setattr("rankscope_server.api.preflight.network.resolved", resolve)
    assert call(40001).json()["outcome"] == "unresolved"
    assert call(40001, "node7").status_code == 404
    assert call(0).status_code == call(70_000).status_code == 422
    assert client.post(f"{RUNS}/none/check", json=joined | {"port": 40001}).status_code == 404
    live = client.app.state.service.preflights.live(made["id"])  # type: ignore[attr-defined]
    live.expires_ns -= 2 * LIFETIME_NS
    assert call(40001).status_code == 404
