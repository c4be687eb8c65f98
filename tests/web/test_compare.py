"""Two runs beside each other: chosen in the list, told in one sentence, narrowed by the address."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.web.accessibility import check_sizes_and_themes
from tests.web.conftest import FRESH, HEALTHY, SLOW, SLOW_FROM, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser


def test_two_runs_are_chosen_in_the_list_by_keyboard(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page("runs")
    page = watched.page
    boxes = page.get_by_role("checkbox")
    boxes.nth(0).focus()
    page.keyboard.press("Space")
    page.get_by_text("Choose one more to compare").wait_for()
    boxes.nth(1).focus()
    page.keyboard.press("Space")
    link = page.get_by_role("link", name="Compare the two")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?a=*&b=*")
    watched.settled()
    assert watched.sentence()
    watched.check()


def test_the_sentence_and_the_rows_are_those_of_the_api(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"compare?a={HEALTHY}&b={SLOW}")
    answer = site.ask(f"runs/{SLOW}/compare?before={HEALTHY}")
    assert watched.sentence() == answer["text"]
    assert "slower than in" in answer["text"]
    table = watched.page.get_by_role("region", name="Parts of a step")
    for row in answer["parts"]:
        if row["state"] in ("longer", "shorter"):
            shown = table.locator("tr", has_text=row["label"].capitalize())
            assert row["state"] in shown.inner_text()
    json_link = watched.page.get_by_role("link", name="JSON").get_attribute("href")
    assert json_link == f"api/v1/runs/{SLOW}/compare?before={HEALTHY}"
    findings = watched.page.get_by_role("region", name="Findings of both")
    assert findings.get_by_role("link").first.is_visible()


def test_distributions_of_parts_and_ranks_are_drawn(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"compare?a={HEALTHY}&b={SLOW}")
    page = watched.page
    answer = site.ask(f"runs/{SLOW}/compare?before={HEALTHY}")
    page.get_by_text(f"{answer['spread_text']}.").wait_for()
    assert f"the self time of rank {SLOW_RANK} changed most" in answer["spread_text"]
    parts = page.get_by_role("region", name="Distributions by part").locator("tbody tr")
    assert parts.count() == len(answer["spreads"])
    ranks = page.get_by_role("region", name="Distributions by rank")
    assert f"rank {SLOW_RANK}" in ranks.locator("tbody tr").nth(1).inner_text()
    slow = answer["rank_spreads"][1]
    track = ranks.locator("tbody tr").nth(1).locator(".bandtrack")
    for side, name in enumerate(("before_ms", "after_ms")):
        box = track.nth(side).bounding_box()
        line = track.nth(side).locator(".barlimit").bounding_box()
        share = slow[name][2] / max(*slow["before_ms"], *slow["after_ms"])
        assert line["x"] - box["x"] == pytest.approx(share * box["width"], abs=2)
    check_sizes_and_themes(page, (420, 1440))
    watched.check()


def test_the_menu_of_a_run_and_steps_before_and_since_its_verdict(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}")
    page = watched.page
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_url(f"**/compare?b={SLOW}")
    watched.settled()
    assert "choose one to compare with" in watched.sentence()
    page.get_by_role("button", name="compare the two").click()
    page.wait_for_url("**a_steps=*")
    page.locator("h1", has_text="slower than steps").wait_for()
    assert f"b_steps={SLOW_FROM}-" in page.url
    again = open_page(page.url.removeprefix(f"{watched.origin}/"))
    assert again.sentence() == watched.sentence(), "the view is its address"
    page.get_by_role("button", name="Swap").click()
    page.locator("h1", has_text="faster than steps").wait_for()
    watched.check()


def test_a_run_without_one_before_it_offers_others(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"compare?b={SLOW}")
    rows = watched.page.locator(".card", has_text="Compare with").locator("li")
    rows.filter(has_text=f" {HEALTHY},").get_by_role("link").wait_for()
    assert rows.filter(has_text=f" {SLOW},").count() == 0
    rows.filter(has_text=f" {HEALTHY},").get_by_role("link").click()
    watched.page.wait_for_url(f"**/compare?a={HEALTHY}&b={SLOW}")
    watched.page.locator("h1", has_text="slower than in").wait_for()
    watched.check()


def test_a_finding_leads_to_its_steps_beside_those_before(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    found = site.ask(f"runs/{SLOW}/findings")
    slow = next(one for one in found["open"] + found["recovered"] if one["kind"] == "slow_compute")
    watched = open_page(f"runs/{SLOW}/findings/{slow['id']}")
    watched.page.get_by_role("link", name="Compare before and since").click()
    watched.page.wait_for_url(f"**b_steps={slow['onset_step']}-*")
    watched.page.locator("h1", has_text="slower than steps 1 to").wait_for()
    watched.page.get_by_role("img", name="Step time").wait_for()
    watched.check()


def test_steps_are_typed_and_what_is_no_range_is_said(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"compare?a={HEALTHY}&b={SLOW}")
    page = watched.page
    form = page.get_by_role("form", name="After")
    form.get_by_label("Steps").fill("nonsense")
    form.get_by_text("Steps are two numbers").wait_for()
    form.get_by_label("Steps").fill(f"11-{SLOW_FROM - 1}")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="no difference beyond noise").wait_for()
    assert f"b_steps=11-{SLOW_FROM - 1}" in page.url
    watched.check()


def test_what_cannot_be_compared_is_said(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"compare?a={HEALTHY}&b={FRESH}")
    text = watched.page.locator(".plainlist").inner_text()
    assert "8 ranks" in text
    assert "is still" in text
    assert "noise is not known" in text
    assert "too few steps" in watched.sentence()


def test_a_run_that_is_not_there_leaves_the_way_to_choose(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page()
    watched.page.goto(f"{watched.origin}/compare?a=no-such&b={SLOW}")
    watched.page.get_by_text("no run 'no-such'").wait_for()
    assert watched.page.get_by_role("form", name="Before").is_visible()


@pytest.mark.parametrize("width", [420, 2560])
def test_narrow_and_wide_windows_hold_it(open_page: Callable[..., Watched], width: int) -> None:
    page = open_page(f"compare?a={HEALTHY}&b={SLOW}", width=width).page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
