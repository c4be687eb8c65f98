"""The collective smoke test: rendezvous, all-reduces, and which node or pair is slow."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from rankscope.preflight.checks.base import BUSY_MS, BuiltinCheck, Run, on_each
from rankscope.preflight.checks.meeting import is_address
from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.smoke import SmokeFacts, SmokeHalf
from rankscope.preflight.model import CheckFinding, Fix
from rankscope.wire.formulas import busbw_bytes_per_second


def gloo_truth(run: Run, node: str) -> tuple[Choice, ...]:
    """Return what gloo itself chose on `node`, one for each of its devices; () if not asked."""
    report = run.reports.get(node)
    smoke = report.facts.smoke if report is not None else None
    return smoke.gloo if smoke is not None else ()


def difference(run: Run, node: str) -> str:
    """Return how gloo's choice differs from the emulated one; "" if it does not, or is unknown.

    Where they differ gloo is right, and the sentence is evidence.
    """
    truth = gloo_truth(run, node)
    report = run.reports.get(node)
    interfaces = report.facts.interfaces if report is not None else None
    guess = interfaces.gloo if interfaces is not None else ()
    if not truth or not guess or [_what(c) for c in truth] == [_what(c) for c in guess]:
        return ""
    return f"{node}: gloo itself takes {_shown(truth)}; its rules suggest {_shown(guess)}"


def _what(choice: Choice) -> str:
    """Return what decides: the address, or that there is none."""
    return "" if choice.problem else choice.address


def _shown(choices: tuple[Choice, ...]) -> str:
    return ", ".join(choice.address or f"nothing ({choice.problem})" for choice in choices)


# gloo names the peer it waits for: `third_party/gloo/gloo/transport/tcp/pair.cc`
_REMOTE = re.compile(r"remote=\[([^\]]+)\]")


def began(run: Run) -> dict[str, SmokeFacts]:
    """Return what the children say of all nodes on which one was started."""
    return {n: s for n, s in run.each(lambda facts: facts.smoke).items() if not s.skipped}


class _AllReduces(BuiltinCheck):
    """All-reduces over one backend."""

    backend: ClassVar[str]

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Return wrong sums and collectives that did not end."""
        members = began(run)
        used = {s.backend for s in members.values() if s.stage not in ("not started", "imported")}
        if self.backend in used:
            yield from self._wrong_sums(members)
            yield from self._stalls(run, members)
            yield from self._network(run, members)
        elif used:
            yield self.skipped(f"the smoke test ran over {', '.join(sorted(used))}")
        else:
            yield self.unknown("the members of the smoke test did not meet: coll.rdzv says why")

    def _network(self, run: Run, members: dict[str, SmokeFacts]) -> Iterator[CheckFinding]:
        """Yield what is wrong with the network that the backend took."""
        return iter(())

    def _wrong_sums(self, members: dict[str, SmokeFacts]) -> Iterator[CheckFinding]:
        wrong = {
            node: size
            for node, smoke in members.items()
            if (size := next((size for size in smoke.sizes if size.num_wrong), None)) is not None
        }
        if not wrong:
            return
        is_everywhere = len(wrong) == len(members)  # then the first to send it wrong is not known
        smallest = min(size.size_bytes for size in wrong.values())
        where = "all nodes" if is_everywhere else ", ".join(wrong)
        yield self.fail(
            f"an all-reduce of {amount(smallest)} gives a wrong sum on {where}",
            nodes=() if is_everywhere else wrong,
            evidence={
                node: {"size_bytes": s.size_bytes, "num_wrong": s.num_wrong}
                for node, s in wrong.items()
            },
            lines=(
                f"{node}: {s.num_wrong} of {max(1, s.size_bytes // 4)} numbers are wrong"
                for node, s in wrong.items()
            ),
            fix=(
                *(
                    Fix(
                        node=node,
                        command=f"ethtool -S {shlex.quote(name)} | grep -iE 'err|crc|drop'",
                        owner="admin",
                    )
                    for node in wrong
                    if (name := next((c.interface for c in members[node].gloo if c.interface), ""))
                ),
                Fix(
                    node="" if is_everywhere else next(iter(wrong)),
                    command="# leave it out of the job until its memory and its network interface "
                    "are tested",
                    owner="admin",
                ),
            ),
            impact="training continues with wrong gradients, no error: the loss diverges or is NaN",
            unless="another program wrote into this process, or this build is broken",
            confidence="likely",
        )

    def _stalls(self, run: Run, members: dict[str, SmokeFacts]) -> Iterator[CheckFinding]:
        """Yield one finding if the members met and then did not get through the collectives."""
        failed = {
            node: smoke
            for node, smoke in members.items()
            if smoke.error and smoke.stage in ("store", "group", "collectives", "halving")
        }
        died = {node: smoke for node, smoke in failed.items() if smoke.ended_by == "died"}
        busy = {r.node: r.delay_p90_ms for r in run.present if r.delay_p90_ms > BUSY_MS}
        if died:  # the others lost it, and say so
            yield self._dead(died)
        elif failed and set(busy) & set(members):
            node = max(busy, key=lambda name: busy[name])
            yield self.unknown(
                f"{node} was too busy to distinguish a hang from a pause ({busy[node]:.0f} ms)"
            )
        elif failed:
            yield self._hung(run, members, failed)

    def _hung(
        self, run: Run, members: dict[str, SmokeFacts], failed: dict[str, SmokeFacts]
    ) -> CheckFinding:
        size = min((_open_size(smoke) for smoke in failed.values()), default=0)
        what = f"an all-reduce of {amount(size)}" if size else "connecting all members"
        passed = max((_passed(smoke) for smoke in members.values()), default=0)
        hung = [node for node, smoke in failed.items() if smoke.ended_by == "limit"]
        is_one = len(hung) == 1 and len(failed) > 1  # the rest had torch's own time-out
        edges = _edges(run, failed)
        after = f"; {amount(passed)} passed" if passed else ""
        by = f" between {edges[0][0]} and {edges[0][1]}" if len(edges) == 1 else ""
        if is_one:
            by = f" on {hung[0]}, for which the others waited"
        return self.fail(
            f"{what} did not end{by}{after}",
            nodes=hung if is_one else (),
            edges=edges,
            evidence={"size_bytes": size, "passed_bytes": passed, "stages": _stages(failed)},
            lines=(f"{node}: {_first_line(smoke)}" for node, smoke in failed.items()),
            fix=_probes(run, edges, hung if is_one else []),
            impact="the first collective of this size hangs; torch gives up after 30 min "
            '("Timed out waiting 1800000ms"), and nothing names the cause'
            if size
            else "init_process_group hangs on some ranks for up to 33 min",
            unless="the machine was so busy that a few MB took longer than the limit",
            confidence="likely",
        )

    def _dead(self, died: dict[str, SmokeFacts]) -> CheckFinding:
        return self.fail(
            f"the torch process of {', '.join(died)} died in the smoke test",
            nodes=died,
            evidence={"stages": _stages(died)},
            lines=(f"{node}: {_first_line(smoke)}" for node, smoke in died.items()),
            fix=on_each(died, "journalctl -k --since -5min | grep -iE 'oom|killed|segfault'"),
            impact='its ranks die in the first collective, the others with "Connection closed by '
            'peer"',
            unless="this process was ended by hand",
        )


