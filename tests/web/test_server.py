"""The page of Rankscope itself: how it is, where its settings are from, who may see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.seed import seed_run
from tests.web.accessibility import WIDTHS, check_sizes_and_themes
from tests.web.conftest import SLOW, Site, Watched, serving
from tests.web.prefix import proxy

pytestmark = pytest.mark.browser
SECRET = "open sesame"


def test_settings_say_where_they_are_from_and_keep_secrets(
    tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    file = tmp_path / "rankscope.toml"
    file.write_text("look_seconds = 2.0\n")
    with serving(
        tmp_path, "--config", str(file), RANKSCOPE_SERVER_LOG_LEVEL="error", RANKSCOPE_TOKEN=SECRET
    ) as url:
        seed_run(url, SECRET, run_id="r", ranks=2, steps=20, fault="none", end=False)
        watched = open_page()
        watched.origin = url
        page = watched.page
        page.goto(f"{url}/sign-in?next=server")
        page.get_by_label("Token").fill(SECRET)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url("**/server")
        watched.settled()
        table = page.get_by_role("region", name="Settings in force")
        for name, words in {
            "look_seconds": ("2", "file", f"{file}: look_seconds"),
            "log_level": ("error", "environment", "RANKSCOPE_SERVER_LOG_LEVEL"),
            "port": ("0", "command line", "--port"),
            "token": ("(set)", "environment", "RANKSCOPE_TOKEN"),
        }.items():
            row = table.get_by_role("row").filter(has=page.get_by_text(name, exact=True))
            for text in words:
                expect(row).to_contain_text(text)
        expect(table.get_by_text("silent_after_seconds", exact=True)).to_have_count(0)
        page.get_by_role("button", name="Defaults too").click()
        page.wait_for_url("**/server?settings=all")
        expect(table.get_by_text("silent_after_seconds", exact=True)).to_be_visible()
        expect(page.get_by_role("region", name="What was done")).to_contain_text("sign in")
        expect(page.get_by_role("region", name="Coverage of live runs")).to_contain_text("of 2")
        assert SECRET not in page.content()
        check_sizes_and_themes(page, WIDTHS)
        watched.check()


def test_it_is_reached_by_keyboard_and_under_a_prefix(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    with proxy(site.url, "/user/proxy/8787") as url:
        watched.origin = url
        page = watched.go(f"runs/{SLOW}").page
        page.keyboard.press("g")
        page.keyboard.press("x")
        page.wait_for_url(f"{url}/server")
        watched.settled()
        parts = page.get_by_role("region", name="Parts of the server")
        expect(parts.get_by_text("works", exact=True)).to_have_count(7)
        watched.check()
