"""Path quality: MTU, latency, jitter, loss, bandwidth, idle connections."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Unpack

from rankscope.preflight.checks.base import BUSY_MS, BuiltinCheck, Details, Run, listed
from rankscope.preflight.checks.blame import Blame, Path, Side, blame
from rankscope.preflight.checks.pairs import NO_PATH, arrows, interface_towards, ordered, shortened
from rankscope.preflight.facts.edges import Bandwidth, EdgeFacts, PathMtu
from rankscope.preflight.facts.interfaces import Interface
from rankscope.preflight.facts.loss import along
from rankscope.preflight.model import CheckFinding, Fix, Status
from rankscope.preflight.probe import schedule

NODE_SHARE = 0.5  # of its paths must be bad, two at least, before a node is named
ALONE = 3.0  # times as far above, where one pair is all that there is to compare with
FEW = 4  # nodes: one bad node has half of all pairs among four, and more among three


def both_ends(run: Run) -> Iterator[tuple[str, str, EdgeFacts]]:
    """Yield the measured paths whose other end has reported as well."""
    for start, end, edge in run.edges():
        if end in run.reports:
            yield start, end, edge


def is_reached(edge: EdgeFacts) -> bool:
    """Return whether a port at the far end answered."""
    dials = (edge.mesh, edge.master, *edge.others, *edge.ephemeral)
    return any(dial is not None and dial.outcome == "ok" for dial in dials)


def usual(values: Mapping[Path, float]) -> float | None:
    """Return the usual value of a path where low is good; None with fewer than three nodes."""
    best: dict[str, float] = {}
    for path, value in values.items():
        for node in path:
            best[node] = min(best.get(node, value), value)
    if len(best) < 3:
        return None
    return statistics.median(values.values() if len(best) > FEW else best.values())


def high(values: Mapping[Path, float], ratio: float, floor: float) -> tuple[Path, ...]:
    """Return the paths far above the usual value; further where a single pair is good."""
    middle = usual(values)
    if middle is None:
        return ()
    limit = max(ratio * middle, floor)
    good = {frozenset(path) for path, value in values.items() if value <= limit}
    if len(good) == 1:
        limit *= ALONE
    return tuple(path for path, value in values.items() if value > limit) if good else ()


def seen_from_both(values: Mapping[Path, float]) -> dict[Path, float]:
    """Return the lower of what both ends measured: each confirms the other."""
    return {
        (start, end): min(value, values.get((end, start), value))
        for (start, end), value in values.items()
    }


@dataclass(frozen=True)
class Group:
    """Bad paths that one finding is about, the nodes to name, and whose paths they are."""

    paths: tuple[Path, ...]
    nodes: tuple[str, ...]
    whose: str  # begins the title


def grouped_paths(run: Run, bad: Collection[Path], tested: Collection[Path]) -> Iterator[Group]:
    """Yield bad paths: nodes of the same side together, all pairs together."""
    sides: dict[Side, list[Blame]] = defaultdict(list)
    for one in blame(bad, tested, share=NODE_SHARE, partly=False):
        sides[one.side].append(one)
    for side, some in sides.items():
        paths = tuple(dict.fromkeys(path for one in some for path in one.paths))
        nodes = tuple(node for one in some for node in one.nodes)
        yield Group(paths, nodes if side != "pair" else (), who(run, Blame(side, paths, nodes)))


class PathCheck(BuiltinCheck):
    """A check of the quality of paths."""

    @classmethod
    def about(
        cls, group: Group, title: str, status: Status = "warn", **details: Unpack[Details]
    ) -> CheckFinding:
        """Return a finding about a group of paths."""
        details["nodes"], details["edges"] = group.nodes, group.paths
        return cls.finding(status, f"{group.whose}: {title}", **details)


def at_ends(
    run: Run, group: Group, path: Path, command: Callable[[str], str], unknown: str, remedy: str
) -> Iterator[Fix]:
    """Yield `command`, of an interface, for the nodes of a group, else for the ends of a path.

    It only shows where to look: `remedy` says what a person does then.
    """
    start, end = path
    for node in (ordered(run, group.nodes) or path)[:4]:
        interface = interface_towards(run, node, end if node == start else start)
        text = command(interface.name) if interface is not None else unknown
        yield Fix(node=node, command=text, owner="admin")
    yield said_to(start, remedy)


def said_to(node: str, sentence: str) -> Fix:
    """Return what a person must do, where no command can."""
    return Fix(node=node, command=f"# {sentence}", owner="admin")


def who(run: Run, one: Blame) -> str:
    """Return whose paths these are, to begin a title."""
    if one.nodes:
        names = listed(ordered(run, one.nodes))
        return {"inbound": f"paths to {names}", "outbound": f"paths from {names}"}.get(
            one.side, f"paths of {names}"
        )
    pairs = list(dict.fromkeys(tuple(sorted(path)) for path in one.paths))
    if len(pairs) * 2 == len(one.paths):
        return listed([f"{start}-{end}" for start, end in ordered_pairs(run, pairs)])
    return arrows(one.paths)


def ordered_pairs(run: Run, pairs: Collection[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return pairs in the order of the run."""
    place = {name: number for number, name in enumerate(run.expected)}
    sides = [sorted(pair, key=lambda name: (place.get(name, len(place)), name)) for pair in pairs]
    return sorted(((a, b) for a, b in sides), key=lambda p: (place.get(p[0], 0), p))


