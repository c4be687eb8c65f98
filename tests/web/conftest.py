"""A real server with seeded runs, and a real browser that is watched while it looks at them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import capabilities
from tests.command_server import Forked
from tests.server.seed import seed_run, wait_until_judged
from tests.web.preflights import BAD, keep_two

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",  # which may be of 64 MB
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
START_SECONDS = 40.0
SLOW, HEALTHY, CRASH, FRESH = "slow", "healthy", "crash", "fresh"
SLOW_RANK, SLOW_FROM, STEPS = 5, 121, 300


@dataclass(frozen=True)
class Site:
    """A running server that holds the seeded runs."""

    url: str

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=30) as reply:
            return json.load(reply)

    def sentence(self, run: str) -> str:
        """Return the first sentence that the API holds for a run."""
        answer = self.ask(f"runs/{run}")
        return str((answer["verdict"] or {}).get("what") or answer["answer"]["text"])


@contextmanager
def serving(folder: Path, *flags: str, **environ: str) -> Iterator[str]:
    """Run a server of its own; yield its address."""
    ready = folder / "ready.json"
    command = [
        sys.executable, "-m", "rankscope_server.cli", "--port", "0",
        "--data-dir", str(folder), "--ready-file", str(ready), *flags,
    ]  # fmt: skip
    log = (folder / "server.log").open("wb")
    environ = os.environ | {"RANKSCOPE_SERVER_DISK_RESERVE_BYTES": "0"} | environ
    process = Forked(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        yield str(json.loads(ready.read_text())["url"])
    finally:
        process.terminate()
        process.wait(15)
        log.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("web")) as url:
        site = Site(url)
        seed_all(site)
        yield site


@pytest.fixture(scope="session")
def kept(site: Site) -> str:
    """A preflight with a failure, and a good one of the day before."""
    keep_two(site.url, SLOW)
    return BAD


@pytest.fixture
def token_site(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, RANKSCOPE_TOKEN="open sesame") as url:
        yield url


def seed_all(site: Site) -> None:
    seed_run(site.url, run_id=HEALTHY, ranks=8, steps=STEPS, fault="none", steps_per_batch=100)
    seed_run(
        site.url, run_id=SLOW, ranks=8, steps=STEPS, fault="slow_compute", slow_rank=SLOW_RANK,
        slow_from=SLOW_FROM, slow_factor=1.4, steps_per_batch=100,
    )  # fmt: skip
    seed_run(site.url, run_id=CRASH, ranks=4, steps=120, fault="crash", steps_per_batch=60)
    seed_run(site.url, run_id=FRESH, ranks=4, steps=4, fault="none", end=False)
    wait_until_judged(site.url)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    capabilities.need("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = capabilities.find("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page and everything that went wrong or out while it was open."""

    page: Any
    context: Any
    origin: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def go(self, path: str) -> Watched:
        """Open an address and wait until the answer stands there."""
        self.page.goto(f"{self.origin}/{path}")
        return self.settled()

    def settled(self) -> Watched:
        self.page.locator("#verdict").first.wait_for(timeout=20_000)
        for _ in range(200):
            if self.page.locator(".skeleton").count() == 0:
                break
            self.page.wait_for_timeout(50)
        self.page.evaluate("document.fonts.ready.then(() => true)")
        return self

    def sentence(self) -> str:
        return str(self.page.locator("#verdict").first.inner_text())

    def check(self) -> None:
        """Fail on any error, violation or request that left the origin."""
        assert not self.problems, "\n".join(self.problems)
        assert self.requests
        assert not self.strangers(), f"left the origin: {self.strangers()}"

    def strangers(self) -> list[str]:
        """Return the requests that left the origin."""
        return [url for url in self.requests if not url.startswith((self.origin, "data:", "blob:"))]


def watch(
    browser: Any, origin: str, theme: str = "dark", width: int = 1440, **more: Any
) -> Watched:
    """Return a new page of an own context; nothing is opened yet."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce",
        **more,
    )  # fmt: skip
    page = context.new_page()
    watched = Watched(page, context, origin)
    context.on("request", lambda request: watched.requests.append(request.url))
    page.on("pageerror", lambda error: watched.problems.append(f"page error: {error}"))
    page.on("console", lambda message: note(watched, message))
    return watched


@pytest.fixture
def open_page(browser: Any, site: Site) -> Iterator[Callable[..., Watched]]:
    contexts = []

    def make(path: str = "", theme: str = "dark", width: int = 1440, **more: Any) -> Watched:
        watched = watch(browser, site.url, theme, width, **more)
        contexts.append(watched.context)
        if path:
            watched.go(path)
        return watched

    yield make
    for context in contexts:
        context.close()


def note(watched: Watched, message: Any) -> None:
    # A violation of the content security policy is reported on the console as an error.
    if message.type in {"error", "warning"}:
        watched.problems.append(f"console {message.type}: {message.text}")
