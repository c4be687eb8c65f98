"""The storage page: sizes, a pin, and a deletion that names the run and wants its id."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.seed import seed_run, wait_until_judged
from tests.web.accessibility import violations
from tests.web.conftest import Site, Watched, serving

pytestmark = pytest.mark.browser


def test_a_run_is_pinned_and_deleted_by_its_id(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    seed_run(site.url, run_id="to-delete", ranks=2, steps=40, fault="none", seed=7)
    seed_run(site.url, run_id="still-live", ranks=2, steps=40, fault="none", end=False, seed=8)
    wait_until_judged(site.url)
    watched = open_page("runs")
    page = watched.page
    page.get_by_role("link", name="Storage").click()
    watched.settled()
    assert "runs, " in watched.sentence()
    page.get_by_role("region", name="Sizes by kind").get_by_text("single collectives").wait_for()
    assert page.get_by_role("button", name="Delete run still-live").is_disabled()

    page.get_by_role("button", name="Pin run to-delete", exact=True).click()
    page.get_by_role("button", name="Unpin run to-delete").wait_for()
    assert page.get_by_role("button", name="Delete run to-delete").is_disabled()
    page.get_by_role("button", name="Unpin run to-delete").click()
    page.get_by_role("button", name="Pin run to-delete", exact=True).wait_for()

    page.get_by_role("button", name="Delete run to-delete").click()
    form = page.get_by_role("form", name="Delete run to-delete")
    form.get_by_text("Delete run “to-delete”").wait_for()
    assert violations(page) == []
    confirm = form.get_by_role("button", name="Delete to-delete")
    field = form.get_by_role("textbox", name="Its id")
    field.fill("still-live")
    assert confirm.is_disabled()
    form.get_by_role("button", name="Cancel").click()
    assert site.ask("runs/to-delete")["run"]["run_id"] == "to-delete"  # nothing was asked
    page.get_by_role("button", name="Delete run to-delete").click()
    field.fill("to-delete")
    confirm.click()
    page.get_by_role("region", name="Deleted runs").get_by_text("to-delete").wait_for()
    page.get_by_role("region", name="Deleted runs").get_by_text("gone", exact=True).wait_for()
    assert "to-delete" not in {run["run_id"] for run in site.ask("runs")["runs"]}
    assert violations(page) == []
    watched.check()

    page.goto(f"{site.url}/runs/to-delete")
    page.get_by_role("heading", name="Run “to-delete” was deleted").wait_for()


def test_a_page_says_what_retention_removed(
    tmp_path: Path, browser: Any, open_page: Callable[..., Watched]
) -> None:
    with serving(tmp_path) as url:
        seed_run(url, run_id="thinned", ranks=2, steps=40, fault="none")
        with sqlite3.connect(tmp_path / "rankscope.db") as database:
            row = ("thinned", "logs", 9, 4096)
            database.execute(
                "INSERT INTO removal (run_id, kind, rows, bytes) VALUES (?,?,?,?)", row
            )
        database.close()
        page = open_page().page
        page.goto(f"{url}/runs/thinned/logs")
        page.get_by_role("note").get_by_text(
            "Older log lines were removed by retention (4.0 KiB)."
        ).wait_for()
        page.goto(f"{url}/runs/thinned/collectives")
        page.locator("#verdict").wait_for()
        assert page.get_by_role("note").count() == 0
