"""PyTorch's Flight Recorder: its dumps as typed values, and the small file that says how to ask.

A rank writes that file for the collector of its node. What does not parse raises.
"""

from __future__ import annotations

import msgspec

OF_NCCL = "dump_nccl_trace_json"  # handlers of torch's control server
OF_OTHERS = "fr_trace_json"
MODES = ("auto", "on", "off")
MAX_ENTRIES = 100_000


class FlightSetup(msgspec.Struct):
    """Which questions may be asked at the socket beside it, and when."""

    handlers: list[str] = []  # for an incident
    polled: list[str] = []  # those that may be asked all the time
    is_timed: bool = False  # entries will carry a duration, a little after they are completed
    endless: list[str] = []  # groups of which no other source reports an end


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(FlightSetup).decode


def check_mode(wanted: str) -> None:
    """Raise ValueError if the setting is none of MODES."""
    if wanted not in MODES:
        raise ValueError(f"RANKSCOPE_FLIGHT_RECORDER={wanted!r}: there are: {', '.join(MODES)}")


class DumpError(ValueError):
    """These bytes are no Flight Recorder dump; the message says why."""


class Frame(msgspec.Struct):
    """One frame of the stack of a call."""

    name: str = ""
    filename: str = ""
    line: int = 0


class FlightEntry(msgspec.Struct):
    """One operation as the Flight Recorder keeps it; times are wall clock, 0 or null unknown."""

    record_id: int
    pg_id: int
    process_group: tuple[str, str]  # name, description
    collective_seq_id: int
    p2p_seq_id: int
    profiling_name: str
    time_created_ns: int
    state: str
    retired: bool
    is_p2p: bool
    op_id: int = 0
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    duration_ms: float | None = None
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_sizes: list[list[int]] = []
    output_dtypes: list[str] = []
    timeout_ms: int = 0
    frames: list[Frame] = []

    @property
    def sequence(self) -> int:
        """Its number in the group, among collectives or among exchanges."""
        return self.p2p_seq_id if self.is_p2p else self.collective_seq_id

    @property
    def batch(self) -> tuple[int, bool, int]:
        """What the entries of one coalesced batch have in common."""
        return self.pg_id, self.is_p2p, self.sequence

    @property
    def ends_batch(self) -> bool:
        """Whether this is the entry, "nccl:coalesced", that has the state of its whole batch."""
        return self.profiling_name.endswith(":coalesced")


class Dump(msgspec.Struct):
    """One answer. `pg_status` is by `pg_id`, `pg_config` by name."""

    version: str = ""
    pg_config: dict[str, dict[str, str]] = {}
    pg_status: dict[str, dict[str, str | int]] = {}
    entries: list[FlightEntry] = []


_decode_dump = msgspec.json.Decoder(Dump).decode


def parse(answer: bytes) -> Dump:
    """Return the values of a dump in JSON. Raises DumpError for anything else."""
    try:
        dump = _decode_dump(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"the answer is no dump: {error}") from None
    if len(dump.entries) > MAX_ENTRIES:
        raise DumpError(f"the answer has {len(dump.entries)} entries")
    return dump


def open_entries(dump: Dump) -> list[FlightEntry]:
    """Return what is not done: the state says so for NCCL, `retired` for every backend.

    The entries of a coalesced batch never change, the one that ends the batch has the state of all.
    """
    done = {entry.batch for entry in dump.entries if _is_done(entry) and entry.ends_batch}
    return [entry for entry in dump.entries if not _is_done(entry) and entry.batch not in done]


def _is_done(entry: FlightEntry) -> bool:
    return entry.retired or entry.state == "completed"
