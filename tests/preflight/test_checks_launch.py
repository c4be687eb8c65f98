"""Checks of the launch: each is provoked, and silent where nothing is wrong."""

from __future__ import annotations

import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check
from rankscope.preflight.checks.launch import (
    EnvAgree,
    EnvComplete,
    EnvEndpointLocal,
    EnvRankUnique,
    NodeTwice,
)
from rankscope.preflight.checks.meeting import is_local
from rankscope.preflight.checks.variables import (
    EnvDrift,
    EnvOmp,
    EnvSlowLeft,
    EnvUnknown,
    closest,
    known_variables,
)
from rankscope.preflight.facts.gpu import GpuFacts
from rankscope.preflight.facts.rdma import RdmaFacts, RdmaPort
from rankscope.preflight.model import CheckFinding, Claim
from rankscope.preflight.options import Options
from rankscope.preflight.system import Resolved
from tests.preflight.healthy import both, having, judged, run

OWN = [check for check in FAMILIES["launch"] if check.id.startswith("env.")]


def commands(finding: CheckFinding) -> list[str]:
    return [fix.command for fix in finding.fix]


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
@pytest.mark.parametrize("mode", ["static", "c10d", "env"])
def test_a_healthy_run_yields_nothing(check: Check, mode: str) -> None:
    found = judged(check, run({"*": having("launch", mode=mode)}))
    assert [f for f in found if f.status != "skipped"] == []


@pytest.mark.parametrize("check", OWN, ids=lambda check: check.id)
def test_by_hand_nothing_is_accused(check: Check) -> None:
    by_hand = having(
        "launch", launcher="hand", master_addr="", node_rank=None, num_nodes=None,
        nproc_per_node=None, environment={},
    )  # fmt: skip
    assert [f for f in judged(check, run({"*": by_hand})) if f.status in ("fail", "warn")] == []


def plain(**fields: object):  # type: ignore[no-untyped-def]
    told: dict[str, object] = {
        "launcher": "env", "mode": "env", "rank": 0, "world_size": 3, "nproc_per_node": 1,
    }  # fmt: skip
    return having("launch", **(told | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": None}, "RANK not set"),
        ({"world_size": None, "master_addr": ""}, "MASTER_ADDR, WORLD_SIZE not set"),
        ({"rank": 3}, "RANK=3, but WORLD_SIZE=3: ranks are counted from 0"),
        ({"rank": -1}, "RANK=-1 is negative"),
        ({"world_size": 0, "rank": 0}, "RANK=0, but WORLD_SIZE=0"),
        ({"local_rank": 8, "nproc_per_node": 8}, "LOCAL_RANK=8, but LOCAL_WORLD_SIZE=8"),
        ({"rank": None, "errors": ("RANK=x is no integer",)}, "RANK=x is no integer"),
        ({"master_port": 99999}, "MASTER_PORT=99999 is no port"),
        ({"num_nodes": 0}, "nodes=0: at least 1 is needed"),
        ({"min_nodes": 4, "num_nodes": 2}, "--nnodes=4:2: the smaller number comes first"),
    ],
)
def test_env_complete(fields: dict[str, object], words: str) -> None:
    found = judged(EnvComplete(), run({"node1": plain(**fields)}))
    assert found
    assert all(f.status == "fail" and f.nodes == ("node1",) for f in found)
    assert any(words in f.title for f in found), [f.title for f in found]


@pytest.mark.parametrize(
    ("fields", "command"),
    [
        ({"master_addr": "[fd00::1]"}, "export MASTER_ADDR=fd00::1"),
        ({"master_addr": "http://node0"}, "export MASTER_ADDR=node0"),
        ({"master_addr": "node0:29500"}, "export MASTER_ADDR=node0 MASTER_PORT=29500"),
        ({"master_port": 0}, "export MASTER_PORT=29500"),
        ({"errors": ("MASTER_ADDR='node0 ' has a blank in it",)}, "export MASTER_ADDR=node0"),
        ({"launcher": "torchrun", "errors": ("--rdzv-endpoint='node0 ' has a blank in it",)},
         "torchrun --rdzv-endpoint node0:29500 ..."),
        ({"launcher": "torchrun", "errors": ("PET_MASTER_ADDR=' node0' has a blank in it",)},
         "export PET_MASTER_ADDR=node0"),
        ({"launcher": "torchrun", "master_addr": "http://node0", "read_from": ("--master-addr",)},
         "torchrun --master-addr node0 ..."),
        ({"launcher": "slurm", "master_port": 0, "read_from": ("MASTER_PORT",)},
         "export MASTER_PORT=29500"),
        ({"launcher": "hand", "rank": None, "errors": ("MASTER_ADDR='a b' has a blank in it",)},
         "export MASTER_ADDR=node0"),
    ],
)  # fmt: skip
def test_a_mistaken_endpoint_is_set_where_the_launch_says_it(
    fields: dict[str, object], command: str
) -> None:
    (finding,) = judged(EnvComplete(), run({"*": plain(**fields)}))
    assert set(commands(finding)) == {command}


