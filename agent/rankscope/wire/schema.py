"""The wire schema: every record that an agent sends, defined once.

A batch is one msgpack map (`Batch`). Sparse facts travel as records, one struct per kind; dense
events travel as chunks of columns (`chunk.py`). The server decodes the records one by
one with the same classes, so a bad record is refused by name and its neighbours are kept.

All times are wall-clock nanoseconds of the host that measured them unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from rankscope.wire.group_state import GroupState as GroupState
from rankscope.wire.group_state import PeerState as PeerState
from rankscope.wire.sample_columns import (
    SAMPLE_COLUMNS,
    SAMPLE_FLOAT_COLUMNS,
    SAMPLE_STRING_COLUMNS,
)

SCHEMA_VERSION = 1
MAX_RANK = 1 << 17  # pages hold ranks by steps: with a million of them, gigabytes
NODE_RANK = -1  # the `rank` of what belongs to a whole node, for example host samples

Phase: TypeAlias = Literal[
    "other", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation"
]
PHASES: tuple[Phase, ...] = (
    "other", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation",
)  # fmt: skip

OPERATIONS: tuple[str, ...] = (
    "other", "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "barrier", "send",
    "recv", "recv_any_source", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single", "gather", "scatter",
    "gather_into_tensor",
)  # fmt: skip
P2P_OPERATIONS = frozenset({"send", "recv", "recv_any_source"})

DTYPES: tuple[str, ...] = (
    "other", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8",
    "uint8", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip

C10_DTYPES = {  # by the name that torch's C++ and its dumps use
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2": "float8_e5m2",
}  # fmt: skip

REDUCE_OPS: tuple[str, ...] = (
    "", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "other",
)  # fmt: skip

# which source saw the call of a collective, and which saw its end
ISSUED_BY: tuple[str, ...] = ("", "kernel", "official hook", "probe", "class patch")
ENDED_BY: tuple[str, ...] = ("", "future", "wait", "probe", "flight recorder", "error")

# state of a collective
ISSUED, RETURNED, ENDED, FAILED = 1, 2, 3, 4
STATES: tuple[str, ...] = ("unknown", "issued", "returned", "ended", "failed")

# flags of a collective; 4 and 32 were others and stay free
FLAG_ASYNC = 1
FLAG_P2P = 2
FLAG_END_IS_UPPER_BOUND = 8  # ended_ns is when a callback ran, up to a few ms late
FLAG_END_FROM_WAIT = 16  # ended_ns is when Work.wait returned: not before the true end
FLAG_THINNED = 64  # of a thinned step: no call site, no end; stays on its node, never in a chunk
FLAG_BY_ENGINE = 128  # the autograd engine itself called (DDP's reducer): C++ waits, not Python

# flags of a step
STEP_SKIPPED = 1  # the optimizer did not step (gradient scaler)
STEP_CHECKPOINT = 2
STEP_EVALUATION = 4
STEP_FIRST = 8  # first step of this process: includes start-up work
# Its collectives were counted but not recorded, to keep what recording costs below the budget.
# `num_collectives` is right; blocked time comes from waits alone and may be too long by what DDP
# does after its last bucket. All ranks thin the same steps once that is agreed.
STEP_THINNED = 16
# Waits inside C++ (DDP's) were not seen at all: blocked time is a lower bound, and what is left of
# the step without it is not the rank's self time. Only with STEP_THINNED.
STEP_WAITS_UNKNOWN = 32
IMPORTED = "import"  # the launcher of a run that was recorded without the agent, and is over
COMMAND_ENDED = "command ended"  # an event of a launcher, as RunStarted is of its begin
RECORDING = "recording"  # an event: what is known of a recording as a whole
REGROUPED = "regrouped"  # an event of each member: the ranks that train on, after some were lost
THINNING_CHANGED = "thinning_changed"  # an event: from when on which steps are recorded whole
DATA_LOADER = "data loader"  # an event: how a rank loads its data
LOSS_SCALE = "loss scale"  # an event: by what the loss of each pass of a step is divided
OPTIMIZER_USED = "optimizer"  # an event: what the optimizer is, and which rate the command gives
TRACKER = "tracker"  # an event: a rank logs to a run of an experiment tracker, see wire/trackers.py
SPANS = "OpenTelemetry"  # the source of what a server made of spans
OPEN_SPANS = "open spans"  # an event of a server: spans of OpenTelemetry whose step is open
# Events that hold until the next one of their kind: an analysis that begins anew needs them all.
LASTING_EVENTS = frozenset({
    COMMAND_ENDED, RECORDING, REGROUPED, THINNING_CHANGED, DATA_LOADER, LOSS_SCALE,
    OPTIMIZER_USED,
})  # fmt: skip

ChunkKind: TypeAlias = Literal[
    "collectives", "steps", "host", "pressure", "tcp", "disk", "nic", "cgroup", "process",
    "connections", "infiniband", "gpu", "gpu_activity", "gpu_health", "nvlink", "gpu_process",
]  # fmt: skip


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """What every record says: which process of which attempt, and when."""

    attempt: int
    rank: int
    time_ns: int


class RunStarted(Record, frozen=True, tag="run"):
    """A run as the user sees it; sent once per node, the first one wins."""

    name: str
    command: list[str] = []
    launcher: str = ""
    world_size: int = 0
    tags: dict[str, str] = {}


class RankRegistered(Record, frozen=True, tag="rank"):
    """A training process came up: its identity and the sources its hooks use."""

    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int
    role: str = ""
    backend: str = ""
    sources: dict[str, str] = {}  # hook name -> what it uses, or "skipped: reason"
    # pipeline place, when the process owns a stage of torch.distributed.pipelining
    stage: int = -1
    num_stages: int = 0
    num_microbatches: int = 0
    schedule: str = ""
    num_local_stages: int = 0  # that this rank holds; `stage` is the first of them


class RankEnded(Record, frozen=True, tag="rank_end"):
    """A training process is gone. `time_ns` is when its end was seen."""

    reason: Literal["clean", "exception", "exit_code", "signal", "lost"]
    exit_code: int | None = None  # None: not known
    signal: int | None = None
    last_step: int = 0
    detail: str = ""


class RankState(Record, frozen=True, tag="state"):
    """Where a rank is now; each replaces the one before. Sent about once a second."""

    step: int
    phase: Phase
    phase_since_ns: int
    heartbeat_ns: int  # last time that any hook ran in the process
    alive: bool = True
    # False: switched off, or so switched on that its sequences do not match those of its peers
    is_recording: bool = True
    thinning: int = 0  # level in force: see rankscope.wire.thinning
    thinning_wanted: int = 0  # level that this rank needs to keep its budget
    thinning_asked: int = 0  # level that a server which does not keep up has asked it for
    groups: list[GroupState] = []
    cpu_seconds: float = 0.0
    rss_bytes: int = 0


class GroupDefined(Record, frozen=True, tag="group"):
    """A process group of this rank. `ranks` are global ranks, in group order."""

    group: str
    ranks: list[int]
    backend: str
    description: str = ""


class Environment(Record, frozen=True, tag="environment"):
    """Facts of one process: versions really loaded, hardware, selected variables."""

    facts: dict[str, str]


class LogLine(Record, frozen=True, tag="log"):
    """One log record, warning or line of output. `level` is a number of the logging module."""

    level: int
    message: str
    logger: str = ""
    stream: Literal["logging", "warning", "stdout", "stderr", "agent"] = "logging"
    step: int = 0
    fields: dict[str, str] = {}


class ErrorRaised(Record, frozen=True, tag="error"):
    """An exception that left the script or a thread, or that a torch.distributed call raised."""

    type: str
    message: str
    traceback: str = ""
    where: Literal["main", "thread", "training", "collective", "fatal_signal"] = "main"
    step: int = 0


class Metrics(Record, frozen=True, tag="metrics"):
    """Numbers of training that the script gave or a hook could see."""

    step: int
    values: dict[str, float]
    counted_step: int = 0  # where the script gave `step`: the agent's own count at that moment


class Event(Record, frozen=True, tag="event"):
    """Something that happened once: a checkpoint, a resume, a change of source."""

    name: str
    step: int = 0
    fields: dict[str, str] = {}


class Stacks(Record, frozen=True, tag="stacks"):
    """Python stacks of all threads of one rank, innermost frame first."""

    text: str
    reason: str = ""
    command: int = 0  # the command that asked for them; 0: the collector by itself


class OperatorTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often one operator or kernel ran in a trace, and for how long."""

    name: str
    category: str
    count: int
    total_ns: int
    self_ns: int = -1  # without what it called; -1 not known


