"""The faults of the laboratory, each once: what is broken, and what preflight must say of it.

The same table drives the tests and the benchmark that compares preflight with plain torchrun.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.preflight import injections as broken
from tests.preflight import injections_machine as machine
from tests.preflight.injections import EPHEMERAL, MASTER_PORT, Injection
from tests.preflight.nslab import Wire
from tests.preflight.scene import Mode, Scene

ALL = ("node0", "node1", "node2")
DROP_NEW = f"tcp dport {EPHEMERAL} ct state new drop"


@dataclass(frozen=True)
class Expected:
    """One finding: which check, about whom, with which repair."""

    id: str
    nodes: tuple[str, ...] | None = None  # exactly these; None: the pairs say it all
    edges: tuple[tuple[str, str], ...] | None = None  # of these pairs, in either direction
    remedy: str = ""  # a regular expression that one of the commands matches
    status: str = "fail"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in an otherwise healthy laboratory."""

    name: str
    says: str  # for the table in the documents
    inject: Injection
    expected: tuple[Expected, ...]  # every finding there may be; none: it passes
    options: str = ""  # of preflight; {shared} and {script} are filled in
    job: str = ""  # of the training script
    modes: tuple[Mode, ...] = ("static",)  # launches in which torchrun was looked at
    mode: Mode = "static"  # the launch that it needs
    wire: Wire = "veth"
    mtu: int = 1500
    net: str = "10.77.0"
    is_timed: bool = False  # it, or its healthy peers, are timed: it wants the machine for itself
    also: tuple[str, ...] = ()  # ids that may stand beside: true as well, and no more than that
    is_user: bool = False  # it binds ordinary users only
    needs_torch: bool = False  # it lies in torch itself
    needs: tuple[str, ...] = ()  # of the machine, beside hosts and the wire (tests/capabilities.py)
    agree: bool = True  # all nodes print the same; without any carrier they cannot

    def build(self, scene: Scene) -> None:
        """Break the scene."""
        self.inject(scene)


def _one(
    id: str, *nodes: str, remedy: str = "", status: str = "fail",
    edges: tuple[tuple[str, str], ...] | None = None,
) -> tuple[Expected, ...]:  # fmt: skip
    told = nodes or (None if edges else ())
    return (Expected(id=id, nodes=told, edges=edges, remedy=remedy, status=status),)


_OPEN_MASTER = r"(nft|ufw|iptables|firewall-cmd).*29500"
_OPEN_RANGE = r"(nft|ufw|iptables|firewall-cmd).*32768[-:]60999"
_SIDE = r"--(share|server)"