def test_one_cause_on_all_nodes_is_one_finding_with_each_nodes_export() -> None:
    (finding,) = judged(EnvComplete(), run({"*": plain(rank=None)}))
    assert finding.nodes == ("node0", "node1", "node2")
    assert commands(finding) == ["export RANK=0", "export RANK=1", "export RANK=2"]


def test_a_missing_world_size_is_taken_from_the_others() -> None:
    change = {"*": plain(world_size=24), "node2": plain(world_size=None)}
    (finding,) = judged(EnvComplete(), run(change))
    assert commands(finding) == ["export WORLD_SIZE=24"]


@pytest.mark.parametrize(
    ("fields", "what", "command"),
    [
        ({"num_nodes": 2}, "number of nodes", "torchrun --nnodes 3 ..."),
        ({"master_port": 29501}, "port of the endpoint", "torchrun --master-port 29500 ..."),
        ({"rendezvous_id": "7"}, "rendezvous id", "torchrun --rdzv-id none ..."),
        ({"min_nodes": 1}, "number of nodes", "torchrun --nnodes 3 ..."),
        ({"master_addr": "node9"}, "endpoint", "torchrun --master-addr node0 ..."),
    ],
)
def test_env_agree(fields: dict[str, object], what: str, command: str) -> None:
    change = having("launch", **fields)
    if "master_addr" in fields:
        change = both(
            change, having("names", master=Resolved(name="node9", addresses=("9.9.9.9",)))
        )
    (finding,) = judged(EnvAgree(), run({"node2": change}))
    assert (finding.status, finding.nodes) == ("fail", ("node2",))
    assert what in finding.title
    assert commands(finding) == [command]
    assert finding.impact


def test_several_differences_of_one_node_are_one_finding() -> None:
    (finding,) = judged(EnvAgree(), run({"node1": having("launch", num_nodes=2, master_port=1)}))
    assert finding.nodes == ("node1",)
    assert "port of the endpoint, number of nodes differ" in finding.title


def test_two_names_of_one_address_agree() -> None:
    alias = both(
        having("launch", master_addr="head"),
        having("names", master=Resolved(name="head", addresses=("10.77.0.1",))),
    )
    assert judged(EnvAgree(), run({"node2": alias})) == []


def test_a_tie_is_said_and_nobody_is_told_to_change() -> None:
    change = {"node1": having("launch", num_nodes=3)}
    (finding,) = judged(EnvAgree(), run(change, ("node0", "node1")))
    assert set(finding.nodes) == {"node0", "node1"}
    assert "no majority" in finding.title
    assert finding.fix == ()


def test_different_gpus_per_node_are_a_warning() -> None:
    (finding,) = judged(EnvAgree(), run({"node1": having("launch", nproc_per_node=4)}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))


def test_preflight_that_was_asked_otherwise() -> None:
    (finding,) = judged(EnvAgree(), run({"node1": having("", options=Options(tier="quick"))}))
    assert (finding.status, finding.nodes) == ("warn", ("node1",))


def test_two_nodes_with_one_rank() -> None:
    (finding,) = judged(EnvRankUnique(), run({"node2": having("launch", node_rank=1)}))
    assert finding.nodes == ("node1", "node2")
    assert finding.title == "node1 and node2 both say node rank 1"
    assert commands(finding)[1] == "torchrun --node-rank 2 ..."


def test_nobody_gave_a_node_rank() -> None:
    change = having("launch", node_rank=0, read_from=("--nnodes",))
    (finding,) = judged(EnvRankUnique(), run({"*": change}))
    assert "torchrun takes 0 where --node-rank is not given" in finding.title


def test_ranks_of_plain_variables() -> None:
    found = judged(EnvRankUnique(), run({"*": plain(rank=0, node_rank=0)}))
    assert [f.title for f in found] == ["node0, node1, node2 all say RANK 0"]
    assert commands(found[0]) == ["export RANK=0", "export RANK=1", "export RANK=2"]


