"""What-if answers on a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rankscope.planning.units import bytes_text, seconds_text
from rankscope.terminal import SafeConsole

_COLUMNS = ("change", "step", "within", "throughput", "memory", "by")


def show(answer: dict[str, Any], console: SafeConsole, *, is_asked: bool) -> None:
    """Print the sentence, the answers, and of those that were asked for what they rest on."""
    _Screen(console).show(answer, is_asked)


class _Screen:
    """Prints one answer."""

    def __init__(self, console: SafeConsole) -> None:
        self._console = console

    def show(self, answer: dict[str, Any], is_asked: bool) -> None:
        """Print all of it."""
        now = answer["now"]
        self._say(answer["text"], style="bold")
        self._say(f"  now: {now['text']}, {_now(answer)}")
        known = [one for one in answer["answers"] if one["step_ms"] is not None]
        if known:
            self._table(answer, known)
        for one in known if is_asked else ():
            self._rests_on(one, answer)
        unknown = [one for one in answer["answers"] if one["step_ms"] is None]
        if unknown:
            self._say("\nNot known", style="bold")
        for one in unknown:
            self._say(f"  {one['label']}: {one['why_not']}")
        if known and not is_asked:
            self._say("\nAsk for one, as in --strategy fsdp, to see what is assumed.")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, markup=False, soft_wrap=True, style=style)

    def _table(self, answer: dict[str, Any], known: list[dict[str, Any]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for place, heading in enumerate(_COLUMNS):
            is_number = 0 < place < len(_COLUMNS) - 1
            table.add_column(heading, overflow="fold", justify="right" if is_number else "left")
        now = answer["now"]
        table.add_row("as it is", _ms(now["step_ms"]), "", "", _bytes(now["memory_bytes"]), "")
        for one in known:
            within = f"{_ms(one['step_low_ms'])} to {_ms(one['step_high_ms'])}"
            gain = f"{100 * (one['throughput_ratio'] - 1):+.1f} %"
            table.add_row(
                one["label"], _ms(one["step_ms"]), within, gain, _bytes(one["memory_bytes"]),
                one["by"],
            )  # fmt: skip
        self._console.print()
        self._console.print(table)

    def _rests_on(self, one: dict[str, Any], answer: dict[str, Any]) -> None:
        if one["parts"]:
            parts = ", ".join(f"{name} {_ms(ms)}" for name, ms in one["parts"].items())
            self._say(f"\n  a step: {parts}")
        if one["no_memory"]:
            self._say(f"  memory: not known, {one['no_memory']}")
        for text in one["assumptions"]:
            self._say(f"  assumed: {text}")
        if one["band"]:
            self._say(f"  band: {one['band']}")
        for factor in answer["factors"] if one["by"] != "replay" else ():
            is_time = factor["name"].endswith("_ms")
            value = _ms(factor["value"]) if is_time else f"{factor['value']:.0%}"
            self._say(f"  calibrated: {factor['what']}: {value}")
        self._say("\nMeasured", style="bold")
        for row in answer["inputs"]:
            self._say(f"  {row['label']}: {_value(row)} ({row['source']})")


def _now(answer: dict[str, Any]) -> str:
    if not answer["num_steps"]:
        return "no steps to go by"
    return f"steps {answer['step_lo']:,} to {answer['step_hi']:,}"


def _ms(value: float | None) -> str:
    return "not known" if value is None else seconds_text(value / 1e3)


def _bytes(value: float | None) -> str:
    return "not known" if value is None else bytes_text(value)


def _value(row: dict[str, Any]) -> str:
    value, unit = row["value"], row["unit"]
    if value is None:
        return "not known"
    if isinstance(value, str):
        return value
    if unit == "ms":
        return _ms(value)
    if unit in ("bytes", "bytes/s"):
        return f"{bytes_text(value)}{unit.removeprefix('bytes')}"
    return f"{value:,.0f}"
