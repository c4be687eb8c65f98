"""The table fault x plain torchrun x preflight, from the two result files."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from tests.preflight.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TORCHRUN = RESULTS / "preflight_torchrun.jsonl"
FOUND = RESULTS / "preflight_found.jsonl"
DOCUMENT = ROOT / "docs" / "preflight_faults.md"
SLOW_FACTOR = 2.0  # against the healthy median step: what a user would notice
SHOWN_LINE = 100
# Lines that only say that something was said.
_EMPTY = re.compile(
    r"[Tt]raceback|raise \w+|Exception raised from|Root Cause|error_file|ChildFailedError|"
    r"Sending process|FAILED|exitcode"
)
Row = dict[str, Any]

_HEAD = """# What breaks a launch, and who says so when

This page is written by `python benchmarks/preflight_faults.py --table` from what was measured.

Each row is one thing that is wrong in a laboratory of three fake nodes (namespaces on one machine),
and otherwise healthy. *Plain torchrun* is torch 2.13 with gloo and its default time limits, running
a small script that meets, reduces one number and makes ten steps of a 4 MB all-reduce; a launch
that still hung was cut at {cut_s:.0f} s, which is beyond torch's longest limit. *First hint* is the
first line on any node that would make a reader suspect trouble. Addresses that torch prints wrongly
are left out. *preflight* is `rankscope preflight` on the same nodes, started like the job, with the
collective test. All nodes share one machine, so its times grow with whatever else that does{busy}.

{summary}

| What is wrong | Launch | First hint | End | What plain torchrun does | preflight | What it says |
|---|---|---:|---:|---|---:|---|
"""


def load(path: Path) -> list[Row]:
    """Return the rows of a result file, oldest first; none if it is absent."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table() -> str:
    """Return the whole document."""
    launches = {(row["fault"], row["mode"]): row for row in load(TORCHRUN)}
    found = {row["fault"]: row for row in load(FOUND) if "num_hosts" not in row}
    healthy_ms = _healthy_ms(launches)
    lines = []
    for fault in FAULTS:
        lines += _rows(fault, launches, found.get(fault.name), healthy_ms)
    cut_s = max((row["cut_s"] for row in launches.values()), default=0.0)
    summary = "\n".join(_summary(launches, found, healthy_ms))
    loads = [row["load"] for row in found.values() if "load" in row]
    busy = f"; its load was {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    return _HEAD.format(cut_s=cut_s, summary=summary, busy=busy) + "\n".join(lines) + "\n"


def _healthy_ms(launches: dict[tuple[str, str], Row]) -> float:
    medians = [row["median_step_ms"] for (fault, _), row in launches.items() if fault == "healthy"]
    return statistics.median([ms for ms in medians if ms] or [float("inf")])


def _rows(
    fault: Fault, launches: dict[tuple[str, str], Row], found: Row | None, healthy_ms: float
) -> list[str]:
    told = _told(found)
    lines = []
    for mode in fault.modes or ("-",):
        row = launches.get((fault.name, mode))
        if row is None:
            cells = [mode, "-", "-", "not measured"]
        else:
            hint = "none" if row["hint_s"] is None else f"{row['hint_s']:.0f} s"
            end = "never" if row["end_s"] is None else f"{row['end_s']:.0f} s"
            cells = [mode, hint, end, _outcome(row, healthy_ms)]
        first = not lines
        answer = told if first else ["", '"'] if told[1] else ["", ""]
        lines.append(f"| {' | '.join([_cell(fault.says), *cells, *answer])} |")
    return lines


def _told(found: Row | None) -> list[str]:
    if found is None:
        return ["-", "not measured"]
    marks = {"fail": "✗", "warn": "!"}
    told = [f"{marks[f['status']]} `{f['id']}` {_cell(f['title'])}" for f in found["findings"]]
    wrong = " **(not as it should be)**" if found["misses"] else ""
    return [f"{found['elapsed_s']:.1f} s", "<br>".join(told) + wrong]


def _outcome(row: Row, healthy_ms: float) -> str:
    """Return what became of the launch, and its first and last words."""
    words = _words(row)
    if row["worked"]:
        size = max(row["world_sizes"], default=0)
        step_ms = row["median_step_ms"] or 0.0
        if step_ms > SLOW_FACTOR * healthy_ms:
            slow = f"works, silently slow: {step_ms:,.0f} ms a step, healthy {healthy_ms:.0f} ms"
            return "; ".join([slow, *words])
        return "; ".join(["works" if size == _num_nodes(row) else f"WORLD_SIZE={size}", *words])
    return "; ".join([_stops(row), *words])


