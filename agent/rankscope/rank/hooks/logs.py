"""Log records and warnings, without touching the user's configuration."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from rankscope.output.log_limits import Limiter, template_of
from rankscope.rank.context import Context
from rankscope.rank.guard import attempt, guarded
from rankscope.wire.redaction import clean_fields

MAX_FIELDS = 32
_MAX_FIELD_NAME, _MAX_FIELD_VALUE = 100, 1000
_MAX_ITEMS = 32  # of a list or dict that is a field
_REPORT_SECONDS = 1.0
_C10D_LOGGER = "c10d-NullHandler-default"  # torch logs a dict there for each failed dist call
_OWN_ATTRIBUTES = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
state = threading.local()  # inside: our own code runs; recorded: what is printed now is kept


class Logs:
    """Every record that reaches a handler of the logging module, with the fields of `extra=`."""

    name: ClassVar[str] = "logging"
    needs: ClassVar[str] = "logging"

    def install(self, context: Context) -> str:
        """Patch Logger.callHandlers. A handler on the root would make basicConfig a no-op."""
        original = logging.Logger.callHandlers
        lowest = level_of(context.settings.log_level)
        capture = LogCapture(context)

        def callHandlers(self: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno < lowest and record.name != _C10D_LOGGER:
                original(self, record)
                return
            capture.take(record)
            before = getattr(state, "recorded", False)
            state.recorded = True  # a handler prints it: that is no second line
            try:
                original(self, record)
            finally:
                state.recorded = before

        context.patch(logging.Logger, "callHandlers", callHandlers)
        atexit.register(capture.report)
        return f"logging records from {logging.getLevelName(lowest)} up"


def level_of(name: str) -> int:
    """Return the number of a level. Raises ValueError if the setting names none."""
    known = logging.getLevelNamesMapping()
    if name.upper() not in known:
        raise ValueError(f"RANKSCOPE_LOG_LEVEL={name!r}: there are: {', '.join(known)}")
    return known[name.upper()]


class LogCapture:
    """Writes logging records to the journal of an agent, within the limits."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._limiter = Limiter()
        self._reported = time.monotonic()

    @guarded
    def take(self, record: logging.LogRecord) -> None:
        """Keep one logging record, unless it is our own."""
        recorder = self._context.recorder
        if recorder is None or record.name.partition(".")[0] == "rankscope":
            return
        if getattr(state, "inside", False):
            return
        state.inside = True  # formatting runs the user's __str__, which may log
        try:
            if record.name == _C10D_LOGGER:
                _collective_error(self._context, record)
                return
            if time.monotonic() - self._reported > _REPORT_SECONDS:
                self.report()
            template = template_of(record.msg, bool(record.args))
            if not self._limiter.admit(record.name, record.levelno, template):
                recorder.count_drop("too many alike")
                return
            self._context.log_line(
                record.levelno,
                _text(record),
                urgent=record.levelno >= logging.ERROR,
                time_ns=int(record.created * 1e9),
                logger=record.name,
                fields=extra_fields(vars(record)),
            )
        finally:
            state.inside = False

    @guarded
    def report(self) -> None:
        """Say what was suppressed since the last report."""
        self._reported = time.monotonic()
        if self._context.recorder is None:
            return
        for alike in self._limiter.take_suppressed():
            self._context.log_line(
                alike.level,
                f"suppressed {alike.suppressed:,} similar lines: {alike.template}",
                urgent=alike.level >= logging.ERROR,
                logger=alike.logger,
                stream="agent",
                fields={"suppressed": str(alike.suppressed)},
            )


def _text(record: logging.LogRecord) -> str:
    """Return message, traceback and stack as a formatter shows them.

    A message that cannot be formatted is the script's mistake, which logging itself reports.
    """
    message = attempt(record.getMessage)
    if message is None:
        message = (
            f"{record.msg if isinstance(record.msg, str) else type(record.msg)} (not formatted)"
        )
    if record.exc_info and record.exc_info[0] is not None:
        message += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
    if record.stack_info:
        message += "\n" + record.stack_info
    return message


def extra_fields(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return what `extra=` added to a record, bounded and without secrets.

    Only plain values become text: a tensor would be copied from its device for it.
    """
    names = [name for name in attributes if name not in _OWN_ATTRIBUTES][:MAX_FIELDS]
    if not names:
        return {}
    return clean_fields(
        {name[:_MAX_FIELD_NAME]: _plain(attributes[name])[:_MAX_FIELD_VALUE] for name in names}
    )


def _plain(value: Any, depth: int = 2) -> str:
    if isinstance(value, str):
        return value[: 4 * _MAX_FIELD_VALUE]
    if value is None or type(value) in (bool, int, float, complex) or isinstance(value, PurePath):
        return str(value)
    if depth and type(value) in (list, tuple, set, frozenset):
        return f"[{', '.join(_plain(item, depth - 1) for item in list(value)[:_MAX_ITEMS])}]"
    if depth and type(value) is dict:
        pairs = list(value.items())[:_MAX_ITEMS]
        words = (f"{_plain(k, depth - 1)}: {_plain(v, depth - 1)}" for k, v in pairs)
        return f"{{{', '.join(words)}}}"
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _collective_error(context: Context, record: logging.LogRecord) -> None:
    """Keep what torch says when a torch.distributed call raised."""
    if isinstance(record.msg, dict) and "error" in record.msg:
        details = record.msg
        context.error(
            kind=str(details.get("func_name", "torch.distributed")),
            message=str(details["error"]),
            where="collective",
        )


class Warnings:
    """What the warnings module shows, with category and place."""

    name: ClassVar[str] = "warnings"
    needs: ClassVar[str] = "warnings"

    def install(self, context: Context) -> str:
        """Wrap the function that shows a warning; who catches warnings keeps them."""
        original = warnings._showwarnmsg_impl  # type: ignore[attr-defined]

        def show(message: Any) -> None:
            keep(message)
            before = getattr(state, "recorded", False)
            state.recorded = True
            try:
                original(message)
            finally:
                state.recorded = before

        @guarded
        def keep(message: Any) -> None:
            if context.recorder is not None:
                text = attempt(lambda: str(message.message)) or "(not formatted)"
                context.log_line(
                    logging.WARNING,
                    f"{message.category.__name__}: {text}",
                    logger="py.warnings",
                    stream="warning",
                    fields={"place": f"{message.filename}:{message.lineno}"},
                )

        context.patch(warnings, "_showwarnmsg_impl", show)
        return "warnings that are shown"
