"""Runs a script with the agent attached and reads what the ranks recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rankscope
from rankscope.files import journal, ring
from rankscope.files.run_directory import COLLECTIVES_RING, STEPS_RING
from rankscope.wire import schema
from tests.fork_server import server

SCRIPTS = Path(__file__).parent / "scripts"
SITE = Path(rankscope.__file__).parent / "rank" / "attach" / "site"


@dataclass
class Recorded:
    """What one process wrote."""

    directory: Path
    rank: int
    collectives: Any  # structured array of ring.COLLECTIVE_FIELDS
    steps: Any
    records: list[schema.Record]
    groups: dict[int, str]
    call_sites: dict[int, str]
    ended: int

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def operations(self) -> Counter[str]:
        return Counter(schema.OPERATIONS[number] for number in self.collectives["operation"])


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANKSCOPE", "TORCHELASTIC")) and name != "RANK"
    }
    return (
        clean
        | {
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN_ID": "test",
            "RANKSCOPE_DIR": str(tmp_path),
            "RANKSCOPE_COLLECTOR": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SITE),
        }
        | more
    )


def run(
    tmp_path: Path, script: str | Path, *arguments: str, ranks: int = 0, launched: bool = False,
    **more: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script alone, or on as many ranks as `ranks` says.

    Its processes are forked from one that has imported torch. `launched`: one process, started by
    Python, whose output is a pipe.
    """
    environ, words = environment(tmp_path, **more), list(arguments)
    if launched:
        return subprocess.run(
            [sys.executable, str(SCRIPTS / script), *words], env=environ, capture_output=True,
            text=True, timeout=180, check=False,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rankscope-ranks.") as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        code = server().run(SCRIPTS / script, ranks, words, output, errors=errors, environ=environ)
        said = [file.read_text(errors="replace") for file in (output, errors)]
    return subprocess.CompletedProcess([str(script), *words], code, *said)


def read(tmp_path: Path) -> list[Recorded]:
    """Return what each process recorded, by rank."""
    found = [_read_one(path.parent) for path in tmp_path.glob(f"test/*/*/{COLLECTIVES_RING}")]
    return sorted(found, key=lambda recorded: recorded.rank)


def _read_one(directory: Path) -> Recorded:
    reader = ring.RingReader(directory / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
    steps = ring.RingReader(directory / STEPS_RING, ring.STEP_FIELDS)
    records: list[schema.Record] = []
    names: dict[int, dict[int, str]] = {journal.GROUP: {}, journal.CALL_SITE: {}}
    for _, path in journal.segments(directory):
        for kind, body, _ in journal.read_frames(path, 0):
            if kind == journal.RECORD:
                records.append(schema.decode_record(body))
            elif kind in names:
                (index,) = journal.INDEXED.unpack_from(body)
                names[kind][index] = body[journal.INDEXED.size :].decode()
    return Recorded(
        directory=directory,
        rank=reader.rank,
        collectives=reader.read(np.arange(reader.u64(ring.HEAD_AT)))[0],
        steps=steps.read(np.arange(steps.u64(ring.HEAD_AT)))[0],
        records=records,
        groups=names[journal.GROUP],
        call_sites=names[journal.CALL_SITE],
        ended=reader.u8(ring.ENDED_AT),
    )
