"""The open error corpus, where it is at hand: the marks that the known errors must keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope_server.known_errors.entry import FAMILIES
from rankscope_server.known_errors.evaluation import Root, evaluate
from rankscope_server.known_errors.load import known_errors
from rankscope_server.known_errors.reading import Reader
from tests.shared_data import SHARED_DATA

DATA = SHARED_DATA / "errors" / "open.jsonl"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the shared error corpus is not there")


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


def root_of(record: dict[str, Any]) -> Root | None:
    texts = record.get("rank_texts")
    reader = Reader(known_errors(), len(texts) if texts else 1)
    for name, text in ({f"rank_{k}.log": v for k, v in texts.items()} if texts else
                       {"train.log": record["text"]}).items():  # fmt: skip
        reader.read([text.encode()], name)
    return evaluate(reader.tally).root


@pytest.fixture(scope="module")
def judged() -> list[tuple[dict[str, Any], Root | None]]:
    return [(record, root_of(record)) for record in records()]


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


def test_the_families_are_those_of_the_corpus() -> None:
    assert {record["family"] for record in records()} == set(FAMILIES)


def test_families(judged: list[tuple[dict[str, Any], Root | None]]) -> None:
    right = [
        (record, (root.group.family if root else "benign") == record["family"])
        for record, root in judged
    ]
    wrong = [record["id"] for record, is_right in right if not is_right]
    confirmed = [is_right for record, is_right in right if record["evidence"] != "inferred"]
    assert share([is_right for _, is_right in right]) >= 0.90, wrong
    assert share(confirmed) >= 0.95, wrong


def test_first_signals(judged: list[tuple[dict[str, Any], Root | None]]) -> None:
    found = [
        root is not None and (root.signal or "").strip() == record["first_signal"].strip()
        for record, root in judged
        if record["first_signal"]
    ]
    assert share(found) >= 0.90


def test_no_harmless_record_is_a_fault(judged: list[tuple[dict[str, Any], Root | None]]) -> None:
    called = [record["id"] for record, root in judged if record["family"] == "benign" and root]
    assert not called


def test_the_roots_of_several_ranks(judged: list[tuple[dict[str, Any], Root | None]]) -> None:
    many = [(record, root) for record, root in judged if record.get("rank_texts")]
    assert len(many) == 5
    for record, root in many:
        assert root is not None
        assert root.ranks == (record["root_rank"],), record["id"]
