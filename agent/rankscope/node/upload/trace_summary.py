"""What took most time in a trace of torch.profiler, read in bounded memory.

The file is JSON with one list of events, which may be gigabytes: it is decoded event by event.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.wire.schema import OperatorTime

NUM_OPERATORS = 20
_BLOCK = 1 << 18
_MAX_EVENT = 1 << 20  # characters; what is longer is no event of ours
_MAX_NAMES = 5_000
_MAX_NESTED = 300_000  # events whose nesting is looked at; beyond, own time is not known
_CATEGORIES = ("cpu_op", "kernel", "user_annotation", "gpu_memcpy", "gpu_memset")
_NESTED = "cpu_op"
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')


class _Totals:
    """Sums by name, and the intervals of CPU operators to find out what nests in what."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.counts: list[int] = []
        self.total_us: list[float] = []
        self.thread, self.number = array("q"), array("q")
        self.begin, self.length = array("d"), array("d")
        self.is_whole = True

    def add(self, event: dict[str, Any]) -> None:
        name, category = str(event.get("name", ""))[:200], str(event.get("cat", ""))
        if event.get("ph") != "X" or category not in _CATEGORIES or not name:
            return
        duration, begin = event.get("dur", 0), event.get("ts", 0)
        if not isinstance(duration, int | float) or not isinstance(begin, int | float):
            return
        key = (name, category)
        number = self.numbers.get(key)
        if number is None:
            if len(self.counts) >= _MAX_NAMES:
                return
            number = self.numbers[key] = len(self.counts)
            self.counts.append(0)
            self.total_us.append(0.0)
        self.counts[number] += 1
        self.total_us[number] += duration
        if category != _NESTED:
            return
        if len(self.begin) >= _MAX_NESTED:
            self.is_whole = False
            return
        self.thread.append(hash(event.get("tid", 0)) & 0xFFFFFFFF)
        self.number.append(number)
        self.begin.append(begin)
        self.length.append(duration)

    def self_us(self) -> list[float]:
        """Return the own time by number: without the operators that ran inside."""
        own = [0.0] * len(self.counts)
        if not len(self.begin):
            return own
        begin, length = np.frombuffer(self.begin), np.frombuffer(self.length)
        order = np.lexsort((-length, begin, np.frombuffer(self.thread, dtype=np.int64)))
        stack: list[tuple[int, float, int]] = []  # thread, end, number
        for at in order.tolist():
            thread, start, took = self.thread[at], self.begin[at], self.length[at]
            while stack and (stack[-1][0] != thread or stack[-1][1] <= start):
                stack.pop()
            if stack:
                own[stack[-1][2]] -= took
            own[self.number[at]] += took
            stack.append((thread, start + took, self.number[at]))
        return own


def summarise(path: Path) -> list[OperatorTime]:
    """Return the operators, kernels and ranges that took most. Raises OSError, ValueError."""
    totals = _Totals()
    for event in trace_events(path):
        totals.add(event)
    own = totals.self_us()
    rows = [
        OperatorTime(
            name=name,
            category=category,
            count=totals.counts[number],
            total_ns=int(totals.total_us[number] * 1000),
            self_ns=int(max(own[number], 0.0) * 1000)
            if category == _NESTED and totals.is_whole
            else -1,
        )
        for (name, category), number in totals.numbers.items()
    ]
    rows.sort(key=lambda row: row.total_ns if row.self_ns < 0 else row.self_ns, reverse=True)
    return rows[:NUM_OPERATORS]


def trace_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace one by one. Raises OSError, ValueError where it is none."""
    decode = json.JSONDecoder().raw_decode
    with path.open(encoding="utf-8", errors="replace") as file:
        text = ""
        while (start := _BEGIN.search(text)) is None:
            block = file.read(_BLOCK)
            if not block or len(text) > 1 << 24:
                raise ValueError("no traceEvents in it")
            text += block
        at = start.end()
        while True:
            while at < len(text) and text[at] in " \r\n\t,":
                at += 1
            if at < len(text) and text[at] == "]":
                return
            try:
                if at >= len(text):
                    raise ValueError("at the end of what was read")
                event, at = decode(text, at)
            except ValueError:
                block = file.read(_BLOCK)
                if not block or len(text) - at > _MAX_EVENT:
                    raise ValueError("the trace breaks off") from None
                text, at = text[at:] + block, 0
                continue
            if isinstance(event, dict):
                yield event
