"""The pages of preflights: the answer, what stands in the way, paths, a call of the server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.command_server import Forked
from tests.web.accessibility import WIDTHS, check_sizes_and_themes, violations
from tests.web.conftest import SLOW, Site, Watched
from tests.web.prefix import proxy
from tests.web.preflights import BAD, COMMAND, GOOD

pytestmark = pytest.mark.browser
PAGES = ("preflight", f"preflight?run={SLOW}&node=peer-a", f"preflight/{BAD}",
         f"preflight/{BAD}?metric=mbit", f"preflight/{GOOD}", "preflight?run=none")  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_whole_and_accessible_in_both_themes(
    kept: str, open_page: Callable[..., Watched], path: str
) -> None:
    watched = open_page(path, theme="dark")
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def test_the_answer_is_that_of_the_api_and_worst_comes_first(
    kept: str, site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"preflight/{kept}")
    answer = site.ask(f"preflight/runs/{kept}")
    assert watched.sentence() == answer["text"]
    assert answer["text"] == "Do not launch yet: peer-b cannot reach peer-a:29500"
    page = watched.page
    found = page.locator(".pffinding h3")
    assert "peer-b cannot reach" in found.nth(0).inner_text()
    assert "1024 files" in found.nth(1).inner_text()
    assert page.locator(".pffinding .command code").first.inner_text() == COMMAND
    assert page.get_by_text("Ask who runs the switch.").is_visible(), "no command: a person's work"
    families = [row.inner_text().split("\n") for row in page.locator(".pffamily summary").all()]
    assert [(one[1], one[0]) for one in families] == [
        ("ports", "Fails"), ("limits", "Warning"), ("paths", "No answer"), ("gpu", "Skipped"),
    ]  # fmt: skip
    page.locator(".pffamily summary").nth(3).focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("cell", name="no GPU on any node").is_visible()
    watched.check()


def test_the_matrix_has_a_direction_and_hatches_what_was_not_measured(
    kept: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"preflight/{kept}")
    page = watched.page
    matrix = page.get_by_role("region", name="Reachability from node to node")
    assert matrix.locator("td.pfbad").inner_text() == "dropped"
    assert matrix.locator("td.pfbad").get_attribute("title") == (
        "peer-b to peer-a: dropped; named by port.master.reach"
    )
    assert matrix.get_by_text("reached").count() == 5
    page.get_by_role("button", name="Bandwidth").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**metric=mbit")
    speeds = page.get_by_role("region", name="Bandwidth from node to node")
    speeds.get_by_text("700 Mbit/s").wait_for()
    assert speeds.get_by_text("700 Mbit/s").get_attribute("class") == "l-4"
    assert speeds.get_by_text("9 Gbit/s").count() == 3
    assert speeds.locator("td.unmeasured").get_attribute("title") == (
        "peer-c to peer-b: not measured"
    )
    assert speeds.locator("td.pfbad").inner_text() == "dropped", "no speed, and it is known why"
    watched.check()


def test_what_changed_since_the_last_good_one(
    kept: str, site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"preflight/{kept}")
    page = watched.page
    page.get_by_role("heading", name="What changed since the last good one").wait_for()
    paths = page.get_by_role("region", name="Paths that differ")
    paths.wait_for()
    compared = site.ask(f"preflight/runs/{kept}/compare?before={GOOD}")
    assert paths.locator("tbody tr").count() == len(compared["pairs"]) == 2
    assert "peer-b" in paths.locator("tbody tr").first.inner_text()
    assert "1.13" not in paths.inner_text()
    assert page.locator("main").get_by_text("peer-c: 1024 files").count() == 3  # once as new
    page.get_by_role("link", name="the one of").click()
    page.wait_for_url(f"**/preflight/{GOOD}")
    watched.settled()
    assert watched.sentence().startswith("Ready to launch: 1 check passed on 3 nodes")
    assert "no earlier preflight" in page.locator("main").inner_text()
    watched.check()


def test_commands_of_a_peer_and_its_history(kept: str, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"preflight/{kept}")
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watched.page

    def copied(name: str) -> str:
        page.evaluate("navigator.clipboard.writeText('')")  # what was said of the last one stands
        page.get_by_role("button", name=name).click()
        page.locator("[aria-live=polite]", has_text="Copied").wait_for()
        for _ in range(100):
            text = str(page.evaluate("navigator.clipboard.readText()"))
            if text:
                break
            page.wait_for_timeout(50)
        return text

    assert copied("Copy 1 command for peer-a") == COMMAND
    assert copied("Copy command that repeats it on peer-b") == (
        "rankscope preflight --nodes peer-a,peer-b,peer-c --node peer-b"
    )
    page.get_by_role("region", name="Nodes", exact=True).get_by_role("link", name="peer-a").click()
    page.wait_for_url("**/preflight?node=peer-a")
    page.get_by_text("a failure named it in 1 of 2").wait_for()
    states = page.get_by_role("list", name="States of peer-a").get_by_role("link")
    assert [one.get_attribute("class") for one in states.all()] == ["is-ok", "is-fail"]
    states.last.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/preflight/{BAD}")
    watched.check()


def test_a_run_leads_to_its_preflights_by_keyboard_and_under_a_prefix(
    kept: str, site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    with proxy(site.url, "/user/proxy/8787") as url:
        watched.origin = url
        page = watched.go(f"runs/{SLOW}").page
        page.keyboard.press("g")
        page.keyboard.press("p")
        page.wait_for_url(f"{url}/preflight?run={SLOW}")
        watched.settled()
        assert watched.sentence() == "Do not launch yet: peer-b cannot reach peer-a:29500"
        page.get_by_role("link", name="Why").click()
        page.wait_for_url(f"{url}/preflight/{BAD}")
        watched.settled()
        page.get_by_role("link", name=f"run {SLOW}").click()
        page.wait_for_url(f"{url}/runs/{SLOW}")
        watched.check()


@pytest.fixture
def waiting(site: Site, tmp_path: Path) -> Iterator[str]:
    """The id of a preflight under way: a real agent on this machine waits for a second node."""
    own = next(
        row.address
        for rows in psutil.net_if_addrs().values()
        for row in rows
        if row.family.name == "AF_INET" and not row.address.startswith("127.")
    )
    argv = [
        sys.executable, "-m", "rankscope", "preflight", "--quick", "--server", site.url, "--run",
        tmp_path.name, "--nodes", f"{own},10.255.255.1", "--node", own, "--wait", "50",
    ]  # fmt: skip
    known = {one["id"] for one in site.ask("preflight/runs")["preflights"]}
    with (tmp_path / "agent.log").open("wb") as log:
        agent = Forked(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 40
            while True:
                assert time.monotonic() < deadline, (tmp_path / "agent.log").read_text()
                fresh = {one["id"] for one in site.ask("preflight/runs")["preflights"]} - known
                if fresh:
                    (id,) = fresh
                    nodes = site.ask(f"preflight/runs/{id}")["nodes"]
                    if any(node["ports"] for node in nodes):
                        break
                time.sleep(0.1)
            yield id
        finally:
            agent.terminate()
            agent.wait(30)


def test_the_server_calls_an_agent_that_listens(
    waiting: str, site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"preflight/{waiting}")
    page = watched.page
    assert watched.sentence() == "Still under way: 0 of 2 nodes ended"
    form = page.get_by_role("form", name="Call a node")
    form.get_by_role("button", name="Make 1 call").focus()
    page.keyboard.press("Enter")
    calls = page.get_by_role("region", name="Calls of the server")
    calls.get_by_text("ok: the agent of the node answered").wait_for(timeout=15_000)
    assert violations(page) == []
    watched.check()


def test_a_new_preflight_gives_its_command_once(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page("preflight")
    page = watched.page
    field = page.get_by_label("Nodes: their names, or how many")
    field.fill("node-x; rm")
    page.get_by_role("button", name="Make the command").click()
    page.get_by_role("alert").get_by_text("Names of letters").wait_for()
    field.fill("node-x, node-y")
    page.keyboard.press("Enter")
    command = page.locator("[role=status] .command code")
    command.wait_for()
    assert f"rankscope preflight --server {site.url} --run " in command.inner_text()
    page.get_by_role("link", name="Follow it").click()
    watched.settled()
    assert watched.sentence() == "Still under way: 0 of 2 nodes ended"
    page.get_by_text("Waiting for node-x, node-y.").wait_for()
    page.get_by_text("No node has said yet on which ports it listens.").wait_for()
    watched.check()


def test_one_that_is_not_there_says_so(open_page: Callable[..., Watched]) -> None:
    watched = open_page("preflight/no-such-one")
    assert watched.sentence() == "No preflight no-such-one can be shown"
    assert watched.page.get_by_role("link", name="All preflights").is_visible()
