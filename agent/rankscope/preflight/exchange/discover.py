"""Who takes part, and which of them is this machine: from options, schedulers, the environment.

Where the nodes are not named (plain torchrun, mpirun) only the address of node 0 and the own rank
are known: then `nodes` is empty, everyone meets at `master_addr`, and `expected` fills the places
with names as the reports arrive.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rankscope.preflight.exchange.hostlist import (
    HostListError,
    expand,
    read_counted,
    read_hostfile,
    same_host,
)
from rankscope.preflight.facts.launch import (
    LOCAL_RANKS,
    LaunchFacts,
    is_of_mpirun,
    is_of_srun,
)
from rankscope.preflight.system import System
from rankscope.process.family import hosts_of_job, node_of_job

PORT = 29500  # torch's default, `torch/distributed/distributed_c10d.py`
_SLURM_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# files of PBS, LSF and SGE; then LSF's variables: "a 2 b 2", and "a a b b" (unset where too long)
_HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
_HOST_TEXTS = ("LSB_MCPU_HOSTS", "LSB_HOSTS")
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "localhost4", "localhost6")
_NUM_RESOLVERS = 32


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says of the nodes; empty: not said."""

    nodes: tuple[str, ...] = ()
    node: str = ""  # which of them this machine is
    hostfile: str = ""
    node_rank: int = -1
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Who takes part, and how that is known."""

    nodes: tuple[str, ...] = ()  # all, node 0 first; empty: they were not named
    me: str = ""
    node_rank: int = -1  # -1: not known
    num_nodes: int = 0  # 0: not known
    master_addr: str = ""
    master_port: int = PORT
    is_master_said: bool = False  # MASTER_ADDR is the launch's own; else it was assumed
    how: str = ""  # "--nodes", "SLURM_STEP_NODELIST", "MASTER_ADDR and NODE_RANK"
    stands_aside: str = ""  # why this process leaves the work to another one of this node
    errors: tuple[str, ...] = ()  # wrong usage: what is missing or contradicts, and the remedy


def discover(system: System, asked: Asked, launch: LaunchFacts) -> Discovery:
    """Find out who the nodes are. `launch` is what `facts.launch.collect(system)` returned."""
    aside = _stands_aside(system.environ)
    if aside:
        return Discovery(me=system.hostname(), how="the launcher", stands_aside=aside)
    rank = asked.node_rank if asked.node_rank >= 0 else _node_rank(system, launch)
    if asked.node:
        asked = replace(asked, node=_written(system, (asked.node,))[0])
    nodes, how, is_ordered, error = _named(system, asked, launch, rank)
    if error:
        return Discovery(how=how, errors=(error,))
    if not nodes:
        return _unnamed(system, asked, launch, rank)
    me, errors = _which(system, asked, nodes, rank, is_ordered)
    if rank < 0 and me in nodes:
        rank = nodes.index(me)
        if rank == 0 and launch.rank:
            rank = -1  # the first of the list, and yet not the one with rank 0
    return Discovery(
        nodes=nodes,
        me=me,
        node_rank=rank,
        num_nodes=len(nodes),
        master_addr=asked.master_addr or launch.master_addr or nodes[0],
        master_port=asked.master_port or launch.master_port or PORT,
        is_master_said=_is_said(asked, launch),
        how=how,
        errors=errors,
    )


def expected(found: Discovery, node_ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Return all names, node 0 first; "node-rank-2" where no node of that rank has reported.

    `node_ranks` are those of the reports, by name. Two that claim one rank are both listed, and
    those without one (c10d gives them out at the start) take the free places after node 0.
    """
    if found.nodes:
        return found.nodes
    by_rank: dict[int, list[str]] = {}
    for name, rank in sorted(node_ranks.items()):
        by_rank.setdefault(rank, []).append(name)
    unranked = by_rank.pop(-1, [])
    names: list[str] = []
    for rank in range(found.num_nodes):
        if rank not in by_rank and rank > 0 and unranked:
            by_rank[rank] = [unranked.pop(0)]
        names += by_rank.pop(rank, [f"node-rank-{rank}"])
    for rest in (unranked, *by_rank.values()):
        names += rest
    return tuple(names)


def agreed(found: Discovery, lists: Sequence[tuple[str, ...]]) -> Discovery:
    """Return `found` with the list of nodes that most were given, of equal votes the longest.

    All nodes take the same one, so that they also print the same answer.
    """
    votes = Counter(one for one in lists if one)
    if not found.nodes or len(votes) < 2:
        return found
    best = max(votes, key=lambda one: (votes[one], len(one), one))
    return replace(found, nodes=best, num_nodes=len(best))


