"""Whose line it is: the rank from the prefix that a launcher writes, or from the file's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The forms: torchrun tees "[default0]:" (role and local rank), PyTorch 2.2+ itself "[rank0]:";
# srun -l "0: "; Open MPI --tag-output "[1,0]<stderr>:" and, from version 5, "[job,0]<..>: ";
# horovodrun "Thu Aug 29 16:41:02 2019[0]<stderr>:"; colours, of which a paste keeps "[36m";
# kubectl logs --prefix "[pod/name/container] "; Ray "(Actor pid=1, ip=...) "; pdsh "host: ";
# docker compose "name-1  | ".
_RANK = re.compile(r"\[rank[ _]?(\d{1,7})\]:? ?|rank[ _=]?(\d{1,7})(?:\]|:)\s?", re.IGNORECASE)
_MPI = re.compile(r"\[(?:[\w@.-]+,)?(\d{1,7})(?:,\d+)?\]<std(?:out|err|diag)>:? ?")
_ROLE = re.compile(r"\[[A-Za-z_][\w-]{0,40}?(\d{1,5})(?:\|\d{1,5})?\]: ?")
_POD = re.compile(r"\[pod/([\w.-]+)/[\w.-]+\] ?")
_TORCHX = re.compile(r"[\w-]+/(\d{1,5}) (?=\[)")
_BARE_LOCAL = re.compile(r"\[(\d{1,3})\]: ?")
_RAY = re.compile(r"\((?:[\w.<>-]+ )?pid=\d+(?:, ip=[\w.:]+)?\) ?")
_PDSH = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}: ?|[a-zA-Z][\w.-]*\d[\w.-]*: (?=\[)")
_DETERMINED = re.compile(r"[0-9a-f]{8} \[rank=(\d{1,7})\] \|\| ?")
_QUOTED = re.compile(r"> ")  # a log that was pasted into a mail or an issue
_COMPOSE = re.compile(r"[\w.-]+ +\| ")
_TIME = re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?\]? ")
_DATE = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4} ?(?=\[)")
_LOGGER = re.compile(  # of vLLM, of torch's elastic agent: before each line of a traceback
    r"(?:(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./-]+:\d+\]"
    r"|E\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\.py:\d+\]) "
    r"(?=Traceback \(|\s|[A-Za-z_][\w.]*(?:Error|Exception)\b)"
)
_COLOUR = re.compile(r"\x1b?\[\d{1,3}(?:;\d{1,3}){0,4}m ?")
_ORDINAL = re.compile(r"(?:worker|rank|trainer|replica|node|task)?-(\d{1,6})$", re.IGNORECASE)
_SRUN = re.compile(rb"[ 0]{0,6}(\d{1,6}): ")
_SRUN_TEXT = re.compile(r"[ 0]{0,6}(\d{1,6}): ")
_SRUN_SHARE = 0.6  # of the lines of a block: then its numbers are srun's, not the program's own
_IN_NAME = (
    re.compile(r"(?:^|[^a-z])rank[-_=.]?(\d{1,7})(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[^a-z])(?:worker|trainer|replica|task|proc(?:ess)?)[-_=.]?(\d{1,7})(?!\d)",
               re.IGNORECASE),
)  # fmt: skip
_BARE_NAME = re.compile(r"(?:std(?:out|err)|log|out|err)?[-_.]?(\d{1,6})(?:\.(?:log|txt|out|err))*")
_TORCHRUN_DIR = re.compile(r"attempt_\d+/(\d{1,5})/std(?:out|err)\.log(?:\.gz)?$")


@dataclass(frozen=True, slots=True)
class LineOwner:
    """Whose line it is, as far as the line says. `local_rank` counts on one node only."""

    rank: int | None = None
    local_rank: int | None = None


UNKNOWN_OWNER = LineOwner()


def rank_of_path(path: str, is_alone: bool = False) -> LineOwner:
    """Return the rank in the name of a file or of a folder above it.

    A bare number is one only among other logs: `3.log` alone may be anything.
    """
    if found := _TORCHRUN_DIR.search(path):
        return LineOwner(local_rank=int(found[1]))
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for pattern in _IN_NAME:
        for part in reversed(parts[-3:]):
            if found := pattern.search(part):
                return LineOwner(int(found[1]))
    name = parts[-1].removesuffix(".gz") if parts else ""
    found = None if is_alone else _BARE_NAME.fullmatch(name)
    return LineOwner(int(found[1])) if found else UNKNOWN_OWNER


def is_srun(block: bytes) -> bool:
    """Return whether the lines of a block begin with the task's number, as `srun --label` does."""
    lines = [line for line in block[:65_536].split(b"\n")[:400] if line.strip()]
    return len(lines) >= 1 and sum(bool(_SRUN.match(one)) for one in lines) >= _SRUN_SHARE * len(
        lines
    )


def owner_of(line: str, is_from_srun: bool = False) -> tuple[LineOwner, str]:
    """Return whose a line is, and the line without what the launchers wrote before it."""
    rank = local = None
    while True:
        for pattern, take in _PREFIXES:
            if found := pattern.match(line):
                some_rank, some_local = take(found)
                rank = some_rank if rank is None else rank
                local = some_local if local is None else local
                line = line[found.end() :]
                break
        else:
            if is_from_srun and (found := _SRUN_TEXT.match(line)):
                is_from_srun, line = False, line[found.end() :]
                rank = int(found[1]) if rank is None else rank
                continue
            return (
                LineOwner(rank, local) if (rank, local) != (None, None) else UNKNOWN_OWNER
            ), line


_Taken = tuple[int | None, int | None]


def _rank(found: re.Match[str]) -> _Taken:
    return int(next(group for group in found.groups() if group is not None)), None


def _local(found: re.Match[str]) -> _Taken:
    return None, int(found[1])


def _pod(found: re.Match[str]) -> _Taken:
    ordinal = _ORDINAL.search(found[1])
    return (int(ordinal[1]) if ordinal else None), None


def _nothing(found: re.Match[str]) -> _Taken:
    return None, None


_PREFIXES: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str]], _Taken]]] = (
    *((pattern, _rank) for pattern in (_RANK, _MPI, _DETERMINED)),
    (_POD, _pod),
    *((pattern, _local) for pattern in (_ROLE, _BARE_LOCAL)),
    *(
        (one, _nothing)
        for one in (_COLOUR, _QUOTED, _TORCHX, _RAY, _TIME, _DATE, _PDSH, _COMPOSE, _LOGGER)
    ),
)
