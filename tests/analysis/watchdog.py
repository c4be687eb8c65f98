"""What a rank tells that waited in vain over NCCL, as one did on an H200 with PyTorch 2.11."""

from __future__ import annotations

from rankscope.wire import schema

_TIMED_OUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=231, OpType=ALLREDUCE, "
    "NumelIn=1049600, NumelOut=1049600, Timeout(ms)=25000) ran for 25007 milliseconds before "
    "timing out."
)
_TOLD = (
    ("collective", "NCCL watchdog timeout", "ALLREDUCE SeqNum=231 ran for 25007 ms: [E1126 "
     f"03:03:09.091558991 ProcessGroupNCCL.cpp:689] [Rank 0] {_TIMED_OUT}", 0),
    ("fatal_signal", "Aborted", "Fatal Python error: Aborted", 60_549),
    ("collective", "NCCL takes the process down", "[E1126 03:04:09.643024801 "
     "ProcessGroupNCCL.cpp:764] [Rank 0] To avoid data inconsistency, we are taking the entire "
     "process down.", 60_550),
    ("collective", "c10::DistBackendError", "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group "
     f"watchdog thread terminated with exception: [Rank 0] {_TIMED_OUT}", 60_551),
    ("main", "DistBackendError", "NCCL communicator was aborted on rank 0. ", 60_552),
)  # fmt: skip
SIGNALS = (6, 11)  # of its end: the abort, or another thread that touched what was gone


def gives_up(rank: int, time_ns: int, step: int, number: int) -> list[schema.AnyRecord]:
    """Return its words from the time-out on, and its end by a signal a minute later."""
    records: list[schema.AnyRecord] = [
        schema.ErrorRaised(
            attempt=0, rank=rank, time_ns=time_ns + ms * 10**6, type=kind, message=message,
            traceback="", where=where, step=step if where == "main" else 0,  # type: ignore[arg-type]
        )
        for where, kind, message, ms in _TOLD
    ]  # fmt: skip
    end_ns = time_ns + 60_700 * 10**6
    return [*records, schema.RankEnded(
        attempt=0, rank=rank, time_ns=end_ns, reason="signal", signal=number, last_step=step,
    )]  # fmt: skip
