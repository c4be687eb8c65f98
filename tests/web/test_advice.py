"""The advice to controllers on the page of findings: it is shown, and what was done is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.web.conftest import CRASH, SLOW, Site, Watched

pytestmark = pytest.mark.browser


def test_advice_is_shown_with_its_evidence_and_what_was_done_is_recorded(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{CRASH}/findings")
    page = watched.page
    card = page.locator(".advicecard")
    card.get_by_text("How sure").wait_for()
    advice = site.ask(f"runs/{CRASH}/advice")
    text = card.inner_text()
    assert advice["what"] in text
    assert advice["why"] in text
    assert f"number {advice['epoch']}" in text
    assert "below 85 %" in text
    links = card.locator("dd a")
    assert links.count() == len(advice["evidence"]) > 0
    watched.settled()
    page.keyboard.press("d")
    choice = card.locator("form select")
    assert choice.evaluate("field => field === document.activeElement")
    choice.select_option("refused")
    card.get_by_label("By").fill("night shift")
    card.get_by_label("Note").fill("it ends in an hour")
    card.get_by_label("Note").press("Enter")
    row = card.locator("tbody tr", has_text=advice["what"]).first
    row.get_by_text("night shift").wait_for()
    assert "Refused by night shift" in row.inner_text().replace("refused", "Refused")
    assert "it ends in an hour" in row.inner_text()
    (report,) = site.ask(f"runs/{CRASH}/advice/history")["reports"]
    assert (report["epoch"], report["outcome"], report["controller"], report["text"]) == (
        advice["epoch"], "refused", "night shift", "it ends in an hour",
    )  # fmt: skip
    watched.check()


def test_where_nothing_is_to_be_done_there_is_nothing_to_report(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/findings")
    card = watched.page.locator(".advicecard")
    card.get_by_text("The run has ended.").wait_for()
    assert site.ask(f"runs/{SLOW}/advice")["evidence"] == []
    assert card.get_by_text("Nothing to do", exact=True).count() == 1
    assert card.locator("form").count() == 0
    watched.check()
