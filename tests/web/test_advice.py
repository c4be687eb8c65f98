"""The advice to controllers on the page of findings: it is shown, and what was done is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.seed import seed_run, wait_until_judged
from tests.web.conftest import HEALTHY, SLOW, SLOW_FROM, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser
ADVISED = "advised"


@pytest.fixture(scope="module")
def advised(site: Site) -> str:
    """A run with a slow rank that has not ended."""
    seed_run(
        site.url, run_id=ADVISED, ranks=8, steps=300, slow_rank=SLOW_RANK, slow_from=SLOW_FROM,
        slow_factor=1.4, steps_per_batch=100, end=False,
    )  # fmt: skip
    wait_until_judged(site.url)
    return ADVISED


def test_of_a_run_that_ended_nothing_is_to_be_reported(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    for run in (SLOW, HEALTHY):
        watched = open_page(f"runs/{run}/findings")
        card = watched.page.locator(".advicecard")
        card.get_by_text("The run has ended.").wait_for()
        watched.page.keyboard.press("d")
        assert card.locator("form, dl").count() == 0
        assert "as it was while the run was live" in card.inner_text()
        assert "No controller asked for advice while it was live" in card.inner_text()
        assert site.ask(f"runs/{run}/advice")["is_over"]
        watched.check()


def test_advice_is_shown_with_its_evidence_and_what_was_done_is_recorded(
    site: Site, advised: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{advised}/findings")
    page = watched.page
    card = page.locator(".advicecard")
    card.get_by_text("How sure").wait_for()
    advice = site.ask(f"runs/{advised}/advice")
    text = card.inner_text()
    assert advice["what"] in text
    assert advice["why"] in text
    assert f"number {advice['epoch']}" in text
    assert "below 85 %" in text
    links = card.locator("dd a")
    assert links.count() == len(advice["evidence"])
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
    (report,) = site.ask(f"runs/{advised}/advice/history")["reports"]
    assert (report["epoch"], report["outcome"], report["controller"], report["text"]) == (
        advice["epoch"], "refused", "night shift", "it ends in an hour",
    )  # fmt: skip
    watched.check()