class CommandAnswer(Record, frozen=True, tag="command"):
    """What became of a command in one rank; each replaces the one before."""

    command: int
    state: Literal["running", "done", "refused"]
    reason: str = ""  # why refused, or what is worth saying of what was done
    trace_bytes: int = 0  # of the uploaded trace, compressed
    operators: list[OperatorTime] = []  # of a trace: those that took most time


class ClockOffset(Record, frozen=True, tag="clock"):
    """The server's wall clock minus that of this host, measured once a minute."""

    offset_ns: int
    band_ns: int  # it is wrong by at most so much: half the time that a request was under way
    host: str = ""


class Loss(Record, frozen=True, tag="loss"):
    """What this agent lost, and why. Counts are totals since the producer started."""

    source: str  # "collectives", "journal", "spool", ...
    reason: str  # "overwritten", "disk full", "spool full", ...
    count: int


AnyRecord: TypeAlias = (
    RunStarted
    | RankRegistered
    | RankEnded
    | RankState
    | GroupDefined
    | Environment
    | LogLine
    | ErrorRaised
    | Metrics
    | Event
    | Stacks
    | CommandAnswer
    | ClockOffset
    | Loss
)
RECORD_KINDS: tuple[type[Record], ...] = (
    RunStarted, RankRegistered, RankEnded, RankState, GroupDefined, Environment, LogLine,
    ErrorRaised, Metrics, Event, Stacks, CommandAnswer, ClockOffset, Loss,
)  # fmt: skip


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One rank (or one node), one kind, a few thousand events; `data` is `rankscope.wire.chunk`."""

    kind: ChunkKind
    attempt: int
    rank: int
    host: str
    count: int
    time_lo_ns: int
    time_hi_ns: int
    data: bytes
    step_lo: int = 0
    step_hi: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one POST carries. (`producer`, `sequence`) makes sending twice store once."""

    schema_version: int
    run_id: str
    producer: str  # unique per run and node; continues, with its numbers, over collector restarts
    sequence: int  # 1, 2, 3 ... per producer
    host: str
    sent_ns: int
    records: list[msgspec.Raw] = []  # each one record, decoded alone
    chunks: list[Chunk] = []


