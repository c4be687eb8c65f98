"""Starts the four ranks of the matrix and puts what they did beside what was recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.wire import schema
from tests.agent import recorded
from tests.fork_server import server

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4


@dataclass
class Cell:
    """One family on one rank: what the program says, what the agent recorded."""

    outcome: dict[str, str]  # `skipped` or `error` with its reason; empty where it ran
    calls: list[dict[str, Any]] = field(default_factory=list)  # of the ledger, in order
    slots: list[dict[str, Any]] = field(default_factory=list)  # of the record, in order
    groups: dict[str, schema.GroupDefined] = field(default_factory=dict)


def launch(tmp_path: Path, families: list[str], source: str) -> dict[str, list[Cell]]:
    """Run the families on all ranks, in as few launches as they need; return cells by family."""
    cells: dict[str, list[Cell]] = {}
    for attempt in range(len(families)):
        waiting = [name for name in families if name not in cells]
        if not waiting:
            break
        scratch = tmp_path / f"launch-{attempt}"
        scratch.mkdir()
        output = _run(scratch, waiting, source)
        ranks = recorded.read(scratch)
        assert len(ranks) == RANKS, output
        for rank in ranks:
            for name, cell in _cells(scratch / f"ledger-{rank.rank}.jsonl", rank).items():
                cells.setdefault(name, []).append(cell)
        for name in waiting:  # what a failure cut off on some ranks
            if name in cells and len(cells[name]) < RANKS:
                cells[name].append(Cell({"error": output}))
        assert any(name in cells for name in waiting), output
    return cells


def _run(scratch: Path, families: list[str], source: str) -> str:
    """Run the ranks to their end; when one fails, the others end. Return what they printed."""
    environ = recorded.environment(scratch, RANKSCOPE_COLLECTIVES=source, GLOO_SOCKET_IFNAME="lo")
    output = scratch / "output.txt"
    words = [str(scratch), *families]
    code = server().run(PROGRAMS / "main.py", RANKS, words, output, environ=environ)
    return f"exit code {code}:\n{output.read_text(errors='replace')[-12000:]}"


def _cells(ledger: Path, rank: recorded.Recorded) -> dict[str, Cell]:
    slots = _slots(rank)
    groups = {group.group: group for group in rank.of(schema.GroupDefined)}
    cells: dict[str, Cell] = {}
    cell, begin_ns = Cell({}), 0
    for text in ledger.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "begin_ns" in line:
            cell = cells[line["family"]] = Cell({"error": "hangs"}, groups=groups)
            begin_ns = line["begin_ns"]
        elif "end_ns" in line:
            cell.outcome = {key: line[key] for key in ("skipped", "error") if key in line}
            cell.slots = [
                slot for slot in slots if begin_ns <= slot["arrived_ns"] <= line["end_ns"]
            ]
        else:
            cell.calls.append(line)
    return cells


def _slots(rank: recorded.Recorded) -> list[dict[str, Any]]:
    """Return the slots as the words of the wire."""
    found = []
    for slot in rank.collectives:
        found.append(
            {
                "operation": schema.OPERATIONS[slot["operation"]],
                "group": rank.groups[int(slot["group_id"])],
                "sequence": int(slot["sequence"]),
                "input_bytes": int(slot["input_bytes"]),
                "output_bytes": int(slot["output_bytes"]),
                "num_tensors": int(slot["num_tensors"]),
                "dtype": schema.DTYPES[slot["dtype"]],
                "reduce_op": schema.REDUCE_OPS[slot["reduce_op"]],
                "peer_rank": int(slot["peer_rank"]),
                "is_p2p": bool(slot["flags"] & schema.FLAG_P2P),
                "is_async": bool(slot["flags"] & schema.FLAG_ASYNC),
                "state": schema.STATES[slot["state"]],
                "issued_by": schema.ISSUED_BY[slot["issued_by"]],
                "ended_by": schema.ENDED_BY[slot["ended_by"]],
                "call_site": rank.call_sites.get(int(slot["call_site"]), ""),
                "arrived_ns": int(slot["arrived_ns"]),
                "started_ns": int(slot["started_ns"]),
                "returned_ns": int(slot["returned_ns"]),
                "ended_ns": int(slot["ended_ns"]),
                "blocked_ns": int(slot["blocked_ns"]),
            }
        )
    return found


def torch_version() -> tuple[int, int]:
    """Return major and minor without importing torch into the tests."""
    import importlib.metadata

    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)
