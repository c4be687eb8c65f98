"""Lines of output that belong together: tracebacks, torchrun's summary, the last words of C++."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_BLOCK_LINES = 400
Kind = Literal["traceback", "summary", "terminate", "fatal", "key"]

_TRACEBACK = re.compile(r"^\s*(\+ |\| )*(Exception Group )?Traceback \(most recent call last\):")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_SUMMARY_EDGE = re.compile(r"^={20,}\s*$")
_KEY = "PRIVATE KEY"
_TERMINATE = "terminate called"
_AFTER_TERMINATE = re.compile(r"^\s|^Exception raised from |^frame #|^$")
_FATAL = "Fatal Python error: "
_AFTER_FATAL = re.compile(
    r"^$|^\s|^(Python runtime state|Current thread|Thread 0x|Extension modules|<no Python)"
)
_SUMMARY_FIELD = re.compile(r"^\s+(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
_ROOT = "Root Cause (first observed failure):"
_RANK = re.compile(r"\b(\d{1,9}) \(local_rank: (-?\d+)\)")
_EXIT = re.compile(r"(-?\d+)\s+\(pid: (\d+)\)")


@dataclass
class Block:
    """A block that still grows. `closing`: what comes next may be the end of it."""

    kind: Kind
    lines: list[str]
    closing: bool = False

    def take(self, text: str) -> bool:
        """Take in the next line; return False if it is not of this block."""
        if len(self.lines) >= MAX_BLOCK_LINES or not _CONTINUES[self.kind](self, text):
            return False
        self.lines.append(text)
        return True

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can belong to it."""
        return len(self.lines) >= MAX_BLOCK_LINES or (
            self.closing and self.kind in ("summary", "key")
        )


def begin(text: str) -> Block | None:
    """Return a new block if a line begins one."""
    if _TRACEBACK.match(text):
        return Block("traceback", [text])
    if _SUMMARY_EDGE.match(text):
        return Block("summary", [text])
    if text.startswith(_TERMINATE):
        return Block("terminate", [text])
    if text.startswith(_FATAL):
        return Block("fatal", [text])
    if "-----BEGIN" in text and _KEY in text and "-----END" not in text:
        return Block("key", [text])
    return None


def _continues_traceback(block: Block, text: str) -> bool:
    is_chain = text.startswith(_CHAINED) or _TRACEBACK.match(text) is not None
    if block.closing:
        block.closing = not is_chain
        return is_chain or not text.strip()
    inside = text[:1].isspace() or not text or is_chain or text.startswith("Traceback ")
    block.closing = not inside  # the exception itself, at the margin
    return True


def _continues_summary(block: Block, text: str) -> bool:
    """A summary ends at its second double rule; other lines between rules are none."""
    if len(block.lines) == 1 and not text.rstrip().endswith("FAILED"):
        return False
    block.closing = _SUMMARY_EDGE.match(text) is not None
    return True


def _continues_terminate(block: Block, text: str) -> bool:
    return _AFTER_TERMINATE.match(text) is not None


def _continues_fatal(block: Block, text: str) -> bool:
    return _AFTER_FATAL.match(text) is not None


def _continues_key(block: Block, text: str) -> bool:
    block.closing = "-----END" in text
    return True


_CONTINUES = {
    "traceback": _continues_traceback,
    "summary": _continues_summary,
    "terminate": _continues_terminate,
    "fatal": _continues_fatal,
    "key": _continues_key,
}


def summary_fields(text: str) -> dict[str, str]:
    """Return what torchrun's failure summary says of the first failure; empty if it is none.

    Keys: rank, local_rank, host, time, exit_code, pid, failures, and error with the traceback's
    last line where torchrun has one.
    """
    _, has_root, root = text.partition(_ROOT)
    if not has_root:
        return {}
    fields: dict[str, str] = {}
    for line in root.splitlines():
        if match := _SUMMARY_FIELD.match(line):
            fields.setdefault(match[1], match[2].strip())
    found: dict[str, str] = {name: fields[name] for name in ("host", "time") if name in fields}
    if match := _RANK.search(fields.get("rank", "")):
        found |= {"rank": match[1], "local_rank": match[2]}
    if match := _EXIT.search(fields.get("exitcode", "")):
        found |= {"exit_code": match[1], "pid": match[2]}
    found["failures"] = str(len(re.findall(r"(?m)^\s+exitcode\s*:", text)))
    if "To enable traceback" not in (reason := _reason(root)):
        found["error"] = reason
    return found


def _reason(root: str) -> str:
    _, _, after = root.partition("traceback : ")
    lines = [line.strip() for line in after.splitlines() if not _SUMMARY_EDGE.match(line)]
    return next((line for line in reversed(lines) if line), "")
