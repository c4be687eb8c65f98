"""How far the collector has come: what a restarted one needs to go on, in one small value.

Why nothing is lost and nothing sent twice. A batch holds everything that was read since the one
before, and its spool file holds, beside the batch, the `Offsets` that were reached by reading it.
The file appears by one rename, so the batch and the progress become durable in the same instant:
- killed before the rename: neither exists, the next life reads the same slots and frames again;
- killed after it: both exist, the next life begins behind them and sends the file that it finds.
`offsets.json` is a copy, written behind each rename and before the file is handed to the upload,
for the file is deleted at the server's 200. A start takes the newest of that copy and the spool,
by sequence. The producer id and its sequence are part of the value and go on over restarts, so a
number is never given to two batches and the server stores a batch that comes twice once. Only
when both are gone does a new producer begin, and reads from the start of the files.

A batch that is dropped because the spool is full is in the losses of the one that replaces it, and
its number in that one's `dropped`: a collector that is killed before the file is deleted leaves
that to the next one, which neither sends it nor counts it again.

While the disk is full a batch has no file. Such batches carry a second producer id, known to this
life alone; a collector killed in that state sends again what it read since the last file.
This covers the death of the process. The machine's own death takes the ranks with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rankscope.files.run_directory import replace_file

OFFSETS_FILE = "offsets.json"


class RankOffsets(msgspec.Struct):
    """How far the files of one process have been read."""

    read_to: int = 0  # slots of collectives.ring below this are taken, except `open_ranges`
    open_ranges: list[int] = []  # first, count, first, count ... of slots not yet final
    steps_to: int = 0
    segment: int = 0
    offset: int = 0
    stacks: int = 0  # bytes of the file `stacks` that are sent
    outputs: dict[str, int] = {}  # bytes of each file of output that are read, by path
    dropped: list[int] = []  # drop counters of the ring header that are in the losses


class LossTotal(msgspec.Struct):
    """One total of the ledger."""

    attempt: int
    rank: int
    source: str
    reason: str
    count: int


class Offsets(msgspec.Struct):
    """Everything that survives a restart."""

    producer: str
    sequence: int = 0  # last batch that was made
    files: dict[str, RankOffsets] = {}  # by directory, relative to the run
    finished: list[str] = []  # directories that are read to the end, and not yet marked so
    losses: list[LossTotal] = []
    # events that are sent once; the file calls them `said`
    reported: list[str] = msgspec.field(default_factory=list, name="said")
    dropped: list[int] = []  # batches that went for this one, and are in the losses


def save(directory: Path, offsets: Offsets) -> None:
    """Replace the copy in `directory`. Raises OSError."""
    replace_file(directory / OFFSETS_FILE, msgspec.json.encode(offsets))


def load(directory: Path) -> Offsets | None:
    """Return the copy, None where there is none that can be read."""
    try:
        return msgspec.json.decode((directory / OFFSETS_FILE).read_bytes(), type=Offsets)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


def to_ranges(numbers: Any) -> list[int]:
    """Return sorted slot numbers as first, count, first, count ..."""
    import numpy as np

    if len(numbers) == 0:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate(([0], breaks))]
    counts = np.diff(np.concatenate(([0], breaks, [len(numbers)])))
    flat: list[int] = np.stack((firsts, counts), axis=1).ravel().tolist()
    return flat


def from_ranges(flat: list[int], limit: int) -> Any:
    """Return the numbers again, at most `limit` of them (the file is not trusted)."""
    import numpy as np

    parts = [
        np.arange(first, first + min(count, limit), dtype=np.int64)
        for first, count in zip(flat[::2], flat[1::2], strict=False)
    ]
    return np.concatenate(parts)[:limit] if parts else np.empty(0, dtype=np.int64)
