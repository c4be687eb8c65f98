"""RDMA ports from recorded trees of /sys."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.rdma import chosen
from rankscope.preflight.facts import rdma
from rankscope.preflight.model import Facts, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.system import System

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000\n"


def machine(root: Path, ports: int = 2, **changes: str) -> System:
    """Record a node with RoCE ports mlx5_0, mlx5_1 ...; `changes` replace files of mlx5_0."""
    files = {
        "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "rate": "400 Gb/sec (4X NDR)\n",
        "link_layer": "Ethernet\n", "gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001\n",
        "gids/1": EMPTY, "gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
        "gid_attrs/types/0": "IB/RoCE v1\n", "gid_attrs/types/3": "RoCE v2\n",
        "gid_attrs/ndevs/3": "eth2\n", "counters/symbol_error": "3\n",
        "counters/link_downed": "1\n",
    }  # fmt: skip
    for number in range(ports):
        told = files | ({n.replace("__", "/"): t for n, t in changes.items()} if not number else {})
        for name, text in told.items():
            put(root, f"sys/class/infiniband/mlx5_{number}/ports/1/{name}", text)
        put(root, f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"mlx5_{number}\n")
        put(root, f"dev/infiniband/uverbs{number}", "")
    put(root, "sys/class/net/eth2/mtu", "9000\n")
    put(root, "usr/lib64/libibverbs.so.1", "")
    return System(root=root, environ={})


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def judged(**systems: System) -> list[tuple[str, str, tuple[str, ...]]]:
    reports = {
        node: NodeReport(node=node, facts=Facts(rdma=rdma.collect(system, Options())))
        for node, system in systems.items()
    }
    run = Run("r", tuple(systems), reports, Options(backend="nccl"))
    found = [finding for check in FAMILIES["rdma"] for finding in check.evaluate(run)]
    return [(f.id, f.status, f.nodes) for f in found if f.status in ("fail", "warn")]


def test_a_port_as_the_kernel_shows_it(tmp_path: Path) -> None:
    facts = rdma.collect(machine(tmp_path), Options())
    port = facts.ports[0]
    assert (port.name, port.state, port.phys_state) == ("mlx5_0:1", "ACTIVE", "LinkUp")
    assert (port.rate_gbit, port.link_layer, port.interface_mtu_bytes) == (400.0, "Ethernet", 9000)
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, "IB/RoCE v1"), (3, "RoCE v2")]
    assert port.counters == {"symbol_error": 3, "link_downed": 1}
    assert facts.verbs == {"mlx5_0": "", "mlx5_1": ""}
    assert facts.has_library
    assert len(facts.ports) == 2


def test_a_machine_without_is_without(tmp_path: Path) -> None:
    facts = rdma.collect(System(root=tmp_path, environ={}), Options())
    assert not facts.ports


def test_like_nodes_yield_nothing(tmp_path: Path) -> None:
    systems = {f"node{n}": machine(tmp_path / str(n)) for n in range(3)}
    assert judged(**systems) == []


def test_a_port_that_is_down_is_told(tmp_path: Path) -> None:
    systems = {f"node{n}": machine(tmp_path / str(n)) for n in range(2)}
    systems["node2"] = machine(tmp_path / "2", state="1: DOWN\n", phys_state="2: Polling\n")
    assert judged(**systems) == [("ib.port", "fail", ("node2",))]


def test_a_port_that_nobody_cabled_is_no_fault(tmp_path: Path) -> None:
    systems = {f"node{n}": machine(tmp_path / str(n), state="1: DOWN\n") for n in range(3)}
    assert judged(**systems) == []


def test_a_port_left_out_by_the_job_is_not_looked_at(tmp_path: Path) -> None:
    systems = {f"node{n}": machine(tmp_path / str(n)) for n in range(2)}
    systems["node2"] = machine(tmp_path / "2", state="1: DOWN\n")
    systems = {
        node: System(root=system.root, environ={"NCCL_IB_HCA": "^mlx5_0"})
        for node, system in systems.items()
    }
    assert judged(**systems) == []


def test_the_filter_of_nccl(tmp_path: Path) -> None:
    facts = rdma.collect(machine(tmp_path, ports=11), Options())
    for text, count in (
        ("", 11), ("mlx5_1", 2), ("=mlx5_1", 1), ("^mlx5_1", 9), ("^=mlx5_1", 10),
        ("mlx5_0:1,mlx5_3:2", 1), ("=mlx5_10,mlx5_2", 2),
    ):  # fmt: skip
        assert len(chosen(msgspec.structs.replace(facts, hca_filter=text))) == count, text


def test_errors_during_the_preflight_are_counted(tmp_path: Path) -> None:
    system = machine(tmp_path)
    facts = rdma.collect(system, Options())
    assert rdma.again(system, facts).ports[0].errors_during == {}
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "10\n")
    assert rdma.again(system, facts).ports[0].errors_during == {"symbol_error": 7}


def test_a_device_that_may_not_be_opened(tmp_path: Path) -> None:
    system = machine(tmp_path)
    (tmp_path / "dev/infiniband/uverbs1").unlink()
    facts = rdma.collect(system, Options())
    assert facts.verbs == {"mlx5_0": "", "mlx5_1": "ENOENT: /dev/infiniband/uverbs1"}