def _stands_aside(environ: Mapping[str, str]) -> str:
    """One process speaks for a node: the one of local rank 0."""
    for name in LOCAL_RANKS:
        value = environ.get(name, "")
        if value.isdecimal():
            text = f"{name}={value}: local rank 0 of this machine does the preflight for it"
            return "" if int(value) == 0 else text
    return ""


def _node_rank(system: System, launch: LaunchFacts) -> int:
    if launch.node_rank is not None:
        return launch.node_rank
    if launch.rank is not None and launch.nproc_per_node:
        return launch.rank // launch.nproc_per_node
    by_slurm = "" if is_of_mpirun(system.environ) else system.environ.get("SLURM_NODEID")
    text = by_slurm or system.environ.get("JOB_COMPLETION_INDEX") or ""
    if text.isdecimal():
        return int(text)
    place = node_of_job(system.environ) if hosts_of_job(system.environ) else None
    return -1 if place is None else place


def _named(
    system: System, asked: Asked, launch: LaunchFacts, rank: int
) -> tuple[tuple[str, ...], str, bool, str]:
    """Return (nodes, how, whether the node rank is the place in the list, error)."""
    if asked.nodes:
        nodes = _written(system, asked.nodes)
        return nodes, "--nodes", False, _wrong_names(nodes, "--nodes")
    if asked.hostfile:
        return _from_file(system, asked.hostfile, "--hostfile")
    for name in _slurm_lists(system.environ):
        if system.environ.get(name) and not _is_here_alone(system, launch):
            return _from_slurm(system, launch, name)
    if found := _from_batch(system, launch):
        return found
    hosts, by_skypilot = hosts_of_job(system.environ), "SKYPILOT_NODE_IPS" in system.environ
    if hosts and not _is_here_alone(system, launch):
        return hosts, "SKYPILOT_NODE_IPS" if by_skypilot else "SM_HOSTS", True, ""
    numbered = _kubernetes(system, asked.master_addr or launch.master_addr, launch, rank)
    return numbered, "the names of the pods", True, ""


