"""Run something right after a module was imported, now or later."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see rankscope/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}
_awaited: set[str] = set()  # packages whose end of import will be noticed
_complete: set[str] = set()  # packages whose body has run, though Python still initializes them


class _Finder:
    """A meta path finder that finds nothing itself: it adds a call behind a module's body."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _waiting:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not _Finder and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        loader: Any = spec.loader if spec is not None else None
        if not hasattr(loader, "exec_module"):
            return spec
        body = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            body(module)
            actions = _waiting.pop(name, [])
            if name != _top(name) and _is_half_there(_top(name)):
                _waiting[_top(name)].extend(actions)
                return
            _complete.add(name)
            for action in actions:
                action()

        loader.exec_module = exec_module
        _awaited.add(name)
        return spec


def when_imported(name: str, action: Callable[[], Any]) -> None:
    """Call `action` when module `name` has been imported; at once if it has been."""
    if name in sys.modules and not _is_initializing(name) and not _is_half_there(_top(name)):
        action()
        return
    _waiting.setdefault(name, []).append(action)
    _waiting.setdefault(_top(name), [])
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_half_there(package: str) -> bool:
    """Return whether a package is being imported, and its end will be noticed."""
    return package in _awaited and _is_initializing(package)


def _is_initializing(name: str) -> bool:
    if name in _complete:
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
