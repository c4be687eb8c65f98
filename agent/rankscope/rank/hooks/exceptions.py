"""Exceptions that leave the script, one of its threads, or a place where no code can catch them."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import attempt, guarded
from rankscope.rank.hooks.logs import state


class Exceptions:
    """Exceptions that leave the script or one of its threads, and unraisable ones."""

    name: ClassVar[str] = "exceptions"
    needs: ClassVar[str] = "sys"

    def install(self, context: Context) -> str:
        """Chain sys.excepthook, threading.excepthook and sys.unraisablehook."""
        main_hook, thread_hook = sys.excepthook, threading.excepthook
        unraisable_hook = sys.unraisablehook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            keep(context, kind, error, trace, "main")
            _unrecorded(main_hook, kind, error, trace)

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            # of a thread that trained in the main one's place: its rank trains no more
            where = "training" if context.clock.is_ours() else "thread"
            keep(context, args.exc_type, args.exc_value, args.exc_traceback, where)
            _unrecorded(thread_hook, args)

        def unraisable(args: sys.UnraisableHookArgs) -> None:
            _keep_unraisable(context, args)
            _unrecorded(unraisable_hook, args)

        context.patch(sys, "excepthook", excepthook)
        context.patch(threading, "excepthook", thread_excepthook)
        context.patch(sys, "unraisablehook", unraisable)
        return "sys.excepthook, threading.excepthook and sys.unraisablehook"


def _unrecorded(hook: Callable[..., Any], *arguments: Any) -> None:
    """Call the hook that was there; what it prints is in the record already."""
    before = getattr(state, "recorded", False)
    state.recorded = True
    try:
        hook(*arguments)
    finally:
        state.recorded = before


@guarded
def keep(context: Context, kind: Any, error: Any, trace: Any, where: Any) -> None:
    """Record an exception that left a thread."""
    text = "".join(traceback.format_exception(kind, error, trace))
    message = attempt(lambda: str(error))
    context.error(kind.__qualname__, "(not formatted)" if message is None else message, text, where)
    at_a_prompt = hasattr(sys, "ps1") or sys.flags.inspect  # which continues
    if where == "main" and not at_a_prompt:
        context.exception_left()


@guarded
def _keep_unraisable(context: Context, args: sys.UnraisableHookArgs) -> None:
    """Keep an exception that Python could only print: it ended nothing."""
    if context.recorder is None or sys.is_finalizing():
        return
    trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    about = f"{args.err_msg or 'Exception ignored in'}: <{type(args.object).__qualname__}>"
    message = f"{about}\n{''.join(trace)}".rstrip()
    context.log_line(logging.ERROR, message, urgent=True, logger="py.unraisable")