def amount(size_bytes: int) -> str:
    """Return a size for people: "64 kB"; the sizes are powers of two."""
    for unit, factor in (("MB", 2**20), ("kB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def _stages(members: Mapping[str, SmokeFacts]) -> dict[str, str]:
    return {node: smoke.stage for node, smoke in members.items()}


def _open_size(smoke: SmokeFacts) -> int:
    return next((size.size_bytes for size in smoke.sizes if size.elapsed_ms < 0), 0)


def _passed(smoke: SmokeFacts) -> int:
    return max((size.size_bytes for size in smoke.sizes if size.elapsed_ms >= 0), default=0)


def _edges(run: Run, failed: Mapping[str, SmokeFacts]) -> tuple[tuple[str, str], ...]:
    """Return the paths on which a backend says that it waited, by the address it names."""
    owners = {address: r.node for r in run.present for address in r.addresses}
    found: dict[tuple[str, str], None] = {}
    for node, smoke in failed.items():
        for address in _REMOTE.findall(f"{smoke.error}\n{smoke.output_tail}"):
            peer = owners.get(address.partition("%")[0])
            if peer is not None and peer != node:
                found[node, peer] = None
    return tuple(found)


def _probes(run: Run, edges: tuple[tuple[str, str], ...], hung: list[str]) -> tuple[Fix, ...]:
    if hung:
        return (Fix(node=hung[0], command="journalctl -k --since -5min | tail -n 50"),)
    return tuple(
        Fix(node=start, command=f"ping -c 3 -M do -s 1472 {run.reports[end].addresses[0]}")
        for start, end in edges[:3]
        if run.reports[end].addresses and is_address(run.reports[end].addresses[0])
    )


def _first_line(smoke: SmokeFacts) -> str:
    return (smoke.error.splitlines() or [""])[0][:200]


# Connecting and reading one key per member takes 3 ms on loopback and some round trips elsewhere;
# a name server that does not answer costs 5 s per question (resolv.conf(5), `timeout`).
SLOW_MS = 5000.0
_NO_RENDEZVOUS = {
    "static": "ranks wait in init_process_group and give up after 15 min",
    "env": "ranks wait in init_process_group and give up after 30 min",
    "c10d": "the rendezvous fails after 10 min with RendezvousTimeoutError",
}


class CollRdzv(BuiltinCheck, id="coll.rdzv", scope="all", tier="default", needs=("peers", "smoke")):
    """The torch processes of all nodes start, and meet in a TCPStore within 5 s."""

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Return whose torch does not start, who did not meet, and who met slowly."""
        members = began(run)
        broken = {n: s for n, s in members.items() if s.stage == "not started" and s.error}
        if broken:
            yield from self._broken(broken)
            return  # the others waited for these
        missed = {n: s for n, s in members.items() if s.stage == "imported" and s.error}
        if missed:
            yield self._missed(run, missed, members)
        slow = {n: s.store_ms for n, s in members.items() if s.store_ms > SLOW_MS}
        if slow:
            yield self._slow(run, slow)

    def _broken(self, broken: dict[str, SmokeFacts]) -> Iterator[CheckFinding]:
        for node, smoke in broken.items():
            has_tried = smoke.ended_by in ("raised", "died")
            line = (smoke.error.splitlines() or [""])[-1][:160]
            yield self.finding(
                "fail" if has_tried else "unknown",
                f"torch cannot be imported on {node}: {line}"
                if has_tried
                else f"{node}: {smoke.error}",
                nodes=(node,),
                evidence={"error": smoke.error, "ended_by": smoke.ended_by},
                lines=smoke.output_tail.splitlines()[-5:],
                fix=(Fix(node=node, command='python -c "import torch"'),) if has_tried else (),
                impact=f"the ranks of {node} die at `import torch`, the others wait for them",
                unless="training runs in another Python environment than this command",
            )

    def _missed(
        self, run: Run, missed: dict[str, SmokeFacts], members: dict[str, SmokeFacts]
    ) -> CheckFinding:
        stores = {node: smoke.store for node, smoke in missed.items() if smoke.store}
        store = next(iter(stores.values()), f"{run.master}:{run.master_port}")
        is_all = len(missed) == len(members)  # no two met: then it is the store's side
        return self.fail(
            f"{'no node' if is_all else ', '.join(missed)} "
            f"{'reached' if is_all else 'did not reach'} the store of {run.master} at {store}",
            nodes=(run.master,) if is_all else tuple(missed),
            edges=((node, run.master) for node in missed if node != run.master),
            evidence={
                "stores": stores,
                "beside": next((s.beside for s in missed.values() if s.beside), ""),
                "errors": {n: s.error for n, s in missed.items()},
            },
            lines=(f"{n}: {s.error.splitlines()[0][:200]}" for n, s in missed.items()),
            fix=(
                Fix(node=node, command=_call(stores[node]))
                for node in missed
                if node != run.master and node in stores
            ),
            impact=_NO_RENDEZVOUS[run.mode],
            unless="these machines were too busy to import torch in time",
            confidence="likely",
        )

    def _slow(self, run: Run, slow: dict[str, float]) -> CheckFinding:
        worst = max(slow, key=lambda node: slow[node])
        address = next(filter(is_address, run.reports[run.master].addresses), "")
        return self.warn(
            f"{worst} needs {slow[worst] / 1e3:.1f} s to meet in the store of {run.master}",
            nodes=slow,
            evidence={"store_ms": slow},
            lines=(f"{node}: {ms / 1e3:.1f} s" for node, ms in slow.items()),
            fix=on_each(
                slow,
                f"time getent hosts {shlex.quote(run.master)}; time getent hosts {address}",
            ),
            impact="each start and each new process group waits that long; training does not",
            unless="the machine was busy with something else just then",
        )


def _call(store: str) -> str:
    """Return a command that connects to "host:port", and says why it cannot."""
    host, _, port = store.rpartition(":")
    where = (host.strip("[]"), int(port) if port.isdecimal() else 0)
    program = f"import socket; print(socket.create_connection({where!r}, 5))"
    return f"python -c {shlex.quote(program)}"


class CollGloo(_AllReduces, id="coll.gloo", scope="all", tier="default", needs=("peers", "smoke")):
    """All-reduces over gloo from 4 B to 64 MB end, and their sums are right."""

    backend = "gloo"


_NO_IB = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")  # what may keep NCCL from InfiniBand


class CollNccl(
    _AllReduces, id="coll.nccl", scope="all", tier="default", needs=("peers", "smoke", "gpu")
):
    """All-reduces over NCCL end, sum rightly, and use InfiniBand where there is some."""

    backend = "nccl"

    def _network(self, run: Run, members: dict[str, SmokeFacts]) -> Iterator[CheckFinding]:
        rdma = run.each(lambda facts: facts.rdma)
        ports = {
            node: len(rdma[node].ports)
            for node, smoke in members.items()
            if smoke.nccl_net == "Socket" and node in rdma and rdma[node].ports
        }
        if ports:
            yield self.warn(
                f"NCCL uses TCP sockets on {', '.join(ports)} though there is InfiniBand",
                nodes=ports,
                evidence={"num_rdma_ports": ports},
                lines=(f'{node}: NCCL says "NET/Socket"' for node in ports),
                fix=(Fix(node=node, command=_remedy(run, node)) for node in ports),
                impact="training runs, its communication only at the speed of TCP over Ethernet",
                unless="these InfiniBand ports are for storage: NCCL is kept off them on purpose",
            )


def _remedy(run: Run, node: str) -> str:
    launch = run.launches.get(node)
    known = [name for name in _NO_IB if launch is not None and name in launch.environment]
    if known:
        return f"unset {' '.join(known)}"
    return "ls -l /dev/infiniband; ldconfig -p | grep libibverbs  # both must be there"


# Groups of equal machines differ by up to 1.7 x while three processes share two cores.
SLOWER_RATIO = 2.5
# 4 MB take 4 ms at 10 Gbit/s and 35 ms at 1 Gbit/s; below this a scheduler's pause may be all.
LEAST_EXCESS_MS = 20.0


class CollPair(
    BuiltinCheck, id="coll.pair", scope="pair", tier="default", needs=("peers", "smoke", "cpu-pace")
):
    """No node and no pair slows the collectives of all nodes down."""

    def evaluate(self, run: Run) -> Iterable[CheckFinding]:
        """Return, for each group that ran together, its slow node, or else its slow pair."""
        searches = dict.fromkeys(smoke.halves for smoke in began(run).values() if smoke.halves)
        if not searches:
            yield self.skipped("needs three nodes or more that got through the collectives")
        for halves in searches:
            if not _is_begun_by_another(halves, searches):
                yield from self._slow(run, halves)

    def _slow(self, run: Run, measured: tuple[SmokeHalf, ...]) -> Iterator[CheckFinding]:
        # a group that was slow by what the machine did just then was not when it was tried again
        halves = {half.nodes: half for half in sorted(measured, key=_speed)}.values()
        best = max(halves, key=_speed)
        slow = [half for half in halves if _is_slow(half, best)]
        if not slow:
            return
        fast = {node for half in halves if half not in slow for node in half.nodes}
        suspects = {node for half in slow for node in half.nodes} - fast
        worst = min(slow, key=_speed)
        if len(suspects) == 1:
            yield self._finding(run, worst, best, tuple(suspects), ())
        elif not suspects and len(worst.nodes) == 2:
            yield self._finding(run, worst, best, (), ((worst.nodes[0], worst.nodes[1]),))
        else:
            names = ", ".join(sorted(suspects or worst.nodes))
            yield self.unknown(f"one of {names} slows the collectives; which is not known")

    def _finding(
        self,
        run: Run,
        worst: SmokeHalf,
        best: SmokeHalf,
        nodes: tuple[str, ...],
        edges: tuple[tuple[str, str], ...],
    ) -> CheckFinding:
        who = nodes[0] if nodes else f"the pair {edges[0][0]} and {edges[0][1]}"
        times = _speed(best) / max(_speed(worst), 1e-9)
        size = amount(worst.size_bytes)
        return self.warn(
            f"{who} makes an all-reduce of {size} {times:.1f} times slower",
            nodes=nodes,
            edges=edges,
            evidence={
                "slow_ms": worst.elapsed_ms,
                "slow_nodes": list(worst.nodes),
                "fast_ms": best.elapsed_ms,
                "fast_nodes": list(best.nodes),
            },
            lines=(
                f"among {', '.join(worst.nodes)}: {worst.elapsed_ms:.1f} ms",
                f"among {', '.join(best.nodes)}: {best.elapsed_ms:.1f} ms",
            ),
            fix=on_each(nodes, "top -b -n 1 | head -n 15"),
            impact=f"each step of all {len(run.expected)} nodes waits for it, without a message",
            unless="something else kept it busy just then: run it again",
            confidence="likely",
        )


def _is_begun_by_another(
    halves: tuple[SmokeHalf, ...], searches: Iterable[tuple[SmokeHalf, ...]]
) -> bool:
    """Return whether another node reports the same search further: this one ended early."""
    return any(other[: len(halves)] == halves and other != halves for other in searches)


def _speed(half: SmokeHalf) -> float:
    seconds = max(half.elapsed_ms, 1e-3) / 1e3
    return busbw_bytes_per_second("all_reduce", half.size_bytes, seconds, len(half.nodes)) or 0.0


def _is_slow(half: SmokeHalf, best: SmokeHalf) -> bool:
    ratio = _speed(best) / max(_speed(half), 1e-9)
    excess_ms = half.elapsed_ms * (1 - 1 / max(ratio, 1e-9))
    return ratio > SLOWER_RATIO and excess_ms > LEAST_EXCESS_MS
