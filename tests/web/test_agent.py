"""The agent's page: ask in the browser, be answered by a collector, see it without a reload."""

from __future__ import annotations

import gzip
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.wire import schema
from tests.server.seed import seed_run
from tests.web.accessibility import violations
from tests.web.conftest import Site, Watched

pytestmark = pytest.mark.browser
TRACE = gzip.compress(json.dumps({"traceEvents": []}).encode())


class Collector:
    """Speaks for rank 1 as a node's collector does."""

    def __init__(self, site: Site, run: str) -> None:
        self.site, self.run, self.sequence = site, run, 0
        seed_run(site.url, run_id=run, ranks=4, steps=6, fault="none", end=False)

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.site.url}/api/v1/{path}", body, {schema.COMMANDS_HEADER: "1"}
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def send(self, *records: schema.Record) -> list[dict[str, Any]]:
        """Send where rank 1 is, and more; return the open commands."""
        self.sequence += 1
        now = time.time_ns()
        state = schema.RankState(
            attempt=0, rank=1, time_ns=now, step=7, phase="other", phase_since_ns=now,
            heartbeat_ns=now,
        )  # fmt: skip
        batch = schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=self.run, producer="browser-test",
            sequence=self.sequence, host="node-a", sent_ns=now,
            records=[msgspec.Raw(schema.encode(record)) for record in (state, *records)],
        )  # fmt: skip
        commands: list[dict[str, Any]] = self.post("ingest", schema.encode(batch))["commands"]
        return commands

    def answer(self, command: int, state: Any, **more: Any) -> None:
        self.send(
            schema.CommandAnswer(
                attempt=0, rank=1, time_ns=time.time_ns(), command=command, state=state, **more
            )
        )


def test_a_profile_is_asked_for_confirmed_answered_and_downloaded(
    site: Site, open_page: Callable[..., Watched], tmp_path: Path
) -> None:
    collector = Collector(site, "asked")
    watched = open_page("runs/asked/agent")
    page = watched.page
    page.get_by_role("textbox", name="Ranks").fill("1")
    page.get_by_role("textbox", name="Steps to profile").fill("2")
    page.get_by_role("button", name="Profile").focus()
    page.keyboard.press("Enter")  # by keyboard alone: the question takes the focus
    page.get_by_text("Profile 2 steps on rank 1?").wait_for()
    assert violations(page) == []
    page.keyboard.press("Enter")
    page.get_by_text("waits for its node").wait_for()
    (command,) = collector.send()
    assert (command["kind"], command["ranks"], command["num_steps"]) == ("profile", [1], 2)
    page.get_by_text("sent to its node").wait_for()
    collector.answer(command["id"], "running", reason="steps 8 to 10")
    page.get_by_text("under way").wait_for()
    address = f"runs/asked/commands/{command['id']}/ranks/1/trace?offset=0&total={len(TRACE)}"
    collector.post(address, TRACE)
    operator = schema.OperatorTime(name="aten::mm", category="cpu_op", count=3, total_ns=10**6)
    collector.answer(
        command["id"], "done", reason="3 steps in 1 s", trace_bytes=len(TRACE), operators=[operator]
    )
    with page.expect_download() as download:
        page.get_by_role("link", name="Trace,").click()
    download.value.save_as(tmp_path / "trace.json.gz")
    assert (tmp_path / "trace.json.gz").read_bytes() == TRACE
    page.get_by_text("What took most time").click()
    page.get_by_text("aten::mm").wait_for()
    watched.settled()
    assert violations(page) == []
    watched.check()


def test_mistakes_and_refusals_are_told_in_words(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    collector = Collector(site, "refused")
    watched = open_page("runs/refused/agent?for=1,x", theme="light")
    page = watched.page
    page.get_by_role("button", name="Take stacks").click()
    page.get_by_role("alert").get_by_text("“x” is no rank").wait_for()
    page.get_by_role("textbox", name="Ranks").fill("1")
    page.get_by_role("button", name="Switch recording off").click()
    page.get_by_text("better ask all ranks at once").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Take stacks").click()
    page.get_by_text("Stacks of rank 1", exact=True).wait_for()
    (command,) = collector.send()
    assert command["kind"] == "stacks"  # what was cancelled was never asked
    collector.answer(command["id"], "refused", reason="the rank has no handler for stacks")
    page.get_by_text("the rank has no handler for stacks").wait_for()
    page.get_by_role("textbox", name="Ranks").fill("99")
    page.get_by_role("button", name="Take stacks").click()
    page.get_by_role("alert").get_by_text("no rank 99 in this attempt").wait_for()
    assert violations(page) == []
    # the browser itself reports the answer 409 on its console; nothing else may be there
    watched.problems = [one for one in watched.problems if "409" not in one]
    watched.check()
