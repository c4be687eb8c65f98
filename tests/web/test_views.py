"""Views that are saved under a name: of one run or of every run, opened from the palette."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.web.accessibility import violations
from tests.web.conftest import CRASH, SLOW, Site, Watched

pytestmark = pytest.mark.browser


def save(page: Any, name: str, every_run: bool) -> None:
    page.keyboard.press("v")
    form = page.get_by_role("form", name="Save this view")
    expect(form.get_by_role("textbox")).to_be_focused()
    page.keyboard.type(name)
    if every_run:
        form.get_by_role("checkbox", name="for every run").check()
    form.get_by_role("textbox").press("Enter")
    page.get_by_role("button", name=f"Delete the view {name}").wait_for()
    page.keyboard.press("Escape")


def open_from_palette(watched: Watched, name: str) -> None:
    page = watched.page
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Go to").fill(name)
    page.get_by_role("option", name=name).filter(has_text="saved view").click()
    watched.settled()


def test_a_view_is_saved_opened_in_another_run_and_deleted(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?steps=100-200&order=worst&sel=5@150")
    page = watched.page
    seen = page.url
    save(page, "the slow rank", every_run=False)
    watched.go(f"runs/{SLOW}/logs?level=error")
    save(page, "errors of a run", every_run=True)
    saved = {one["name"]: one["address"] for one in site.ask("views")["views"]}
    assert saved["the slow rank"] == seen.removeprefix(f"{site.url}/")
    assert saved["errors of a run"] == "runs/*/logs?level=error"

    watched.go(f"runs/{CRASH}")
    open_from_palette(watched, "errors of a run")
    assert page.url == f"{site.url}/runs/{CRASH}/logs?level=error"
    open_from_palette(watched, "the slow rank")
    assert page.url == seen
    expect(page.get_by_role("region", name="Pinned cell")).to_be_visible()

    watched.go("runs")  # where no run is open
    page.get_by_role("button", name="Views").click()
    dialog = page.get_by_role("dialog", name="Saved views")
    expect(dialog.get_by_role("link", name="the slow rank")).to_be_visible()
    expect(dialog.get_by_text("errors of a run")).to_be_visible()
    expect(dialog.get_by_role("link", name="errors of a run")).to_have_count(0)
    assert violations(page) == []
    for name in saved:
        dialog.get_by_role("button", name=f"Delete the view {name}").click()
    dialog.get_by_text("None is saved yet").wait_for()
    assert site.ask("views")["views"] == []
    watched.check()


def test_a_name_that_is_refused_is_said(site: Site, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}")
    page = watched.page
    page.route("**/api/v1/views", lambda route: route.continue_(post_data='{"name": ""}'))
    page.keyboard.press("v")
    page.get_by_role("dialog", name="Saved views").wait_for()
    page.keyboard.type("mine")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("this cannot be kept")
    assert "mine" not in {one["name"] for one in site.ask("views")["views"]}