def test_counted_from_one() -> None:
    change = {
        "node0": having("launch", node_rank=1),
        "node1": having("launch", node_rank=2),
        "node2": having("launch", node_rank=3),
    }
    (finding,) = judged(EnvRankUnique(), run(change))
    assert finding.nodes == ("node2",)
    assert "counted from 0: node2 says 3 of 3" in finding.title


def test_a_node_that_was_told_fewer_nodes_has_no_wrong_rank() -> None:
    assert judged(EnvRankUnique(), run({"node2": having("launch", num_nodes=2)})) == []


def test_c10d_numbers_the_nodes_itself() -> None:
    found = judged(EnvRankUnique(), run({"*": having("launch", mode="c10d", node_rank=0)}))
    assert [f.status for f in found] == ["skipped"]


def test_localhost_everywhere() -> None:
    found = judged(EnvEndpointLocal(), run({"*": having("launch", master_addr="localhost")}))
    assert [(f.status, f.nodes) for f in found] == [("fail", ("node0", "node1", "node2"))]
    assert commands(found[0]) == ["torchrun --master-addr node0 ..."]


def test_only_node_0_may_call_itself_localhost() -> None:
    local = having("launch", master_addr="127.0.0.1")
    assert judged(EnvEndpointLocal(), run({"node0": local})) == []
    (finding,) = judged(EnvEndpointLocal(), run({"node2": local}))
    assert finding.nodes == ("node2",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("localhost", True), ("LOCALHOST.", True), ("127.9.9.9", True), ("::1", True), ("", False),
     ("0.0.0.0", True), ("node0", False), ("10.0.0.1", False), ("localhost2", False),
     ("fe80::1%eth0", False)],
)  # fmt: skip
def test_what_is_local(name: str, expected: bool) -> None:
    assert is_local(name) is expected


def environment(**variables: str):  # type: ignore[no-untyped-def]
    return having("launch", environment={"NCCL_DEBUG": "WARN", **variables})


def test_drift_names_the_odd_one() -> None:
    (finding,) = judged(EnvDrift(), run({"node2": environment(NCCL_BUFFSIZE="8388608")}))
    assert (finding.status, finding.nodes) == ("warn", ("node2",))
    assert finding.title == "node2: NCCL_BUFFSIZE differs (8388608, elsewhere (not set))"
    assert commands(finding) == ["unset NCCL_BUFFSIZE"]


def test_drift_of_the_protocol_fails_with_nccl_only() -> None:
    change = {"node2": environment(NCCL_ALGO="Ring")}
    with_nccl = judged(EnvDrift(), run(change, options=Options(backend="nccl")))
    assert [f.status for f in with_nccl] == ["fail"]
    assert [f.status for f in judged(EnvDrift(), run(change))] == ["warn"]


def test_several_variables_of_one_node_are_one_finding() -> None:
    change = {"node0": environment(UCX_TLS="tcp", FI_PROVIDER="efa")}
    (finding,) = judged(EnvDrift(), run(change))
    assert "FI_PROVIDER and 1 more differ" in finding.title
    assert set(finding.evidence["variables"]) == {"UCX_TLS", "FI_PROVIDER"}


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE", "OMPI_RANK_X"]
)
def test_what_differs_by_design_is_no_drift(name: str) -> None:
    assert judged(EnvDrift(), run({"node1": environment(**{name: "1"})})) == []


