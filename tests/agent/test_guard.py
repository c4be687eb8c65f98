from __future__ import annotations

import pytest

from rankscope import guard
from rankscope.guard import guarded, to_the_end


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


def test_what_a_signal_handler_raises_passes_on_when_all_is_done() -> None:
    done: list[str] = []
    stops = iter([SystemExit(143), None])

    def broken_off_once() -> None:
        if (stop := next(stops)) is not None:
            raise stop
        done.append("settled")

    with pytest.raises(SystemExit, match="143"):
        to_the_end(lambda: done.append("ended"), broken_off_once, lambda: done.append("closed"))
    assert done == ["ended", "settled", "closed"]


def test_what_is_broken_off_again_and_again_is_left() -> None:
    done: list[str] = []

    def always() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_the_end(always, lambda: done.append("closed"))
    assert done == ["closed"]
