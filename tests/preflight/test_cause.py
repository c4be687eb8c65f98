"""What explains what, beyond the findings of one family."""

from __future__ import annotations

import pytest

from rankscope.preflight.model import CheckFinding
from rankscope.preflight.verdict.cause import _RULES, group
from rankscope.preflight.verdict.impact import _SAYS, impact_of

from .synthetic import cluster


def one(
    id: str, nodes: str = "", edges: str = "", status: str = "fail", **evidence: str
) -> CheckFinding:
    """Return a finding: nodes "0 2", edges "0>1 2>1"."""
    return CheckFinding(
        id=id,
        status=status,
        title=f"about {nodes or edges}",
        nodes=tuple(f"node{n}" for n in nodes.split()),
        edges=tuple(
            (f"node{start}", f"node{end}") for start, end in (e.split(">") for e in edges.split())
        ),
        evidence=dict(evidence),
    )


@pytest.mark.parametrize(
    ("cause", "symptoms"),
    [
        (one("net.dup_ip", "1 2"), [
            one("node.absent", "2"), one("dns.wrong", "0", "0>2"), one("port.oneway", "", "0>1"),
            one("net.mtu.path", "1"), one("coll.gloo", "1"),
        ]),
        (one("dns.wrong", "2", "2>0"), [one("port.master.reach", "", "2>0")]),
        (one("dns.master", "2"), [one("port.master.reach", "", "2>0"), one("coll.gloo", "2")]),
        (one("env.complete", "0 1", variable="MASTER_ADDR"), [
            one("dns.master", "0 1", variable="MASTER_ADDR"),
        ]),
        (one("net.mtu.path", "", "0>1 1>0"), [
            one("port.ephemeral", "", "0>1", **{"class": "no-data"}),
            one("port.master.reach", "", "1>0", **{"class": "no-data"}),
        ]),
        (one("port.local", "1", "1>0"), [
            one("port.count", "1", status="warn"), one("port.ephemeral", "", "1>0"),
        ]),
        (one("dns.self.loopback", "1"), [
            one("net.iface.gloo", "1"), one("port.ephemeral", "1", "0>1 2>1"),
        ]),
        (one("port.master.free", "0"), [
            one("port.master.identity", "0", "1>0 2>0"), one("proc.leftover", "0", status="warn"),
        ]),
        (one("port.ephemeral", "1", "0>1 2>1"), [
            one("port.oneway", "", "0>1"), one("coll.gloo", "0 1 2"),
        ]),
        (one("env.endpoint.local", "0 1 2"), [
            one("dns.loopback", "1 2", "1>0 2>0"), one("port.master.identity", "0", "1>0"),
        ]),
        (one("net.down", "1"), [
            one("net.route", "1", "1>0 1>2"), one("port.ephemeral", "1", "0>1 1>0"),
            one("coll.gloo", "1"),
        ]),
        (one("net.route", "1", "1>2 2>1"), [
            one("port.ephemeral", "", "2>1 1>2"), one("port.master.reach", "", "2>1"),
            one("net.route.sym", "1", "1>2", status="warn"), one("coll.gloo", "0 1 2"),
        ]),
        (one("net.nat", "2", "0>2 1>2"), [one("port.ephemeral", "2", "0>2 1>2")]),
        (one("net.loopback", "0"), [one("coll.rdzv", "0 1 2")]),
        (one("env.unknown", "2", variable="NCCL_IFNAME", status="warn"), [
            one("env.drift", "2", variable="NCCL_IFNAME", status="warn"),
        ]),
        (one("clock.offset", "2"), [one("clock.sync", "2", status="warn")]),
        (one("net.iface.missing", "2"), [one("coll.gloo")]),
        (one("lim.nofile", "1"), [one("coll.gloo", "0 1 2")]),
        (one("net.latency", "", "0>1 1>0", "warn"), [one("coll.pair", "1", status="warn")]),
    ],
    ids=lambda value: value.id if isinstance(value, CheckFinding) else "",
)  # fmt: skip
def test_a_cause_hides_what_it_explains(cause: CheckFinding, symptoms: list[CheckFinding]) -> None:
    run = cluster(3).run()
    for order in ([cause, *symptoms], [*reversed(symptoms), cause]):
        grouped = group(order, run)
        assert [f.id for f in grouped] == [cause.id]
        assert sorted(grouped[0].explains) == sorted(f"{s.id}: {s.title}" for s in symptoms)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (one("dns.wrong", "2", "2>0"), one("port.master.reach", "0", "1>0 2>0")),
        (one("net.dup_ip", "1 2"), one("port.oneway", "", "0>3")),
        (one("port.master.free", "0"), one("port.ephemeral", "0", "1>0 2>0")),
        (one("net.rp_filter", "1", "0>1", status="warn"), one("port.oneway", "", "0>1", **{
            "class": "refused"
        })),
        (one("net.latency", "", "0>1 1>0"), one("net.bandwidth", "2", "2>1 2>0")),
        (one("clock.offset", "2"), one("clock.sync", "0 2", status="warn")),
        (one("lim.nofile", "1", status="warn"), one("coll.gloo", "1")),
        (one("net.route", "1", "1>2 2>1"), one("port.ephemeral", "3", "0>3 1>3 2>3")),
        (one("env.slow_left", "2", status="warn", variable="NCCL_DEBUG"),
         one("env.drift", "2", status="warn", variable="NCCL_ALGO")),
    ],
    ids=lambda value: value.id,
)  # fmt: skip
def test_what_is_only_partly_explained_stays(first: CheckFinding, second: CheckFinding) -> None:
    run = cluster(4).run()
    assert {f.id for f in group([first, second], run)} == {first.id, second.id}


