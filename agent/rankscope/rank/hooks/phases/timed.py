"""Functions of torch that are a phase of their own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from rankscope.rank.guard import guarded
from rankscope.rank.steps import OTHER, StepClock

# gets the arguments, the result and the duration of an outermost call in ns
After = Callable[[tuple[Any, ...], dict[str, Any], Any, int], None]


def in_phase(
    clock: StepClock,
    phase: int,
    original: Callable[..., Any],
    *,
    after: After | None = None,
    returns: bool = False,
) -> Callable[..., Any]:
    """Return `original`, timed as `phase` on the main thread. Its exceptions pass.

    Behind it comes the phase before if it `returns`, else none in particular.
    """

    @guarded
    def enter() -> int | None:
        return clock.enter(phase) if clock.is_ours() else None

    @guarded
    def leave(before: int) -> None:
        clock.enter(before if returns or before == phase else OTHER)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        before = enter()
        began = time.monotonic_ns()
        try:
            result = original(*args, **kwargs)
        finally:
            if before is not None:
                leave(before)
        if after is not None and before != phase:
            after(args, kwargs, result, time.monotonic_ns() - began)
        return result

    return timed
