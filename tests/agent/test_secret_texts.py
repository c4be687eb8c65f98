"""Output, command lines, addresses, headers and JSON: no secret is shown, nothing else goes."""

from __future__ import annotations

import re

import pytest

from rankscope.wire.redaction import HIDDEN, redact
from tests.agent.secret_texts import HARMLESS, SECRET, filled

_MARKED = re.compile(r"\{([^{}\"' ]+)\}")


def test_there_are_enough_of_each() -> None:
    assert len(set(SECRET)) >= 200
    assert len(set(HARMLESS)) >= 200


@pytest.mark.parametrize("line", SECRET)
def test_a_secret_goes_and_what_stands_around_it_stays(line: str) -> None:
    text = filled(line)
    (marked,) = [found for found in _MARKED.finditer(text) if found.group(1) != HIDDEN]
    said = text[: marked.start()] + marked.group(1) + text[marked.end() :]
    cleaned = redact(said)
    assert marked.group(1) not in cleaned
    assert HIDDEN in cleaned
    if text.startswith("-----"):
        return  # the head of the block goes with it
    before = re.split(r"[ =:?&'\"/]", text[: marked.start()])[0]
    assert cleaned.startswith(before)
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize("line", HARMLESS)
def test_nothing_harmless_goes(line: str) -> None:
    assert redact(filled(line)) == filled(line)
