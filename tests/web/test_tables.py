"""Tables: heads that say what their column is, and rows in the order that the reader chose."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from tests.server.seed import seed_run, wait_until_judged
from tests.web.conftest import CRASH, SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser


MANY, LATE_RANK = "many-ranks", 251
# How far the colour between two rows is at each edge from that in the middle, 0 to 255.
SHADES = """async ([png, ratio]) => {
  const bytes = Uint8Array.from(atob(png), (one) => one.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes]));
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.drawImage(image, 0, 0);
  const y = Math.round(image.height * ratio);
  const at = (x) => context.getImageData(x, y, 1, 1).data;
  const middle = at(Math.round(image.width / 2));
  const off = (x) => Math.max(...[0, 1, 2].map((i) => Math.abs(at(x)[i] - middle[i])));
  return [off(1), off(image.width - 2)];
}"""


def shades(page: Any, frame: Locator) -> tuple[int, int]:
    """Return how much the left and the right edge of a frame differ from its middle."""
    page.mouse.move(0, 0)
    ratio = frame.evaluate("""one => {
      const row = one.querySelector('thead tr').getBoundingClientRect();
      return (row.top + 3 - one.getBoundingClientRect().top) / one.clientHeight;
    }""")
    png = base64.b64encode(frame.screenshot()).decode()
    left, right = page.evaluate(SHADES, [png, ratio])
    return int(left), int(right)


def texts(rows: Locator, column: int) -> list[str]:
    return [text.strip() for text in rows.locator(f"td:nth-child({column})").all_inner_texts()]


def test_rows_are_sorted_by_the_head_that_is_pressed(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/ranks")
    page = watched.page
    page.keyboard.press("t")
    table = page.get_by_role("region", name="The map as a table")
    rows = table.locator("tbody tr")
    slowest = table.get_by_role("columnheader", name="Slowest")
    expect(slowest).to_have_attribute("aria-sort", "descending")
    assert re.match(rf"Rank {SLOW_RANK}\b", texts(rows, 1)[0])

    step = table.get_by_role("columnheader", name="At step")
    step.get_by_role("button").press("Enter")
    expect(step).to_have_attribute("aria-sort", "descending")
    assert slowest.get_attribute("aria-sort") is None
    steps = [int(text.replace(",", "")) for text in texts(rows, 4)]
    assert len(set(steps)) > 1, "the lanes have their worst steps at different places"
    assert steps == sorted(steps, reverse=True)

    step.get_by_role("button").press("Enter")  # once more: the rows as they came
    expect(table.locator("[aria-sort]")).to_have_count(0)
    watched.check()


@pytest.mark.parametrize(
    "path", [f"runs/{SLOW}", f"runs/{SLOW}/collectives", f"runs/{CRASH}/ranks", "storage"]
)
def test_heads_name_their_columns_and_a_wide_table_scrolls_in_its_frame(
    open_page: Callable[..., Watched], path: str
) -> None:
    page = open_page(path).page
    heads = page.locator("main .scroll[tabindex='0'][aria-label] > table.table > thead > tr")
    heads.first.wait_for()
    assert page.locator("main table.table").count() == heads.count()
    assert heads.locator("th").count() == heads.locator("th[scope=col]").count()
    page.set_viewport_size({"width": 420, "height": 900})
    expect(heads.first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_columns_beyond_an_edge_are_hinted_at(
    open_page: Callable[..., Watched], theme: str
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks", theme=theme)
    page = watched.page
    frame = page.get_by_role("region", name="Ranks", exact=True)
    assert frame.evaluate("one => one.scrollWidth - one.clientWidth") <= 0
    assert max(shades(page, frame)) <= 2, "all columns are in sight"

    page.set_viewport_size({"width": 420, "height": 900})
    assert frame.evaluate("one => one.scrollWidth - one.clientWidth") > 100
    left, right = shades(page, frame)
    assert left <= 2
    assert right >= 20
    frame.evaluate("one => { one.scrollLeft = 100 }")
    assert min(shades(page, frame)) >= 20, "columns are beyond both edges"
    frame.evaluate("one => { one.scrollLeft = one.scrollWidth }")
    left, right = shades(page, frame)
    assert left >= 20
    assert right <= 2
    watched.check()


@pytest.fixture(scope="module")
def many(site: Site) -> str:
    """Send a run of more ranks than a page lists, of which one near the end is slow."""
    seed_run(
        site.url, run_id=MANY, ranks=256, ranks_per_node=64, steps=120, fault="slow_compute",
        slow_rank=LATE_RANK, slow_factor=1.8, end=False,
    )  # fmt: skip
    wait_until_judged(site.url)
    return f"runs/{MANY}/ranks"


def test_the_worst_rank_is_first_and_all_can_be_sorted_by_keyboard(
    site: Site, open_page: Callable[..., Watched], many: str
) -> None:
    named = {one["rank"]: one for one in site.ask(many)["ranks"] if one["finding_id"] is not None}
    assert named[LATE_RANK]["finding_kind"] == "slow_compute"
    watched = open_page(many)
    page = watched.page
    table = page.get_by_role("region", name="Ranks", exact=True)
    rows = table.locator("tbody tr")
    expect(rows.first).to_contain_text(f"Rank {LATE_RANK}")
    expect(rows.first.get_by_role("link", name="Straggler")).to_be_visible()
    expect(table.locator("xpath=..").get_by_text("First 200 of 256 ranks.")).to_be_visible()
    expect(rows).to_have_count(200)

    memory = table.get_by_role("columnheader", name="Memory")
    memory.get_by_role("button").press("Enter")
    expect(memory).to_have_attribute("aria-sort", "descending")
    most = max(site.ask(many)["ranks"], key=lambda one: one["rss_bytes"])["rank"]
    expect(rows.first, "of all ranks, also of those that were not listed").to_contain_text(
        f"Rank {most}"
    )
    rank = table.get_by_role("columnheader", name="Rank")
    rank.get_by_role("button").press("Enter")
    expect(rank).to_have_attribute("aria-sort", "ascending")
    expect(rows.first).to_contain_text("Rank 0")
    table.get_by_role("button", name="Show all").press("Enter")
    expect(rows).to_have_count(256)
    expect(rows.last).to_contain_text("Rank 255")
    watched.check()