FIREWALLS = (
    Fault(
        "master-drop", "MASTER_PORT dropped at node 0",
        broken.firewall(0, f"tcp dport {MASTER_PORT} drop"),
        _one("port.master.reach", "node0", remedy=_OPEN_MASTER), modes=("static", "env", "c10d"),
    ),
    Fault(
        "master-reset", "MASTER_PORT rejected at node 0 (TCP reset)",
        broken.firewall(0, f"tcp dport {MASTER_PORT} reject with tcp reset"),
        _one("port.master.reach", "node0", remedy=_OPEN_MASTER), modes=("static", "env"),
    ),
    Fault(
        "master-prohibited", "MASTER_PORT rejected at node 0 (admin-prohibited)",
        broken.firewall(0, f"tcp dport {MASTER_PORT} reject with icmpx type admin-prohibited"),
        _one("port.master.reach", "node0", remedy=_OPEN_MASTER),
    ),
    Fault(
        "only-master-drop", "only 29500 open, the rest dropped", broken.only_master_open("drop"),
        _one("port.ephemeral", *ALL, remedy=_OPEN_RANGE), modes=("static", "env"),
    ),
    Fault(
        "only-master-reject", "only 29500 open, the rest rejected",
        broken.only_master_open("reject"), _one("port.ephemeral", *ALL, remedy=_OPEN_RANGE),
    ),
    Fault(
        "ephemeral-drop", "random ports dropped at node 1", broken.firewall(1, DROP_NEW),
        _one("port.ephemeral", "node1", remedy=_OPEN_RANGE),
    ),
    Fault(
        "one-way-2-1", "one way node2 -> node1 dropped", broken.one_way(2, 1),
        _one("port.oneway", edges=(("node2", "node1"),), remedy=r"10\.77\.0\.3"),
    ),
    Fault(
        "one-way-1-2", "one way node1 -> node2 dropped", broken.one_way(1, 2),
        _one("port.oneway", edges=(("node1", "node2"),), remedy=r"10\.77\.0\.2", status="warn"),
    ),
    Fault(
        "third-drop", "a third of the random ports dropped at node 1",
        broken.hole(1, 36000, 45409), _one("port.ephemeral", "node1", remedy=_OPEN_RANGE),
        modes=(),
    ),
    Fault(
        "seventh-drop", "a seventh of the random ports dropped at node 1",
        broken.hole(1, 32768, 36800), _one("port.ephemeral", "node1", remedy=_OPEN_RANGE),
        modes=(),
    ),
    Fault(
        "third-drop-2-1", "a third of the random ports dropped one way, node2 -> node1",
        broken.hole(1, 34000, 43409, source=2),
        _one("port.oneway", edges=(("node2", "node1"),), remedy=r"10\.77\.0\.3"), modes=(),
    ),
    Fault(
        "third-drop-1-2", "a third of the random ports dropped one way, node1 -> node2",
        broken.hole(2, 34000, 43409, source=1),
        _one("port.oneway", edges=(("node1", "node2"),), remedy=r"10\.77\.0\.2", status="warn"),
        modes=(),
    ),
    Fault(
        "data-drop", "handshakes pass, data is dropped on random ports at node 1",
        broken.no_data(1, EPHEMERAL, "drop"),
        _one("port.ephemeral", "node1", remedy=_OPEN_RANGE), modes=(),
    ),
    Fault(
        "data-reset", "handshakes pass, data is reset on random ports at node 1",
        broken.no_data(1, EPHEMERAL, "reject with tcp reset"),
        _one("port.ephemeral", "node1", remedy=_OPEN_RANGE), modes=(),
    ),
    Fault(
        "data-drop-master", "handshakes pass, data is dropped on MASTER_PORT at node 0",
        broken.no_data(0, str(MASTER_PORT), "drop"),
        _one("port.master.reach", "node0", remedy=_OPEN_MASTER), modes=(),
    ),
    Fault(
        "sidecar-http", "node 2's outgoing random ports go to a proxy that speaks HTTP",
        broken.sidecar(2, "http"),
        _one("port.intercepted", "node2", remedy=r"nft insert rule.*32768-60999"), modes=(),
    ),
    Fault(
        "sidecar-silent", "node 2's outgoing random ports go to a proxy that is silent",
        broken.sidecar(2, "hang"),
        _one("port.intercepted", "node2", remedy=r"nft insert rule.*32768-60999"), modes=(),
    ),
    Fault(
        "sidecar-master", "node 2's outgoing calls of MASTER_PORT go to a proxy beside it",
        broken.sidecar(2, "http", str(MASTER_PORT)),
        _one("port.master.identity", "node2", remedy=r"nft insert rule.*29500"), modes=(),
    ),
    Fault(
        "local-ports-used", "all local ports of node 1 are held by another program",
        broken.local_ports_used(1, 40000, 40100),
        _one("port.local", "node1", remedy="ip_local_port_range"), modes=(),
    ),
    Fault(
        "isolated-one", "node 2 hears and reaches no node", broken.isolated(2),
        _one("port.ephemeral", "node2", remedy=_OPEN_MASTER), options="--share {shared}",
    ),
    Fault(
        "isolated-all-shared", "no node reaches another; a shared directory is there",
        broken.isolated(0, 1, 2), (Expected("port.ephemeral", remedy=_OPEN_MASTER),),
        options="--share {shared}", modes=(),
    ),
    Fault(
        "isolated-all", "no node reaches another", broken.isolated(0, 1, 2),
        (Expected("node.absent", remedy=_SIDE),), options="--wait 6", agree=False,
    ),
)  # fmt: skip

