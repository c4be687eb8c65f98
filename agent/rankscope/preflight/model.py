"""What preflight's parts hand to each other: reports of nodes, findings, the verdict.

All of it is plain data that goes to JSON and back (`encode`, `decode_report`, ...). Times are
milliseconds unless the name says otherwise, sizes are bytes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.facts.endpoint import Endpoint, NodeList
from rankscope.preflight.facts.gpu import GpuFacts
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.facts.interfaces import InterfaceFacts
from rankscope.preflight.facts.launch import LaunchFacts
from rankscope.preflight.facts.limits import LimitFacts
from rankscope.preflight.facts.names import NameFacts
from rankscope.preflight.facts.ports import PortFacts
from rankscope.preflight.facts.rdma import RdmaFacts
from rankscope.preflight.facts.smoke import SmokeFacts
from rankscope.preflight.facts.software import SoftwareFacts
from rankscope.preflight.facts.storage import StorageFacts
from rankscope.preflight.options import Options

SCHEMA_VERSION = 1
Status = Literal["ok", "warn", "fail", "skipped", "unknown"]
Scope = Literal["node", "pair", "all"]
Owner = Literal["you", "admin", "provider"]
Confidence = Literal["proven", "likely"]
Stage = Literal[
    "facts",  # being collected
    "listening",  # ports are bound, and what must be known before any node is called
    "reached",  # all peers were dialled, and this machine is quiet: paths can be timed
    "pairs",  # paths are timed
    "transferred",  # all transfers that this node drives are over
    "bandwidth",  # and those of all others: what each received is known
    "again", "collective", "done",
]  # fmt: skip
STAGES: tuple[Stage, ...] = get_args(Stage)


class Listening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ports on which this node's agent answers: what a refused dial is compared with."""

    master: int = 0  # 0: could not be bound, `facts.ports.master_busy` says by whom it is held
    master_error: str = ""  # why it could not be bound: "EADDRINUSE"
    mesh: int = 0  # where the control connection is; equals master wherever that was free
    ephemeral: tuple[int, ...] = ()  # spread evenly over the range of ephemeral ports
    shut: int = 0  # bound, and no process listens: what accepts there is not this node
    udp: int = 0  # answers probes of the path's MTU
    store: int = 0  # kept free on the master for the store of the smoke test


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the facts that could not be measured here, and why."""

    part: str  # the field of Facts, or the id of a check
    status: Literal["skipped", "unknown"]
    reason: str


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node knows of itself. None: not measured; `NodeReport.troubles` says why."""

    launch: LaunchFacts | None = None
    host: HostFacts | None = None
    names: NameFacts | None = None
    interfaces: InterfaceFacts | None = None
    ports: PortFacts | None = None
    limits: LimitFacts | None = None
    storage: StorageFacts | None = None
    software: SoftwareFacts | None = None
    gpu: GpuFacts | None = None
    rdma: RdmaFacts | None = None
    smoke: SmokeFacts | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent that goes by the name of a node."""

    started_unix_s: float
    pid: int = 0
    addresses: tuple[str, ...] = ()


class Gone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node whose agent has reported, and then left, closed its links or fell silent."""

    how: Literal["left", "closed", "silent"]
    stage: Stage  # the last that it reported
    after_s: float = 0.0  # since the agent that says so began


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one node says. Reports of a node are ordered by `version`: the newest holds."""

    node: str  # its name in this preflight, unique; also the key of `edges` of the others
    version: int = 0
    schema_version: int = 0  # SCHEMA_VERSION of who wrote it; defaults do not travel
    node_rank: int = -1  # -1: not known
    started_unix_s: float = 0.0  # the node's wall clock
    pid: int = 0  # of the agent
    secret_from: str = ""  # the variable or file that the run's secret is in; never the secret
    stage: Stage = "facts"
    is_leaving: bool = False  # interrupted: no node should wait for it
    options: Options = Options()
    addresses: tuple[str, ...] = ()  # all of this node's own, without loopback
    listening: Listening = Listening()
    nodes: NodeList | None = None  # as this node was told them; None: they were not named
    endpoint: Endpoint | None = None
    facts: Facts = Facts()
    edges: dict[str, EdgeFacts] = {}  # by peer: what THIS node measured towards it
    claims: dict[str, tuple[Claim, ...]] = {}  # by node: its agents, where THIS one saw several
    heard: tuple[str, ...] = ()  # nodes whose agent has talked to this one over the mesh
    gone: dict[str, Gone] = {}  # by node: agents that THIS one heard, and that are not there now
    delay_p90_ms: float = -1.0  # of a 20 ms sleep, while the paths were measured; -1: unknown
    troubles: tuple[Trouble, ...] = ()
    extra: dict[str, Any] = {}  # by id of a check from elsewhere: what its `collect` returned


# Format characters turn or hide text beside them; the others end lines or move cursors.
_ACTS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def acts(one: str) -> bool:
    """Return whether a terminal or a shell would do something at this character."""
    return not (one.isascii() and one.isprintable()) and unicodedata.category(one) in _ACTS


def gone_nodes(reports: Mapping[str, NodeReport]) -> dict[str, Gone]:
    """Return the nodes that left, or of which most that have heard them say that they are gone.

    One of several may have lost its path to a node that is alive: that is a broken path, and the
    node's reports come by the others.
    """
    accused = {node for report in reports.values() for node in report.gone}
    found = {
        node: Gone(how="left", stage=report.stage)
        for node, report in reports.items()
        if report.is_leaving and report.stage != "done"
    }
    for node in sorted(accused - set(found)):
        if node in reports and reports[node].stage == "done":
            continue
        voters = [r for name, r in reports.items() if name not in accused
                  and (node in r.gone or node in r.heard)]  # fmt: skip
        says = [report.gone[node] for report in voters if node in report.gone]
        if 2 * len(says) > len(voters):
            found[node] = min(says, key=lambda one: one.after_s)
    return found


class Fix(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One repair: a command, ready to paste on that node; it is one line, whatever was in it."""

    node: str = ""  # empty: on every node
    command: str
    owner: Owner = "you"  # whose right it takes

    def __post_init__(self) -> None:
        """Take out what would end the line, or change how it looks."""
        if any(map(acts, self.command)):
            safe = "".join(" " if acts(one) else one for one in self.command)
            msgspec.structs.force_setattr(self, "command", safe)


