"""Which pages the dashboard has, by its own registry of addresses, and where tests look at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.web.conftest import CRASH, FRESH, HEALTHY, SLOW, Site
from tests.web.preflights import BAD

REGISTRY = Path(__file__).parents[2] / "web" / "app" / "url.js"
_PLACE = re.compile(r"^  \[/(.+)/, '(\w+)'\],$", re.MULTILINE)
# what an address may be of, by the name of its page in the registry and a word for its state
PAGES = {
    "runs": "runs",
    "overview": f"runs/{SLOW}",
    "overview-healthy": f"runs/{HEALTHY}",
    "overview-fresh": f"runs/{FRESH}",
    "overview-crash": f"runs/{CRASH}",
    "findings": f"runs/{SLOW}/findings",
    "finding": f"runs/{SLOW}/findings/first",
    "ranks": f"runs/{SLOW}/ranks?sel=5@200",
    "rank": f"runs/{SLOW}/ranks/5",
    "step": f"runs/{SLOW}/steps/200?sel=5@200&at=0:90000",
    "step-healthy": f"runs/{HEALTHY}/steps/100",
    "step-first": f"runs/{FRESH}/steps/1",
    "ranks-worst": f"runs/{SLOW}/ranks?order=worst",
    "ranks-by-node": f"runs/{SLOW}/ranks?order=node",
    "collectives": f"runs/{SLOW}/collectives",
    "collectives-open": f"runs/{SLOW}/collectives?call=all_reduce@default_pg@8388608&steps=200-260",
    "collectives-nothing": f"runs/{SLOW}/collectives?steps=900-950",
    "resources": f"runs/{SLOW}/resources?ranks=5",
    "resources-fresh": f"runs/{FRESH}/resources?span=all",
    "hang-over": f"runs/{HEALTHY}/hang",
    "hang-crash": f"runs/{CRASH}/hang",
    "hang-fresh": f"runs/{FRESH}/hang?ranks=1",
    "errors": f"runs/{CRASH}/errors",
    "logs": f"runs/{SLOW}/logs",
    "environment": f"runs/{SLOW}/environment",
    "agent": f"runs/{FRESH}/agent?for=1",
    "agent-over": f"runs/{SLOW}/agent",
    "machines": f"runs/{SLOW}/machines",
    "node": f"runs/{SLOW}/nodes/node-c",
    "node-missing": f"runs/{SLOW}/nodes/node-nowhere",
    "search": "search?q=kind%3Dslow_compute%20OR%20step%20OR%20error",
    "search-nothing": "search?q=nosuchwordanywhere",
    "search-empty": "search",
    "compare": f"compare?a={HEALTHY}&b={SLOW}",
    "compare-within": f"compare?a={SLOW}&b={SLOW}&a_steps=11-120&b_steps=121-300",
    "compare-nothing": "compare",
    "compare-alone": f"compare?b={HEALTHY}",
    "parallelism": f"runs/{SLOW}/parallelism",
    "parallelism-fresh": f"runs/{FRESH}/parallelism",
    "cost": f"runs/{SLOW}/cost",
    "fleet": "fleet",
    "alerts": "alerts",
    "storage": "storage",
    "access": "access",
    "server": "server?settings=all",
    "sign-in": "sign-in",
    "preflights": "preflight",
    "preflight": f"preflight/{BAD}",
}


def places() -> list[tuple[str, str]]:
    """Return the pattern of the path of each place, and the name of its page."""
    return [(pattern, name) for pattern, name in _PLACE.findall(REGISTRY.read_text())]


def page_of(path: str) -> str:
    """Return the name of the page at a path."""
    clean = path.partition("?")[0]
    return next((name for pattern, name in places() if re.search(pattern, clean)), "unknown")


def all_pages() -> set[str]:
    """Return the names of all pages; that of the root leads to the runs and is none."""
    return {name for _, name in places()} - {"home"}


def of_run(ask: Callable[[str], Any], run: str) -> Iterator[tuple[str, str]]:
    """Yield a name and a path for each page of a run that has something to show.

    `ask` returns the answer of the API to a path below `/api/v1/`.
    """
    yield "overview", f"runs/{run}"
    yield "findings", f"runs/{run}/findings"
    found = ask(f"runs/{run}/findings")
    for finding in (found["open"] + found["recovered"])[:1]:
        yield "finding", f"runs/{run}/findings/{finding['id']}"
    yield "ranks", f"runs/{run}/ranks"
    yield "rank", f"runs/{run}/ranks/0"
    newest = ask(f"runs/{run}")["run"]["step"]
    yield "step", f"runs/{run}/steps" + (f"/{max(1, newest - 2)}" if newest else "")
    parts = ("collectives", "parallelism", "cost", "resources", "hang", "errors", "logs",
             "environment", "machines", "agent")  # fmt: skip
    for name in parts:
        yield name, f"runs/{run}/{name}"
    for machine in ask(f"runs/{run}/machines")["machines"][:1]:
        yield "node", f"runs/{run}/nodes/{machine['host']}"
    yield "compare", f"compare?b={run}"


def of_all(ask: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield those that are of no single run."""
    yield "runs", "runs"
    yield "search", "search?q=step%20OR%20error"
    yield from ((name, name) for name in ("fleet", "alerts", "storage", "access"))
    yield "server", "server?settings=all"
    yield "preflights", "preflight"
    kept = ask("preflight/runs?limit=50")["preflights"]
    for status in ("fail", "ok"):
        for one in [one for one in kept if one["status"] == status][:1]:
            yield f"preflight-{status}", f"preflight/{one['id']}"
    yield "sign-in", "sign-in"


def path_of(site: Site, name: str) -> str:
    path = PAGES[name]
    if path.endswith("/first"):
        found = site.ask(f"runs/{SLOW}/findings")
        listed = found["open"] + found["recovered"]
        assert listed, "the seeded run has a slow rank: a server that finds nothing is a failure"
        path = path.replace("first", str(listed[0]["id"]))
    return path
