"""Functions that ours replace: how they are taken out again, and what a warning says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CodeType
from typing import Any

from rankscope.rank.guard import guarded

# `warnings.warn` leaves frames out of its `stacklevel` whose file has both words in its name
# (is_internal_frame in CPython's _warnings.c): an import has such frames between two modules.
_NOT_COUNTED = " (importlib._bootstrap)"


class UndoScope(contextlib.ExitStack):
    """What takes hooks out again, last one first; where one fails the others run all the same."""

    is_used = False

    def add(self, undo: Callable[[], Any]) -> None:
        """Run `undo` when the scope is closed."""
        self.is_used = True
        self.callback(guarded(undo))

    def nested(self) -> UndoScope:
        """Return a scope that is closed with this one, if not before."""
        return self.enter_context(UndoScope())


def leave_out_of_warnings(wrapper: Any) -> None:
    """Let `stacklevel` of a warning count past the frames of a wrapper, a function.

    So a warning names the user's code, not our wrapper between it and the function that warns.
    """
    code = wrapper.__code__
    if _NOT_COUNTED not in code.co_filename:
        wrapper.__code__ = code.replace(co_filename=code.co_filename + _NOT_COUNTED)


def file_of(code: CodeType) -> str:
    """Return the file that holds a function, also of a wrapper that warnings leave out."""
    return code.co_filename.removesuffix(_NOT_COUNTED)