NAMES = (
    Fault(
        "hosts-wrong", "hosts entry for node 0 is wrong on node 2",
        broken.hosts_entry(2, "node0", "{net}.99 node0"),
        _one("dns.wrong", "node2", remedy=r"/etc/hosts"),
    ),
    Fault(
        "name-missing", "node 2 cannot resolve node 0", broken.hosts_entry(2, "node0", ""),
        _one("dns.master", "node2", remedy=r"10\.77\.0\.1 +node0.*/etc/hosts"),
        modes=("static", "c10d"),
    ),
    Fault(
        "loopback-everywhere", "own name is 127.0.1.1 everywhere",
        broken.own_name(0, 1, 2, address="127.0.1.1"),
        _one("dns.self.loopback", *ALL, remedy=r"/etc/hosts|GLOO_SOCKET_IFNAME=eth0"),
    ),
    Fault(
        "loopback-node0-10", "own name is 127.0.1.1 at node 0 only, on 10.x",
        broken.own_name(0, address="127.0.1.1"),
        _one("dns.self.loopback", "node0", remedy=r"/etc/hosts|GLOO_SOCKET_IFNAME=eth0"),
        modes=("static", "c10d", "env"),
    ),
    Fault(
        "loopback-node0-192", "own name is 127.0.1.1 at node 0 only, on 192.168.x",
        broken.own_name(0, address="127.0.1.1"),
        _one("dns.self.loopback", "node0", remedy=r"/etc/hosts|GLOO_SOCKET_IFNAME=eth0"),
        net="192.168.77", modes=("static", "env"),
    ),
    Fault(
        "own-names-unresolvable", "no node can resolve its own name",
        broken.own_name(0, 1, 2, address=""),
        _one("dns.self.loopback", *ALL, remedy=r"/etc/hosts|GLOO_SOCKET_IFNAME=eth0"),
    ),
    Fault(
        "own-name-unresolvable", "node 1 cannot resolve its own name",
        broken.own_name(1, address=""),
        _one("dns.self.loopback", "node1", remedy=r"/etc/hosts|GLOO_SOCKET_IFNAME=eth0"),
    ),
    Fault(
        "dead-ipv6-first", "a dead IPv6 address first", broken.dead_ipv6_first,
        _one("dns.family", "node1", "node2", status="warn"), modes=("static", "c10d"),
    ),
    Fault(
        "same-host-name", "two nodes with one host name", broken.same_host_name,
        _one("host.dup", "node1", "node2", status="warn"),
    ),
)  # fmt: skip

INTERFACES = (
    Fault(
        "docker0-asked", "GLOO_SOCKET_IFNAME=docker0, one address everywhere",
        broken.docker0_asked,
        _one("net.iface.virtual", *ALL, remedy=r"GLOO_SOCKET_IFNAME=eth0"),
    ),
    Fault(
        "docker0-named", "own name is docker0's address", broken.docker0_named,
        _one("net.iface.virtual", *ALL, remedy=r"GLOO_SOCKET_IFNAME=eth0|/etc/hosts"),
    ),
    Fault(
        "nic-renamed", "GLOO_SOCKET_IFNAME=eth0 is absent on node 2", broken.renamed_nic,
        _one("net.iface.missing", "node2", remedy=r"GLOO_SOCKET_IFNAME=ens5"),
    ),
    Fault(
        "duplicate-address", "one address on two nodes", broken.duplicate_address,
        _one("net.dup_ip", "node1", "node2"), options="--share {shared}",
    ),
    Fault(
        "rp-filter", "asymmetric route and rp_filter", broken.wrong_source,
        _one("net.rp_filter", edges=(("node0", "node1"),), remedy=r"eth0\.rp_filter=2"),
        also=("net.route.sym",),
    ),
    Fault(
        "route-blackhole", "node 1 has a blackhole route for node 2",
        broken.route(1, "blackhole {2}/32"),
        _one("net.route", "node1", edges=(("node1", "node2"),), remedy="ip route del blackhole"),
    ),
    Fault(
        "route-gateway", "node 1 sends to node 2 by a router that is not there",
        broken.route(1, "{2}/32 via {nobody} dev eth0"),
        _one("net.route", "node1", edges=(("node1", "node2"),), remedy="ip route del .* via"),
    ),
    Fault(
        "gloo-other-network", "GLOO_SOCKET_IFNAME=eth1 on node 1, which is in no common network",
        broken.other_network(1),
        _one("net.route", "node1", edges=(("node0", "node1"), ("node2", "node1")),
             remedy="GLOO_SOCKET_IFNAME=eth0"),
    ),
    Fault(
        "behind-nat", "node 2 is behind 1:1 NAT", broken.behind_nat(2),
        _one("net.nat", "node2", edges=(("node0", "node2"), ("node1", "node2")), remedy="^# "),
    ),
    Fault(
        "nic-down", "node 1's interface is switched off", broken.interface_down(1, "eth0"),
        _one("net.down", "node1", remedy="ip link set dev eth0 up"), options="--share {shared}",
    ),
    Fault(
        "loopback-down", "lo is down at node 0", broken.interface_down(0, "lo"),
        _one("net.loopback", "node0", remedy="ip link set dev lo up"),
    ),
)  # fmt: skip