class NetMtuPath(BuiltinCheck, id="net.mtu.path", scope="pair", needs=("peers",)):
    """Large messages pass wherever small ones do.

    A path that carries less than the interfaces say, without a word back, passes every small
    test: gloo connects, reduces one number, and then waits for 30 minutes.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Blame the node on all bad paths, or the pair."""
        edges = {(a, b): edge for a, b, edge in both_ends(run) if not {a, b} & set(run.gone)}
        paths = {path: edge.mtu for path, edge in edges.items() if edge.mtu is not None}
        untried = [path for path, edge in edges.items() if path not in paths and is_reached(edge)]
        stalled = {path for path, mtu in paths.items() if not mtu.large_ok}
        # an echo goes both ways, so a path that is bad one way is bad both ways
        stalled |= {(b, a) for a, b in stalled if (b, a) in paths}
        bad = {
            (a, b)
            for a, b in stalled
            if any(_is_narrow(paths[path]) for path in ((a, b), (b, a)) if path in paths)
        }
        found = blame([path for path in paths if path in bad], list(paths))
        for one in found:
            yield self._finding(run, one, paths)
        if stalled - bad:
            doubtful = tuple(sorted(stalled - bad))
            title = f"{arrows(doubtful)}: 64 kB did not come back in time, "
            is_whole = all(paths[path].carried_bytes >= 0 for path in doubtful)
            title += "though packets of full size pass" if is_whole else "what passes is not known"
            yield self.unknown(title, edges=doubtful)
        if untried:
            title = f"{arrows(untried)}: large messages were not tried, or not to the end"
            yield self.unknown(title, edges=untried)

    def _finding(self, run: Run, one: Blame, paths: dict[tuple[str, str], PathMtu]) -> CheckFinding:
        mtus = [paths[path] for path in one.paths]
        carried = min((m.carried_bytes for m in mtus if m.carried_bytes > 0), default=0)
        says = max(m.interface_bytes for m in mtus)
        about = "about " if any(m.how == "clamp" for m in mtus) else ""
        carry = f"carry {about}{carried} bytes" if carried else "carry no large packet"
        ends = one.nodes or tuple({node for path in one.paths for node in path})
        lines = [
            f"{a}->{b}  {m.carried_bytes} bytes by {m.how}, 64 kB over TCP "
            + (f"in {m.large_ms:.0f} ms" if m.large_ok else "stalls")
            for (a, b), m in zip(one.paths, mtus, strict=True)
        ]
        return self.fail(
            f"{who(run, one)} {carry}, interfaces say {says}: large messages vanish",
            nodes=one.nodes,
            edges=one.paths,
            evidence={"carried_bytes": carried, "interface_bytes": says, "side": one.side},
            lines=shortened(lines),
            fix=(
                (
                    Fix(node=node, command=_command(run, node, one, carried), owner="admin")
                    for node in ordered(run, ends)
                )
                if carried > 0
                else (said_to(ordered(run, ends)[0], _NOTHING_CARRIED),)
            ),
            unless="a firewall holds back large packets for another reason than their size",
        )


