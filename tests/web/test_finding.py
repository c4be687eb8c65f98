"""A finding and a verdict are understood on one screen: what, why, cost, next, how sure, what else.

The screen is a small laptop's, 1280 x 800, without scrolling.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.web.conftest import CRASH, FRESH, SLOW, Site, Watched

pytestmark = pytest.mark.browser
WIDTH, HEIGHT = 1280, 800
PARTS = {
    "what": "h1#verdict",
    "why": ".verdict .why",
    "evidence": ".verdict .evidence",
    "ruled out": ".verdict .ruledout",
    "next": ".verdict .todo > p:first-of-type",
    "how sure": ".verdict .sure",
    "wrong if": ".verdict .wrongif",
}
# The longest that any detector said in its own tests, and as many; words as in a real one.
WORDS = "rank 12 on node-3 takes 1.42 times as long as the median of its 15 peers since step 181; "
LONGEST = {"what": 200, "why": 440, "next": 260, "would_be_wrong_if": 160}
MANY_EVIDENCE, EVIDENCE_CHARS, MANY_RULED_OUT, RULED_OUT_CHARS = 9, 360, 12, 130


def first_finding(site: Site, run: str) -> dict[str, Any]:
    found = site.ask(f"runs/{run}/findings")
    listed = found["open"] + found["recovered"]
    assert listed
    finding: dict[str, Any] = listed[0]
    return finding


def one_screen(watched: Watched, *, cost: str) -> None:
    """Fail where a part is missing, or lies below the edge of the screen."""
    page = watched.page
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.wait_for_timeout(100)
    assert page.evaluate("scrollY") == 0
    for name, selector in [*PARTS.items(), ("cost", cost)]:
        box = page.locator(selector).first.bounding_box()
        assert box is not None, f"{name} is missing"
        assert box["y"] + box["height"] <= HEIGHT, f"{name} ends at {box['y'] + box['height']:.0f}"
    over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert over <= 0
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("run", [SLOW, CRASH])
def test_a_finding_is_on_one_screen(
    site: Site, open_page: Callable[..., Watched], run: str, theme: str
) -> None:
    finding = first_finding(site, run)
    watched = open_page(f"runs/{run}/findings/{finding['id']}", theme=theme)
    one_screen(watched, cost=".verdictcost")
    sure = watched.page.locator(".verdict .sure").inner_text()
    assert sure.startswith(f"{round(finding['confidence'] * 100)} % sure, ")
    reason = finding["confidence_text"].partition(": ")[2]
    assert reason in sure
    facts = watched.page.locator(".facts").inner_text()
    assert "a second signal agrees" in facts  # what "high" means stands on the page as well


def test_a_slow_rank_is_drawn_beside_its_peers(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    finding = first_finding(site, SLOW)
    watched = open_page(f"runs/{SLOW}/findings/{finding['id']}")
    picture = watched.page.locator(".picture", has_text="Self time, each step").first
    picture.locator(".series canvas").wait_for()
    assert "dashed: the onset" in watched.page.locator(".card", has=picture).inner_text()
    text = picture.inner_text()
    assert f"rank {finding['ranks'][0]}" in text
    assert "the 7 other ranks, and their median" in text
    assert "Source: steps as each rank measured them, by its own clock." in text
    label = picture.get_by_role("img").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Self time, each step: ")
    watched.check()


@pytest.mark.parametrize("run", [SLOW, CRASH])
def test_a_verdict_is_on_one_screen(open_page: Callable[..., Watched], run: str) -> None:
    one_screen(open_page(f"runs/{run}"), cost=".verdictcost")


def long_text(length: int, begins: str = "") -> str:
    return (begins + WORDS * (length // len(WORDS) + 1))[:length].strip()


def test_the_longest_finding_is_on_one_screen_too(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    finding = site.ask(f"runs/{SLOW}/findings/{first_finding(site, SLOW)['id']}")
    finding |= {name: long_text(length) for name, length in LONGEST.items()}
    finding |= {
        "confidence_text": f"medium: {long_text(120)}",
        "cost_throughput_ratio": None,
        "cost_rank_hours_per_day": None,
        "next_command": "tr '\\0' '\\n' < /proc/41823/environ | grep ^NCCL_SOCKET_IFNAME=",
        "evidence": [
            {"text": long_text(EVIDENCE_CHARS, f"{n} "), "link": ""} for n in range(MANY_EVIDENCE)
        ],
        "ruled_out": [long_text(RULED_OUT_CHARS, f"{n} ") for n in range(MANY_RULED_OUT)],
    }  # fmt: skip
    watched = open_page()
    path = re.compile(r"/api/v1/runs/[^/]+/findings/\d+$")
    watched.page.route(path, lambda route: route.fulfill(json=finding))
    watched.go(f"runs/{SLOW}/findings/{finding['id']}")
    one_screen(watched, cost=".verdict .verdicthead")
    assert "not known" in watched.page.locator(".facts").inner_text()  # the cost, said as such
    more = watched.page.locator(".verdict .more")
    assert more.count() == 2  # the rest is there, behind a press
    more.first.locator("summary").first.click()
    assert watched.page.locator(".verdict .evidence li").count() == MANY_EVIDENCE


def test_what_a_finding_explains_is_under_it(site: Site, open_page: Callable[..., Watched]) -> None:
    found = site.ask(f"runs/{SLOW}/findings")
    listed = found["open"] + found["recovered"]
    folded = next(one for one in listed if one["explained_by"] is not None)
    watched = open_page(f"runs/{SLOW}/findings/{folded['explained_by']}")
    link = watched.page.locator(".verdictfoot a", has_text=folded["what"])
    assert link.count() == 1
    link.click()
    watched.settled()
    assert "Explained by" in watched.page.locator(".verdictsay").inner_text()


def test_an_answer_without_a_verdict_says_what_would_decide(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    overview = site.ask(f"runs/{FRESH}")
    overview |= {
        "verdict": None,
        "answer": {
            "state": "unknown", "text": "No verdict: partial, 3 of 4 ranks reporting", "detail": "",
            "deciding": ["records of the ranks that never reported; attach the agent to all ranks"],
        },
    }  # fmt: skip
    watched = open_page()
    path = re.compile(rf"/api/v1/runs/{FRESH}$")
    watched.page.route(path, lambda route: route.fulfill(json=overview))
    watched.go(f"runs/{FRESH}")
    text = watched.page.locator(".deciding").inner_text()
    assert text.startswith("What would decide")
    assert "Records of the ranks that never reported" in text
