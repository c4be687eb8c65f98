"""Draws raw runs and what is asked of them, and sends them: for tests of numbers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import Phase, settings
from hypothesis import strategies as st

from tests.server.conftest import Sender, TestClient
from tests.server.raw_run import RawRun, batches_of, make_run

# An example is a whole run: a quarter of what other tests try, and shrinking one takes minutes.
EXAMPLES = settings(
    max_examples=settings.default.max_examples // 4,  # type: ignore[union-attr]
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
runs = itertools.count()


@st.composite
def raw_runs(draw: st.DrawFn) -> RawRun:
    """Draw a run; later attempts begin at or before the step after the last one."""
    spans: list[tuple[int, int]] = []
    begin = draw(st.sampled_from((1, 1, 5, 60)))
    for _ in range(draw(st.integers(1, 3))):
        end = begin + draw(st.integers(0, 12))
        spans.append((begin, end))
        begin = draw(st.integers(spans[0][0], end + 1))
    return make_run(
        seed=draw(st.integers(0, 1 << 20)), ranks=draw(st.integers(1, 5)), spans=spans,
        per_step=draw(st.integers(0, 4)), repeats=draw(st.integers(0, 3)),
    )  # fmt: skip


def send(client: TestClient, run: RawRun, seed: int) -> Sender:
    """Send a run in two producers' batches, each seventh of them twice."""
    senders = [Sender(client, f"raw-{next(runs)}", "p0")]
    senders.append(Sender(client, senders[0].run_id, "p1"))
    bodies = [
        senders[place % 2].body(*records, chunks=chunks)
        for place, (records, chunks) in enumerate(batches_of(run, seed))
    ]
    for place, body in enumerate([*bodies[::-1], *bodies[::7]]):
        reply = client.post("/api/v1/ingest", content=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["refused"] == []
        assert reply.json()["duplicate"] is (place >= len(bodies))
    return senders[0]


class Asked(NamedTuple):
    """What is asked of a run."""

    lo: int
    hi: int
    rank: int | None
    attempt: int | None
    limit: int
    width: int
    seed: int


@st.composite
def questions(draw: st.DrawFn) -> tuple[RawRun, Asked]:
    """Draw a run and what is asked of it."""
    run = draw(raw_runs())
    step = st.integers(0, run.last_step + 2)
    lo, hi = sorted((draw(step), draw(step)))
    return run, Asked(
        lo, hi, draw(st.none() | st.integers(0, run.ranks - 1)),
        draw(st.none() | st.integers(0, run.attempt)), draw(st.integers(1, 60)),
        draw(st.integers(1, 20)), draw(st.integers(0, 1 << 20)),
    )  # fmt: skip