_NOTHING_CARRIED = (
    "the path is to be mended: packets vanish of every size that a host must take (a tunnel with "
    "a wrong MTU, a firewall that drops what is long)"
)


def _is_narrow(mtu: PathMtu) -> bool:
    """Return whether a path carries less than its interface sends: else it is slow or lossy."""
    is_measured = mtu.carried_bytes >= 0
    return is_measured and (mtu.carried_bytes < mtu.interface_bytes or not mtu.interface_bytes)


def _command(run: Run, node: str, one: Blame, carried: int) -> str:
    peer = next((b if a == node else a for a, b in one.paths if node in (a, b)), "")
    interface = interface_towards(run, node, peer)
    name = interface.name if interface is not None else "$(ip route | awk '/^default/{print $5}')"
    return f"sudo ip link set {name} mtu {carried}"


class NetMtuDiffers(BuiltinCheck, id="net.mtu.differs", scope="all", needs=("peers",)):
    """The interfaces that the job will use have the same MTU on all nodes."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Name the nodes that differ from the majority; without one, none."""
        groups: dict[int, dict[str, Interface]] = defaultdict(dict)
        for report in run.present:
            interface = interface_towards(run, report.node)
            if interface is not None and interface.mtu_bytes and not interface.is_loopback:
                groups[interface.mtu_bytes][report.node] = interface
        if len(groups) < 2:
            return
        usual = max(groups, key=lambda mtu: len(groups[mtu]))
        num = sum(map(len, groups.values()))
        has_majority = 2 * len(groups[usual]) > num
        odd = {
            node: one for mtu, some in groups.items() if mtu != usual for node, one in some.items()
        }
        wanted, changed = usual, odd
        if not has_majority:  # the smallest fits everywhere
            wanted = min(groups)
            changed = {
                node: one for mtu, some in groups.items() if mtu > wanted
                for node, one in some.items()
            }  # fmt: skip
        says = ", ".join(
            f"{listed(list(some))} {mtu}" for mtu, some in groups.items() if mtu != usual
        )
        yield self.warn(
            f"MTU differs: {says}; {listed(list(groups[usual]))} {usual} bytes",
            nodes=tuple(odd) if has_majority else (),
            evidence={"mtu_bytes": {str(mtu): list(some) for mtu, some in groups.items()}},
            lines=(
                f"{mtu} bytes: {listed([f'{n} ({i.name})' for n, i in some.items()])}"
                for mtu, some in groups.items()
            ),
            fix=tuple(
                Fix(node=node, command=f"sudo ip link set {one.name} mtu {wanted}", owner="admin")
                for node, one in list(changed.items())[:4]
            ),
            unless="the job uses another interface, or the difference is meant",
        )


LATENCY_RATIO = 5.0  # above the usual round trip; racks of one cluster differ by 2 to 3
LATENCY_FLOOR_MS = 5.0  # below, no all-reduce of a training step is bound by it
SURE_MS = 60.0  # a busy machine delays by a few 20 ms slices; the best of 12 is never that late


