"""The pages of hangs and of resources on a real run: none waits, one hangs, and once it is over."""

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
    watched.start_forked(RANKS, *TRAINING, "--fault", f"hang:rank={CULPRIT},start={START}")
    none_waits(watched)
    resources_of_all_ranks(watched)
    one_hangs(watched)
    watched.stop()
    watched.until(lambda: watched.get()["run"]["status"] == "failed")
    it_was_so(watched)


def none_waits(watched: Watched) -> None:
    def moves() -> dict[str, Any] | None:
        page = watched.get("/hang")
        return page if watched.step() >= 20 and page.get("state") else None

    page = watched.until(moves)
    assert page["text"] == "No rank waits for another", page
    assert page["graph"]["nodes"] == []
    (group,) = page["groups"]
    assert {row["standing"] for row in group["rows"]} == {"moving"}
    assert sum(row["ranks"]["count"] for row in group["rows"]) == RANKS


def resources_of_all_ranks(watched: Watched) -> None:
    def sampled() -> dict[str, Any] | None:
        found = {chart["key"]: chart for chart in watched.get("/resources")["charts"]}
        known = [found[key]["num"] for key in ("rank_memory", "loss") if key in found]
        return found if known == [RANKS, RANKS] else None

    charts = watched.until(sampled)
    assert charts["rank_memory"]["scope_text"] == f"of each rank: {RANKS} ranks"
    assert 100 << 20 < charts["rank_memory"]["usual"] < 4 << 30
    assert charts["node_processors"]["unit"] == "ratio"


def one_hangs(watched: Watched) -> None:
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
    merged = page["merged"]
    assert merged["nodes"][merged["parts_at"]]["num_roots"] == 1
    assert "in fire (injector.py:" in merged["text"]


def it_was_so(watched: Watched) -> None:
    def agreed() -> dict[str, Any] | None:
        page = watched.get("/hang")
        (first, *_) = page["findings"]
        return page if page["text"] == watched.get(f"/findings/{first['id']}")["what"] else None

    page = watched.until(agreed)
    assert (page["is_over"], page["state"]) == (True, "hang")
    assert "it has not entered all_reduce #" in page["text"]
    root, waiting = page["graph"]["nodes"]
    assert (root["ranks"]["text"], waiting["ranks"]["text"]) == ("1", "0, 2")
    assert [edge["text"] for edge in page["graph"]["edges"]] == ["Ranks 0 and 2 waited for rank 1"]
    assert [one["note"] for one in page["stacks"]] == ["", ""]
