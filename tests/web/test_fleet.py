"""The page of all runs together: the sentence, live runs, hosts over runs, hours by week."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rankscope_server.report.store import DATABASE
from tests.server.seed import seed_run, wait_until_judged
from tests.web.accessibility import WIDTHS, check_sizes_and_themes
from tests.web.conftest import Site, Watched, serving
from tests.web.prefix import proxy

pytestmark = pytest.mark.browser
SLOW_HOST = "node-b"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Runs on the same four hosts: one of them is slow in two of three; a fourth run goes on."""
    with serving(tmp_path_factory.mktemp("fleet")) as url:
        now_ns = time.time_ns()
        for at, fault in enumerate(("slow_compute", "none", "slow_compute", "slow_compute")):
            seed_run(
                url, run_id=f"r{at}", ranks=8, ranks_per_node=2, steps=200, fault=fault,
                slow_rank=3, slow_from=80, slow_factor=1.5, steps_per_batch=100, end=at < 3,
                start_ns=now_ns - (40 - at * 10) * 60 * 10**9,
            )  # fmt: skip
        wait_until_judged(url)
        yield Site(url)


def opened(cluster: Site, open_page: Callable[..., Watched], path: str = "fleet") -> Watched:
    watched = open_page()
    watched.origin = cluster.url
    return watched.go(path)


@pytest.mark.parametrize("path", ["fleet", "fleet?weeks=26"])
def test_the_page_is_whole_and_accessible_in_both_themes(
    cluster: Site, open_page: Callable[..., Watched], path: str
) -> None:
    watched = opened(cluster, open_page, path)
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def test_the_slow_host_is_named_and_leads_to_its_findings(
    cluster: Site, open_page: Callable[..., Watched]
) -> None:
    watched = opened(cluster, open_page)
    page = watched.page
    for _ in range(3):  # its ranks may fall silent between the two answers
        answer = cluster.ask("fleet")
        if watched.sentence() == answer["text"]:
            break
        watched.go("fleet")
    assert watched.sentence() == answer["text"]
    assert f"{SLOW_HOST} was slow in 3 of 4 runs" in answer["text"]
    assert answer["text"].startswith("1 of 1 live run needs attention")
    row = page.get_by_role("region", name="Hosts over runs").locator("tbody tr").first
    assert row.get_attribute("data-host") == SLOW_HOST
    assert "3 of 4" in row.inner_text()
    row.get_by_role("link", name="r3").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/r3/findings/*")
    watched.settled()
    assert "Rank 3" in watched.sentence()
    watched.check()


def test_live_runs_and_weeks_are_those_of_the_api(
    cluster: Site, open_page: Callable[..., Watched]
) -> None:
    watched = opened(cluster, open_page)
    page = watched.page
    answer = cluster.ask("fleet")
    live = page.get_by_role("region", name="Live runs").locator("tbody tr")
    assert live.count() == len(answer["live"]) == 1
    assert answer["live"][0]["sentence"] in live.first.inner_text()
    weeks = page.get_by_role("region", name="Rank-hours by week").locator("tbody tr")
    assert weeks.count() == 8
    page.get_by_role("button", name="26 weeks").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/fleet?weeks=26")
    weeks.nth(25).wait_for()
    live.first.get_by_role("link", name="%").click()
    page.wait_for_url("**/runs/r3/cost")
    watched.check()


def test_a_week_shows_what_was_lost_to_what_and_how_busy_machines_were(
    cluster: Site, open_page: Callable[..., Watched]
) -> None:
    watched = opened(cluster, open_page)
    page = watched.page
    week = cluster.ask("fleet")["weeks"][-1]
    if week["num_runs"] == 0:  # they began before Monday
        week = cluster.ask("fleet")["weeks"][-2]
    row = page.get_by_role("region", name="Rank-hours by week", exact=True).locator("tbody tr")
    newest = row.filter(has_text="rank-").first
    text = newest.inner_text()
    assert week["num_gpu_known"] == 0
    assert "not measured" in text, "a run without GPUs is not one whose GPUs idle"
    assert newest.locator(".usetrack.t-unknown").count() == 1
    assert f"{round(100 * week['cpu_utilization_ratio'])} %" in text
    assert "until now" in page.get_by_text("of the runs that began in it").inner_text()
    assert row.first.get_by_text("not over").is_visible()
    causes = page.get_by_role("region", name="Lost rank-hours by cause")
    cells = causes.locator("tbody tr").first.locator("td").all_inner_texts()
    heads = [head.lower() for head in causes.locator("thead th").all_inner_texts()]
    assert heads[2:] == list(week["lost_by_cause"])
    assert week["lost_by_cause"]["straggling"] > 0
    assert cells[heads.index("straggling")] != "0 rank-h"
    assert cells[heads.index("bubble")] == "0 rank-h"
    assert page.get_by_role("region", name="Rank-hours by week and project").count() == 0
    watched.check()


def test_projects_stand_apart(tmp_path: Path, open_page: Callable[..., Watched]) -> None:
    with serving(tmp_path) as url:
        for name in ("a", "b"):
            seed_run(url, run_id=name, ranks=4, steps=60, fault="none", gpus=name == "a",
                     start_ns=time.time_ns() - 600 * 10**9)  # fmt: skip
        wait_until_judged(url)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        database.execute("UPDATE run SET project = 'vision' WHERE run_id = 'a'")
    with serving(tmp_path) as url:
        watched = opened(Site(url), open_page)
        rows = watched.page.get_by_role("region", name="Rank-hours by week and project")
        texts = {row.split("\t")[1]: row for row in rows.locator("tbody tr").all_inner_texts()}
        assert set(texts) == {"default", "vision"}
        assert "not measured" in texts["default"]
        assert "not measured" not in texts["vision"]
        check_sizes_and_themes(watched.page, WIDTHS)
        watched.check()


def test_it_is_reached_by_keyboard_and_under_a_prefix(
    cluster: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    with proxy(cluster.url, "/user/proxy/8787") as url:
        watched.origin = url
        page = watched.go("runs/r0").page
        page.keyboard.press("g")
        page.keyboard.press("v")
        page.wait_for_url(f"{url}/fleet")
        watched.settled()
        assert SLOW_HOST in watched.sentence()
        watched.check()


def test_a_server_without_runs_says_so(tmp_path: Path, open_page: Callable[..., Watched]) -> None:
    with serving(tmp_path) as url:
        watched = opened(Site(url), open_page)
        assert watched.sentence() == "No run is live"
        watched.check()
