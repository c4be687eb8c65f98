"""Real ranks on one node leave out collectives for a server whose collectors wait for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING
from rankscope.wire import schema, thinning
from tests.agent import recorded
from tests.scenarios.conftest import Watched
from tests.server.conftest import Sender, ServerProcess, log_line

pytestmark = pytest.mark.multiproc
RANKS, LEVEL = 2, 2
LATE_SECONDS = 12  # for which batches of the others have waited, as they say
STEPS_AFTER = 40  # that are looked at
TRAINING = (
    "--strategy", "ddp", "--steps", "100000", "--layers", "2", "--layer-seconds", "0.016",
    "--width", "32", "--context", "32", "--data-bytes", "65536", "--log-every", "1000",
)  # fmt: skip


class LateCollectors:
    """Collectors of another run, which have to wait for the server."""

    def __init__(self, server: ServerProcess) -> None:
        self._client = httpx.Client(base_url=server.url, trust_env=False)
        self._senders = [
            Sender(self._client, "other", f"late-{number}")  # type: ignore[arg-type]
            for number in range(2 * RANKS)
        ]
        self._next = 0.0

    def send(self) -> None:
        """Send a batch each, once a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1.0
        for sender in self._senders:
            clock = str(time.time_ns() + LATE_SECONDS * 10**9)
            reply = self._client.post(
                "/api/v1/ingest", content=sender.body(log_line("x")),
                headers={schema.CLOCK_HEADER: clock},
            )  # fmt: skip
            assert reply.status_code == 200, reply.text

    def close(self) -> None:
        self._client.close()


def headers(tmp_path: Path) -> list[ring.RingReader]:
    return [
        ring.RingReader(rank.directory / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
        for rank in recorded.read(tmp_path)
    ]


def test_ranks_of_one_node_thin_the_same_steps_and_the_page_says_why(
    tmp_path: Path, server: ServerProcess
) -> None:
    run = Watched(server, tmp_path, "test")
    run.start_forked(RANKS, *TRAINING, RANKSCOPE_OVERHEAD_PERCENT="90")
    others = LateCollectors(server)

    def is_asked() -> Any:
        others.send()
        return run.get("/commands").get("commands")

    def is_thinned() -> bool:
        others.send()
        levels = [header.u8(ring.THINNING_AT) for header in headers(tmp_path)]
        return levels == [LEVEL] * RANKS

    try:
        run.until(lambda: run.step() > 20, 120)
        (asked,) = run.until(is_asked, 60)
        assert asked["asked_by"] == f"{schema.SHEDDING}behind by {LATE_SECONDS} s"
        run.until(is_thinned, 120)
        run.until(lambda: run.step() > asked["at_step"] + STEPS_AFTER, 120)
        (done,) = run.get("/commands")["commands"]  # nor is it taken back
        assert {rank["state"] for rank in done["ranks"]} == {"done"}
        why = f"because the server did not keep up (behind by {LATE_SECONDS} s); to record more"
        run.until(lambda: any(why in note for note in run.get()["answer"]["notes"]), 30)
        (left_out,) = run.get(f"/collectives?from={asked['at_step'] - 10}")["left_out"]
        assert left_out["count"] > 0
    finally:
        others.close()
        run.stop()
    ranks = recorded.read(tmp_path)
    assert len(ranks) == RANKS
    for rank in ranks:
        (event,) = [one for one in rank.of(schema.Event) if one.name == "thinning_changed"]
        assert event.fields["from_step"] == str(asked["at_step"])
        steps = rank.steps["step"]
        thinned = steps[(rank.steps["flags"] & schema.STEP_THINNED) != 0].tolist()
        after = [step for step in steps.tolist() if step >= asked["at_step"]]
        assert thinned == [step for step in after if thinning.is_thinned(step, LEVEL)]
        assert len(thinned) >= STEPS_AFTER // 2
