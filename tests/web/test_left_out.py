"""What an answer does not count stands on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Sender
from tests.server.raw_run import batches_of, make_run
from tests.web.conftest import Watched, serving

pytestmark = pytest.mark.browser


def test_collectives_that_are_not_counted_are_named(browser: Any, tmp_path: Path) -> None:
    run = make_run(seed=3, ranks=2, spans=[(1, 9), (6, 12)], per_step=3, repeats=0)
    with serving(tmp_path) as url:
        with httpx.Client(base_url=url, trust_env=False) as client:
            sender = Sender(client, "twice")  # type: ignore[arg-type]
            for records, chunks in batches_of(run, 5):
                sender.send(*records, chunks=chunks)
        page = browser.new_page()
        watched = Watched(page, page.context, url).go("runs/twice/collectives")
        count = sum(one.attempt == 0 for one in run.collectives)
        assert page.get_by_text(f"Not counted: {count} operations of attempt 0.").count() == 1
        watched.go("runs/twice/collectives?steps=5-8")
        _, again = run.counted(5, 8, None, None)
        said = f"Not counted: {again} operations of steps that a later attempt ran again."
        assert page.get_by_text(said).count() == 1
        page.close()