class NetLatency(PathCheck, id="net.latency", scope="pair", needs=("peers",)):
    """No pair is much slower to answer than the others.

    The best of 12 round trips, the lower of what both ends measured, against the median of all.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Compare all pairs; of a busy node only what is beyond any delay of its own."""
        measured = {(a, b): e.rtt.min_ms for a, b, e in both_ends(run) if e.rtt is not None}
        values = seen_from_both(measured)
        busy = {r.node for r in run.present if r.delay_p90_ms > BUSY_MS}
        middle = usual(values)
        bad = [
            path
            for path in dict.fromkeys(
                (*high(values, LATENCY_RATIO, LATENCY_FLOOR_MS), *_far(values))
            )
            if values[path] > SURE_MS or not busy & {*path}
        ]
        for group in grouped_paths(run, bad, values):
            yield self._slow(run, group, values, middle)
        if busy and values:
            worst = max(run.reports[node].delay_p90_ms for node in busy)
            title = f"not evaluated below {SURE_MS:g} ms: {listed(ordered(run, busy))} too busy "
            title += f"to time a path (a 20 ms sleep took {worst:.0f} ms more)"
            yield self.unknown(title, nodes=ordered(run, busy))
        if not values and len(run.present) > 1:
            yield from self.note(
                "unknown", ordered(run, [report.node for report in run.present]), NO_PATH
            )

    def _slow(
        self, run: Run, group: Group, values: dict[Path, float], middle: float | None
    ) -> CheckFinding:
        worst_ms = max(values[path] for path in group.paths)
        usual_text = f"; usual here is {middle:.2g} ms" if middle else ""
        start, end = group.paths[0]
        return self.about(
            group,
            f"round trip of {worst_ms:.0f} ms{usual_text}",
            evidence={"round_trip_ms": round(worst_ms, 3), "usual_ms": middle},
            lines=shortened(
                f"{a}->{b}  {values[a, b]:.1f} ms, best of 12 round trips" for a, b in group.paths
            ),
            fix=(
                Fix(node=start, command=_trace(run, start, end)),
                said_to(
                    start,
                    "the hop at which the time jumps is the cause; a single hop: tc qdisc and the "
                    "cable at both ends, the virtual machines' host, or leave these nodes out",
                ),
            ),
            unless="the nodes are in different places on purpose",
        )


def _far(values: dict[Path, float]) -> tuple[Path, ...]:
    """Return what is slow for any cluster, also where there is nothing to compare with."""
    return tuple(path for path, value in values.items() if value > SURE_MS)


def _trace(run: Run, start: str, end: str) -> str:
    interface = interface_towards(run, start, end)
    through = f" -i {interface.name}" if interface is not None else ""
    return f"traceroute -n{through} {run.gloo_address(end) or end}"


JITTER_RATIO = 5.0  # above what is usual here
JITTER_FLOOR_MS = 5.0  # between the best and the middle round trip; a healthy LAN has 0.1 ms
JITTER_SHARE = 0.5  # of the best round trip: below, the distance is what costs, see net.latency
JITTER_DELAYS = 2.0  # p90 of the own delay to be taken off, for each of two ends that answer late


class NetJitter(
    PathCheck, id="net.jitter", scope="pair", tier="default", needs=("peers", "cpu-pace")
):
    """Round trips of a pair do not vary much more than those of the others.

    The median less the minimum: a single late answer, as of one lost packet, is not jitter.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Compare all pairs; both ends must have seen it."""
        rtts = {(a, b): edge.rtt for a, b, edge in both_ends(run) if edge.rtt is not None}
        spread = seen_from_both({path: r.median_ms - r.min_ms for path, r in rtts.items()})
        bad = [
            path
            for path in high(spread, JITTER_RATIO, JITTER_FLOOR_MS)
            if spread[path] > max(_own_ms(run, path), JITTER_SHARE * rtts[path].min_ms)
        ]
        for group in grouped_paths(run, bad, spread):
            worst = max(group.paths, key=lambda path: rtts[path].max_ms - rtts[path].min_ms)
            rtt, (start, end) = rtts[worst], worst
            figures = ("min_ms", "median_ms", "p95_ms", "max_ms")
            command = f"ping -i 0.2 -c 50 {run.gloo_address(end) or end}"
            yield self.about(
                group,
                f"round trips vary from {rtt.min_ms:.1f} ms to {rtt.max_ms:.1f} ms",
                evidence={name: getattr(rtt, name) for name in figures},
                lines=shortened(
                    f"{a}->{b}  min {rtts[a, b].min_ms:.1f}, median {rtts[a, b].median_ms:.1f}, "
                    f"p95 {rtts[a, b].p95_ms:.1f}, max {rtts[a, b].max_ms:.1f} ms"
                    for a, b in group.paths
                ),
                fix=(
                    Fix(node=start, command=command),
                    said_to(
                        start,
                        "find what else fills this path, or the processors of its ends; where "
                        "nothing does: tc qdisc at both ends, then the switch between them",
                    ),
                ),
                unless="other traffic filled the path at that moment",
            )


