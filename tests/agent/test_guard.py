from __future__ import annotations

import functools
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.rank import guard
from rankscope.rank.guard import guarded, guarded_one, guarded_two, to_the_end
from tests.agent import recorded


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


class Unspeakable(Exception):
    """An error of the script whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.swallows
@pytest.mark.parametrize("make_stderr", [lambda: None, _closed])
@pytest.mark.parametrize("kind", [ValueError, Unspeakable])
def test_a_stderr_that_takes_nothing_and_an_error_without_text_harm_no_step(
    make_stderr: Callable[[], Any], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    @guarded
    def broken() -> None:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", make_stderr())
        assert broken() is None
    assert guard.failures[broken.__qualname__] == 1


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("trouble", ["unwritable", "setting", "no package"])
def test_what_cannot_be_said_at_the_start_harms_no_program(
    tmp_path: Path, trouble: str, stderr: str
) -> None:
    (tmp_path / "file").touch()
    environ = recorded.environment(tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    code = "import torch.optim; print('trained')"
    if trouble == "unwritable":
        environ["RANKSCOPE_DIR"] = str(tmp_path / "file")
    elif trouble == "setting":
        environ["RANKSCOPE_STEP_SLOTS"] = "lots"
    else:
        code = (
            "import sys\n"
            "for name in list(sys.modules):\n"
            "    if name.partition('.')[0] in ('rankscope', 'sitecustomize'):\n"
            "        del sys.modules[name]\n"
            "sys.modules['rankscope'] = None  # cannot be imported\n"
            "import sitecustomize\n"
        ) + code
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {stderr}', "sh", sys.executable, "-c", code],
        env=environ, stdout=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("trained\n", 0)


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


def _takes_itself_out(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise TookTooLong


def _takes_itself_out_of_any(*arguments: Any) -> None:
    _takes_itself_out(*arguments)


@pytest.mark.parametrize(
    "handler",
    [
        _takes_itself_out,
        _takes_itself_out_of_any,
        functools.partial(lambda text, number, frame: _takes_itself_out(number, frame), "limit"),
    ],
)
def test_a_handler_that_takes_itself_out_is_known_all_the_same(
    handler: Callable[..., None],
) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TookTooLong):
            guarded(_interrupted)()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.swallows
def test_a_bug_of_ours_that_handles_frames_is_swallowed() -> None:
    def look(frame: Any) -> None:
        raise ValueError(frame.f_lineno)

    @guarded
    def broken() -> None:
        look(sys._getframe(1))

    assert broken() is None