def _written(system: System, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return names as all nodes write them: resolvers know no capitals, but Slurm's lists do."""
    if any(system.environ.get(name) for name in _SLURM_LISTS):
        return nodes
    return tuple(same_host(name) for name in nodes)


def _wrong_names(nodes: tuple[str, ...], how: str) -> str:
    """Return why these cannot be the names of several nodes; "" if they can."""
    doubles = sorted({name for name in nodes if nodes.count(name) > 1})
    if doubles:
        return f"{', '.join(doubles)} is in {how} twice: name each node once"
    local = [name for name in nodes if same_host(name) in _LOCAL_NAMES]
    if local and not all(name in local or _is_loopback(name) for name in nodes):
        return (
            f"{how} names {local[0]} beside other nodes: there it means each of them itself; "
            "write the name by which the others reach this node"
        )
    return ""


def _from_batch(
    system: System, launch: LaunchFacts
) -> tuple[tuple[str, ...], str, bool, str] | None:
    """Read the hosts of PBS, LSF or SGE, else those of Flux; None where there are none."""
    environ = system.environ
    if launch.launcher == "torchrun" and launch.num_nodes == 1:
        return None  # a launch on this node alone, in a job that may have more
    for name in _HOST_FILES:
        if environ.get(name) and (launch.launcher == "mpi" or name != "PE_HOSTFILE"):
            return _from_file(system, environ[name], name)
    for name in _HOST_TEXTS:
        if environ.get(name):
            return read_counted(environ[name]), name, False, ""
    if environ.get("FLUX_JOB_ID"):
        done = system.run(("flux", "hostlist", "--expand", "local"))
        if done.code == 0 and done.out.strip():
            return tuple(dict.fromkeys(done.out.split())), "flux hostlist", False, ""
    return None


def _from_file(system: System, path: str, how: str) -> tuple[tuple[str, ...], str, bool, str]:
    text = system.read(os.path.abspath(path))
    if text is None:
        return (), how, False, f"{how}: {path} cannot be read"
    try:
        nodes = _written(system, read_hostfile(text))
    except HostListError as unread:
        return (), how, False, f"{how} {path}: {unread}"
    error = _wrong_names(nodes, how) if nodes else f"{how}: {path} names no host"
    return nodes, how, False, error


def _slurm_lists(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that may name all nodes: a step may be of mpirun's daemons, or a shell.

    mpirun starts one on every node but its own.
    """
    return _SLURM_LISTS if is_of_srun(environ) and not is_of_mpirun(environ) else _SLURM_LISTS[1:]


def _is_here_alone(system: System, launch: LaunchFacts) -> bool:
    """Return whether a batch script starts a torchrun of one node, in a job that may have more."""
    return launch.num_nodes == 1 and launch.mode != "env" and not is_of_srun(system.environ)


def _from_slurm(
    system: System, launch: LaunchFacts, name: str
) -> tuple[tuple[str, ...], str, bool, str]:
    try:
        nodes = expand(system.environ[name])
    except HostListError as error:
        return (), name, True, f"{name}: {error}"
    by_another = launch.launcher in ("torchrun", "mpi")
    is_started_everywhere = is_of_srun(system.environ) or by_another
    if launch.launcher == "mpi":
        nodes = nodes[: launch.num_nodes or None]  # mpirun fills the first ones
    if len(nodes) > 1 and not is_started_everywhere:
        text = f"this job has {len(nodes)} nodes, and this process runs on one of them only"
        remedy = "srun --ntasks-per-node=1 rankscope preflight"
        return (), name, True, f"{text}: start it with `{remedy}`"
    # torchrun numbers its groups itself, mpirun too: only srun's own number is a place in the list
    return nodes, name, launch.launcher == "slurm", ""


def _kubernetes(system: System, master: str, launch: LaunchFacts, rank: int) -> tuple[str, ...]:
    """Derive the names of the pods from that of node 0; none where the pattern is another.

    An Indexed Job, a JobSet and a StatefulSet number their pods, "train-0.svc", and node 0 has
    number 0; a PyTorchJob has "train-master-0" and "train-worker-0" onwards, each with a service.
    """
    num_nodes = launch.num_nodes or 0
    if num_nodes < 2 or rank >= num_nodes or launch.min_nodes is not None:
        return ()
    if not master:
        return _mpi_workers(system, num_nodes, rank) if launch.launcher == "mpi" else ()
    host, dot, domain = master.partition(".")
    name = system.hostname().partition(".")[0]
    if match := re.fullmatch(r"(.+)-master-0", host):
        workers = [f"{match[1]}-worker-{number}" for number in range(num_nodes - 1)]
        labels = [host, *workers]
    elif match := re.fullmatch(r"(.+)-0", host):
        labels = [f"{match[1]}-{number}" for number in range(num_nodes)]
    else:
        return ()
    if name not in labels or (rank >= 0 and labels[rank] != name):
        return ()
    return tuple(f"{label}{dot}{domain}" for label in labels)


def _mpi_workers(system: System, num_nodes: int, rank: int) -> tuple[str, ...]:
    """Derive the names of an MPIJob's workers, "pi-worker-0.pi...", from that of this pod.

    Where its launcher is a worker as well it comes first, and numbers are one less than ranks.
    """
    hostname = system.hostname()
    match = re.fullmatch(r"(.+)-(worker|launcher)(?:-(\d+))?", hostname.partition(".")[0])
    if match is None or "KUBERNETES_SERVICE_HOST" not in system.environ:
        return ()
    number = int(match[3] or -1)
    if rank - number not in (0, 1):
        return ()
    labels = [f"{match[1]}-worker-{one}" for one in range(num_nodes - (rank - number))]
    if rank > number:
        labels = [f"{match[1]}-launcher", *labels]
    domain = _domain(system, hostname)
    return tuple(f"{label}{domain}" for label in labels)


def _domain(system: System, hostname: str) -> str:
    """Return the domain of this pod, with its dot, as the kubelet writes it into /etc/hosts."""
    for line in (system.read("/etc/hosts") or "").splitlines():
        for name in line.partition("#")[0].split()[1:]:
            if name.startswith(f"{hostname}."):
                return name[len(hostname) :]
    return ""


def _unnamed(system: System, asked: Asked, launch: LaunchFacts, rank: int) -> Discovery:
    """Meet at MASTER_ADDR, or be alone."""
    me = asked.node or _own_name(system)
    master = asked.master_addr or launch.master_addr
    port = asked.master_port or launch.master_port or PORT
    num_nodes = _num_nodes(launch)
    is_local = not master or master == "localhost" or _is_loopback(master)
    if num_nodes == 1 or (num_nodes == 0 and is_local):
        return Discovery(
            nodes=(me,), me=me, node_rank=0, num_nodes=1, master_addr=master or "localhost",
            master_port=port, how="no other node was named",
        )  # fmt: skip
    if rank < 0 and launch.rank is not None and num_nodes == launch.world_size:
        rank = launch.rank
    errors = []
    if not master:
        errors.append(
            f"{num_nodes} nodes, but neither their names nor MASTER_ADDR: give --nodes a,b,..., "
            "or --hostfile FILE, or MASTER_ADDR=NODE0 on every node"
        )
    elif rank < 0 and (is_local or _is_mine(system, master)):
        rank = 0  # c10d gives ranks out at the start; node 0 is the one with the endpoint
    if not num_nodes and launch.world_size:
        errors.append(f"it is not known how many nodes have the {launch.world_size} ranks: set "
                      "LOCAL_WORLD_SIZE, or give --nodes a,b,...")  # fmt: skip
    elif not num_nodes:
        errors.append("the number of nodes is not known: give --nodes a,b,..., or set NNODES")
    return Discovery(
        me=me, node_rank=rank, num_nodes=num_nodes, master_addr=master, master_port=port,
        is_master_said=_is_said(asked, launch),
        how="MASTER_ADDR and the number of nodes", errors=tuple(errors),
    )  # fmt: skip


def _is_said(asked: Asked, launch: LaunchFacts) -> bool:
    """Return whether MASTER_ADDR was given; the first of Slurm's nodes is only likely to be it."""
    by_list = any(name.endswith("NODELIST") for name in launch.read_from)
    return bool(asked.master_addr or (launch.master_addr and not by_list))


def _own_name(system: System) -> str:
    """Return the host name; where that is localhost, on which all agree, an address."""
    name = system.hostname()
    if same_host(name) not in _LOCAL_NAMES:
        return name
    outside = (a for a in system.addresses() if not _is_loopback(a) and not a.startswith("fe80"))
    return next(outside, name)


def _num_nodes(launch: LaunchFacts) -> int:
    """Return how many nodes there are; 0: not known."""
    if launch.num_nodes:
        return launch.num_nodes
    if launch.world_size and launch.nproc_per_node:
        return -(-launch.world_size // launch.nproc_per_node)
    # ranks without a local number: one on each node, as operators of Kubernetes count pods
    return launch.world_size or 0 if launch.local_rank is None else 0


def _which(
    system: System, asked: Asked, nodes: Sequence[str], rank: int, is_ordered: bool
) -> tuple[str, tuple[str, ...]]:
    """Return which of `nodes` this machine is: by its own name, address, or node rank."""
    if asked.node:
        wrong = f"--node {asked.node} is not among the nodes {_some(nodes)}"
        return asked.node, () if asked.node in nodes else (wrong,)
    hostname = system.environ.get("SLURMD_NODENAME") or system.hostname()
    ranked = nodes[rank] if 0 <= rank < len(nodes) else ""
    own = _called(hostname, nodes)
    if own and (not ranked or ranked == own):
        return own, ()
    if own:  # cloned machines share a name: then the rank decides, if the address agrees
        return ranked if _is_mine(system, ranked) and not _is_mine(system, own) else own, ()
    if is_ordered and ranked:
        return ranked, ()
    mine = _mine(system, nodes)
    if len(mine) == 1:
        return mine[0], ()
    if ranked:
        return ranked, ()
    if len(nodes) == 1:
        return nodes[0], ()
    why = f"this machine is called {hostname}, which is none of {_some(nodes)}"
    if mine:
        why += f", and {', '.join(mine)} all have its address"
    return hostname, (f"{why}: say which one with --node NAME",)


def _called(hostname: str, nodes: Sequence[str]) -> str:
    """Return the one node with this name, first as it stands, then without the domain."""
    forms: tuple[Callable[[str], str], ...] = (str.lower, lambda name: _short(name.lower()))
    for form in forms:
        same = [node for node in nodes if form(node) == form(hostname)]
        if same:
            return same[0] if len(same) == 1 else ""
    return ""


def _short(name: str) -> str:
    """Cut the domain off a name; an address stays whole."""
    label = name.partition(".")[0]
    return name if label.isdecimal() or ":" in name else label


def _is_mine(system: System, name: str) -> bool:
    return bool(name) and bool(set(system.resolve(name).addresses) & set(system.addresses()))


def _mine(system: System, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose name means an address of this machine; loopback does not count."""
    own = {address for address in system.addresses() if not _is_loopback(address)}
    with ThreadPoolExecutor(min(_NUM_RESOLVERS, len(nodes))) as pool:
        found = pool.map(lambda node: system.resolve(node).addresses, nodes)
        return [node for node, addresses in zip(nodes, found, strict=True) if own & set(addresses)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _some(nodes: Iterable[str], limit: int = 6) -> str:
    names = list(nodes)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
