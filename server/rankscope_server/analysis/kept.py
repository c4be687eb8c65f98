"""The state of a run as bytes, so that a restarted server reads on and not all again.

It is a pickle, and a pickle is a program: the one here may make arrays, plain values and the
classes of the analysis, and gets no other name. It is a cache of what the store holds anyway: what
other code wrote, or what cannot be read, is left alone and the run is read again.

Large arrays are apart, by what they hold: most are the same from one time to the next.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rankscope.wire
from rankscope_server.analysis.state import RunState
from rankscope_server.store.packing import pack, pack_array, unpack, unshuffled

_LEAST_PART_BYTES = 1 << 14
# Whose classes a state is made of. A change in any of their files makes it unreadable.
_ROOMS = ("analysis", "diagnose", "findings", "known_errors", "observe", "replay", "verdict")
_OURS = ("rankscope.wire.", "rankscope_server.call_shapes", *(
    f"rankscope_server.{room}." for room in _ROOMS
))  # fmt: skip
_OTHERS = frozenset({
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("builtins", "dict"),  # what a defaultdict makes
    ("builtins", "int"),
    ("builtins", "list"),
    ("builtins", "set"),
    ("msgspec._utils", "rebuild"),  # a class with its fields
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),  # of NumPy before 2
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("re", "_compile"),
})  # fmt: skip


class NotKeptError(Exception):
    """A state cannot be written, or what was written cannot be read."""


@dataclass(frozen=True, slots=True)
class Written:
    """A state as bytes: its large arrays are views of those in use, by digest."""

    data: bytes
    digests: list[str]  # in the order in which they are read
    parts: dict[str, memoryview]

    def packed(self, known: Iterable[str]) -> dict[str, bytes]:
        """Return the parts that are not `known`, compressed."""
        return {
            digest: pack_array(np.frombuffer(part, _type_of(part.nbytes)))
            for digest, part in self.parts.items()
            if digest not in known
        }


def write(state: RunState) -> Written:
    """Return the state as bytes. Raises NotKeptError where something in it cannot be."""
    digests: list[str] = []
    parts: dict[str, memoryview] = {}

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LEAST_PART_BYTES:
            return True
        digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        digests.append(digest)
        parts[digest] = raw
        return False

    try:
        data = pickle.dumps(state, protocol=5, buffer_callback=is_inside)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise NotKeptError(f"{type(error).__name__}: {error}") from error
    return Written(pack(data), digests, parts)


def read(data: bytes, parts: Iterable[bytes]) -> RunState:
    """Return the state that `write` wrote. Raises NotKeptError where it is not that."""
    try:
        buffers = [_unpacked(part) for part in parts]
        state = _Reader(io.BytesIO(unpack(data)), buffers=buffers).load()
    except Exception as error:
        raise NotKeptError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, RunState):
        raise NotKeptError(f"a {type(state).__name__} is no state of a run")
    return state


@functools.cache
def code_digest() -> str:
    """Return what changes with the code that a state is made by and for."""
    server = Path(__file__).parents[1]
    files = [server / "call_shapes.py", *Path(rankscope.wire.__file__).parent.rglob("*.py")]
    for room in _ROOMS:
        files += (server / room).rglob("*.py")
    found = hashlib.blake2b(digest_size=16)
    found.update(f"{platform.python_version()} {np.__version__}".encode())
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


class _Reader(pickle.Unpickler):  # noqa: S301 - it resolves no name but those above
    """An unpickler of arrays, plain values and the classes of the analysis."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in a state means. Raises UnpicklingError for what must not be."""
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module.startswith(_OURS) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a state")


def _type_of(num_bytes: int) -> np.dtype[Any]:
    """Return the numbers as which bytes are compressed: they are mostly of four bytes, or eight."""
    return np.dtype("<u4" if num_bytes % 4 == 0 else "u1")


def _unpacked(part: bytes) -> memoryview:
    data = unpack(part)
    return unshuffled(data, _type_of(len(data))).view(np.uint8).data
