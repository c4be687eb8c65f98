"""The overview leads to runs of trackers and to labels that are addresses, and to nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from rankscope.wire import schema
from tests.web import questioned as on
from tests.web.conftest import Site, Watched

pytestmark = pytest.mark.browser
TICKET = "https://tickets.example/7"


def test_links_lead_out(site: Site, open_page: Callable[..., Watched]) -> None:
    at = time.time_ns()
    started = schema.RunStarted(
        attempt=0, rank=schema.NODE_RANK, time_ns=at, name="linked",
        tags={"ticket": TICKET, "team": "vision", "bad": "javascript:alert(1)"},
    )  # fmt: skip
    said = schema.Event(
        attempt=0, rank=0, time_ns=at, name=schema.TRACKER,
        fields={"tracker": "mlflow", "run": "8d1f", "name": "quiet-owl", "page": on.LOSSES},
    )  # fmt: skip
    on.send(site.url, "linked", started, said)
    page = open_page("runs/linked").page
    row = page.get_by_role("list", name="Trackers and labels")
    links = {one.inner_text(): one.get_attribute("href") for one in row.locator("a").all()}
    assert links == {"quiet-owl": on.LOSSES, TICKET: TICKET}
    assert "team vision" in " ".join(row.inner_text().split())
    assert json.dumps(links).count("javascript") == 0