def test_drift_of_a_file() -> None:
    change = having("launch", conf_files={"/etc/nccl.conf": "NCCL_IB_HCA=mlx5\n"})
    (finding,) = judged(EnvDrift(), run({"node1": change}))
    assert finding.title.startswith("node1: /etc/nccl.conf differs (NCCL_IB_HCA=mlx5")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"),
        ("NCCL_DEBUGS", "NCCL_DEBUG"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_P2P_DISABLED", "NCCL_P2P_DISABLE"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLIN", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_DISTRIBUTED_DEBG", "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_a_misspelt_variable(name: str, meant: str) -> None:
    found = judged(EnvUnknown(), run({"*": environment(**{name: "x"})}))
    assert [(f.status, f.nodes) for f in found] == [("warn", ("node0", "node1", "node2"))]
    assert f"did you mean {meant}?" in found[0].title
    assert commands(found[0]) == [f"unset {name}; export {meant}=x"]


@pytest.mark.parametrize(
    "name",
    ["NCCL_SITE_SPECIAL", "TORCH_HOME", "NCCL_VERSION", "NCCL_IB_TC", "TORCH_CUDA_ARCH_LIST",
     "NCCL_NTHREADS", "NCCL_FASTRAK_NUM_FLOWS", "TORCH_X"],
)  # fmt: skip
def test_a_known_or_foreign_variable_is_left_alone(name: str) -> None:
    assert closest(name) == ""


def test_the_list_of_variables_is_one() -> None:
    names = known_variables()
    assert len(names) > 400
    assert all(name.isupper() and name.split("_")[0] in ("NCCL", "TORCH", "GLOO") for name in names)


def test_left_over_from_debugging() -> None:
    slow = environment(TORCH_DISTRIBUTED_DEBUG="detail", NCCL_IB_DISABLE="1")
    found = judged(EnvSlowLeft(), run({"node1": slow}))
    assert [(f.status, f.nodes) for f in found] == [("warn", ("node1",))]
    assert commands(found[0]) == ["unset TORCH_DISTRIBUTED_DEBUG"]


def test_what_is_switched_off_must_be_there() -> None:
    slow = environment(NCCL_IB_DISABLE="1", CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="0")

    def has_devices(report):  # type: ignore[no-untyped-def]
        import msgspec

        facts = msgspec.structs.replace(
            report.facts,
            gpu=GpuFacts(num_gpus=8),
            rdma=RdmaFacts(ports=(RdmaPort(device="mlx5_0", number=1),)),
        )
        return msgspec.structs.replace(report, facts=facts)

    found = judged(EnvSlowLeft(), run({"node1": both(slow, has_devices)}))
    assert {f.evidence["variable"] for f in found} == {"NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"}


@pytest.mark.parametrize(
    ("launch_fields", "threads", "warns"),
    [
        ({"nproc_per_node": 4}, "8", True),
        ({"nproc_per_node": 1}, "8", False),
        ({"nproc_per_node": 4}, "2", False),
        ({"nproc_per_node": 4}, "2,4", False),
        ({"nproc_per_node": 4}, "", False),  # torchrun sets 1
        ({"nproc_per_node": 4, "launcher": "mpi", "mode": "env"}, "", True),
        ({"nproc_per_node": 1, "launcher": "mpi", "mode": "env"}, "", False),
        ({"nproc_per_node": 16}, "1", False),  # lim.cgroup.cpu's
        ({"nproc_per_node": 4}, "many", False),
    ],
)
def test_threads_against_cores(launch_fields: dict[str, object], threads: str, warns: bool) -> None:
    variables = {"OMP_NUM_THREADS": threads} if threads else {}
    change = both(environment(**variables), having("launch", **launch_fields))
    found = judged(EnvOmp(), run({"node1": change}))
    assert [f.nodes for f in found] == ([("node1",)] if warns else [])
    if warns:
        assert commands(found[0]) == ["export OMP_NUM_THREADS=2"]


def claims(*addresses: str) -> tuple[Claim, ...]:
    return tuple(
        Claim(started_unix_s=1_800_000_000.0 + number, pid=100 + number, addresses=(address,))
        for number, address in enumerate(addresses)
    )


def test_two_machines_of_one_name_fail_with_both_agents() -> None:
    apart = claims("10.77.0.1", "10.77.0.9")
    some = run({"node2": having("", claims={"node0": apart}), "node1": having("", claims={})})
    (finding,) = judged(NodeTwice(), some)
    assert (finding.status, finding.nodes, finding.confidence) == ("fail", ("node0",), "proven")
    assert finding.title == "node0: 2 agents go by this name, not on one machine"
    assert [agent["pid"] for agent in finding.evidence["agents"]] == [100, 101]
    assert finding.lines[1] == "node0 is pid 101 at 10.77.0.9, since 08:00:01 UTC"
    assert finding.fix[0].command == "rankscope preflight --node NAME   # on 10.77.0.9"
    assert "15 min" in finding.impact


def test_two_agents_on_one_machine_only_warn() -> None:
    twins = claims("10.77.0.1", "10.77.0.1")
    some = run({node: having("", claims={"node0": twins}) for node in ("node0", "node1")})
    (finding,) = judged(NodeTwice(), some)  # one finding, whoever saw it
    assert (finding.status, finding.confidence) == ("warn", "likely")
    assert finding.title == "node0: 2 agents go by this name, on one machine"
    assert finding.fix[0].command.startswith("# leave one agent on each machine")
    assert finding.unless


def test_one_agent_on_each_node_is_silent() -> None:
    assert judged(NodeTwice(), run()) == []
