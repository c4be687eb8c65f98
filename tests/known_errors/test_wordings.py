"""How libraries word their errors, line by line: each is recognised as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope_server.known_errors.entry import FAMILIES
from rankscope_server.known_errors.evaluation import evaluate
from rankscope_server.known_errors.load import known_errors
from rankscope_server.known_errors.reading import Reader

ROWS = [
    tuple(line.split("\t", 1))
    for line in (Path(__file__).parent / "wordings.tsv").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize(("family", "text"), ROWS, ids=[f"{f}-{t[:40]}" for f, t in ROWS])
def test_a_wording_is_recognised(family: str, text: str) -> None:
    reader = Reader(known_errors())
    lines = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")
    reader.read([f"step 1\n{lines}\nstep 2\n".encode()], "train.log")
    root = evaluate(reader.tally).root
    assert (root.group.family if root else "benign") == family


def test_most_families_are_there() -> None:
    assert {family for family, _ in ROWS} == set(FAMILIES)
