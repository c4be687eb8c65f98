"""What every hook looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class Hook(Protocol):
    """One thing that the agent watches; the class docstring says what it records.

    `needs` is the module that must be imported before `install` can run; the runtime calls
    `install` as soon as it is. A hook that cannot do its work raises `HookSkipped`.
    """

    name: ClassVar[str]
    needs: ClassVar[str]

    def install(self, agent: Agent) -> str:
        """Begin to watch, and return in a few words which source is used."""


class HookSkipped(Exception):
    """This hook does not apply here; the message is the reason that people read."""
