"""One step: the sentence of the API, waits where they were, a view with an address, by keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.seed import seed_run
from tests.web.accessibility import check_sizes_and_themes
from tests.web.conftest import HEALTHY, SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser
STEP = 200
# The colour of each part as the style sheet resolves it, and the middle row of each lane.
READ_LANES = """() => {
  const canvas = document.querySelector('.timeline canvas');
  const box = canvas.getBoundingClientRect();
  const ratio = canvas.width / box.width;
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const colours = {};
  for (const name of ['data', 'fwd', 'bwd', 'comm', 'wait', 'opt', 'other']) {
    const probe = document.createElement('span');
    probe.style.color = `var(--t-${name})`;
    document.body.append(probe);
    colours[getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).join()] = name;
    probe.remove();
  }
  return [...document.querySelectorAll('.timeline .gutter .lanename')]
    .filter((name) => name.querySelector('a'))
    .map((name) => {
      const area = name.getBoundingClientRect();
      const y = Math.round((area.top + 3 - box.top) * ratio);
      const pixels = context.getImageData(0, y, canvas.width, 1).data;
      const kinds = [];
      for (let x = 0; x < canvas.width; x += 1)
        kinds.push(colours[[...pixels.subarray(4 * x, 4 * x + 3)].join()] ?? '');
      return {rank: Number(name.querySelector('a').textContent.slice(5)), kinds};
    });
}"""


def shares(page: Any) -> dict[int, dict[str, float]]:
    """Return which share of the width of each lane has the colour of each part."""
    page.wait_for_timeout(100)
    return {
        lane["rank"]: {kind: lane["kinds"].count(kind) / len(lane["kinds"]) for kind in
                       set(lane["kinds"])}
        for lane in page.evaluate(READ_LANES)
    }  # fmt: skip


def test_the_first_sentence_is_that_of_the_api(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    for run, step in ((SLOW, STEP), (HEALTHY, 100), (SLOW, 50)):
        said = site.ask(f"runs/{run}/steps/{step}")["answer"]["what"]
        assert open_page(f"runs/{run}/steps/{step}").sentence() == said
    slow = site.ask(f"runs/{SLOW}/steps/{STEP}")["answer"]
    assert (slow["is_slow"], slow["ranks"]) == (True, [SLOW_RANK])
    assert site.ask(f"runs/{HEALTHY}/steps/100")["answer"]["is_slow"] is False


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("scale", [1, 2])
def test_what_is_drawn_is_what_was_recorded(
    site: Site, open_page: Callable[..., Watched], theme: str, scale: int
) -> None:
    watched = open_page(f"runs/{SLOW}/steps/{STEP}", theme=theme, device_scale_factor=scale)
    answer = site.ask(f"runs/{SLOW}/steps/{STEP}")
    slices, length = answer["slices"], answer["length_us"]
    looks = {"waiting": "wait", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}
    drawn = shares(watched.page)
    assert set(drawn) == set(range(8))
    for kind, look in looks.items():
        number = answer["kinds"].index(kind)
        for rank in range(8):
            truth = sum(
                end - begin
                for lane, k, begin, end in zip(
                    slices["lane"], slices["kind"], slices["begin_us"], slices["end_us"],
                    strict=True,
                )
                if lane == rank and k == number
            ) / length  # fmt: skip
            assert drawn[rank].get(look, 0) == pytest.approx(truth, abs=0.03), (rank, kind)
    assert drawn[SLOW_RANK].get("wait", 0) < 0.02 < 0.2 < drawn[0]["wait"]
    watched.check()


def test_keys_zoom_move_and_speak(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/steps/{STEP}")
    page = watched.page
    region = page.locator(".timeline .plotregion")
    region.focus()
    page.keyboard.press("ArrowDown")
    for _ in range(SLOW_RANK):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    page.locator("[aria-live=polite]", has_text=f"Rank {SLOW_RANK}").wait_for()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.locator("[aria-live=polite]", has_text="Forward").wait_for()
    page.keyboard.press("Space")
    page.wait_for_url(re.compile(rf"at={SLOW_RANK}:\d+"))
    page.locator(".cellpanel", has_text=f"Rank {SLOW_RANK}: Forward").wait_for()
    page.keyboard.press("w")
    page.wait_for_url(re.compile(r"t=\d+-\d+"))
    first = view(page)
    page.keyboard.press("d")
    wait_until(page, lambda: view(page) != first)
    moved = view(page)
    assert moved[0] > first[0]
    assert moved[1] - moved[0] == pytest.approx(first[1] - first[0], abs=3)
    page.keyboard.press("s")
    page.keyboard.press("0")
    page.wait_for_url(lambda url: "t=" not in url.replace("at=", ""))
    page.keyboard.press("t")
    page.locator(".maptable tbody tr").first.wait_for()
    assert "Waiting for the last rank" in page.locator("[aria-label='Slices in view']").inner_text()
    page.keyboard.press("t")
    page.keyboard.press("]")
    page.wait_for_url(f"**/steps/{STEP + 1}*")
    watched.settled()
    page.keyboard.press("[")
    page.wait_for_url(f"**/steps/{STEP}*")
    watched.check()


def view(page: Any) -> tuple[int, int]:
    found = re.search(r"[?&]t=(\d+)-(\d+)", page.url)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def wait_until(page: Any, is_so: Callable[[], bool]) -> None:
    for _ in range(100):
        if is_so():
            return
        page.wait_for_timeout(30)
    pytest.fail(f"it did not come: {page.url}")


def test_a_drag_zooms_and_its_address_restores_the_view(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}/steps/{STEP}")
    page = watched.page
    box = page.locator(".timeline .plotregion").bounding_box()
    y = box["y"] + 60
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=4)
    page.mouse.up()
    wait_until(page, lambda: view(page) != (0, 0))
    low, high = view(page)
    wait_share = shares(page)
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + box["width"] * 0.6, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    wait_until(page, lambda: view(page) != (low, high))
    again = view(page)
    assert again[0] - low == pytest.approx(0.1 * (high - low), rel=0.1)
    page.go_back()
    wait_until(page, lambda: view(page) == (0, 0))
    restored = open_page(f"runs/{SLOW}/steps/{STEP}?t={low}-{high}")
    assert shares(restored.page) == wait_share
    restored.check()
    watched.check()


def test_ranks_are_chosen_and_other_pages_lead_here(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/steps/{STEP}")
    page = watched.page
    page.get_by_label("Ranks", exact=True).fill("2,5-6")
    page.keyboard.press("Enter")
    page.wait_for_url("**ranks=2,5-6*")
    wait_until(page, lambda: page.locator(".timeline .gutter .lanename a").count() == 3)
    page.get_by_role("button", name="The usual ranks").click()
    wait_until(page, lambda: page.locator(".timeline .gutter .lanename a").count() == 8)
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 2, "y": 2})
    watched.go(f"runs/{SLOW}/ranks?sel={SLOW_RANK}@{STEP}")
    page.get_by_role("link", name=f"Open step {STEP}").click()
    page.wait_for_url(f"**/steps/{STEP}?sel={SLOW_RANK}@{STEP}")
    watched.settled()
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url(f"**/steps/{STEP}?sel={SLOW_RANK}@{STEP}")
    page.keyboard.press("Escape")
    page.wait_for_url(f"**/steps/{STEP}")
    page.keyboard.press("g")
    page.keyboard.press("o")
    watched.settled()
    page.locator("a", has_text="Open step").first.click()
    page.wait_for_url("**/steps/*")
    watched.settled()
    watched.check()


def test_ranks_without_a_lane_are_folded_by_host(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    seed_run(
        site.url, run_id="many-lanes", ranks=80, ranks_per_node=8, steps=30, slow_rank=77,
        slow_from=10, steps_per_batch=30,
    )  # fmt: skip
    answer = site.ask("runs/many-lanes/steps/20")
    assert len(answer["lanes"]) == 32
    watched = open_page("runs/many-lanes/steps/20")
    page = watched.page
    page.get_by_role("heading", name="The other 48 ranks, by host").wait_for()
    rows = page.get_by_role("region", name="Ranks without a lane, by host").locator("tbody tr")
    hosts = [row.locator("td").first.inner_text() for row in rows.all()]
    assert hosts == [row["host"] for row in answer["folded"]]
    check_sizes_and_themes(page, (420, 1440))
    worst = answer["folded"][0]
    page.get_by_role("button", name=f"Lanes of {worst['host']}").focus()
    page.keyboard.press("Enter")
    page.locator(".timeline .gutter", has_text=f"Rank {worst['worst_rank']}").wait_for()
    lanes = page.locator(".timeline .gutter .lanename a").all_inner_texts()
    assert [lane.split()[1] for lane in lanes] == expanded(worst["ranks"])
    watched.check()


def expanded(ranks: str) -> list[str]:
    """Return "0-2,7" as single ranks."""
    parts = (part.partition("-") for part in ranks.split(","))
    return [str(rank) for low, _, high in parts for rank in range(int(low), int(high or low) + 1)]