def _num_nodes(row: Row) -> int:
    return len(row["nodes"])


def _stops(row: Row) -> str:
    parts = []
    if row["world_sizes"] and min(row["world_sizes"]) < _num_nodes(row):
        parts.append(f"**trains with WORLD_SIZE={min(row['world_sizes'])}**")
    for node, seen in row["nodes"].items():
        if seen["end_s"] is None:
            parts.append(f"{node} hangs")
        elif seen["exit"] == 0:
            parts.append(f"{node} exits 0 at {seen['end_s']:.0f} s")
        else:
            parts.append(f"{node} dies at {seen['end_s']:.0f} s")
    return ", ".join(parts)


def _words(row: Row) -> list[str]:
    """Return the first line that says something, and the first error that says something else."""
    told: list[tuple[float, str]] = []
    for seen in row["nodes"].values():
        for line in seen["lines"]:
            when, _, text = line.partition(" s: ")
            if not _EMPTY.search(text):
                told.append((float(when), _line(text)))
    told.sort()
    texts = [text for _, text in told]
    if not texts:
        return []
    others = [text for text in texts if _start(text) != _start(texts[0]) and "Error" in text]
    return [f"`{text}`" for text in (texts[0], *others[:1])]


def _start(line: str) -> str:
    return line[:30]


def _line(text: str) -> str:
    """Return a line as it is worth reading: without prefix, clock and invented addresses."""
    text = re.sub(r"^(\[rank\d+\]:)?\s*(\[[A-Z]\d{4} [\d:.]+ \S+\]\s*)?", "", text)
    text = re.sub(r"^(\[rank\d+\]:)?\s*([EWI]\d{4} [\d:.]+ \d+ \S+\])?\s*", "", text)
    text = re.sub(r"^\[c10d\]\s*", "", text)
    text = re.sub(r"\[/\S+/(\w+\.(?:cc|cpp|hpp)):\d+\]\s*", "", text)  # where torch was built
    text = re.sub(r"/tmp/nslab\.\w+/shared", "/checkpoints", text)
    text = re.sub(r"SocketImpl\([^)]*\)", "SocketImpl(...)", text)
    text = re.sub(r"\[[^\] ]*\]:\d+", "[...]", text) if "remote=" not in text else text
    text = re.sub(r"(failed to connect to )[\d.:]+", r"\1...", text)
    text = text.replace("`", "'").replace("|", "\\|").strip()
    return text if len(text) <= SHOWN_LINE else text[: SHOWN_LINE - 4] + " ..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(
    launches: dict[tuple[str, str], Row], found: dict[str, Row], healthy_ms: float
) -> list[str]:
    faulty = [row for (name, _), row in launches.items() if name != "healthy"]
    broken = [row for row in faulty if not row["worked"]]
    hanging = [row for row in broken if row["end_s"] is None]
    ends = [row["end_s"] if row["end_s"] is not None else row["cut_s"] for row in broken]
    slow = [r for r in faulty if r["worked"] and (r["median_step_ms"] or 0) > 2 * healthy_ms]
    small = [r for r in faulty if r["world_sizes"] and min(r["world_sizes"]) < _num_nodes(r)]
    lines = [
        f"- plain torchrun: {len(faulty)} launches under {len({r['fault'] for r in faulty})} "
        f"faults. {len(broken)} broke; the last node stopped after a median of "
        f"{statistics.median(ends or [0]):,.0f} s, and {len(hanging)} still hung when cut. "
        f"{len(small)} trained with fewer ranks than asked for, {len(slow)} were silently slow.",
    ]
    known = {fault.name for fault in FAULTS}
    tried = [row for name, row in found.items() if name in known]
    if tried:
        right = [row for row in tried if not row["misses"]]
        times = [row["elapsed_s"] for row in tried]
        lines.append(
            f"- preflight: {len(right)} of {len(tried)} faults with exactly the right check, nodes "
            "or pairs, repair and exit code, and nothing else; median "
            f"{statistics.median(times):.1f} s, longest {max(times):.1f} s."
        )
    healthy = [row for row in load(FOUND) if "num_hosts" in row]
    if healthy:
        clean = [row for row in healthy if not row["misses"]]
        by_size = {size: max(r["elapsed_s"] for r in healthy if r["num_hosts"] == size)
                   for size in sorted({row["num_hosts"] for row in healthy})}  # fmt: skip
        times_text = ", ".join(f"{size} hosts {s:.1f} s" for size, s in by_size.items())
        lines.append(
            f"- healthy: {len(clean)} of {len(healthy)} runs without a finding; longest: "
            f"{times_text} (all on one machine)."
        )
    return lines
