"""The checks of the collective smoke test, each provoked, and silent on a healthy run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Check, Run
from rankscope.preflight.checks.collective import CollGloo, CollNccl, CollPair, CollRdzv, difference
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.gpu import GpuFacts
from rankscope.preflight.facts.interfaces import InterfaceFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.rdma import RdmaFacts
from rankscope.preflight.facts.smoke import SmokeFacts, SmokeHalf, SmokeSize
from rankscope.preflight.model import CheckFinding, Facts, NodeReport

NODES = ("node0", "node1", "node2")
MB = 2**20


def size(size_bytes: int, ms: float = 5.0, num_wrong: int = 0) -> SmokeSize:
    return SmokeSize(
        size_bytes=size_bytes, elapsed_ms=ms, is_correct=num_wrong == 0, num_wrong=num_wrong
    )


def half(nodes: str, ms: float) -> SmokeHalf:
    names = tuple(f"node{number}" for number in nodes)
    return SmokeHalf(nodes=names, size_bytes=4 * MB, elapsed_ms=ms)


HEALTHY = SmokeFacts(
    backend="gloo",
    stage="done",
    world_size=3,
    port=40001,
    store_ms=4.0,
    sizes=(size(4), size(65_536), size(4 * MB, 40.0), size(64 * MB, 700.0)),
    halves=(half("01", 21.0), half("02", 24.0), half("12", 19.0)),
    gloo=(Choice(interface="eth0", address="10.0.0.0", how="gloo's own choice"),),
)


def run_of(smokes: Sequence[SmokeFacts | None], **facts: Any) -> Run:
    reports = {}
    for number, smoke in enumerate(smokes):
        reports[f"node{number}"] = NodeReport(
            node=f"node{number}", node_rank=number, stage="done",
            addresses=(f"10.0.0.{number}",), facts=Facts(smoke=smoke, **facts),
        )  # fmt: skip
    return Run("7", tuple(reports), reports)


def but(smoke: SmokeFacts = HEALTHY, **changes: Any) -> SmokeFacts:
    return msgspec.structs.replace(smoke, **changes)


def only(found: Sequence[CheckFinding]) -> CheckFinding:
    (finding,) = found
    return finding


def judged(check: Check, *smokes: SmokeFacts, **facts: Any) -> list[CheckFinding]:
    return list(check.evaluate(run_of(smokes, **facts)))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("check", FAMILIES["collective"], ids=lambda check: check.id)
def test_a_healthy_run_yields_nothing(check: Check, backend: str) -> None:
    ran = but(backend=backend, nccl_net="IB")
    loud = [f for f in judged(check, ran, ran, ran) if f.status in ("fail", "warn", "unknown")]
    assert loud == []


def test_a_check_of_the_other_backend_is_skipped_and_says_so() -> None:
    found = only(judged(CollNccl(), *[HEALTHY] * 3))
    assert (found.status, found.title) == ("skipped", "the smoke test ran over gloo")


# coll.rdzv


def test_a_torch_that_cannot_be_imported_is_named_and_nobody_else() -> None:
    error = "ImportError: libcudart.so.12: cannot open shared object file"
    broken = SmokeFacts(backend="gloo", error=error, ended_by="raised")
    waits = SmokeFacts(backend="gloo", stage="imported", error="timed out", ended_by="raised")
    found = only(judged(CollRdzv(), waits, broken, waits))
    assert (found.status, found.nodes) == ("fail", ("node1",))
    assert "libcudart.so.12" in found.title
    assert found.fix[0].node == "node1"


def test_an_import_that_took_too_long_is_unknown() -> None:
    error = "torch was not imported in 30 s"
    late = SmokeFacts(backend="gloo", error=error, ended_by="not begun")
    assert only(judged(CollRdzv(), HEALTHY, HEALTHY, late)).status == "unknown"


def test_who_did_not_reach_the_store_is_named() -> None:
    missed = SmokeFacts(
        backend="gloo", stage="imported", error="DistNetworkError: x", store="head:29500"
    )
    found = only(judged(CollRdzv(), but(stage="store"), but(stage="store"), missed))
    assert (found.nodes, found.edges) == (("node2",), (("node2", "node0"),))
    assert found.title == "node2 did not reach the store of node0 at head:29500"
    assert shlex.split(found.fix[0].command) == [
        "python", "-c", "import socket; print(socket.create_connection(('head', 29500), 5))"
    ]  # fmt: skip


def test_where_nobody_reached_the_store_its_own_side_is_named() -> None:
    missed = SmokeFacts(backend="gloo", stage="imported", error="DistNetworkError: x")
    found = only(judged(CollRdzv(), missed, missed, missed))
    assert found.nodes == ("node0",)
    assert found.title == "no node reached the store of node0 at node0:29500"


def test_what_did_not_meet_is_not_judged_by_the_others() -> None:
    missed = SmokeFacts(backend="gloo", stage="imported", error="DistNetworkError: x")
    assert only(judged(CollGloo(), missed, missed)).status == "unknown"
    assert only(judged(CollPair(), missed, missed)).status == "skipped"


def test_meeting_slowly_is_a_warning() -> None:
    found = only(judged(CollRdzv(), HEALTHY, but(store_ms=10_040.0), HEALTHY))
    assert (found.status, found.nodes) == ("warn", ("node1",))
    assert "10.0 s" in found.title
    assert "getent hosts 10.0.0.0" in found.fix[0].command


# coll.gloo


def test_a_wrong_sum_on_one_node() -> None:
    wrong = but(sizes=(size(4), size(65_536, num_wrong=3), size(4 * MB, 40.0, num_wrong=9)))
    found = only(judged(CollGloo(), HEALTHY, wrong, HEALTHY))
    assert (found.status, found.nodes) == ("fail", ("node1",))
    assert found.title == "an all-reduce of 64 kB gives a wrong sum on node1"
    assert found.lines == ("node1: 3 of 16384 numbers are wrong",)
    assert "ethtool -S eth0" in found.fix[0].command


def test_a_wrong_sum_everywhere_accuses_nobody() -> None:
    wrong = but(sizes=(size(4, num_wrong=1),))
    found = only(judged(CollGloo(), wrong, wrong))
    assert found.nodes == ()
    assert "on all nodes" in found.title


def stuck(at: int, **changes: Any) -> SmokeFacts:
    return but(stage="collectives", sizes=(size(4), SmokeSize(size_bytes=at)), halves=(), **changes)


def test_large_messages_that_vanish_show_as_a_size_and_a_path() -> None:
    text = "RuntimeError: Timed out waiting 12000ms for recv operation to complete"
    ends = [
        stuck(65_536, error=text, ended_by="raised"),
        stuck(65_536, error=f"{text}, remote=[10.0.0.2]:42", ended_by="raised"),
        stuck(65_536, error=text, ended_by="raised"),
    ]
    found = only(judged(CollGloo(), *ends))
    assert found.title == "an all-reduce of 64 kB did not end between node1 and node2; 4 B passed"
    assert (found.status, found.nodes) == ("fail", ())
    assert found.edges == (("node1", "node2"),)
    assert found.fix[0].command == "ping -c 3 -M do -s 1472 10.0.0.2"


def test_the_one_that_hangs_is_told_from_those_that_time_out() -> None:
    waits = stuck(65_536, error="RuntimeError: Timed out", ended_by="raised")
    hangs = stuck(65_536, error="killed in stage collectives", ended_by="limit")
    found = only(judged(CollGloo(), waits, hangs, waits))
    assert found.nodes == ("node1",)
    assert found.confidence == "likely"
    assert only(judged(CollGloo(), hangs, hangs, waits)).nodes == ()  # two: not known which


def test_a_stall_on_a_busy_machine_accuses_nobody() -> None:
    waits = stuck(65_536, error="RuntimeError: Timed out", ended_by="raised")
    hangs = stuck(65_536, error="killed in stage collectives", ended_by="limit")
    run = run_of([waits, hangs, waits])
    busy = msgspec.structs.replace(run.reports["node2"], delay_p90_ms=40.0)
    found = only(list(CollGloo().evaluate(Run("7", NODES, {**run.reports, "node2": busy}))))
    assert (found.status, found.nodes) == ("unknown", ())
    assert "node2" in found.title


def test_one_that_died_is_named_and_those_that_lost_it_are_not() -> None:
    lost = stuck(4 * MB, error="RuntimeError: Connection closed by peer", ended_by="raised")
    died = stuck(4 * MB, error="ended with signal SIGKILL in stage collectives", ended_by="died")
    found = only(judged(CollGloo(), lost, lost, died))
    assert (found.nodes, found.confidence) == (("node2",), "proven")


def test_a_group_that_does_not_connect() -> None:
    refused = "RuntimeError: connectFullMesh failed ... Connection refused, remote=[10.0.0.1]:9"
    ends = but(stage="store", sizes=(), halves=(), error=refused, ended_by="raised")
    waits = but(stage="store", sizes=(), halves=(), error="Timed out", ended_by="raised")
    found = only(judged(CollGloo(), ends, waits, waits))
    assert found.title == "connecting all members did not end between node0 and node1"


# coll.nccl


def on_nccl(**changes: Any) -> SmokeFacts:
    return but(backend="nccl", **changes)


def test_nccl_on_sockets_beside_infiniband() -> None:
    smokes = [on_nccl(nccl_net="IB"), on_nccl(nccl_net="Socket"), on_nccl(nccl_net="IB")]
    facts = {"rdma": rdma_with_port(), "gpu": GpuFacts(num_gpus=8)}
    found = only(judged(CollNccl(), *smokes, **facts))
    assert (found.status, found.nodes) == ("warn", ("node1",))
    assert "libibverbs" in found.fix[0].command
    launch = LaunchFacts(environment={"NCCL_IB_DISABLE": "1"})
    told = only(judged(CollNccl(), *smokes, launch=launch, **facts))
    assert told.fix[0].command == "unset NCCL_IB_DISABLE"


def rdma_with_port() -> RdmaFacts:
    """Return facts with one port, of whatever type a port is."""
    field = next(f for f in msgspec.structs.fields(RdmaFacts) if f.name == "ports")
    raw: Any = "mlx5_0/1"
    (kind, *_) = getattr(field.type, "__args__", (str,))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        raw = {
            f.encode_name: "mlx5_0" if f.type is str else 1
            for f in msgspec.structs.fields(kind)
            if f.required
        }
    return msgspec.convert({"ports": [raw]}, RdmaFacts)  # fmt: skip


def test_nccl_on_sockets_where_there_is_nothing_else_is_fine() -> None:
    assert judged(CollNccl(), *[on_nccl(nccl_net="Socket")] * 3, rdma=RdmaFacts()) == []


# coll.pair


def test_the_slow_one_of_three() -> None:
    slow = but(halves=(half("01", 21.0), half("02", 240.0), half("12", 250.0)))
    found = only(judged(CollPair(), slow, slow, slow))
    assert (found.status, found.nodes, found.edges) == ("warn", ("node2",), ())
    assert "11.9 times slower" in found.title


def test_a_slow_pair_accuses_no_node() -> None:
    slow = but(halves=(half("01", 21.0), half("02", 22.0), half("12", 250.0)))
    found = only(judged(CollPair(), slow, slow, slow))
    assert (found.nodes, found.edges) == ((), (("node1", "node2"),))


def test_halving_down_to_one_of_eight() -> None:
    halves = (
        half("0123", 40.0), half("4567", 300.0), half("45", 30.0), half("67", 290.0),
        half("60", 280.0), half("70", 31.0),
    )  # fmt: skip
    found = only(judged(CollPair(), *[but(halves=halves)] * 8))
    assert found.nodes == ("node6",)


def test_halving_that_was_cut_short_names_nobody() -> None:
    halves = (half("0123", 40.0), half("4567", 300.0))
    found = only(judged(CollPair(), *[but(halves=halves)] * 8))
    assert (found.status, found.nodes) == ("unknown", ())


def test_groups_are_compared_among_themselves_only() -> None:
    # the second group is slower as a whole: another kind of machine, not a sick node
    quick = but(halves=(half("01", 21.0), half("02", 24.0), half("12", 19.0)))
    slower = but(halves=(half("34", 210.0), half("35", 240.0), half("45", 190.0)))
    assert judged(CollPair(), *[quick] * 3, *[slower] * 3) == []
    sick = but(halves=(half("34", 21.0), half("35", 240.0), half("45", 250.0)))
    cut = but(halves=sick.halves[:2], error="killed", ended_by="limit")
    assert only(judged(CollPair(), *[quick] * 3, sick, sick, cut)).nodes == ("node5",)


def test_a_small_difference_is_the_machine_s_own_noise() -> None:
    noisy = but(halves=(half("01", 4.0), half("02", 14.0), half("12", 13.0)))
    assert judged(CollPair(), noisy, noisy, noisy) == []


def test_two_nodes_have_no_third_to_compare_with() -> None:
    assert only(judged(CollPair(), but(halves=()), but(halves=()))).status == "skipped"


# gloo's truth


def test_gloo_s_own_word_against_its_rules() -> None:
    same = InterfaceFacts(gloo=(Choice(interface="eth0", address="10.0.0.0"),))
    other = InterfaceFacts(gloo=(Choice(interface="docker0", address="172.17.0.1"),))
    assert difference(run_of([HEALTHY], interfaces=same), "node0") == ""
    assert difference(run_of([None], interfaces=other), "node0") == ""
    assert difference(run_of([HEALTHY]), "nobody") == ""
    assert difference(run_of([HEALTHY], interfaces=other), "node0") == (
        "node0: gloo itself takes 10.0.0.0; its rules suggest 172.17.0.1"
    )
    absent = but(gloo=(Choice(interface="eth9", problem="Unable to find address for: eth9"),))
    guess = InterfaceFacts(gloo=(Choice(interface="eth9", problem="no interface is named eth9"),))
    assert difference(run_of([absent], interfaces=guess), "node0") == ""
