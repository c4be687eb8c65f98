"""Log records, warnings and uncaught exceptions, without touching the user's configuration."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope import schema
from rankscope.guard import guarded

if TYPE_CHECKING:
    from rankscope.runtime import Agent

MAX_TEXT = 32 * 1024  # characters kept of one message or traceback
_C10D_LOGGER = "c10d-NullHandler-default"  # torch logs a dict there for each failed dist call
_busy = threading.local()


class Logs:
    """Every record that reaches a handler of the logging module, whatever handlers there are."""

    name: ClassVar[str] = "logging"
    needs: ClassVar[str] = "logging"

    def install(self, agent: Agent) -> str:
        """Patch Logger.callHandlers. A handler on the root would make basicConfig a no-op."""
        original = logging.Logger.callHandlers
        lowest = logging.getLevelNamesMapping().get(agent.settings.log_level.upper(), logging.INFO)

        def callHandlers(self: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= lowest:
                capture(agent, record)
            original(self, record)

        agent.patch(logging.Logger, "callHandlers", callHandlers)
        return f"logging records from {logging.getLevelName(lowest)} up"


@guarded
def capture(agent: Agent, record: logging.LogRecord) -> None:
    """Write one logging record to the journal, unless it is our own."""
    if record.name.partition(".")[0] == "rankscope" or getattr(_busy, "inside", False):
        return
    recorder = agent.recorder
    if recorder is None:
        return
    _busy.inside = True  # formatting runs the user's __str__, which may log
    try:
        if record.name == _C10D_LOGGER:
            _collective_error(agent, record)
            return
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            message += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        recorder.record(
            schema.LogLine(
                attempt=recorder.identity.attempt,
                rank=recorder.identity.rank,
                time_ns=int(record.created * 1e9),
                level=record.levelno,
                message=cut(message),
                logger=record.name,
                step=recorder.step,
            ),
            urgent=record.levelno >= logging.ERROR,
        )
    finally:
        _busy.inside = False


def _collective_error(agent: Agent, record: logging.LogRecord) -> None:
    """Keep what torch says when a torch.distributed call raised."""
    if isinstance(record.msg, dict) and "error" in record.msg:
        details = record.msg
        agent.error(
            kind=str(details.get("func_name", "torch.distributed")),
            message=str(details["error"]),
            where="collective",
        )


class Warnings:
    """What the warnings module shows, with category and place."""

    name: ClassVar[str] = "warnings"
    needs: ClassVar[str] = "warnings"

    def install(self, agent: Agent) -> str:
        """Wrap the function that shows a warning; who catches warnings keeps them."""
        original = warnings._showwarnmsg_impl  # type: ignore[attr-defined]

        def show(message: Any) -> None:
            keep(message)
            original(message)

        @guarded
        def keep(message: Any) -> None:
            recorder = agent.recorder
            if recorder is not None:
                place = f"{message.filename}:{message.lineno}"
                recorder.record(
                    schema.LogLine(
                        **agent.here(),
                        level=logging.WARNING,
                        message=cut(f"{message.category.__name__}: {message.message}"),
                        logger="py.warnings",
                        stream="warning",
                        step=recorder.step,
                        fields={"place": place},
                    )
                )

        agent.patch(warnings, "_showwarnmsg_impl", show)
        return "warnings that are shown"


class Exceptions:
    """Exceptions that leave the script or one of its threads, with their traceback."""

    name: ClassVar[str] = "exceptions"
    needs: ClassVar[str] = "sys"

    def install(self, agent: Agent) -> str:
        """Chain sys.excepthook and threading.excepthook."""
        main_hook, thread_hook = sys.excepthook, threading.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            keep(kind, error, trace, "main")
            main_hook(kind, error, trace)

        def thread_excepthook(args: threading.ExceptHookArgs) -> None:
            keep(args.exc_type, args.exc_value, args.exc_traceback, "thread")
            thread_hook(args)

        @guarded
        def keep(kind: Any, error: Any, trace: Any, where: Any) -> None:
            text = "".join(traceback.format_exception(kind, error, trace))
            agent.error(kind.__qualname__, str(error), text, where)
            if where == "main":
                agent.exception_left()

        agent.patch(sys, "excepthook", excepthook)
        agent.patch(threading, "excepthook", thread_excepthook)
        return "sys.excepthook and threading.excepthook"


def cut(text: str) -> str:
    """Return `text`, shortened in the middle with a mark: both ends of a traceback matter."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"
