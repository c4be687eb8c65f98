"""Tables: heads that say what their column is, and rows in the order that the reader chose."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from tests.web.conftest import CRASH, SLOW, SLOW_RANK, Watched

pytestmark = pytest.mark.browser


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