PATHS = (
    Fault(
        "mtu-hole-node", "MTU black hole at node 1", broken.black_hole(1, 1500),
        _one("net.mtu.path", "node1", remedy=r"ip link set (dev )?eth0 mtu 1500"), mtu=9000,
    ),
    Fault(
        "mtu-hole-pair", "MTU black hole between nodes 0 and 1", broken.links((0, 1), mtu=1400),
        _one("net.mtu.path", edges=(("node0", "node1"),), remedy=r"mtu 1400"), wire="tap",
    ),
    Fault(
        "mtu-hole-small", "MTU black hole between nodes 0 and 1 that even 1280 bytes fall into",
        broken.links((0, 1), mtu=1000),
        _one("net.mtu.path", edges=(("node0", "node1"),), remedy=r"mtu 1000"), wire="tap",
        modes=(),
    ),
    Fault(
        "mtu-hole-no-udp", "the same, where UDP is closed", broken.hole_without_udp(0, 1, 1230),
        _one("net.mtu.path", edges=(("node0", "node1"),), remedy=r"mtu 1200"), wire="tap",
        modes=(),
    ),
    Fault(
        "mtu-differs", "node 1 has a smaller MTU", broken.smaller_mtu,
        _one("net.mtu.differs", "node1", status="warn", remedy=r"mtu 1500"),
    ),
    Fault(
        "delay-pair", "100 ms round trip on one pair", broken.links((0, 1), delay=0.05),
        _one("net.latency", edges=(("node0", "node1"),), status="warn"),
        wire="tap", is_timed=True,
    ),
    Fault(
        "jitter-pair", "round trips of one pair vary by 40 ms", broken.jitter(0, 1, 0.04),
        _one("net.jitter", edges=(("node0", "node1"),), status="warn"),
        wire="tap", is_timed=True,
    ),
    Fault(
        "loss-node", "2 % loss on both pairs of node 1",
        broken.links((0, 1), (1, 2), loss=0.02), _one("net.loss", "node1", status="warn"),
        wire="tap", is_timed=True,
    ),
    Fault(
        "rate-node", "10 Mbit/s at node 1", broken.slow_sender,
        _one("net.bandwidth", "node1", status="warn"), is_timed=True,
    ),
)  # fmt: skip

CLOCKS = (
    *(
        Fault(
            f"clock-{name}", f"clock {seconds:+d} s at node 2", broken.clock(2, seconds),
            _one("clock.offset", "node2", remedy=r"chrony", status="fail"), modes=modes,
            needs=("compiler",),
        )
        for name, seconds, modes in (
            ("behind-16", -16, ("c10d",)), ("behind-20", -20, ("c10d", "static")),
            ("behind-90", -90, ("c10d",)), ("ahead-20", 20, ("c10d", "env")),
            ("ahead-90", 90, ("c10d",)),
        )
    ),
    Fault(
        "clock-ahead-5", "clock +5 s at node 2", broken.clock(2, 5),
        _one("clock.offset", "node2", remedy=r"chrony", status="warn"), modes=("c10d",),
        needs=("compiler",),
    ),
)  # fmt: skip

