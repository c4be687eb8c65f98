"""Whether rank 0 is where all look for it, the lists of nodes, and ranks that fit together."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from rankscope.preflight.checks.base import worker_host
from rankscope.preflight.checks.endpoint import EnvMasterRank0, EnvNodes
from rankscope.preflight.checks.launch import EnvAgree, EnvComplete, EnvRankUnique
from rankscope.preflight.checks.variables import EnvDrift
from rankscope.preflight.facts.endpoint import opens_store
from rankscope.preflight.facts.names import HostsLine
from rankscope.preflight.model import CheckFinding
from rankscope.preflight.system import Resolved
from rankscope.preflight.verdict.engine import evaluate
from tests.preflight.healthy import both, having, judged, run
from tests.preflight.synthetic import Cluster, cluster, dial

NODES = ("node0", "node1", "node2")


def meeting(num: int = 3, **fields: object) -> Cluster:
    """Return a healthy cluster whose nodes have called their endpoint."""
    some = cluster(num, **fields)
    for node in some.names:
        some.believes(node, "node0", answered_by="node0")
        some.told(node, *some.names)
        launch = some.reports[node].facts.launch
        assert launch is not None
        by = "env" if launch.mode == "env" else "torchrun"
        number = launch.node_rank if launch.mode == "env" else None
        told = msgspec.structs.replace(launch, launcher=by, rank=number, world_size=num)
        some.facts(node, launch=told)
    return some


def loud(some: Cluster) -> list[CheckFinding]:
    return list(evaluate(some.run()).findings)


def ids(some: Cluster) -> list[str]:
    return [finding.id for finding in loud(some)]


def commands(finding: CheckFinding) -> list[tuple[str, str]]:
    return [(fix.node, fix.command) for fix in finding.fix]


@pytest.mark.parametrize("mode", ["static", "env", "c10d"])
def test_healthy(mode: str) -> None:
    some = meeting(mode=mode)
    for node in NODES:
        names = some.reports[node].facts.names
        assert names is not None
        some.facts(node, names=msgspec.structs.replace(names, opens_store=node == "node0"))
    assert ids(some) == []


@pytest.mark.parametrize(
    ("mode", "launcher", "command"),
    [
        ("static", "torchrun", "torchrun --master-addr node1 ..."),
        ("env", "env", "export MASTER_ADDR=node1"),
        ("env", "slurm", "export MASTER_ADDR=node1"),
    ],
)
def test_swapped_ranks(mode: str, launcher: str, command: str) -> None:
    some = meeting(mode=mode)
    some.ranks(node0=1, node1=0)
    for node in NODES:
        launch = some.reports[node].facts.launch
        assert launch is not None
        told = msgspec.structs.replace(
            launch, launcher=launcher, rank=launch.node_rank, world_size=3, nproc_per_node=1
        )
        some.facts(node, launch=told)
    (found,) = loud(some)
    assert (found.id, found.status, found.nodes) == ("env.master.rank0", "fail", ("node1",))
    assert found.title == "rank 0 runs on node1, but MASTER_ADDR node0 (10.77.0.1) is node0"
    assert commands(found) == [("", command)]
    assert "or start rank 0 on node0 and leave MASTER_ADDR as it is" in found.lines
    assert not any("hosts" in fix.command for fix in found.fix)


def test_master_addr_of_another_node_mends_no_hosts_file() -> None:
    some = meeting()
    for node in NODES:
        some.believes(node, "head", some.address["node1"], answered_by="node1")
    (found,) = loud(some)
    assert (found.id, found.nodes) == ("env.master.rank0", ("node0",))
    assert commands(found) == [("", "torchrun --master-addr node0 ...")]


def test_without_calls_the_owner_of_the_address_decides() -> None:
    some = cluster(3)  # reports by files: no agent called any other
    for node in NODES:
        some.believes(node, "node1")
        some.report(node, endpoint=None)
    assert ids(some) == ["env.master.rank0"]


@pytest.mark.parametrize("answered_by", ["node0", ""])
def test_an_address_that_no_node_has(answered_by: str) -> None:
    some = meeting()
    for node in NODES:
        some.believes(node, "10.9.9.9", answered_by=answered_by)
    if answered_by:  # a virtual address behind which rank 0 answers
        assert ids(some) == []
        return
    (found,) = loud(some)
    assert (found.id, found.nodes) == ("env.master.rank0", ("node0",))
    assert "10.9.9.9 does not lead to node0, which has rank 0: no host has it" in found.title


def test_a_virtual_address_that_one_node_cannot_reach() -> None:
    some = meeting()
    for node in NODES:
        some.believes(node, "10.9.9.9", answered_by="node0" if node != "node2" else "")
    (found,) = loud(some)
    assert (found.id, found.nodes) == ("env.master.rank0", ("node2",))
    assert commands(found) == [("", "torchrun --master-addr node0 ...")]


def test_an_address_that_all_nodes_have_is_each_node_itself() -> None:
    some = meeting()
    for node in NODES:
        some.report(node, addresses=(some.address[node], "172.17.0.1"))
        some.believes(node, "172.17.0.1", answered_by=node)
    found = [f for f in loud(some) if f.id.startswith("env.")]
    assert [(f.id, f.nodes) for f in found] == [("env.endpoint.local", NODES)]
    assert commands(found[0]) == [("", "torchrun --master-addr node0 ...")]


def test_an_assumed_endpoint_accuses_nobody() -> None:
    some = meeting()
    some.ranks(node0=1, node1=0)
    for node in NODES:
        endpoint = some.reports[node].endpoint
        assert endpoint is not None
        some.report(node, endpoint=msgspec.structs.replace(endpoint, is_said=False))
    assert judged(EnvMasterRank0(), some.run()) == []


def test_an_absent_master_is_not_looked_for_elsewhere() -> None:
    some = meeting()
    some.absent("node0", "drop")
    for node in ("node1", "node2"):
        some.believes(node, "node0", outcome="drop")
    assert ids(some) == ["node.absent"]


def c10d(opens: tuple[str, ...], endpoint: str = "10.77.0.1") -> Cluster:
    some = meeting(mode="c10d")
    for node in NODES:
        some.believes(node, endpoint, answered_by="node0")
        names = some.reports[node].facts.names
        assert names is not None
        some.facts(node, names=msgspec.structs.replace(names, opens_store=node in opens))
    return some


def test_nobody_opens_the_store_of_a_c10d_rendezvous() -> None:
    (found,) = judged(EnvMasterRank0(), c10d(()).run())
    assert (found.status, found.nodes) == ("fail", ("node0",))
    told = 'export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=1"  # --rdzv-conf'
    assert commands(found) == [("node0", told)]


def test_several_open_the_store() -> None:
    (found,) = judged(EnvMasterRank0(), c10d(("node0", "node2"), "headless").run())
    assert found.nodes == ("node2",)
    assert commands(found) == [("", "torchrun --rdzv-endpoint node0:29500 ...")]


def test_is_host_is_taken_at_its_word() -> None:
    some = c10d(())
    launch = some.reports["node0"].facts.launch
    assert launch is not None
    some.facts("node0", launch=msgspec.structs.replace(launch, is_store_host=True))
    assert judged(EnvMasterRank0(), some.run()) == []
    assert some.run().master == "node0"


def resolved(*addresses: str, canonical: str = "", error: str = "") -> Resolved:
    return Resolved(name="x", addresses=addresses, canonical=canonical, error=error)


@pytest.mark.parametrize(
    ("name", "own", "endpoint", "opens"),
    [
        ("localhost", resolved(), None, True),
        ("127.0.0.9", resolved(), None, True),
        ("me", resolved(error="EAI_NONAME"), None, True),  # compared before it is resolved
        ("other", resolved(error="EAI_NONAME"), None, None),  # torchrun ends with the error
        ("me.site", resolved("10.0.0.1", canonical="me.site"), resolved("10.0.0.9"), True),
        ("10.0.0.1", resolved("10.0.0.1"), resolved("10.0.0.1"), True),
        ("10.0.0.1", resolved("127.0.1.1"), resolved("10.0.0.1"), False),  # as Debian writes it
        ("alias", resolved("10.0.0.1"), resolved("10.0.0.2", "10.0.0.1"), True),
        ("alias", resolved("10.0.0.1"), resolved("10.0.0.2"), False),
    ],
)
def test_who_opens_the_store_as_torch_sees_it(
    name: str, own: Resolved, endpoint: Resolved | None, opens: bool | None
) -> None:
    assert opens_store(name, "me", own, endpoint) is opens


def workers(**lost: str) -> Cluster:
    """Return a c10d run whose rank 0 calls itself alpha; `lost` cannot find that name."""
    some = c10d(("node0",))
    full = {"node0": "alpha", "node1": "node1.site", "node2": "node2.site"}
    for node in NODES:
        names, endpoint = some.reports[node].facts.names, some.reports[node].endpoint
        assert names is not None
        assert endpoint is not None
        some.facts(node, names=msgspec.structs.replace(names, full_name=full[node]))
        asked = Resolved(name="alpha", addresses=(some.address["node0"],))
        if node in lost:
            failed = ":" not in lost[node]
            asked = Resolved(
                name="alpha",
                addresses=(lost[node],) if failed else (),
                error="" if failed else lost[node],
            )
        some.report(node, endpoint=msgspec.structs.replace(endpoint, workers=asked))
    return some


@pytest.mark.parametrize("why", ["EAI_NONAME: not known", "10.77.0.9", "127.0.0.1"])
def test_the_workers_of_c10d_meet_at_the_own_name_of_rank_0(why: str) -> None:
    assert ids(workers()) == []
    (found,) = loud(workers(node1=why, node2=why))
    assert (found.id, found.status, found.nodes) == ("dns.master", "fail", ("node0",))
    assert commands(found) == [("node0", "export PET_LOCAL_ADDR=node0  # torchrun --local-addr")]
    (found,) = loud(workers(node2=why))
    assert found.nodes == ("node2",)


def test_a_name_for_the_workers_that_was_given_is_the_one() -> None:
    some = workers()
    launch = some.reports["node2"].facts.launch
    assert launch is not None
    some.facts("node2", launch=msgspec.structs.replace(launch, local_addr="a"))
    assert worker_host(some.run()) == ("node2", "a")  # torch sorts the nodes by these names


def test_the_endpoint_of_rank_0_is_right_however_few_say_it() -> None:
    some = meeting(mode="env")
    for node in ("node1", "node2"):
        some.believes(node, "node2", answered_by="node2")
    found = [f for f in loud(some) if f.id == "env.agree"]
    assert [f.nodes for f in found] == [("node1", "node2")]
    assert commands(found[0]) == [
        ("node1", "export MASTER_ADDR=node0"), ("node2", "export MASTER_ADDR=node0"),
    ]  # fmt: skip
    assert ids(some) == ["env.agree"]


@pytest.mark.parametrize("outcome", ["ok", "no-route"])
def test_two_addresses_of_one_node(outcome: str) -> None:
    some = meeting()
    second = "192.168.0.1"
    some.report("node0", addresses=(some.address["node0"], second))
    answered_by = "node0" if outcome == "ok" else ""
    some.believes("node2", second, answered_by=answered_by, outcome=outcome)
    found = judged(EnvAgree(), some.run())
    if outcome == "ok":
        assert found == []
        return
    assert [(f.status, f.nodes) for f in found] == [("warn", ("node2",))]
    assert commands(found[0]) == [("node2", "torchrun --master-addr node0 ...")]


def test_a_wrong_entry_for_an_alias_is_mended_where_it_is() -> None:
    some = meeting()
    for node in NODES:
        some.believes(node, "head", some.address["node0"], answered_by="node0")
    some.believes("node2", "head", "10.77.0.99")
    names = some.reports["node2"].facts.names
    assert names is not None
    line = HostsLine(number=4, text="10.77.0.99 head")
    some.facts("node2", names=msgspec.structs.replace(names, hosts_lines=(line,)))
    (found,) = loud(some)
    assert (found.id, found.nodes) == ("dns.wrong", ("node2",))
    assert "4s/.*/10.77.0.1 head/" in found.fix[0].command


def test_an_unresolved_name_of_a_node_is_given_that_nodes_address() -> None:
    some = meeting()
    some.ranks(node0=1, node1=0)
    for node in NODES:
        some.believes(node, "node0", answered_by="node0")
    names = some.reports["node2"].facts.names
    assert names is not None
    failed = Resolved(name="node0", error="EAI_NONAME: no such name")
    some.facts("node2", names=msgspec.structs.replace(names, master=failed))
    some.report("node2", endpoint=None)
    (found,) = [f for f in loud(some) if f.id == "dns.master"]
    assert commands(found) == [("node2", "echo '10.77.0.1 node0' | sudo tee -a /etc/hosts")]


# ---- lists of nodes


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("node0", "node2", "node1"), "node2 has another order"),
        (("node0", "node2"), "node2 lacks node1"),
        (("node0", "node1", "node2", "node9"), "node2 adds node9"),
    ],
)
def test_a_list_that_differs(names: tuple[str, ...], words: str) -> None:
    some = meeting()
    some.told("node2", *names)
    (found,) = loud(some)
    assert (found.id, found.status, found.nodes) == ("env.nodes", "fail", ("node2",))
    assert words in found.title
    assert commands(found) == [("node2", "rankscope preflight --nodes node0,node1,node2")]


def test_long_lists_are_compared_by_their_digest() -> None:
    some = meeting()
    for node in NODES:
        told = some.reports[node].nodes
        assert told is not None
        digest = "b" if node == "node1" else "a"
        some.report(node, nodes=msgspec.structs.replace(told, names=(), digest=digest, num=100))
    (found,) = judged(EnvNodes(), some.run())
    assert (found.nodes, found.title) == (
        ("node1",), "the lists of nodes differ: node1 has 100 nodes, the others 100",
    )  # fmt: skip


def test_an_agent_with_other_names_is_no_absent_node() -> None:
    some = meeting()
    some.absent("node1", "wrong-host")
    for node in ("node0", "node2"):
        where = some.address["node1"]
        answer = dial("node1", where, 29500, "wrong-host")
        some.change(node, "node1", mesh=msgspec.structs.replace(answer, answered_by=where))
    (found,) = loud(some)
    assert (found.id, found.nodes) == ("env.nodes", ("node1",))
    assert "goes by the name 10.77.0.2" in found.title
    assert any("node.absent" in text for text in found.explains)


@pytest.mark.parametrize(
    ("min_nodes", "num_nodes", "is_told"),
    [(None, 3, False), (2, 4, False), (None, 4, True), (None, 2, True), (4, 8, True)],
)
def test_the_launch_counts_other_nodes_than_the_list(
    min_nodes: int | None, num_nodes: int, is_told: bool
) -> None:
    some = meeting(mode="c10d")
    for node in NODES:
        launch = some.reports[node].facts.launch
        assert launch is not None
        told = msgspec.structs.replace(
            launch, launcher="torchrun", num_nodes=num_nodes, min_nodes=min_nodes
        )
        some.facts(node, launch=told)
    found = judged(EnvNodes(), some.run())
    assert [commands(f) for f in found] == ([[("", "torchrun --nnodes 3 ...")]] if is_told else [])


# ---- ranks


def ranked(*rows: tuple[int, int | None], world: int, **more: object):  # type: ignore[no-untyped-def]
    return run(
        {
            f"node{number}": having(
                "launch", launcher="env", mode="env", rank=first, local_rank=0,
                nproc_per_node=size, world_size=world, **more,
            )
            for number, (first, size) in enumerate(rows)
        },
        tuple(f"node{number}" for number in range(len(rows))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "world", "words", "mended"),
    [
        (((0, 2), (2, 2), (4, 2)), 6, "", []),
        (((0, 8), (8, 8), (16, 4)), 20, "", []),
        (((0, None), (4, None), (8, None)), 12, "", []),
        (((0, 2), (1, 2), (2, 2)), 6, "node1 begins at RANK 1",
         [("node1", "export RANK=2"), ("node2", "export RANK=4")]),
        (((0, 2), (2, 2), (4, 2)), 8, "WORLD_SIZE is 8, and the nodes run 6 ranks",
         [("", "export WORLD_SIZE=6")]),
        (((0, 2), (2, 2), (4, 2)), 5, "WORLD_SIZE is 5, and the nodes run 6 ranks",
         [("", "export WORLD_SIZE=6")]),
        (((0, 2), (2, 2), (6, 2)), 8, "no node has rank 4", [("node2", "export RANK=4")]),
        (((0, None), (1, None), (2, None)), 4, "node2 would run 2, and others 1",
         [("", "export WORLD_SIZE=3")]),
        (((1, None), (2, None), (3, None)), 4, "no node has rank 0: RANK begins at 1",
         [("node0", "export RANK=0"), ("node1", "export RANK=1"), ("node2", "export RANK=2")]),
    ],
)  # fmt: skip
def test_ranks_fit_together(
    rows: tuple[tuple[int, int | None], ...], world: int, words: str,
    mended: list[tuple[str, str]],
) -> None:  # fmt: skip
    found = judged(EnvRankUnique(), ranked(*rows, world=world))
    assert [commands(f) for f in found] == ([mended] if words else [])
    assert all(words in f.title for f in found)


def test_new_numbers_are_those_that_no_other_node_has() -> None:
    some = meeting()
    some.ranks(node0=2, node1=0, node2=0)
    for node in NODES:
        some.believes(node, "node2", answered_by="node2")
    (found,) = judged(EnvRankUnique(), some.run())
    assert commands(found) == [
        ("node1", "torchrun --node-rank 1 ..."), ("node2", "torchrun --node-rank 0 ..."),
    ]  # fmt: skip


def test_who_counts_from_one_numbers_all_anew() -> None:
    some = meeting()
    some.ranks(node0=1, node1=2, node2=3)
    (found,) = judged(EnvRankUnique(), some.run())
    assert commands(found) == [
        (node, f"torchrun --node-rank {number} ...") for number, node in enumerate(NODES)
    ]


def test_a_scheduler_may_deal_ranks_out_in_turns() -> None:
    some = ranked((0, 2), (1, 2), world=4)
    for launcher in ("slurm", "mpi"):
        change = having("launch", launcher=launcher)
        told = run({"*": both(change)}, ("node0", "node1"))
        assert judged(EnvRankUnique(), told) == []
    assert judged(EnvRankUnique(), some)


@pytest.mark.parametrize(
    ("name", "words"),
    [("a" * 64, "64 characters"), (".node0", "begins with a dot"), ("a..b", "between two dots"),
     ("a b", "cannot be part of a name")],
)  # fmt: skip
def test_an_endpoint_that_is_no_host_name(name: str, words: str) -> None:
    some = run({"*": having("launch", launcher="env", mode="env", master_addr=name,
                            rank=0, world_size=3)})  # fmt: skip
    found = [f for f in judged(EnvComplete(), some) if "MASTER_ADDR" in f.title]
    assert [words in f.title for f in found] == [True]


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAMES", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_variable_with_a_check_of_its_own_is_no_drift(name: str) -> None:
    change = having("launch", environment={"NCCL_DEBUG": "WARN", name: "DETAIL"})
    assert judged(EnvDrift(), run({"node1": change})) == []


@pytest.mark.parametrize("name", ["$(reboot)", "a;reboot", "x\nreboot", "node'1"])
def test_no_text_of_another_node_becomes_a_command(name: str) -> None:
    """Names and variables of other nodes are data: what is printed is quoted, or left out."""
    some = cluster(3, mode="env")
    for node in some.names:
        some.believes(node, name, "10.9.9.9")
        launch = some.reports[node].facts.launch
        assert launch is not None
        drifted = {name: "1"} if node == "node2" else {}
        more = {f"NCCL_{name}": name, "NCCL_SOCKET_IFNAMES": name} if node == "node2" else {}
        drifted |= {"NCCL_DEBUG": name} if node != "node2" else {}
        told = msgspec.structs.replace(
            launch, launcher="env", rank=launch.node_rank, world_size=3,
            environment={**drifted, **more},
        )  # fmt: skip
        some.facts(node, launch=told)
    some.told("node1", "node0", name)
    for finding in evaluate(some.run()).findings:
        for fix in finding.fix:
            assert "\n" not in fix.command
            text = shlex.shlex(fix.command, posix=True, punctuation_chars=True)
            assert "reboot" not in list(text)
            assert "$(reboot)" not in fix.command or "'$(reboot)'" in fix.command
