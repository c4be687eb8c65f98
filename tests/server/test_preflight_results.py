"""What is kept of preflights: uploads, the matrix, histories, comparisons, and who cites them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rankscope.preflight.exchange.http import upload
from rankscope.preflight.facts.edges import Bandwidth, Dial, EdgeFacts, PathMtu, Rtt
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.model import (
    CheckFinding,
    Facts,
    LaunchVerdict,
    Listening,
    NodeReport,
    Result,
    encode,
)
from rankscope.wire import schema
from rankscope_server.api.preflight.matrix import matrix, shown_nodes
from rankscope_server.preflight import store
from rankscope_server.preflight.live import Live, Member, brief
from rankscope_server.store import tables
from tests.server.conftest import Sender, TestClient
from tests.server.preflights import Start, get

RUNS = "/api/v1/preflight/runs"
NODES = ("node0", "node1", "node2")
NOW = time.time()


def edge(
    outcome: Any = "ok", mbit: float = 940.0, rtt_ms: float = 0.25, mtu: int = 1500
) -> EdgeFacts:
    return EdgeFacts(
        mesh=Dial(outcome="ok", address="10.77.0.2", port=29500, elapsed_ms=1.0),
        ephemeral=(Dial(outcome=outcome, address="10.77.0.2", port=40001, elapsed_ms=1.0),),
        rtt=Rtt(num=20, min_ms=rtt_ms, median_ms=rtt_ms, p95_ms=rtt_ms, max_ms=rtt_ms),
        mtu=PathMtu(carried_bytes=mtu),
        bandwidth=Bandwidth(mbit_per_s=mbit, num_segments=1000, num_retransmits=10),
    )


def reports(**paths: EdgeFacts) -> list[NodeReport]:
    """Return reports of three nodes; `node0_node1=edge(...)` is a path unlike the others."""
    return [
        NodeReport(
            node=node, version=3, node_rank=rank, stage="done", started_unix_s=NOW - 60,
            facts=Facts(host=HostFacts(hostname=f"{node}.cluster")),
            edges={
                peer: paths.get(f"{node}_{peer}", edge()) for peer in NODES if peer != node
            },
        )
        for rank, node in enumerate(NODES)
    ]  # fmt: skip


SLOW = CheckFinding(
    id="net.bandwidth", status="fail", title="node0 to node1 carries 3 Mbit/s, others 940",
    edges=(("node0", "node1"),), nodes=(),
)  # fmt: skip
SMALL = CheckFinding(
    id="lim.shm", status="warn", title="node2: /dev/shm of 64 MiB", nodes=("node2",)
)
RESULTS = (
    Result(id="net.bandwidth", family="paths", status="fail"),
    Result(id="lim.shm", family="limits", status="warn"),
)


def verdict(*findings: CheckFinding, nodes: tuple[str, ...] = NODES) -> LaunchVerdict:
    return LaunchVerdict(
        run_id="x", expected=nodes, reported=nodes, findings=findings, results=RESULTS
    )


def put(
    client: TestClient, id: str, said: LaunchVerdict, told: list[NodeReport], run: str = ""
) -> Any:
    body = msgspec.json.encode({"verdict": said, "reports": told, "run_id": run})
    reply = client.put(f"{RUNS}/{id}", content=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_upload_is_kept_and_a_repeat_takes_its_place(client: TestClient) -> None:
    bad = [*reports()[:2], reports()[2]]
    kept = put(client, "job-1", verdict(SLOW, SMALL), bad, "train")
    assert kept["summary"]["status"] == "fail"
    assert kept["verdict"]["findings"][0]["title"] == SLOW.title
    again = client.get(f"{RUNS}/job-1/verdict").json()
    assert again == kept
    assert again["is_settled"]
    assert client.get(f"{RUNS}/job-1/reports").json()["reports"] == [
        msgspec.json.decode(encode(one)) for one in bad
    ]
    put(client, "job-1", verdict(SMALL), bad)
    (listed,) = client.get(RUNS).json()["preflights"]
    assert (listed["status"], listed["num_failures"], listed["num_warnings"]) == ("warn", 0, 1)
    assert client.get(f"{RUNS}/none/verdict").status_code == 404
    assert client.put(f"{RUNS}/a/b", content=b"{}").status_code == 405
    for body in (b"{}", b'{"verdict": 3}'):
        assert client.put(f"{RUNS}/job-2", content=body).status_code == 422


def test_an_upload_never_replaces_what_was_coordinated_here(client: TestClient) -> None:
    made = client.post(RUNS, json={}).json()["id"]
    body = msgspec.json.encode({"verdict": verdict()})
    refused = client.put(f"{RUNS}/{made}", content=body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "id")


def test_partial_is_not_ok(client: TestClient) -> None:
    half = msgspec.structs.replace(verdict(), is_partial=True)
    assert put(client, "half", half, reports()[:1])["summary"]["status"] == "unknown"
    good = msgspec.structs.replace(
        verdict(), results=(Result(id="lim.shm", family="limits", status="ok"),)
    )
    assert put(client, "whole", good, reports())["summary"]["status"] == "ok"
    assert put(client, "nothing", verdict(), [])["summary"]["status"] == "unknown"


def test_the_history_of_a_node_says_what_named_it(client: TestClient) -> None:
    put(client, "job-1", verdict(SLOW, SMALL), reports())
    put(client, "job-2", verdict(SMALL), reports())
    for name in ("node1", "node1.cluster"):
        shown = client.get(f"/api/v1/preflight/nodes/{name}").json()["preflights"]
        assert {one["id"]: (one["status"], one["findings"]) for one in shown} == {
            "job-1": ("fail", ["net.bandwidth"]), "job-2": ("ok", []),
        }  # fmt: skip
    assert client.get("/api/v1/preflight/nodes/node9").json()["preflights"] == []


def test_a_path_to_a_node_that_came_late_is_not_measured(client: TestClient) -> None:
    refused = Dial(outcome="refused", address="10.77.0.2", port=29500, elapsed_ms=1.0)
    called = EdgeFacts(mesh=refused)  # before it listened, and never again
    first, second, third = reports(node0_node1=called, node0_node2=called)
    late = msgspec.structs.replace(second, listening=Listening(ephemeral=(40001,)))
    shut = msgspec.structs.replace(third, listening=Listening())
    put(client, "late", verdict(), [first, late, shut])
    shown = client.get(f"{RUNS}/late/matrix?metric=connect").json()
    assert shown["states"] == [["", "", "refused"], ["ok", "", "ok"], ["ok", "ok", ""]]
    put(client, "before", verdict(), reports())
    changes = client.get(f"{RUNS}/late/compare?before=before").json()["pairs"]
    assert {(each["start"], each["end"]) for each in changes} == {("node0", "node2")}


def test_the_matrix_of_each_metric(client: TestClient) -> None:
    told = reports(node0_node1=edge("drop", mbit=3.0, rtt_ms=80.0, mtu=1400))
    put(client, "job-1", verdict(SLOW), told[:2])

    def ask(metric: str) -> Any:
        return client.get(f"{RUNS}/job-1/matrix?metric={metric}").json()

    shown = ask("connect")
    assert shown["nodes"] == list(NODES)
    assert shown["states"] == [["", "drop", "ok"], ["ok", "", "ok"], ["", "", ""]]
    assert shown["values"] == []
    assert shown["flags"] == [{"row": 0, "column": 1, "finding": "net.bandwidth", "status": "fail"}]
    assert ask("mbit")["values"] == [[None, 3.0, 940.0], [940.0, None, 940.0], [None] * 3]
    assert ask("rtt")["values"][0] == [None, 80.0, 0.25]
    assert ask("mtu")["values"][0] == [None, 1400.0, 1500.0]
    assert ask("loss")["values"][0] == [None, 0.01, 0.01]
    assert client.get(f"{RUNS}/job-1/matrix?metric=x").status_code == 422


def test_a_large_matrix_shows_what_findings_name_and_says_so() -> None:
    names = tuple(f"n{number:04}" for number in range(1000))
    bad = CheckFinding(id="port.ephemeral", status="fail", title="x", nodes=("n0777",),
                  edges=(("n0003", "n0777"),))  # fmt: skip
    told = {names[3]: NodeReport(node=names[3], edges={names[777]: edge("drop")})}
    shown = matrix("x", "connect", names, told, verdict(bad, nodes=names))
    assert len(shown.nodes) == 256
    assert len(set(shown.nodes)) == 256
    assert {"n0003", "n0777"} <= set(shown.nodes)
    assert shown.text == (
        "256 of 1,000 nodes: 2 that findings name, 254 of the others, evenly taken"
    )
    assert shown.capped is not None
    (flag,) = shown.flags
    assert shown.nodes[flag.row], shown.nodes[flag.column] == ("n0003", "n0777")
    assert shown.states[flag.row][flag.column] == "drop"
    everyone = CheckFinding(id="env.drift", status="warn", title="x", nodes=names)
    assert len(shown_nodes(names, verdict(everyone, nodes=names), 256)) == 256


def test_a_comparison_names_what_is_new_gone_and_slower(client: TestClient) -> None:
    put(client, "old", verdict(SMALL), reports(node2_node0=edge(mbit=100.0)))
    slow = {"node0_node1": edge(mbit=3.0), "node1_node2": edge("refused", rtt_ms=0.3)}
    put(client, "new", verdict(SMALL, SLOW), reports(**slow))
    shown = client.get(f"{RUNS}/new/compare?before=old").json()
    assert [one["id"] for one in shown["new"]] == ["net.bandwidth"]
    assert [one["id"] for one in shown["same"]] == ["lim.shm"]
    assert shown["gone"] == []
    told = [(one["start"], one["end"], one["metric"], one["is_worse"]) for one in shown["pairs"]]
    assert told == [
        ("node1", "node2", "connect", True), ("node0", "node1", "mbit", True),
        ("node2", "node0", "mbit", False),
    ]  # fmt: skip
    assert (shown["pairs"][1]["before"], shown["pairs"][1]["after"]) == ("940 Mbit/s", "3 Mbit/s")
    assert shown["text"] == "1 new finding, 0 gone, 1 the same; 2 paths worse, 1 better"
    same = client.get(f"{RUNS}/new/compare?before=new").json()
    assert (same["new"], same["gone"], same["pairs"]) == ([], [], [])


def training(client: TestClient, run_id: str, on: tuple[str, ...], **finding: Any) -> Any:
    """Send a run `on` hosts, put a finding into it, and return what the API says of that."""
    sender = Sender(client, run_id)
    now_ns = time.time_ns()
    sender.send(
        *(
            schema.RankRegistered(
                attempt=0, rank=rank, time_ns=now_ns, host=host, pid=rank + 1,
                world_size=len(on),
                local_rank=0, local_world_size=1, node_rank=rank,
            )
            for rank, host in enumerate(on)
        )
    )  # fmt: skip
    body = {"key": "k", "detector": "d", "severity": "critical", "attempt": 0} | finding
    row = {"run_id": run_id, "attempt": 0, "key": "k", "state": "open", "opened_ns": now_ns,
           "body": msgspec.json.encode(body).decode()}  # fmt: skip
    service = client.app.state.service  # type: ignore[attr-defined]
    service.writer.run(lambda unit: unit.connection.execute(sa.insert(tables.finding), [row]))
    (shown,) = sender.get("/findings")["open"]
    assert sender.get(f"/findings/{shown['id']}")["evidence"] == shown["evidence"]
    return [line["text"] for line in shown["evidence"]]


def test_a_hang_cites_what_preflight_measured_of_the_pair(client: TestClient) -> None:
    put(
        client, "pf", verdict(SLOW, SMALL), reports(node0_node1=edge(mbit=3.0, rtt_ms=0.4)), "train"
    )
    at = time.strftime("%H:%M UTC", time.gmtime(NOW - 60))
    cited = training(
        client, "train", ("node0.cluster", "node1.cluster"), kind="hang",
        hosts=["node0.cluster", "node1.cluster"],
    )  # fmt: skip
    assert cited == [
        f"Preflight at {at} found: {SLOW.title}",
        f"Preflight at {at} measured node0 to node1: 3 Mbit/s, 0.4 ms round trip",
    ]


def test_one_host_is_told_its_slowest_path(client: TestClient) -> None:
    put(client, "pf", verdict(), reports(node2_node0=edge(mbit=30.0)), "train")
    (line,) = training(client, "train", ("node2",), kind="slow_link", hosts=["node2"])
    assert line.endswith(
        "measured node2 to node0: 30 Mbit/s, 0.25 ms round trip, the slowest of its 2 paths "
        "(median 485 Mbit/s)"
    )


def test_what_is_cited_is_among_the_first_lines(client: TestClient) -> None:
    put(client, "pf", verdict(), reports(node2_node0=edge(mbit=30.0)), "train")
    own = [{"text": f"path {number}", "link": ""} for number in range(9)]
    first, cited, second, *_ = training(
        client, "train", ("node2",), kind="slow_link", hosts=["node2"], evidence=own
    )
    assert (first, second) == ("path 0", "path 1")
    assert "measured node2 to node0: 30 Mbit/s" in cited


@pytest.mark.parametrize(
    ("hosts", "run", "kind"),
    [
        (("node0", "stranger"), "", "hang"),  # not all of its hosts were there
        (("node0", "node1"), "another", "hang"),  # it precedes another run
        (("node0", "node1"), "train", "nan"),  # preflight says nothing about numbers
        (("node2",), "train", "slow_data"),  # /dev/shm does bear on it: see below
    ],
)
def test_what_does_not_bear_on_a_finding_is_not_cited(
    client: TestClient, hosts: tuple[str, ...], run: str, kind: str
) -> None:
    put(client, "pf", verdict(SLOW, SMALL), reports(), run)
    told = training(client, "train", hosts, kind=kind, hosts=list(hosts))
    assert [line.partition("found: ")[2] for line in told] == (
        [SMALL.title] if kind == "slow_data" else []
    )


def test_hosts_alone_link_a_preflight_of_the_last_hour(client: TestClient) -> None:
    put(client, "pf", verdict(SLOW), reports())
    told = training(client, "train", ("node0", "node1.cluster"), kind="hang", hosts=["node0"])
    assert told[0].endswith(SLOW.title)


def test_a_preflight_after_the_finding_is_not_cited(client: TestClient) -> None:
    late = [msgspec.structs.replace(one, started_unix_s=0.0) for one in reports()]
    service = client.app.state.service  # type: ignore[attr-defined]
    told = training(client, "train", ("node0",), kind="hang", hosts=["node0"])
    assert told == []
    put(client, "pf", verdict(SLOW), late, "train")
    with service.read() as connection:
        assert store.find(connection, "pf").created_ns > 0
    (shown,) = Sender(client, "train").get("/findings")["open"]
    assert shown["evidence"] == []


def test_upload_by_an_agent_over_a_real_connection(start_server: Start) -> None:
    server = start_server()
    where = upload(server.url, "job-1", verdict(SLOW), reports(), "train", environ={})
    assert where == f"{server.url}{RUNS}/job-1/verdict"
    assert get(server, f"{RUNS}/job-1/verdict")["summary"]["run_id"] == "train"


def live(**more: Any) -> Live:
    return Live(id="x", token="pf-x", created_ns=0, expires_ns=1 << 62, **more)


def test_expected_names_everybody_once_and_who_is_missing() -> None:
    one = live(num_nodes=4)
    for rank, name in ((2, "c"), (0, "a")):
        one.join(Member(node=name, observed="", node_rank=rank))
    assert one.expected == ("a", "node-rank-1", "c", "node-rank-3")
    one.join(Member(node="extra", observed=""))
    assert one.expected == ("a", "c", "node-rank-3", "extra")
    unranked = live(num_nodes=3)
    unranked.join(Member(node="b", observed=""))
    assert unranked.expected == ("b", "node-rank-1", "node-rank-2")
    named = live(nodes=("n0", "n1"))
    named.join(Member(node="n9", observed=""))
    assert named.expected == ("n0", "n1", "n9")


def test_a_newer_report_holds_and_an_agent_that_starts_again_begins_anew() -> None:
    one = live()
    one.join(Member(node="node0", observed=""))
    first = NodeReport(node="node0", version=5, started_unix_s=10.0)
    assert one.put(first, encode(first))
    for version, started, is_new in ((5, 10.0, False), (4, 10.0, False), (1, 11.0, True)):
        told = NodeReport(node="node0", version=version, started_unix_s=started)
        assert one.put(told, encode(told)) is is_new
    assert one.stored["node0"].report.started_unix_s == 11.0
    assert one.num_bytes == len(one.stored["node0"].full)


def test_a_brief_report_has_what_agents_need_and_no_facts() -> None:
    (whole, *_) = reports()
    short = brief(whole)
    assert short.facts == Facts()
    assert (short.stage, short.version, short.listening) == ("done", 3, whole.listening)
    assert {peer: found.bandwidth.mbit_per_s for peer, found in short.edges.items()} == {  # type: ignore[union-attr]
        "node1": 940.0, "node2": 940.0,
    }  # fmt: skip
    assert len(encode(short)) < len(encode(whole)) / 2


def test_news_of_a_preflight_are_hints_of_the_event_stream(client: TestClient) -> None:
    made = client.post(RUNS, json={}).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    client.post(f"{RUNS}/{made['id']}/join", json={"node": "node0"}, headers=headers)
    told = encode(NodeReport(node="node0", stage="done"))
    client.post(f"{RUNS}/{made['id']}/reports/node0", content=told, headers=headers)
    broker = client.app.state.service.broker  # type: ignore[attr-defined]
    topic = f"preflight:{made['id']}"
    seen: set[str] = set()
    deadline = time.monotonic() + 20
    while seen != {"reports", "verdict"}:
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
        seen = {name for one in broker.since(0, frozenset({topic})) for name in one.changed}
    assert [one.topic for one in broker.since(0, frozenset({"preflights"}))] == ["preflights"]
