"""The launchers of this run on this node: their journals, and whether they are still there.

Each `rankscope run` has a directory of its own, node/launcher/<pid>.<start ticks>/: there may be
several at once (one for each task of srun) and one after the other (the same run id again). It
holds a journal and, when the command has ended, the file `finished`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks.journals import JournalFollower
from rankscope.process.family import process_start_ticks

FOLDER = "node/launcher"
FINISHED = "finished"
_NAME = re.compile(r"(\d{1,9})\.(\d{1,18})")


def own_directory(run_directory: Path) -> Path:
    """Return the directory of this process as a launcher."""
    pid = os.getpid()
    return run_directory / FOLDER / f"{pid}.{process_start_ticks(pid)}"


class Launchers:
    """Follows the journals of all launchers, as `offsets` (by directory) left them."""

    def __init__(
        self, run_directory: Path, offsets: Mapping[str, RankOffsets], ledger: Ledger
    ) -> None:
        self._run_directory = run_directory
        self._offsets = offsets
        self._ledger = ledger
        self._journals: dict[str, JournalFollower] = {}

    def read(self, forward: Callable[[bytes], None]) -> bool:
        """Pass records on; return whether all that is there was read."""
        caught_up = True
        for key in self._keys():
            if key not in self._journals:
                self._journals[key] = JournalFollower(
                    self._run_directory / key,
                    self._offsets.get(key, RankOffsets()),
                    lambda reason, count: self._ledger.add("launcher journal", reason, count),
                )
            is_gone = not self._lives(key)  # before it is read: a last frame may just come
            has_all = self._journals[key].read(forward)
            if is_gone and has_all:
                self._journals[key].end()
            caught_up &= has_all
        return caught_up

    def journals(self) -> Mapping[str, JournalFollower]:
        """Return the followed journals by directory."""
        return self._journals

    def any_lives(self) -> bool:
        """Return whether some launcher has its command still running."""
        return any(self._lives(key) for key in self._keys())

    def all_finished(self) -> bool:
        """Return whether there was a launcher, and none has anything left to do."""
        keys = self._keys()
        has_finished = any((self._run_directory / key / FINISHED).exists() for key in keys)
        return has_finished and not any(self._lives(key) for key in keys)

    def _lives(self, key: str) -> bool:
        if (self._run_directory / key / FINISHED).exists():
            return False
        pid, _, ticks = Path(key).name.partition(".")
        return process_start_ticks(int(pid)) == int(ticks) != 0

    def _keys(self) -> list[str]:
        try:
            names = os.listdir(self._run_directory / FOLDER)
        except OSError:
            return []
        return [f"{FOLDER}/{name}" for name in sorted(names) if _NAME.fullmatch(name)]
