"""A handler for the standard logging module, for those who configure logging themselves."""

from __future__ import annotations

import logging

from rankscope.rank.attach import start as attach


class LoggingHandler(logging.Handler):
    """Sends records to the agent of this process: `logging.getLogger().addHandler(...)`.

    With the agent's own `logging` hook installed (the default) every record is kept already and
    this handler adds nothing; with `hooks` set without it, this is how logs arrive.
    """

    def __init__(self, level: int | str = logging.NOTSET) -> None:
        super().__init__(level)
        self._capture: object = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record. Never raises, never logs."""
        agent = attach.agent()
        if agent is not None and "logging" not in agent.sources:
            from rankscope.rank.hooks.logs import LogCapture

            if not isinstance(self._capture, LogCapture):
                self._capture = LogCapture(agent)
            self._capture.take(record)