# what people ask for; "thin" is asked by the collector or the server, to keep the budget, or by a
# server that does not keep up
AskedKind: TypeAlias = Literal["stacks", "profile", "agent_off", "agent_on"]
CommandKind: TypeAlias = Literal["stacks", "profile", "agent_off", "agent_on", "thin"]
MAX_PROFILE_STEPS, MAX_TRACE_BYTES = 20, 64 << 20  # compressed
SAMPLING = "sampling"  # how `asked_by` begins where stacks are to show what a rank does
# How `asked_by` begins where a server asks for a level of thinning for its own sake, with what it
# says of itself behind it. A rank keeps the higher one of that level and of what its budget needs.
SHEDDING = "server, "
# With a batch a collector says in this header what its clock shows now, in ns of wall time: how
# long the batch has waited to be sent is the difference to its `sent_ns`.
CLOCK_HEADER = "Rankscope-Clock"
# With it comes a batch that may go past bulk: states and ends of ranks, of at most so many bytes.
VITALS_HEADER, MAX_VITALS_BYTES = "Rankscope-Vitals", 256 << 10
# With a batch a collector says in this header which is the oldest of its producer that it holds,
# and finds in the answer how far they are stored (`Watermark`): until then it keeps them.
HELD_HEADER = "Rankscope-Held-From"
# A collector that sends this header finds commands in the answers to its batches.
COMMANDS_HEADER = "Rankscope-Commands"
COMMANDS_VERSION = 1


