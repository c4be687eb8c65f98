"""The page of what a run cost: shares that add up, money in the address, switches by keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.web.accessibility import WIDTHS, check_sizes_and_themes
from tests.web.conftest import CRASH, FRESH, HEALTHY, SLOW, SLOW_RANK, Site, Watched
from tests.web.prefix import proxy

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    "path",
    [
        f"runs/{SLOW}/cost?price=2.5&currency=EUR&if=as-peers",
        f"runs/{SLOW}/cost?link_times=2&add_nodes=1&without={SLOW_RANK}",
        f"runs/{HEALTHY}/cost",
        f"runs/{CRASH}/cost",
        f"runs/{FRESH}/cost",
    ],
)
def test_the_page_is_whole_and_accessible_in_both_themes(
    open_page: Callable[..., Watched], path: str
) -> None:
    watched = open_page(path, theme="dark")
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def test_the_waterfall_is_that_of_the_api_and_ends_at_productive(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/cost")
    answer = site.ask(f"runs/{SLOW}/cost")
    assert watched.sentence() == answer["text"]
    page = watched.page
    rows = page.get_by_role("region", name="Where the time went").locator("tbody tr")
    shown = [row.get_attribute("data-part") for row in rows.all()]
    names = [part["name"] for part in answer["parts"]]
    assert shown == ["all", *names[1:], "productive"]
    assert answer["slow_ranks"] == [SLOW_RANK]
    assert page.get_by_text(f"Straggling is about rank {SLOW_RANK}.").is_visible()
    boxes = [row.locator(".fall").bounding_box() for row in rows.all()]
    whole = boxes[0]
    left = 1.0
    for part, box in zip([*answer["parts"][1:], answer["parts"][0]], boxes[1:], strict=True):
        left -= part["share"]
        assert box["x"] == pytest.approx(whole["x"] + left * whole["width"], abs=1.5)
        width = max(2.0, part["share"] * whole["width"])  # which can be seen
        assert box["width"] == pytest.approx(width, abs=1.5)
    assert left == pytest.approx(0.0, abs=1e-9)
    watched.check()


def test_a_price_gives_money_and_is_in_the_address(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/cost")
    page = watched.page
    assert page.get_by_role("columnheader", name="Money").count() == 0, "no price, no amount"
    page.get_by_label("Price of a rank-hour").fill("3600")
    page.get_by_label("Currency").fill("CHF")
    page.keyboard.press("Enter")
    page.wait_for_url("**price=3600&currency=CHF")
    page.get_by_role("columnheader", name="Money").wait_for()
    hours = site.ask(f"runs/{SLOW}/cost")["rank_hours"]
    paid = page.locator("tr[data-part=all] td").nth(4).inner_text()
    assert float(paid.removesuffix(" CHF").replace(",", "")) == pytest.approx(
        3600 * hours, rel=0.01, abs=0.51
    )
    page.get_by_label("Price of a rank-hour").fill("dear")
    assert page.get_by_role("button", name="Show", exact=True).is_disabled()
    page.get_by_role("button", name="no price").click()
    page.get_by_role("columnheader", name="Money").wait_for(state="detached")
    watched.check()


def test_a_switch_says_what_it_would_give_and_what_it_assumes(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    found = site.ask(f"runs/{SLOW}/cost")["what_if"]
    assert found is not None, site.ask(f"runs/{SLOW}/cost")["no_what_if"]
    with proxy(site.url, "/user/proxy/8787") as url:
        watched.origin = url
        page = watched.go(f"runs/{SLOW}").page
        page.keyboard.press("g")
        page.keyboard.press("k")
        page.wait_for_url(f"{url}/runs/{SLOW}/cost")
        watched.settled()
        result = page.locator("p.result")
        assert "Switch something on" in result.inner_text()
        switch = page.get_by_role("switch", name=re.compile(f"Rank {SLOW_RANK} as fast"))
        switch.focus()
        page.keyboard.press("Space")
        page.wait_for_url("**if=as-peers")
        steps = {tuple(one["keys"]): one["step_ms"] for one in found["outcomes"]}
        drop = steps["as-peers",] / found["replayed_ms"] - 1
        assert drop < -0.1
        page.locator("p.result", has_text="A step would take").wait_for()
        said = re.search("\\(\u2212([\\d.]+) %\\)", result.inner_text())
        assert said is not None, result.inner_text()
        assert float(said[1]) == pytest.approx(-100 * drop, abs=0.6)
        assert page.get_by_text("Assumed: Self time is replaced").is_visible()
        page.keyboard.press("Space")
        page.wait_for_url(f"{url}/runs/{SLOW}/cost")
        watched.check()


def test_where_it_is_not_known_it_says_so(site: Site, open_page: Callable[..., Watched]) -> None:
    answer = site.ask(f"runs/{FRESH}/cost")
    watched = open_page(f"runs/{FRESH}/cost")
    assert watched.sentence() == answer["text"]
    assert answer["what_if"] is None
    assert watched.page.get_by_text("No replay of the steps: needs").is_visible()
    watched.check()


def test_changes_are_chosen_and_combined_by_keyboard(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/cost")
    page = watched.page
    table = page.get_by_role("region", name="What changes would give")
    answer = site.ask(f"runs/{SLOW}/what-if")
    known = [one["key"] for one in answer["answers"] if one["step_ms"] is not None]
    table.locator("tbody tr").first.wait_for()
    assert [row.get_attribute("data-change") for row in table.locator("tbody tr").all()] == known
    page.get_by_text(answer["text"]).wait_for()
    missing = page.get_by_role("list", name="Not known").inner_text()
    for one in answer["answers"]:
        assert (one["step_ms"] is None) == (f"{one['label']}: not known" in missing)
    page.keyboard.press("f")
    focused = page.evaluate("document.activeElement.parentElement.textContent")
    assert focused.startswith("Strategy")
    page.get_by_label("Links \N{MULTIPLICATION SIGN} faster").fill("2")
    page.get_by_label("Microbatches").fill("4")
    page.keyboard.press("Enter")
    page.wait_for_url("**/cost?link_times=2&microbatches=4")
    both = site.ask(f"runs/{SLOW}/what-if?link_times=2&microbatches=4")
    page.get_by_text(both["text"]).wait_for()
    assumed = page.get_by_role("list", name="What it rests on")
    for text in both["answers"][0]["assumptions"]:
        assert text[1:] in assumed.inner_text()
    page.get_by_label("Nodes more").fill("-9")
    page.keyboard.press("Enter")
    alert = page.get_by_role("alert").filter(has_text="fewer nodes")
    alert.wait_for()
    assert "Take at most" in alert.inner_text()
    page.get_by_role("button", name="as it is").click()
    page.wait_for_url(f"**/runs/{SLOW}/cost")
    table.get_by_role("button", name=f"Rank {SLOW_RANK} as fast as its peers").click()
    page.wait_for_url(f"**/cost?without={SLOW_RANK}")
    watched.problems = [one for one in watched.problems if "422" not in one]
    watched.check()
