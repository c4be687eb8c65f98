from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rankscope.rank import guard
from rankscope.rank.guard import guarded, guarded_one, guarded_two, to_the_end


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
    assert "training continues" in text
    assert guard.failures[broken.__qualname__] == guard.MAX_FAILURES  # then it is switched off


@pytest.mark.swallows
def test_an_enumeration_is_no_signal_handler() -> None:
    @guarded
    def broken() -> None:
        signal.Signals(-1)

    assert broken() is None  # though handlers that Python does not have are members of one


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


class TookTooLong(Exception):
    """As a time limit by a signal raises."""


class Limit:
    def __call__(self, number: int, frame: Any) -> None:
        raise TookTooLong

    def reached(self, number: int, frame: Any) -> None:
        raise TookTooLong


def _reached(text: str, number: int, frame: Any) -> None:
    raise TookTooLong(text)


def _interrupted(*_: Any) -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "handler", [Limit(), Limit().reached, functools.partial(_reached, "after 5 s")]
)
def test_what_a_signal_handler_raises_inside_our_code_is_not_swallowed(
    handler: Callable[[int, Any], None],
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for call in (
            guarded(_interrupted),
            functools.partial(guarded_one(_interrupted), 1),
            functools.partial(guarded_two(_interrupted), 1, 2),
        ):
            with pytest.raises(TookTooLong):
                call()
    finally:
        signal.signal(signal.SIGUSR1, before)
