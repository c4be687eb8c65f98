"""What a pickle costs to build, known before it is built, and to read, before it is expanded.

A few kB can name the same list a thousand times a thousand times; converting it copies
it each time. A place in the memo far beyond what was put there reserves memory up to that place.
"""

from __future__ import annotations

import pickletools
from typing import Any

MAX_OPERATIONS = 32 << 20  # 20,000 entries with stacks take 6 million
MAX_VALUES = 16 << 20  # after each shared value was counted as often as it is named
MAX_DEPTH = 16  # a dump has 5
_STOP = 0x2E
_PUT, _LONG_BINPUT = 0x70, 0x72
_GLOBALS = b"ci"  # two lines of text; refused anyway
_LARGEST_BINPUT = 255
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MEMO_CODE, _TEXT_CODE, _UNKNOWN = 0, -1, -9
_LENGTH_BYTES = {-2: 1, -3: 4, -4: 4, -5: 8}  # of pickletools' arguments that begin with a length


class OverBudgetError(ValueError):
    """This pickle costs more than any dump; the message says what."""


def _sizes() -> list[int]:
    """Return by opcode: its bytes with a fixed argument, or which kind its argument is of."""
    sizes = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        number = 0 if opcode.arg is None else opcode.arg.n
        sizes[ord(opcode.code)] = 1 + number if number >= 0 else number
    sizes[_LONG_BINPUT] = _MEMO_CODE
    for code in _GLOBALS:
        sizes[code] = _UNKNOWN
    return sizes


_SIZES = _sizes()


def check_operations(data: bytes) -> None:
    """Raise OverBudgetError for a pickle of too many steps, or one that wants a far memo place.

    What is damaged ends the count: the unpickler ends there too.
    """
    sizes, size, position = _SIZES, len(data), 0
    for count in range(MAX_OPERATIONS):
        if position >= size:
            return
        step = sizes[data[position]]
        if step <= 0:
            step = step_at(data, position, count)
        if step == 0 or data[position] == _STOP:
            return
        position += step
    raise OverBudgetError(f"it takes more than {MAX_OPERATIONS} steps to build")


def step_at(data: bytes, position: int, count: int) -> int:
    """Return the bytes of the operation at a position, the one after `count`; 0: none of ours."""
    code = data[position]
    kind = _SIZES[code]
    if kind > 0:
        return kind
    if kind == _MEMO_CODE:
        _check_memo(int.from_bytes(data[position + 1 : position + 5], "little"), count)
        return 5
    if kind == _TEXT_CODE:
        return _text_step(data, position, code, count)
    width = _LENGTH_BYTES.get(kind, 0)
    length = int.from_bytes(data[position + 1 : position + 1 + width], "little")
    return 1 + width + length if width else 0


def _text_step(data: bytes, position: int, code: int, count: int) -> int:
    end = data.find(b"\n", position)
    if end < 0:
        return 0
    word = data[position + 1 : end].strip()
    if code == _PUT and word.isdigit():
        _check_memo(int(word) if len(word) < 12 else MAX_OPERATIONS * 2, count)
    return end + 1 - position


def _check_memo(place: int, count: int) -> None:
    if place > max(count, _LARGEST_BINPUT):
        raise OverBudgetError(f"its memo has place {place} after {count} steps")


def check_values(plain: Any) -> None:
    """Raise OverBudgetError where a value is too large once nothing in it is shared any more."""
    left = MAX_VALUES
    path = [iter((plain,))]  # from the value to the one that is counted now
    while path:
        inside = next((child for child in path[-1] if isinstance(child, _CONTAINERS)), None)
        if inside is None:
            path.pop()
            continue
        left -= len(inside)
        if left < 0:
            raise OverBudgetError(f"it expands to more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise OverBudgetError(f"it is nested more than {MAX_DEPTH} deep")
        path.append(iter(inside.values() if isinstance(inside, dict) else inside))
