"""When the state of a live run is stored, so that it need not be read again from its batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import sqlalchemy as sa

from rankscope_server.analysis import kept
from rankscope_server.analysis.state import RunState
from rankscope_server.store import analysis_states
from rankscope_server.store.deletion import find_deletion
from rankscope_server.store.locks import of_run
from rankscope_server.store.unit import Unit
from rankscope_server.store.writer import Writer

log = logging.getLogger(__name__)
PAUSE_SECONDS = 60.0
_COST_RATIO = 100.0  # of the pause to the time it takes: a hundredth of a core at most
MIN_BATCHES = 64  # fewer are read again in a moment


class Keeper:
    """Stores the state of one run once in a while; what cannot be stored is read again instead."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._pause_seconds = PAUSE_SECONDS
        self.num_new = 0  # batches in the state since it was stored
        self.may_read = True  # what is stored is not what made the analysis fail
        self._may_write = True

    @property
    def is_worth_it(self) -> bool:
        """Return whether a restart would take longer without what is new."""
        return self._may_write and self.num_new >= MIN_BATCHES

    @property
    def is_due(self) -> bool:
        """Return whether it is time to store it."""
        return self.is_worth_it and time.monotonic() >= self._since + self._pause_seconds

    def find(self, connection: sa.Connection, run_id: str) -> tuple[RunState, int] | None:
        """Return the state as it was stored and its last batch; None where all must be read."""
        if not self.may_read:
            return None
        found = analysis_states.find_kept(connection, run_id, kept.code_digest())
        if found is None:
            return None
        try:
            state = kept.read(found.data, found.parts)
        except kept.NotKeptError as error:
            log.warning("what was kept of %s is not read, its batches are: %s", run_id, error)
            return None
        return state, found.last_batch

    def store(
        self,
        run_id: str,
        state: RunState,
        last_batch: int,
        writer: Writer,
        reader: sa.Engine,
        check: Callable[[sa.Connection], None],
    ) -> None:
        """Store the state; `check` raises where another process looks at the run by now."""
        began = time.thread_time()
        try:
            written = kept.write(state)
        except kept.NotKeptError as error:
            self._may_write = False
            log.warning("the state of %s is not kept, a restart reads its batches: %s",
                        run_id, error)  # fmt: skip
            return
        with reader.connect() as connection:
            news = written.packed(analysis_states.known_parts(connection, run_id))

        def work(unit: Unit) -> None:
            check(unit.connection)
            if find_deletion(unit.connection, run_id) is None:
                analysis_states.keep(
                    unit, run_id, code=kept.code_digest(), last_batch=last_batch,
                    data=written.data, digests=written.digests, news=news,
                )  # fmt: skip

        self._pause_seconds = max(PAUSE_SECONDS, _COST_RATIO * (time.thread_time() - began))
        self._since = time.monotonic()
        writer.run(work, lock=of_run(run_id))
        self.num_new, self.may_read = 0, True