LAUNCHES = (
    Fault(
        "port-web-server", "a web server on MASTER_PORT", broken.web_server,
        _one("port.master.free", "node0", remedy=r"kill|--master-port"),
        modes=("static", "c10d"),
    ),
    Fault(
        "port-earlier-job", "an earlier torchrun on MASTER_PORT", broken.earlier_job,
        _one("port.master.free", "node0", remedy=r"--master-port"), also=("proc.leftover",),
        modes=("static", "c10d"),
    ),
    Fault(
        "port-bound", "MASTER_PORT is bound by a program that does not listen on it",
        broken.port_bound, _one("port.master.free", "node0", remedy=r"--master-port 29501"),
        modes=(),
    ),
    Fault(
        "node-missing", "node 2 is not started", broken.not_started,
        _one("node.absent", "node2", remedy="rankscope preflight"), options="--wait 6",
        modes=("static", "c10d", "env"),
    ),
    Fault(
        "nnodes-differ", "nnodes 3, 3, 2", broken.told(2, num_nodes=2),
        _one("env.agree", "node2", remedy=r"nnodes[ =]3|NNODES=3"), modes=("static", "c10d"),
    ),
    Fault(
        "rank-twice", "two nodes with node rank 1", broken.told(2, node_rank=1),
        _one("env.rank.unique", "node1", "node2", remedy=r"rank[ =]|NODE_RANK"),
    ),
    Fault(
        "port-differs", "node 2 has another MASTER_PORT", broken.told(2, master_port=29501),
        _one("env.agree", "node2", remedy=r"29500"),
    ),
    Fault(
        "endpoint-localhost", "endpoint localhost everywhere", broken.endpoint_localhost,
        _one("env.endpoint.local", *ALL, remedy=r"node0"), modes=("static", "c10d"),
    ),
    Fault(
        "ranks-swapped", "nodes 0 and 1 have each other's rank: rank 0 is not at MASTER_ADDR",
        broken.ranks_swapped, _one("env.master.rank0", "node1", remedy=r"node1|10\.77\.0\.2"),
        modes=("static", "env"),
    ),
    Fault(
        "master-elsewhere", "MASTER_ADDR is node 1 everywhere, rank 0 is on node 0",
        broken.endpoint_of("node1"), _one("env.master.rank0", "node0", remedy=r"node0"),
        modes=("static", "env"),
    ),
    Fault(
        "master-nowhere", "MASTER_ADDR is an address that no node has",
        broken.endpoint_of("10.77.0.99"), _one("env.master.rank0", "node0", remedy=r"node0"),
        modes=("static", "env"),
    ),
    Fault(
        "master-differs", "MASTER_ADDR is node 1 on node 2 alone",
        broken.endpoint_of("node1", 2), _one("env.agree", "node2", remedy=r"node0"),
        modes=("static", "env", "c10d"),
    ),
    Fault(
        "c10d-no-store", "c10d: the endpoint is node 0's address, its own name is 127.0.1.1",
        broken.unrecognised_endpoint,
        _one("env.master.rank0", "node0", remedy=r"is_host=1"), modes=("c10d",), mode="c10d",
    ),
    Fault(
        "c10d-two-stores", "c10d: the name of the endpoint is nodes 0 and 1",
        broken.shared_endpoint,  # whose address comes first, the resolver decides
        (Expected("env.master.rank0", remedy=r"--rdzv-endpoint node[01]:29500"),),
        modes=("c10d",), mode="c10d",
    ),
    Fault(
        "c10d-unknown-name", "c10d: node 0 calls itself by a name that the others do not know",
        broken.own_name_unknown, _one("dns.master", "node0", remedy=r"--local-addr"),
        modes=("c10d",), mode="c10d",
    ),
    Fault(
        "ranks-overlap", "RANK is the number of the node, where each runs 2 ranks",
        broken.ranks_overlap, _one("env.rank.unique", "node1", "node2", remedy=r"RANK=2"),
        modes=("env",), mode="env",
    ),
    Fault(
        "world-size", "WORLD_SIZE is 4, and 3 ranks are started", broken.world_of(4),
        _one("env.rank.unique", remedy=r"WORLD_SIZE=3"), modes=("env",), mode="env",
    ),
    Fault(
        "nodes-order", "node 2 was given --nodes in another order",
        broken.list_of(2, "node0", "node2", "node1"),
        _one("env.nodes", "node2", remedy=r"--nodes node0,node1,node2"), modes=(),
    ),
    Fault(
        "nodes-shorter", "node 1 was given --nodes without node 2",
        broken.list_of(1, "node0", "node1"),
        _one("env.nodes", "node1", remedy=r"--nodes node0,node1,node2"), modes=(),
    ),
    Fault(
        "env-differs", "NCCL_BUFFSIZE differs on node 2",
        broken.variable(2, NCCL_BUFFSIZE="8388608"),
        _one("env.drift", "node2", status="warn", remedy=r"NCCL_BUFFSIZE"),
    ),
    Fault(
        "env-misspelt", "NCCL_SOCKET_IFNAMES is set everywhere (misspelt)",
        broken.variable(NCCL_SOCKET_IFNAMES="eth0"),
        _one("env.unknown", *ALL, status="warn", remedy=r"NCCL_SOCKET_IFNAME\b"),
    ),
)  # fmt: skip

