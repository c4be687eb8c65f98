"""What one node measured towards one peer. Filled by `probe/`, evaluated by `checks/`."""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope.preflight.facts.routes import Neighbour, Route
from rankscope.preflight.system import Resolved

DialClass = Literal[
    "ok", "refused", "prohibited", "no-arp", "drop", "no-route", "local-firewall",
    "no-local-port",  # the caller has none left: that says nothing of the way or the far end
    "large-stall", "unresolved", "error",
    # The connection was accepted, and then:
    "no-data",  # no byte came back in time, or it was closed or reset before one came
    "not-us",  # bytes came that are no agent's: `banner` holds the first of them
    "other-secret",  # an agent answered that does not share our secret
    "other-run",  # an agent of ours of another preflight: `banner` holds its name
    "other-version",  # an older or a newer rankscope, as `banner` says
    "wrong-host",  # the agent of another node answered: `answered_by`
    "no-answer",  # of reports that earlier versions wrote
]  # fmt: skip

NUM_FLOWS = 16  # connections that are opened to see whether some vanish


class Dial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt to connect, and how it ended (`probe/classify.py` names the classes)."""

    outcome: DialClass
    address: str
    port: int
    elapsed_ms: float = 0.0
    # ECONNREFUSED, ...; of no-data: ETIMEDOUT (silence), ECONNRESET, EOF (closed)
    errno: str = ""
    answered_by: str = ""  # node whose agent answered; of wrong-host: the other one
    local_address: str = ""  # ours, as the kernel chose it
    seen_address: str = ""  # ours, as the acceptor saw it
    banner: str = ""  # of not-us: the first bytes, printable, at most 60
    is_flow: bool = False  # the port is open; this connection alone vanished, each of three SYNs


class Rtt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Round trips of 64-byte ping-pongs over one established TCP connection."""

    num: int
    min_ms: float
    median_ms: float
    p95_ms: float
    max_ms: float


class PathMtu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The largest IP packet that the path carries from here to the peer."""

    carried_bytes: int = 0  # 0: not even the smallest came through; -1: not measured
    how: Literal["udp", "clamp"] = "udp"  # clamp: TCP_MAXSEG, then it is "about"
    interface_bytes: int = 0  # MTU of the interface that the path leaves by
    large_ok: bool = True  # 64 kB over TCP, echoed
    large_ms: float = 0.0


class Datagrams(msgspec.Struct, frozen=True, kw_only=True):
    """Small UDP datagrams sent slowly and acknowledged: what is lost is not lost to congestion."""

    num_sent: int
    num_answered: int  # 0: UDP is closed, and nothing is known of loss
    num_arrived: int = -1  # as the far end counted them; -1: it did not say


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes sent to the peer in rounds of which no two share a node; the best of them."""

    mbit_per_s: float
    rounds: tuple[float, ...] = ()  # Mbit/s of each
    num_segments: int = 0  # TCP_INFO of all rounds
    num_retransmits: int = 0
    again_mbit_per_s: float = -1.0  # a second, later measurement; -1: none was needed
    waited_ratio: float = 0.0  # part of the time in which this node had no core for its transfer
    again_with: str = ""  # the fast partner of the second measurement, if another


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """The peer's wall clock minus ours; best of several exchanges of four time stamps."""

    offset_ms: float
    uncertainty_ms: float  # half of the round trip


class Idle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A connection that was silent for a while, and was used then."""

    silent_s: float
    error: str = ""  # "no answer in 3 s", "ECONNRESET"; empty: it still carried


class EdgeFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one node knows of the way to one peer. None: not measured."""

    resolved: Resolved | None = None  # the peer's name, as this node resolves it
    mesh: Dial | None = None  # the peer's name and control port: the newest attempt
    master: Dial | None = None  # MASTER_ADDR:MASTER_PORT; only towards the node that holds it
    others: tuple[Dial, ...] = ()  # further addresses of the peer's name, if the first one failed
    # The peer's random ports, at its gloo address: all that failed twice, and the first of the
    # others; of the rest, and of ports at the ends of a hole where no process listens, the numbers.
    ephemeral: tuple[Dial, ...] = ()
    ephemeral_ok: tuple[int, ...] = ()
    ephemeral_shut: tuple[int, ...] = ()
    decoy: str = ""  # class of a port that is bound and never listened on; "ok": it was accepted
    source_address: str = ""  # of ours, that the route to the peer takes
    # where no random port answers: the routes to that address, their next hops,
    # and a random port at the address where the control port answers, if that is another one
    routes: tuple[Route, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    detour: Dial | None = None
    rtt: Rtt | None = None
    mtu: PathMtu | None = None
    datagrams: Datagrams | None = None
    bandwidth: Bandwidth | None = None
    clock: Clock | None = None
    idle: Idle | None = None  # --deep alone
    not_tested: str = ""  # why nothing was tried: "sampled: 3 % of pairs"
