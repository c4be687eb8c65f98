"""Photograph every page of the dashboard in both themes and some widths, for a look by eye.

    python benchmarks/screenshots.py --url http://127.0.0.1:8787 --out /tmp/shots
    python benchmarks/screenshots.py --url ... --run RUN --overview docs/overview.png
    python benchmarks/screenshots.py --url ... --only compare --run RUN --before EARLIER \\
        --widths 420,1024,1440,2560

With `--overview FILE` it takes one picture of the run's overview for the README instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
THEMES = ("dark", "light")


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)


def pages(url: str, run: str, before: str) -> Iterator[tuple[str, str]]:
    """Yield a name and a path for each page that has something to show."""
    yield from pages_of_run(url, run)
    yield "compare", f"compare?b={run}{'&a=' + before if before else ''}"
    yield from pages_of_all(url)
    kept = ask(url, "preflight/runs?limit=50")["preflights"]
    for status in ("fail", "ok"):
        for one in [one for one in kept if one["status"] == status][:1]:
            yield f"preflight-{status}", f"preflight/{one['id']}"


def pages_of_run(url: str, run: str) -> Iterator[tuple[str, str]]:
    """Yield those of one run."""
    yield "overview", f"runs/{run}"
    yield "findings", f"runs/{run}/findings"
    found = ask(url, f"runs/{run}/findings")
    for finding in (found["open"] + found["recovered"])[:1]:
        yield "finding", f"runs/{run}/findings/{finding['id']}"
    yield "ranks", f"runs/{run}/ranks"
    yield "rank", f"runs/{run}/ranks/0"
    newest = ask(url, f"runs/{run}")["run"]["step"]
    yield "step", f"runs/{run}/steps" + (f"/{max(1, newest - 2)}" if newest else "")
    parts = ("collectives", "parallelism", "cost", "resources", "hang", "errors", "logs",
             "environment", "machines", "agent")  # fmt: skip
    for name in parts:
        yield name, f"runs/{run}/{name}"


def pages_of_all(url: str) -> Iterator[tuple[str, str]]:
    """Yield those that are of no single run."""
    yield "runs", "runs"
    yield "search", "search?q=step%20OR%20error"
    yield from ((name, name) for name in ("fleet", "alerts", "storage", "access"))
    yield "server", "server?settings=all"
    yield "preflights", "preflight"


def settle(page: Page) -> None:
    """Wait until the page holds its data and its fonts."""
    page.locator("#verdict, .problem, main h1").first.wait_for(timeout=60_000)
    page.evaluate("document.fonts.ready.then(() => true)")
    # Parts mount when they come near the screen: a tall window brings them all.
    size = page.viewport_size or {"width": 1440, "height": 900}
    if page.locator(".logs").count() == 0:
        page.set_viewport_size({"width": size["width"], "height": 2400})
        for _ in range(300):  # the policy of the page forbids wait_for_function
            if page.locator(".skeleton").count() == 0:
                break
            page.wait_for_timeout(100)
        page.wait_for_timeout(300)
        page.set_viewport_size(size)
    page.wait_for_timeout(200)


def photograph(browser: Browser, address: str, file: Path, theme: Any, width: int) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.on("console", lambda message: report(address, message.type, message.text))
    page.on("pageerror", lambda error: report(address, "error", str(error)))
    page.goto(address)
    settle(page)
    page.screenshot(path=file, full_page=True)
    context.close()


reported: set[tuple[str, str]] = set()


def report(address: str, kind: str, text: str) -> None:
    if kind in {"error", "warning"} and (address, text) not in reported:
        reported.add((address, text))
        print(f"{address}: {kind}: {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="address of the server")
    parser.add_argument("--run", default="", help="run id; default is the newest run")
    parser.add_argument("--out", type=Path, default=Path("artifacts/screenshots"))
    parser.add_argument("--before", default="", help="run to compare with; default by name")
    parser.add_argument("--only", default="", help="names of pages, separated by commas")
    parser.add_argument("--widths", default="1440,1024", help="in pixels, separated by commas")
    parser.add_argument("--overview", type=Path, help="write one picture for the README here")
    choices = parser.parse_args()
    url = choices.url.rstrip("/")
    run = choices.run or ask(url, "runs?limit=1")["runs"][0]["run_id"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        if choices.overview:
            photograph(browser, f"{url}/runs/{run}", choices.overview, "dark", 1280)
            print(f"{choices.overview}: {choices.overview.stat().st_size:,} bytes")
            return
        choices.out.mkdir(parents=True, exist_ok=True)
        wanted = set(choices.only.split(",")) - {""}
        for name, path in pages(url, run, choices.before):
            for theme in THEMES if not wanted or name in wanted else ():
                for width in map(int, choices.widths.split(",")):
                    file = choices.out / f"{name}-{theme}-{width}.png"
                    photograph(browser, f"{url}/{path}", file, theme, width)
                    print(file)


if __name__ == "__main__":
    main()