MACHINES = (
    Fault(
        "nofile", "64 open files at node 1", machine.limit(1, "--nofile=64:64"),
        _one("lim.nofile", "node1", remedy=r"ulimit -n|LimitNOFILE|nofile"),
    ),
    Fault(
        "nproc", "64 processes at node 1", machine.limit(1, "--nproc=64:64"),
        _one("lim.nproc", "node1", status="warn", remedy=r"nproc"),
        options="--loader-workers 40", is_user=True,
    ),
    Fault(
        "shm", "/dev/shm of 64 MiB at node 1", machine.tmpfs(1, "/dev/shm", "64m"),
        _one("lim.shm", "node1", remedy=r"shm"), options="--loader-workers 2", job="--loader",
    ),
    Fault(
        "disk-full", "no room for the checkpoint", broken.nothing,
        _one("fs.free", *ALL), options="--checkpoint-dir {shared} --ckpt-gb 1000000", modes=(),
    ),
    Fault(
        "tmpdir-full", "TMPDIR is full at node 1", machine.full_temporary(1),
        _one("fs.free", "node1", status="warn"), job="--checkpoint {full}",
    ),
    Fault(
        "cache-read-only", "HF_HOME is on a read-only mount at node 1",
        machine.read_only_cache(1, "HF_HOME"),
        _one("fs.cache", "node1", status="warn", remedy="export HF_HOME="), modes=(),
    ),
    Fault(
        "disk-read-only", "checkpoint directory is read-only at node 1", machine.read_only(1),
        _one("fs.write", "node1", remedy=r"remount|mount"),
        options="--checkpoint-dir {shared}", job="--checkpoint {shared}",
        is_timed=True,
    ),
    Fault(
        "disk-not-shared", "checkpoint directory is local at node 2",
        machine.tmpfs(2, "{shared}", "4g"), _one("fs.shared", "node2"),
        options="--checkpoint-dir {shared}", job="--checkpoint {shared}", also=("fs.same",),
        is_timed=True,
    ),
    Fault(
        "disk-hung", "checkpoint directory hangs at node 1", machine.hung_mount(1),
        _one("fs.hang", "node1"), options="--checkpoint-dir {shared}",
        job="--checkpoint {shared}", needs=("fuse",), is_timed=True,
    ),
    Fault(
        "torch-differs", "an older torch at node 2", machine.older_torch(2),
        _one("sw.drift", "node2", remedy=r"torch==2\.13"), needs_torch=True,
    ),
    Fault(
        "gpu-stale-process", "a dead job's process holds a GPU of node 1 (recorded NVML)",
        machine.stale_gpu_process(1), _one("gpu.busy", "node1", remedy=r"kill|fuser"),
        options="--backend gloo --nproc 1", modes=(),
    ),
    Fault(
        "script-differs", "another version of the script at node 2", machine.other_script(2),
        _one("sw.script", "node2"), options="--script {script}",
    ),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (
    *FIREWALLS, *NAMES, *INTERFACES, *PATHS, *CLOCKS, *LAUNCHES, *MACHINES,
)  # fmt: skip
HEALTHY = Fault("healthy", "nothing is wrong", broken.nothing, (), modes=("static", "c10d", "env"))
HEALTHY_TAP = replace(HEALTHY, name="healthy-tap", wire="tap", modes=())
BY_NAME = {fault.name: fault for fault in (HEALTHY, HEALTHY_TAP, *FAULTS)}