def _own_ms(run: Run, path: Path) -> float:
    """Return what the ends of a path themselves may add to a round trip, in ms."""
    return JITTER_FLOOR_MS + JITTER_DELAYS * max(run.reports[node].delay_p90_ms for node in path)


LIMIT_RATIO = 0.005  # of datagrams there and back; a sound path loses fewer than 0.0001
MIN_LOST = 4  # of 400: fewer may be one stray burst
TCP_RATIO = 0.005  # retransmitted segments: an overflowing queue alone makes as many, no more
TCP_ALONE_RATIO = 0.02  # where UDP is closed there is nothing else to go by
QUEUE_MBIT = 100.0  # slower than that, TCP fills a queue until it overflows: loss is its way


class NetLoss(PathCheck, id="net.loss", scope="pair", tier="default", needs=("peers", "cpu-pace")):
    """Hardly any packet of a pair is lost.

    Small datagrams at a gentle pace, so that no queue overflows. Both ends must miss answers, and
    TCP must have sent again as well: a receiver that was late loses datagrams, too.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Evaluate pairs, as a datagram is echoed; then find which way it is lost."""
        edges = {(a, b): edge for a, b, edge in both_ends(run) if _is_measured(edge)}
        ratios = {path: _lost(edge, edges.get(path[::-1])) for path, edge in edges.items()}
        bad = [path for path, lost in ratios.items() if lost and _is_this_way(edges, path)]
        for group in grouped_paths(run, bad, edges):
            ways = {path: _way_ratio(edges, path, ratios[path]) for path in group.paths}
            yield self.about(
                group,
                f"{max(ways.values()) * 100:.1f} % of packets are lost",
                evidence={
                    "lost_ratio": round(max(ways.values()), 5),
                    "lost_ratios": {f"{a}->{b}": round(r, 5) for (a, b), r in ways.items()},
                },
                lines=shortened(
                    f"{a}->{b}  {_loss_words(edges[a, b], edges.get((b, a)))}"
                    for a, b in group.paths
                ),
                fix=at_ends(
                    run,
                    group,
                    group.paths[0],
                    lambda name: f"ip -s link show {name} && ethtool {name}",
                    "ip -s link",
                    "errors or drops that grow: that end's cable, transceiver or port; at neither "
                    "end: the switch between them, or leave these nodes out",
                ),
                unless="other traffic filled the path at that moment",
            )
        if not edges and len(run.present) > 1:
            yield self.unknown("neither datagrams nor the bandwidth of any pair was measured")


def _has_datagrams(edge: EdgeFacts) -> bool:
    """Return whether UDP is open: no answer at all is a closed port."""
    return edge.datagrams is not None and edge.datagrams.num_answered > 0


def _is_measured(edge: EdgeFacts) -> bool:
    return _has_datagrams(edge) or _sent_again(edge) is not None


def _sent_again(edge: EdgeFacts) -> float | None:
    """Return the share of segments that TCP sent twice, 0 to 1; None: not known."""
    sent = edge.bandwidth
    if sent is None or not sent.num_segments:
        return None
    return sent.num_retransmits / sent.num_segments


