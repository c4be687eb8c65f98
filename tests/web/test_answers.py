"""What stands first on a page answers its question, of runs that are live, over and empty."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from playwright.sync_api import expect

from rankscope.wire import schema, zstd
from tests.server.seed import post_body
from tests.web.conftest import CRASH, FRESH, HEALTHY, SLOW, SLOW_RANK, STEPS, Site, Watched

pytestmark = pytest.mark.browser
EMPTY = "registered-nothing"


@pytest.fixture(scope="module")
def empty(site: Site) -> str:
    """Send one line of a run of which no rank has registered."""
    now_ns = time.time_ns()
    line = schema.LogLine(
        attempt=0, rank=-1, time_ns=now_ns, level=20, message="starting", logger="launcher", step=0
    )
    body = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": EMPTY, "producer": "p", "sequence": 1,
        "host": "node-a", "sent_ns": now_ns, "records": [line], "chunks": [],
    }  # fmt: skip
    post_body(site.url, zstd.pack(msgspec.msgpack.encode(body), 3), "")
    return EMPTY


@pytest.mark.parametrize("run", [SLOW, CRASH, HEALTHY, FRESH])
def test_findings_say_what_is_wrong(
    site: Site, open_page: Callable[..., Watched], run: str
) -> None:
    answer = site.ask(f"runs/{run}/findings")
    verdict = site.ask(f"runs/{run}")["verdict"]
    sentence = open_page(f"runs/{run}/findings").sentence()
    named = [verdict["what"]] if verdict else [one["what"] for one in answer["open"]]
    assert sentence.startswith(named[0] if named else "No findings in ")
    others = len(answer["open"]) - 1
    assert (f"{others:,} more at the end" in sentence) == (others > 0)


@pytest.mark.parametrize("run", [SLOW, CRASH, HEALTHY, FRESH])
def test_logs_say_how_much_was_reported_as_wrong(
    site: Site, open_page: Callable[..., Watched], run: str
) -> None:
    answer = site.ask(f"runs/{run}/logs?limit=1")
    levels = dict(answer["facets"]["level"])
    errors = levels.get("ERROR", 0) + levels.get("CRITICAL", 0)
    sentence = open_page(f"runs/{run}/logs").sentence()
    assert sentence.endswith(f" in {answer['total']:,} log lines")
    assert (f"{errors} error" in sentence) == (errors > 0)
    assert (f"{levels.get('WARNING', 0)} warning" in sentence) == ("WARNING" in levels)
    if not errors and "WARNING" not in levels:
        assert sentence.startswith("No error or warning in ")


def test_a_rank_says_how_it_is_and_what_names_it(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    verdict = site.ask(f"runs/{SLOW}")["verdict"]
    assert verdict["ranks"] == [SLOW_RANK]
    ranks = site.ask(f"runs/{SLOW}/ranks")["ranks"]
    others = [one for one in ranks if one["finding_what"] and one["rank"] != SLOW_RANK]
    unnamed = next(one for one in ranks if one["finding_what"] is None)
    assert others, "another finding names another rank"
    wanted = {
        SLOW_RANK: verdict["what"],
        others[0]["rank"]: f"Rank {others[0]['rank']} ended after step {STEPS}: "
        + others[0]["finding_what"],
        unnamed["rank"]: f"Rank {unnamed['rank']} ended after step {STEPS}; no finding names it",
    }
    for rank, sentence in wanted.items():
        assert open_page(f"runs/{SLOW}/ranks/{rank}").sentence() == sentence


def test_a_rank_that_failed_says_how(site: Site, open_page: Callable[..., Watched]) -> None:
    failed = [one for one in site.ask(f"runs/{CRASH}/ranks")["ranks"] if one["state"] == "failed"]
    verdict = site.ask(f"runs/{CRASH}")["verdict"]
    assert failed
    for one in failed:
        watched = open_page(f"runs/{CRASH}/ranks/{one['rank']}")
        begins = (
            verdict["what"] if one["rank"] in verdict["ranks"] else f"Rank {one['rank']} failed"
        )
        assert watched.sentence().startswith(begins)
        watched.check()


@pytest.mark.parametrize("run", [SLOW, FRESH])
def test_the_agent_says_what_it_records_and_what_was_lost(
    site: Site, open_page: Callable[..., Watched], run: str
) -> None:
    lost = sum(one["count"] for one in site.ask(f"runs/{run}/agent")["losses"])
    sentence = open_page(f"runs/{run}/agent").sentence()
    assert sentence.startswith("Recording; " if run == FRESH else "Recorded; ")
    assert sentence.endswith(f"; {lost:,} records were lost" if lost else "; no record was lost")


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("findings", "No findings yet: no step has been seen"),
        ("logs", "No error or warning in 1 log line"),
        ("agent", "No rank has registered yet"),
        ("ranks", "No rank has registered yet"),
    ],
)
def test_an_empty_run_says_that_nothing_is_known(
    open_page: Callable[..., Watched], empty: str, page: str, sentence: str
) -> None:
    watched = open_page(f"runs/{empty}/{page}")
    expect(watched.page.locator("#verdict")).to_have_text(sentence)
    watched.check()
