"""The page of hangs: its sentence, the graph by keyboard, stacks side by side and merged."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable

import msgspec
import pytest

from rankscope.wire import schema
from tests.server.seed import seed_run, wait_until_judged
from tests.web.accessibility import violations
from tests.web.conftest import FRESH, HEALTHY, Site, Watched

pytestmark = pytest.mark.browser
HUNG, RANKS, CULPRIT = "hung", 48, 17
OUTER = [("<module>", 210), ("main", 200), ("train", 120), ("run", 90), ("train_step", 88)]


def dump(*inner: str) -> str:
    frames = [*OUTER, *((name, 31) for name in inner)][::-1]
    lines = (f'  File "/job/trainer/train.py", line {at} in {name}\n' for name, at in frames)
    return "Current thread 0x02 (most recent call first):\n" + "".join(lines)


@pytest.fixture(scope="module")
def hung(site: Site) -> str:
    """A run of six nodes in which rank 17 reads a file for ever, and all others wait for it."""
    seed_run(
        site.url, run_id=HUNG, ranks=RANKS, ranks_per_node=8, steps=40, fault="hang",
        slow_rank=CULPRIT, slow_from=20, hang_seconds=41.0, steps_per_batch=20,
    )  # fmt: skip
    stacks = [
        schema.Stacks(
            attempt=0, rank=rank, time_ns=time.time_ns(), reason="stuck",
            text=dump("load", "read") if rank == CULPRIT else dump("backward", "reduce", "wait"),
        )
        for rank in range(40)
    ]  # fmt: skip
    batch = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": HUNG, "producer": "p-stacks",
        "sequence": 1, "host": "node-a", "sent_ns": time.time_ns(), "records": stacks, "chunks": [],
    }  # fmt: skip
    request = urllib.request.Request(f"{site.url}/api/v1/ingest", msgspec.msgpack.encode(batch))
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert json.load(reply)["refused"] == []
    wait_until_judged(site.url)
    return HUNG


def test_the_sentence_is_that_of_the_finding_and_the_graph_folds(
    site: Site, hung: str, open_page: Callable[..., Watched]
) -> None:
    finding = site.ask(f"runs/{hung}/findings")["open"][0]
    watched = open_page(f"runs/{hung}")
    page = watched.page
    page.keyboard.press("g")
    page.keyboard.press("h")
    page.wait_for_url(f"**/runs/{hung}/hang")
    watched.settled()
    page.locator("h1", has_text=finding["what"]).wait_for()
    boxes = page.locator(".waitbox")
    assert boxes.count() == 2
    assert "Rank 17" in boxes.nth(0).inner_text()
    assert f"{RANKS - 1} ranks" in boxes.nth(1).inner_text()
    assert page.locator(".waitarrows .head").count() == 1
    rows = page.get_by_role("region", name=f"Members of all {RANKS} ranks").locator("tbody tr")
    assert rows.nth(0).inner_text().split()[:2] == ["missing", "17"]
    page.get_by_role("link", name="Open the finding").click()
    watched.settled()
    page.get_by_role("link", name="Who waits for whom").click()
    page.wait_for_url(f"**/runs/{hung}/hang?attempt=0")
    watched.check()


def test_boxes_choose_stacks_by_keyboard_and_the_address_keeps_them(
    hung: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{hung}/hang?ranks=9,3")
    page = watched.page
    assert page.locator(".onestack").count() == 2
    assert page.get_by_text("5 frames that all of these share").count() == 0, "8 are the same"
    page.locator("button.waitbox").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**ranks=17,0")
    behind = page.get_by_role("region", name="Stack of rank 17")
    behind.wait_for()
    assert "5 frames that all of these share" in behind.inner_text()
    assert "they part here" in behind.locator("li.parts", has_text="load").inner_text()
    waiting = page.get_by_role("region", name="Stack of rank 0")
    assert "backward" in waiting.locator("li.parts").inner_text()
    page.get_by_label("Ranks", exact=True).fill("17,x")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    again = open_page(page.url.removeprefix(f"{watched.origin}/")).page
    assert again.get_by_role("region", name="Stack of rank 17").is_visible()
    watched.check()


def test_merged_stacks_speak_and_are_a_table_too(
    hung: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{hung}/hang")
    page = watched.page
    parting = page.locator(".parting").inner_text()
    assert parting.startswith("All were in train_step (train.py:88); from there 1 rank")
    chart = page.get_by_role("application")
    assert chart.locator("g.parts").count() == 1
    assert chart.get_by_text("<module>", exact=True).count() == 0, "outer frames are folded"
    page.get_by_role("button", name="With 2 outer frames").click()
    page.wait_for_url("**frames=all")
    chart.get_by_text("<module>", exact=True).first.wait_for(state="attached")
    chart.focus()
    for key in ("ArrowDown", *["ArrowDown"] * 5):
        page.keyboard.press(key)
    spoken = page.locator("[aria-live=polite]")
    spoken.filter(has_text="load (trainer/train.py:31): 1 of 40 ranks").wait_for()
    page.keyboard.press("ArrowRight")
    spoken.filter(has_text="backward").wait_for()
    chosen = page.get_by_role("region", name="Chosen frame").inner_text()
    assert "39 of 40 ranks: 0-16, 18-39" in chosen
    page.keyboard.press("t")
    table = page.get_by_role("region", name="Frames of all ranks")
    table.wait_for()
    assert "all share it, then they part" in table.inner_text()
    assert page.get_by_role("region", name="Who waits for whom").is_visible()
    assert violations(page) == []
    watched.check()


def test_stacks_are_asked_for(site: Site, hung: str, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{hung}/hang")
    page = watched.page
    page.get_by_label("Ranks", exact=True).fill("17, 4")
    page.get_by_role("button", name="Take their stacks now").click()
    page.wait_for_url("**ranks=4,17")
    page.locator("[aria-live=polite]", has_text="Asked: Stacks of ranks 4, 17").wait_for()
    asked = site.ask(f"runs/{hung}/commands")["commands"][0]
    assert (asked["kind"], [one["rank"] for one in asked["ranks"]]) == ("stacks", [4, 17])
    watched.check()


def test_who_may_only_read_is_offered_no_button(
    site: Site, hung: str, open_page: Callable[..., Watched]
) -> None:
    session = site.ask("session") | {"roles": ["read"]}
    watched = open_page()
    watched.page.route(re.compile("/api/v1/session$"), lambda route: route.fulfill(json=session))
    watched.go(f"runs/{hung}/hang")
    watched.page.get_by_text("New stacks are taken by those whose token may operate").wait_for()
    assert watched.page.get_by_role("button", name="Take their stacks now").count() == 0
    watched.check()


def test_a_run_without_a_hang_says_so(site: Site, open_page: Callable[..., Watched]) -> None:
    over = open_page(f"runs/{HEALTHY}/hang")
    assert over.sentence() == "No rank waited for another when the attempt ended"
    text = over.page.locator("main").inner_text()
    assert "How it was at the end of attempt 0" in text
    assert "looks again" not in text
    assert over.page.get_by_role("button", name="Take their stacks now").count() == 0
    assert over.page.locator(".waitbox").count() == 0
    live = open_page(f"runs/{FRESH}/hang")
    assert live.sentence() == site.ask(f"runs/{FRESH}/hang")["text"]
    over.check()
    live.check()


def test_many_ranks_far_apart_widen_nothing(
    site: Site, hung: str, open_page: Callable[..., Watched]
) -> None:
    answer = site.ask(f"runs/{hung}/hang")
    ranks = answer["graph"]["nodes"][1]["ranks"] | {
        "count": 1_023, "num_hosts": 1_023,
        "text": ", ".join(str(rank) for rank in range(1, 190, 8)) + " and 999 more",
    }  # fmt: skip
    answer["graph"]["nodes"][1]["ranks"] = answer["groups"][0]["rows"][1]["ranks"] = ranks
    watched = open_page()
    path = re.compile(rf"/api/v1/runs/{hung}/hang$")
    watched.page.route(path, lambda route: route.fulfill(json=answer))
    for width in (420, 1024, 1440):
        watched.page.set_viewport_size({"width": width, "height": 900})
        watched.go(f"runs/{hung}/hang")
        assert watched.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert "1,023 ranks" in watched.page.locator(".waitbox").nth(1).inner_text()
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1440, 2560])
def test_all_sizes_and_themes_hold_it(
    hung: str, open_page: Callable[..., Watched], theme: str, width: int
) -> None:
    watched = open_page(f"runs/{hung}/hang", theme=theme, width=width)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    boxes = [box.bounding_box() for box in page.locator(".waitbox").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert violations(page) == []
    watched.check()