def _lost(edge: EdgeFacts, back: EdgeFacts | None) -> float:
    """Return the share of packets that a pair surely loses; 0 where that is not sure."""
    ends = [end for end in (edge, back) if end is not None]
    again = [share for end in ends if (share := _sent_again(end)) is not None]
    answered = [end.datagrams for end in ends if end.datagrams is not None and _has_datagrams(end)]
    if not answered:
        sent = edge.bandwidth
        if sent is None or sent.num_retransmits < MIN_LOST or sent.mbit_per_s < QUEUE_MBIT:
            return 0.0
        return again[0] if again[0] > TCP_ALONE_RATIO else 0.0
    if again and max(again) < TCP_RATIO:
        return 0.0
    lost = [(one.num_sent - one.num_answered, one.num_sent) for one in answered]
    if any(num < MIN_LOST or num < LIMIT_RATIO * total for num, total in lost):
        return 0.0
    return min(num / total for num, total in lost)


def _is_this_way(edges: Mapping[Path, EdgeFacts], path: Path) -> bool:
    """Return whether a pair that loses packets does so this way; both, where that is not known."""
    this = along(edges[path], edges.get(path[::-1]))
    other = along(edges.get(path[::-1]), edges[path])
    if this is None or other is None:
        return True
    is_lossy = this.num_lost >= MIN_LOST and this.ratio >= LIMIT_RATIO
    return is_lossy or (this.ratio >= other.ratio and this.num_lost > 0)


def _way_ratio(edges: Mapping[Path, EdgeFacts], path: Path, there_or_back: float) -> float:
    lost = along(edges[path], edges.get(path[::-1]))
    return lost.ratio if lost is not None else there_or_back


def _loss_words(edge: EdgeFacts, back: EdgeFacts | None) -> str:
    words = []
    lost_here = along(edge, back)
    if lost_here is not None:
        words.append(f"{lost_here.num_lost} of {lost_here.num_sent} datagrams lost on this way")
    elif edge.datagrams is not None and edge.datagrams.num_answered:
        lost = edge.datagrams.num_sent - edge.datagrams.num_answered
        words.append(f"{lost} of {edge.datagrams.num_sent} datagrams lost there or back")
    if edge.bandwidth is not None and edge.bandwidth.num_segments:
        sent = edge.bandwidth
        words.append(f"{sent.num_retransmits} of {sent.num_segments} segments sent again")
    return ", ".join(words)


# A transfer is counted for 0.2 s: over a longer round trip it ends while TCP still speeds up, and
# what the kernel remembers of earlier connections makes more difference than the path.
FAR_MS = 10.0
LEAST_SHARE = 0.1  # of a core: an end that had less than a tenth of one proves nothing more


class NetBandwidth(
    PathCheck, id="net.bandwidth", scope="pair", tier="default", needs=("peers", "cpu-pace")
):
    """No pair is much slower than the others, nor slower than --expect-gbps.

    A slow figure counts once a second, exclusive measurement has confirmed it. A node is named
    when it is slow with two partners or more.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail below what was asked for, warn far below what is usual here."""
        speeds = {
            (a, b): edge.bandwidth for a, b, edge in both_ends(run) if edge.bandwidth is not None
        }
        if not speeds:
            yield self.unknown("no pair was measured")
            return
        figures = {path: speed.mbit_per_s for path, speed in speeds.items()}
        middle = schedule.usual(figures)
        wanted = run.options.expect_gbps * 1e3
        if not middle and not wanted:
            yield self.skipped("nothing to compare with: two good pairs at least, or --expect-gbps")
        limit = max(schedule.slow_limit(figures), wanted)
        round_trips = {(a, b): e.rtt.min_ms for a, b, e in both_ends(run) if e.rtt is not None}
        if (usual(round_trips) or 0.0) > FAR_MS:  # all are far: one that is alone is slow by that
            limit = wanted
        bad = [path for path, speed in speeds.items() if _best(speed) < limit]
        known = _known(run) if bad else set()
        # apart: a pair that jitters is no second partner with which a node would be slow
        for some in ([p for p in bad if p not in known], [p for p in bad if p in known]):
            for group in grouped_paths(run, some, speeds):
                if any(_is_confirmed(speeds[path]) for path in group.paths):
                    yield self._slow(run, group, speeds, middle, wanted)

    def _slow(
        self, run: Run, group: Group, speeds: dict[Path, Bandwidth], middle: float, wanted: float
    ) -> CheckFinding:
        sure = [path for path in group.paths if _is_confirmed(speeds[path])]
        slowest = min(_measured(speeds[path]) for path in sure)
        than = f"{wanted:.0f} Mbit/s asked for" if slowest < wanted else f"usual is {middle:.0f}"
        return self.about(
            group,
            f"{_short(slowest)} Mbit/s; {than}",
            "fail" if slowest < wanted else "warn",
            evidence={
                "mbit_per_s": round(slowest, 2),
                "usual_mbit_per_s": round(middle, 1),
                "asked_mbit_per_s": wanted,
            },
            lines=shortened(
                f"{a}->{b}  {_figures(speeds[a, b])}"
                for a, b in sorted(group.paths, key=lambda path: not _is_confirmed(speeds[path]))
            ),
            fix=at_ends(
                run,
                group,
                min(sure, key=lambda path: _best(speeds[path])),
                lambda name: f"ethtool {name}; tc -s qdisc show dev {name}",
                "ip -s link; tc qdisc",
                "a low speed: the cable or port; a tbf, htb or netem: remove it with tc qdisc del; "
                "else a limit of the switch or the virtual machines' host: ask who runs them",
            ),
            unless="other traffic filled the path both times",
        )