_SENT_AS = {"lines": "told", "impact": "would", "unless": "wrong_if", "notes": "asides"}


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=_SENT_AS):
    """What one check says about one cause."""

    id: str  # of the check: "port.ephemeral"
    status: Status
    title: str  # one line: node, number, unit; of skipped and unknown: the reason
    nodes: tuple[str, ...] = ()  # the culprits, never the victims
    edges: tuple[tuple[str, str], ...] = ()  # (from, to): the paths that show it
    evidence: dict[str, Any] = {}  # what was proven: errno, ms, addresses, both sides
    lines: tuple[str, ...] = ()  # the evidence for people, one line each
    fix: tuple[Fix, ...] = ()
    explains: tuple[str, ...] = ()  # "id: title" of what was grouped under this one
    impact: str = ""  # what the launch would have done
    unless: str = ""  # what would make this finding wrong
    confidence: Confidence = "proven"  # both ends testify; likely: one of them is silent


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one check: its worst status, and the reason if it gave no answer."""

    id: str
    family: str
    status: Status
    reason: str = ""
    elapsed_ms: float = 0.0


class LaunchVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=_SENT_AS):
    """The answer of a preflight; every node that has the same reports computes the same."""

    run_id: str
    expected: tuple[str, ...]
    reported: tuple[str, ...]
    findings: tuple[CheckFinding, ...]  # fail and warn, worst first; one per cause
    results: tuple[Result, ...]  # one per check, in the order of the catalogue
    notes: tuple[CheckFinding, ...] = ()  # skipped and unknown ones
    coverage: str = ""  # which pairs were tested, if not all of them
    is_partial: bool = False  # interrupted, or nodes are missing
    elapsed_ms: float = 0.0
    schema_version: int = 0  # SCHEMA_VERSION of who wrote it; defaults do not travel


EXIT_OK, EXIT_WARN, EXIT_FAIL, EXIT_INCOMPLETE, EXIT_USAGE = 0, 1, 2, 3, 64


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_REPORTS = msgspec.json.Decoder(NodeReport)
_VERDICTS = msgspec.json.Decoder(LaunchVerdict)


def encode(value: NodeReport | LaunchVerdict | CheckFinding) -> bytes:
    """Return `value` as JSON."""
    return msgspec.json.encode(value)


def decode_report(data: bytes) -> NodeReport:
    """Read a report. Raises `msgspec.MsgspecError`, which names the field."""
    return _REPORTS.decode(data)


def decode_verdict(data: bytes) -> LaunchVerdict:
    """Read a verdict. Raises `msgspec.MsgspecError`, which names the field."""
    return _VERDICTS.decode(data)
