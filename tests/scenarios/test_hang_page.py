"""The page of hangs on real runs: none waits, one hangs, and how it was once the run is over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.conftest import Watched

pytestmark = pytest.mark.multiproc
START, CULPRIT, RANKS = 61, 1, 3
TRAINING = (
    "--strategy", "ddp", "--steps", "100000", "--layers", "2", "--width", "32", "--context", "32",
    "--data-bytes", "65536", "--layer-seconds", "0.016", "--log-every", "1000",
)  # fmt: skip


def test_a_hang_while_it_lasts_and_afterwards(watched: Watched) -> None:
    fault = f"hang:rank={CULPRIT},start={START}"
    watched.start_forked(RANKS, *TRAINING, "--fault", fault)

    def moves() -> dict[str, Any] | None:
        page = watched.get("/hang")
        return page if watched.step() >= 20 and page.get("state") else None

    page = watched.until(moves)
    assert page["text"] == "No rank waits for another", page
    assert page["graph"]["nodes"] == []
    assert [row["standing"] for group in page["groups"] for row in group["rows"]] == [
        "moving"
    ] * len(page["groups"][0]["rows"])

    def hangs() -> dict[str, Any] | None:
        page = watched.get("/hang")
        has_both = page["state"] == "hang" and all(one["frames"] for one in page["stacks"])
        return page if has_both and page["merged"]["num_ranks"] == RANKS else None

    page = watched.until(hangs)
    (finding,) = watched.get("/findings")["open"]
    assert page["text"] == finding["what"]
    root, waiting = page["graph"]["nodes"]
    assert (root["ranks"]["text"], root["standing"], root["is_root"]) == ("1", "missing", True)
    assert (waiting["ranks"]["text"], waiting["standing"]) == ("0, 2", "waiting")
    assert [edge["text"] for edge in page["graph"]["edges"]] == ["Ranks 0 and 2 wait for rank 1"]
    (group,) = page["groups"]
    lacking, inside = group["rows"]
    assert inside["began"] > lacking["began"] == lacking["ended"]
    assert inside["open_sequence"] == lacking["began"] + 1
    behind, victim = page["stacks"]
    assert (behind["rank"], victim["rank"]) == (CULPRIT, 0)
    assert "fire" in [frame["function"] for frame in behind["frames"]]
    assert "backward" in [frame["function"] for frame in victim["frames"]]
    assert page["merged"]["nodes"][page["merged"]["parts_at"]]["num_roots"] == 1
    assert "in fire (injector.py:" in page["merged"]["text"]

    watched.stop()
    watched.until(lambda: watched.get()["run"]["status"] == "failed")
    page = watched.get("/hang")
    assert page["is_over"]
    assert (page["state"], page["text"]) == ("hang", finding["what"])
    root, waiting = page["graph"]["nodes"]
    assert (root["ranks"]["text"], waiting["ranks"]["text"]) == ("1", "0, 2")
    assert [edge["text"] for edge in page["graph"]["edges"]] == ["Ranks 0 and 2 waited for rank 1"]
    assert [one["note"] for one in page["stacks"]] == ["", ""]
