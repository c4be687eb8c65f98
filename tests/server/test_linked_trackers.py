"""Which runs of trackers a run leads to: one of each, whatever order ranks said so in."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rankscope.wire import schema
from rankscope_server.store.trackers import merged
from tests.server.conftest import Sender

PAGE = "https://mlflow.example/#/experiments/3/runs/8d1f"


def said(run: str, attempt: int = 0, rank: int = 0, at: int = 1, **more: str) -> schema.Event:
    fields = {"tracker": "mlflow", "run": run} | more
    return schema.Event(
        attempt=attempt, rank=rank, time_ns=at, name=schema.TRACKER, fields=fields
    )  # fmt: skip


NEWEST = said("newest", attempt=1, rank=1, at=9)
EVENTS = (
    said("old"), said("nested", attempt=1, rank=1, at=10), NEWEST,
    said("of-another-rank", attempt=1, rank=2, at=2),
)  # fmt: skip


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)), ids=range(24))
def test_the_newest_attempt_the_lowest_rank_its_first_run(order: tuple[schema.Event, ...]) -> None:
    at_once = merged("{}", order)
    one_by_one = "{}"
    for event in order:
        one_by_one = merged(one_by_one, [event])
    assert at_once == one_by_one
    assert json.loads(at_once)["mlflow"]["run"] == NEWEST.fields["run"]


def test_a_page_leads_to_them(sender: Sender) -> None:
    """Addresses of the web do, others are text; a tracker of no known name is none."""
    board = {"tracker": "tensorboard", "store": "/nfs/owl", "page": "javascript:alert(1)"}
    paper = {"tracker": "paper", "page": PAGE}
    other = schema.Event(attempt=0, rank=0, time_ns=1, name="checkpoint", fields=paper)
    sender.send(
        said("owl", **board), said("8d1f", name="quiet-owl", project="3", page=PAGE),
        said("x", **paper), other,
    )  # fmt: skip
    links: list[dict[str, Any]] = sender.get("")["trackers"]
    assert [(link["title"], link["page"]) for link in links] == [
        ("MLflow", PAGE), ("TensorBoard", None),
    ]  # fmt: skip
    assert (links[0]["run"], links[0]["name"], links[0]["rank"]) == ("8d1f", "quiet-owl", 0)
    assert links[1]["store"] == "/nfs/owl"
