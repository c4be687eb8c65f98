"""Sizes, rates, times and prices as people write them, and back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rankscope.planning.errors import PlanError

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*(\S*)\s*", re.I)
_BYTES = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_BITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
_PREFIXES = {"m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_FLOPS = {f"{p}flop{s}": x for p, x in _PREFIXES.items() for s in ("", "s", "/s", "s/s")}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0}
_PRICE = re.compile(r"\s*([^\d\s./+-]*)\s*(\d+(?:\.\d+)?)\s*([^\d\s./+-]*)\s*(/\S+)?\s*")
_HOURS = ("/h", "/hour", "/device-hour", "/gpu-hour", "/rank-hour")
_NODE_HOURS = ("/node-hour", "/host-hour")


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of a device, or of a whole node, costs."""

    amount: float
    currency: str = ""
    is_of_node: bool = False

    def per_device_hour(self, devices_per_node: int) -> float:
        """Return the price of one device."""
        return self.amount / devices_per_node if self.is_of_node else self.amount


def size_bytes(text: str, field: str) -> float:
    """Return bytes of `80GB` or `80GiB`. Raises PlanError."""
    return _read(text, field, _BYTES, "a size such as 80GB or 80GiB")


def rate_flops(text: str, field: str) -> float:
    """Return FLOPs per second of `400TFLOPs`. Raises PlanError."""
    return _read(text, field, _FLOPS, "a rate such as 400TFLOPs")


def link_bytes_per_second(text: str, field: str) -> float:
    """Return bytes per second of `50GB/s` or `400Gbit/s`. Raises PlanError."""
    known = {f"{unit}/s": x for unit, x in (_BYTES | _BITS).items()}
    return _read(text, field, known, "a rate such as 50GB/s or 400Gbit/s")


def time_seconds(text: str, field: str) -> float:
    """Return seconds of `5us` or `0.2ms`. Raises PlanError."""
    return _read(text, field, _SECONDS, "a time such as 5us or 0.2ms")


def price_of(text: str, field: str) -> Price:
    """Return what `2.5/hour`, `2.5 EUR/hour` or `$98/node-hour` says. Raises PlanError."""
    found = _PRICE.fullmatch(text)
    per = (found[4] or "/hour").lower() if found else ""
    if not found or per not in (*_HOURS, *_NODE_HOURS):
        remedy = "Write 2.5/hour for each device, or 20/node-hour; a currency may stand beside it"
        raise PlanError(field, f"{text!r} is no price", remedy)
    return Price(float(found[2]), found[1] or found[3], per in _NODE_HOURS)


def _read(text: str, field: str, units: dict[str, float], wanted: str) -> float:
    found = _NUMBER.fullmatch(text)
    scale = units.get(found[2].lower()) if found else None
    if found is None or scale is None:
        raise PlanError(field, f"{text!r} is not {wanted.split(' such')[0]}", f"Write {wanted}")
    value = float(found[1]) * scale
    if not 0 < value < math.inf:
        raise PlanError(field, f"{text!r} is not above zero", f"Write {wanted}")
    return value


def bytes_text(size: float) -> str:
    """Return a size for people, decimal as vendors count memory: 79.4 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{_three(size / scale)} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a time for people: 2.31 s, 84 ms, 2.1 h."""
    for unit, scale in (("d", 86_400.0), ("h", 3_600.0)):
        if seconds >= 2 * scale:
            return f"{_three(seconds / scale)} {unit}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)):
        if seconds >= scale or scale == 1e-6:
            return f"{_three(seconds / scale)} {unit}"
    raise AssertionError


def count_text(number: float) -> str:
    """Return a large number for people: 6.74 B, 125 M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{_three(number / scale)} {unit}"
    return f"{number:.0f}"


def money_text(amount: float, currency: str) -> str:
    """Return an amount with its currency: 0.0132 EUR."""
    text = _three(amount) if amount < 1_000 else f"{amount:,.0f}"
    return f"{text} {currency}".strip()


def _three(number: float) -> str:
    """Return three digits and no more."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.3g}"
