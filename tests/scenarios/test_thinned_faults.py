"""A fault in a thinned step, of which no collective is sent, is named with its rank all the same.

A rank needs four windows of 20 steps to find that it is above its budget, and some seconds to
agree on a level with the others. So the fault begins well after that, in an odd step: no level
from 2 on records those whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING
from rankscope.native.probe import build
from rankscope.wire import schema, thinning
from tests import capabilities
from tests.agent import recorded
from tests.scenarios.conftest import Watched
from tests.server.conftest import ServerProcess

pytestmark = pytest.mark.multiproc
START, CULPRIT, RANKS = 161, 1, 3
# Steps of 0.1 s with five buckets of different sizes: without one the sizes do not match.
TRAINING = (
    "--strategy", "ddp", "--steps", "100000", "--layers", "2", "--layer-seconds", "0.016",
    "--width", "32", "--context", "32", "--data-bytes", "65536", "--bucket-mib", "0.02",
    "--log-every", "1000",
)  # fmt: skip
THINLY = {"RANKSCOPE_OVERHEAD_PERCENT": "0.001", "RANKSCOPE_COLLECTIVES": "probe"}


@pytest.mark.parametrize(("fault", "kind"), [("hang", "hang"), ("collective_skipped", "desync")])
def test_its_rank_is_named(tmp_path: Path, server: ServerProcess, fault: str, kind: str) -> None:
    if build.is_needed():
        capabilities.need("compiler")
        build.build()
    manifest = tmp_path / "manifest"
    run = Watched(server, tmp_path, "test").start_forked(
        RANKS, *TRAINING, "--fault", f"{fault}:rank={CULPRIT},start={START}",
        "--fault-manifest", str(manifest), **THINLY,
    )  # fmt: skip
    try:
        run.until(lambda: manifest.exists() and manifest.read_text(), 120)

        def named() -> bool:
            verdict = run.get().get("verdict")
            return bool(verdict) and (verdict["kind"], verdict["ranks"]) == (kind, [CULPRIT])

        run.until(named, 40)
        page = run.get("/hang")
        assert (page["state"], page["text"]) == (kind, run.get()["verdict"]["what"])
        was_thinned(tmp_path, START)
    finally:
        run.stop()


def was_thinned(tmp_path: Path, step: int) -> None:
    """Fail unless all ranks were at a level that thins this step, and recorded it so."""
    ranks = recorded.read(tmp_path)
    assert len(ranks) == RANKS
    for rank in ranks:
        header = ring.RingReader(rank.directory / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
        assert header.u64(ring.STEP_AT) == step  # it went no further
        assert thinning.is_thinned(step, header.u8(ring.THINNING_AT))
    flags = [flag for rank in ranks
             for flag in rank.collectives["flags"][rank.collectives["step"] == step]]  # fmt: skip
    assert flags  # those that the fault did not stop called something in this step
    assert all(flag & schema.FLAG_THINNED for flag in flags)
