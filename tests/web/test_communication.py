"""The page of communication: its sentence, its kinds, who is last, what was not measured."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

import msgspec
import pytest

from rankscope.preflight.facts.edges import Bandwidth, EdgeFacts
from rankscope.preflight.facts.host import HostFacts
from rankscope.preflight.model import Facts, LaunchVerdict, NodeReport
from tests.server.jobs_sent import send_job
from tests.server.seed import post_body, seed_run
from tests.simulator.job import Job
from tests.web.accessibility import check_sizes_and_themes, violations
from tests.web.conftest import SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser
LINKED, MANY = "linked", "many-nodes"
MANY_JOB = Job(data=48, steps=10, ranks_per_host=1, backend="gloo")
HOSTS = ("node-a", "node-b", "node-c", "node-d")


@pytest.fixture(scope="module")
def linked(site: Site) -> str:
    """A run of four nodes whose preflight measured all ways but one; one of them is slow."""
    seed_run(site.url, run_id=LINKED, ranks=8, steps=60, fault="none", steps_per_batch=60)
    put_preflight(site, LINKED, HOSTS, ("node-b", "node-c"), ("node-d", "node-a"))
    return LINKED


@pytest.fixture(scope="module")
def many(site: Site) -> str:
    """The same of more nodes than the matrix has room for."""
    send_job(lambda body: post_body(site.url, body), MANY, MANY_JOB, collectives=True)
    hosts = tuple(MANY_JOB.host(rank) for rank in range(MANY_JOB.num_ranks))
    put_preflight(site, MANY, hosts, (hosts[45], hosts[3]), (hosts[0], hosts[1]))
    return MANY


Way = tuple[str, str]


def put_preflight(site: Site, run: str, hosts: tuple[str, ...], slow: Way, missing: Way) -> None:
    reports = [
        NodeReport(
            node=host, version=3, node_rank=rank, stage="done", started_unix_s=time.time(),
            facts=Facts(host=HostFacts(hostname=host)),
            edges={
                peer: EdgeFacts(
                    bandwidth=Bandwidth(mbit_per_s=700.0 if (host, peer) == slow else 9000.0)
                )
                for peer in hosts if peer != host and (host, peer) != missing
            },
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    verdict = LaunchVerdict(run_id="x", expected=hosts, reported=hosts, findings=(), results=())
    body = msgspec.json.encode({"verdict": verdict, "reports": reports, "run_id": run})
    request = urllib.request.Request(
        f"{site.url}/api/v1/preflight/runs/of-{run}", body, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert reply.status == 200


def test_of_many_nodes_every_one_is_listed_the_worst_first(
    many: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{many}/collectives")
    page = watched.page
    page.get_by_role("button", name="Its preflight: ").click()
    matrix = page.get_by_role("region", name="Links between nodes")
    matrix.get_by_text("87.5 MB/s").wait_for()
    assert matrix.locator("tbody tr").count() == 40
    rows = page.get_by_role("region", name="Every node, by its slowest way").locator("tbody tr")
    assert rows.count() == MANY_JOB.num_ranks
    for row in (rows.nth(0), rows.nth(1)):
        assert "node-0045 to node-0003" in row.inner_text()
        assert "94 of 94" in row.inner_text()
    assert "93 of 94" in rows.filter(has_text="node-0001").last.inner_text()
    check_sizes_and_themes(page, (420, 1440))
    watched.check()


def test_the_sentence_is_that_of_the_api_and_names_the_last(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/collectives")
    answer = site.ask(f"runs/{SLOW}/communication")
    assert watched.sentence() == answer["text"]
    assert f"rank {SLOW_RANK} arrives last in" in answer["text"]
    page = watched.page
    assert page.get_by_text(f"Rank {SLOW_RANK} is last in").first.is_visible()
    assert page.get_by_role("region", name="Kinds of calls").get_by_text("unknown").count() > 0
    watched.check()


def test_a_kind_opens_by_keyboard_and_is_in_the_address(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/collectives")
    page = watched.page
    button = page.get_by_role("region", name="Kinds of calls").get_by_role("button").first
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**call=all_reduce@default_pg@*")
    more = page.locator(".morekind")
    more.wait_for()
    assert "Matched on all members" in more.inner_text()
    assert "no preflight of this run measured links" in more.inner_text()
    again = open_page(page.url.removeprefix(f"{watched.origin}/"))
    again.page.locator(".morekind").wait_for()
    button.focus()
    page.keyboard.press("Enter")
    more.wait_for(state="detached")
    watched.check()


def test_steps_are_chosen_and_empty_ones_are_said(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/collectives")
    page = watched.page
    page.get_by_label("Steps").fill("10-40")
    page.keyboard.press("Enter")
    page.wait_for_url("**steps=10-40")
    text = site.ask(f"runs/{SLOW}/communication?from=10&to=40")["text"]
    page.locator("h1", has_text=text[:40]).wait_for()
    page.get_by_label("Steps").fill("900-950")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="No call was recorded in").wait_for()
    watched.check()


def test_links_show_what_was_measured_and_hatch_the_rest(
    linked: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{linked}/collectives")
    page = watched.page
    matrix = page.get_by_role("region", name="Links between nodes")
    assert matrix.get_by_text("87.5 MB/s").get_attribute("class") == "l-4"
    assert matrix.get_by_text("1.13 GB/s").count() == 10
    assert matrix.locator("td.unmeasured").count() == 1, "one way of twelve"
    assert page.get_by_text("node-b to node-c, 87.5 MB/s").first.is_visible()
    kinds = page.get_by_role("region", name="Kinds of calls")
    assert kinds.get_by_text("87.5 MB/s").count() == 2, "expected of each size class"
    assert violations(page) == []
    page.get_by_role("button", name="Messages of the run: 0 ways").click()
    page.wait_for_url("**links=messages")
    assert matrix.locator("td.unmeasured").count() == 16
    watched.check()


@pytest.mark.parametrize("width", [420, 2560])
def test_narrow_and_wide_windows_hold_it(
    linked: str, open_page: Callable[..., Watched], width: int
) -> None:
    page = open_page(f"runs/{linked}/collectives", width=width).page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
