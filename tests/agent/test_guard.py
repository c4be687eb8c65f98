from __future__ import annotations

import pytest

from rankscope import guard
from rankscope.guard import guarded


@pytest.mark.swallows
def test_swallows_counts_and_says_once(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def broken() -> None:
        raise ValueError("a bug of ours")

    for _ in range(5):
        assert broken() is None
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "a bug of ours" in text
    assert "training goes on" in text
    assert guard.failures[broken.__qualname__] == guard.MAX_FAILURES  # then it is switched off


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_lets_the_user_stop_the_job(stop: type[BaseException]) -> None:
    @guarded
    def stopped() -> None:
        raise stop

    with pytest.raises(stop):
        stopped()