def _known(run: Run) -> set[Path]:
    """Return the paths whose slowness another check explains."""
    checks = (NetLatency(), NetJitter(), NetLoss())
    found = [one for check in checks for one in check.evaluate(run) if one.status == "warn"]
    paths = {path for one in found for path in one.edges}
    return paths | {(end, start) for start, end in paths}


def _best(speed: Bandwidth) -> float:
    """Return what the path carries at least: the ends may have had no core for a part of it."""
    share = max(1.0 - speed.waited_ratio, LEAST_SHARE)
    return max(speed.mbit_per_s, speed.again_mbit_per_s) / share


def _measured(speed: Bandwidth) -> float:
    return max(speed.mbit_per_s, speed.again_mbit_per_s)


def _is_confirmed(speed: Bandwidth) -> bool:
    """Return whether this very path was measured again."""
    return speed.again_mbit_per_s >= 0 and not speed.again_with


def _short(mbit_per_s: float) -> str:
    return f"{mbit_per_s:.0f}" if mbit_per_s >= 10 else f"{mbit_per_s:.1f}"


def _figures(speed: Bandwidth) -> str:
    again = f", again {_short(speed.again_mbit_per_s)}" if _is_confirmed(speed) else ""
    return f"{_short(speed.mbit_per_s)} Mbit/s{again}"


class NetIdle(PathCheck, id="net.idle", scope="pair", tier="deep", needs=("peers",)):
    """A connection that is silent for a minute still carries what is sent then.

    NAT and firewalls forget idle connections without a word; a checkpoint makes them idle.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where an idle connection was lost."""
        held = {(a, b): edge.idle for a, b, edge in both_ends(run) if edge.idle is not None}
        if not held:
            yield self.skipped("no idle connection was held")
        lost = {path: idle for path, idle in held.items() if idle.error}
        for group in grouped_paths(run, lost, held):
            first = lost[group.paths[0]]
            command = (
                "sudo sysctl -w net.ipv4.tcp_keepalive_time=30 net.ipv4.tcp_keepalive_intvl=10"
            )
            yield self.about(
                group,
                f"a connection idle for {first.silent_s:.0f} s is lost",
                evidence={"silent_s": first.silent_s, "error": first.error},
                lines=shortened(
                    f"{a}->{b}  {lost[a, b].error} after {lost[a, b].silent_s:.0f} s of silence"
                    for a, b in group.paths
                ),
                fix=(Fix(command=command, owner="admin"),),
                unless="the peer's agent was stopped meanwhile",
            )
