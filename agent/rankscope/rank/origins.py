"""Whom a warning names: the user's code, not our wrapper between it and the function that warns."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

# `warnings.warn` leaves frames out of its `stacklevel` whose file has both words in its name
# (is_internal_frame in CPython's _warnings.c): an import has such frames between two modules.
_NOT_COUNTED = " (importlib._bootstrap)"


def leave_out_of_warnings(wrapper: Any) -> None:
    """Let `stacklevel` of a warning count past the frames of a wrapper, if it is a function."""
    if isinstance(wrapper, FunctionType) and _NOT_COUNTED not in wrapper.__code__.co_filename:
        code = wrapper.__code__
        wrapper.__code__ = code.replace(co_filename=code.co_filename + _NOT_COUNTED)


def file_of(code: CodeType) -> str:
    """Return the file that holds a function, also of a wrapper that warnings leave out."""
    return code.co_filename.removesuffix(_NOT_COUNTED)
