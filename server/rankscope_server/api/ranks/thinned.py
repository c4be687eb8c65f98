"""What sums of collectives leave out: thinned steps, of which ranks sent a count alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import STEP_THINNED
from rankscope_server.answers import LeftOut
from rankscope_server.api.ranks.chunks import Wanted
from rankscope_server.findings.text import percent_text
from rankscope_server.ingest.step_metrics import BLOCK_STEPS
from rankscope_server.store.tiles import BLOCK_RANKS, read_blocks

_METRICS = ("flags", "num_collectives")
MAX_TILES = 512  # that one answer reads, a few hundredths of a second; of more steps some
_SPANS = 16  # of those, evenly spaced


@dataclass(frozen=True, slots=True)
class Thinned:
    """Thinned steps among some steps of some ranks."""

    share: float = 0.0  # of all steps of these ranks that are known
    count: int | None = 0  # of their collectives; None: only some of the steps were looked at

    @property
    def left_out(self) -> list[LeftOut]:
        """Return what sums of single collectives do not hold."""
        what = f"operations of thinned steps ({percent_text(self.share)} of the steps)"
        return [LeftOut(what=what, count=self.count)] if self.share > 0 else []


def thinned_of(connection: sa.Connection, wanted: Wanted, world_size: int) -> Thinned:
    """Return how much of what is asked for was thinned; a range must be asked for."""
    lo, hi = wanted.lo or 0, wanted.hi or 0
    spans = list(_spans(lo, hi, -(-max(world_size, 1) // BLOCK_RANKS)))
    rows = slice(None) if wanted.rank is None else slice(wanted.rank, wanted.rank + 1)
    num_known = num_thinned = count = 0
    for begin, end in spans:
        blocks = read_blocks(connection, wanted.run_id, _METRICS, begin, end, wanted.attempt)
        for _, planes in blocks:
            flags = planes["flags"][rows]
            known = ~np.isnan(flags)
            thinned = np.where(known, flags, 0).astype(np.int64) & STEP_THINNED != 0
            num_known += int(known.sum())
            num_thinned += int(thinned.sum())
            count += int(np.nansum(planes["num_collectives"][rows][thinned]))
    is_all = spans == [(lo, hi)]
    return Thinned(num_thinned / max(num_known, 1), count if is_all else None)


def _spans(lo: int, hi: int, rank_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps to read: all, or some where those are too many."""
    first, last = lo // BLOCK_STEPS, hi // BLOCK_STEPS
    most = max(1, MAX_TILES // (rank_blocks * len(_METRICS)))
    if last - first < most:
        yield lo, hi
        return
    spans = min(_SPANS, most)
    width = most // spans
    for block in np.linspace(last - width + 1, first, spans).astype(int).tolist():
        yield max(lo, block * BLOCK_STEPS), min(hi, (block + width) * BLOCK_STEPS - 1)