def test_two_causes_together_explain_a_symptom() -> None:
    run = cluster(3).run()
    causes = [one("dns.wrong", "2", "2>0"), one("dns.loopback", "1", "1>0")]
    grouped = group([one("port.master.reach", "0", "1>0 2>0"), *causes], run)
    assert {f.id for f in grouped} == {"dns.wrong", "dns.loopback"}


def test_a_warning_that_explains_a_failure_is_a_failure() -> None:
    run = cluster(3).run()
    drop = one("port.oneway", "", "0>1", **{"class": "drop"})
    (grouped,) = group([one("net.rp_filter", "1", "0>1", status="warn"), drop], run)
    assert (grouped.id, grouped.status) == ("net.rp_filter", "fail")


def test_chains_end_at_their_root() -> None:
    run = cluster(3).run()
    (grouped,) = group(
        [
            one("coll.gloo", "0 1 2"),
            one("port.master.reach", "0", "1>0 2>0"),
            one("port.ephemeral", "0", "1>0 2>0"),
            one("dns.self.loopback", "0"),
        ],
        run,
    )
    assert grouped.id == "dns.self.loopback"
    assert len(grouped.explains) == 3


def test_the_worst_stands_first() -> None:
    run = cluster(3).run()
    grouped = group(
        [one("net.jitter", "1", status="warn"), one("clock.offset", "2"), one("net.mtu.path", "0")],
        run,
    )
    assert [f.id for f in grouped] == ["net.mtu.path", "clock.offset", "net.jitter"]


def test_rules_have_a_side() -> None:
    for rule in _RULES:
        assert not set(rule.causes) & set(rule.symptoms), rule


@pytest.mark.parametrize("key", _SAYS, ids=str)
def test_every_sentence_is_said(key: tuple[str, str, str]) -> None:
    id, outcome, mode = key
    run = cluster(3, mode=mode or "static").run()
    finding = one(id, "0", **({"class": outcome} if outcome else {}))
    assert impact_of(finding, run)
    if mode:
        assert impact_of(finding, run) == _SAYS[key]


def test_nobody_knows_what_an_unknown_check_would_have_done() -> None:
    assert impact_of(one("fs.lock", "0"), cluster(2).run()) == ""