class Watermark(msgspec.Struct, frozen=True, kw_only=True):
    """How far the batches of a producer are stored: what was accepted may still be on its way.

    Holds for what its collector holds: none of that is missing up to `durable`.
    """

    durable: int  # number of a batch; 0 for none
    newest: int  # that is stored: accepted ones between the two were lost on their way
    refused: int = 0  # records and chunks that were refused when their batch was accepted already


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server asks of ranks; travels in the answer to a batch that speaks of these ranks.

    It comes with every such answer until each rank's `CommandAnswer` is final: the same `id`
    twice is one command.
    """

    id: int
    kind: CommandKind
    attempt: int
    ranks: list[int]
    asked_by: str  # "user", "finding 7", "sampling of finding 7", "budget", or see SHEDDING
    expires_in_seconds: float
    num_steps: int = 3  # of a profile
    level: int = 0  # of thinning
    at_step: int = 0  # off, on, thin: before which step, the same in every rank; 0 the next
    is_everyone: bool = False  # off, on, thin: every rank of the attempt is asked


# Columns of each chunk kind. int64 unless named in FLOAT_COLUMNS or STRING_COLUMNS.
# `*_ns` durations are nanoseconds; -1 means not known. Times are wall clock.
COLLECTIVE_COLUMNS: tuple[str, ...] = (
    "arrived_ns",  # the call was entered
    "started_ns",  # backend's begin minus arrival; -1 unknown
    "duration_ns",  # end minus arrival; -1 while open or unknown
    "device_duration_ns",  # time on the device as it measured itself; -1 unknown
    "returned_ns",  # duration of the call itself, -1 unknown
    "blocked_ns",  # time the issuing thread was blocked in Work.wait for it
    "sequence",  # 0: not known; per group, collectives only; for p2p per (group, peer, direction)
    "step",
    "size_bytes",  # the larger of the next two
    "input_bytes",  # of the tensors that this rank hands in
    "output_bytes",  # of the tensors that receive the result here
    "peer_rank",  # root or peer as a global rank, -1 none
    "num_tensors",
    "state",
    "flags",
    "group",
    "operation",
    "dtype",
    "reduce_op",
    "call_site",
    "issued_by",  # which source saw the call: ISSUED_BY
    "ended_by",  # which source gave the end: ENDED_BY
)
STEP_COLUMNS: tuple[str, ...] = (
    "step",
    "started_ns",
    "duration_ns",
    "data_ns",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "checkpoint_ns",
    "evaluation_ns",
    "other_ns",
    # part of each phase in which the main thread was blocked on peers
    "forward_blocked_ns",
    "backward_blocked_ns",
    "optimizer_blocked_ns",
    "other_blocked_ns",
    "cpu_ns",  # CPU time of the main thread within the step
    "process_cpu_ns",  # the same of all threads of the process
    "gc_ns",  # pauses of Python's garbage collector in the main thread
    "copy_ns",  # main thread inside copies from host to device
    "microbatches",
    "num_collectives",
    "flags",
    # of the main thread, as the kernel counts them
    "minor_faults",
    "major_faults",
    "voluntary_switches",
    "involuntary_switches",
)
# samples of machines: rankscope.wire.sample_columns
CHUNK_COLUMNS: dict[str, tuple[str, ...]] = {
    "collectives": COLLECTIVE_COLUMNS,
    "steps": STEP_COLUMNS,
    **SAMPLE_COLUMNS,
}
STRING_COLUMNS = SAMPLE_STRING_COLUMNS | {
    "group", "operation", "dtype", "call_site", "reduce_op", "issued_by", "ended_by",
}  # fmt: skip
FLOAT_COLUMNS = SAMPLE_FLOAT_COLUMNS

_encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_record = msgspec.msgpack.Decoder(AnyRecord).decode


def encode(record: msgspec.Struct) -> bytes:
    """Return the bytes of a record or a batch.

    Arguments, names of files and what programs print may hold bytes that are no UTF-8: they
    become question marks.
    """
    try:
        return _encode(record)
    except UnicodeEncodeError:
        return _encode(_encodable(msgspec.to_builtins(record)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value
