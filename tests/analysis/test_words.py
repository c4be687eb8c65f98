"""Numbers in words: what is there is never told as 0, what is large has a prefix."""

from __future__ import annotations

import pytest

from rankscope_server.findings.text import hours_text, ms_text, percent_text, seconds_text, si_text
from rankscope_server.text import duration_text


@pytest.mark.parametrize("milliseconds", [0.0004, 0.004, 0.04, 0.4, 4.0, 40.0, 4e3, 4e5])
def test_a_duration_is_never_nothing(milliseconds: float) -> None:
    for text in (
        ms_text(milliseconds), seconds_text(milliseconds / 1e3), duration_text(milliseconds)
    ):  # fmt: skip
        number, unit = text.replace(",", "").split()
        scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]
        assert float(number) * scale == pytest.approx(milliseconds, rel=0.06)
        assert "e" not in number


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0.0 %"), (0.00003, "under 0.01 %"), (0.0003, "0.03 %"), (0.0006, "0.1 %"),
     (0.012, "1.2 %"), (0.5, "50 %"), (-0.0003, "-0.03 %")],
)  # fmt: skip
def test_a_share_is_never_nothing(ratio: float, text: str) -> None:
    assert percent_text(ratio) == percent_text(ratio) == text


def test_large_numbers_have_a_prefix() -> None:
    assert si_text(7_871_558_374, "FLOP/s") == "7.87 GFLOP/s"
    assert si_text(123_456, "tokens/s") == "123 ktokens/s"
    assert si_text(28.44, "steps/s") == "28.44 steps/s"
    assert si_text(2.3, "") == "2.3"
    assert si_text(5985, "tokens/s") == "5,985 tokens/s"
    assert ms_text(1059) == "1,059 ms"
    assert ms_text(4_200_000) == "4,200.0 s"


def test_hours_of_a_small_loss_are_told() -> None:
    assert hours_text(0.3) == "0.3 rank-hours"
    assert hours_text(1234.5) == "1,234 rank-hours"
