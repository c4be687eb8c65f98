"""A plan on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal

from rich.table import Table

from rankscope.cli.plan_answer import activations_both_ways, money
from rankscope.cli.plan_options import Request
from rankscope.planning.layout import ASYNCHRONOUS, FAMILIES
from rankscope.planning.machine import DEVICES
from rankscope.planning.model import KNOWN_MODELS, PRECISIONS
from rankscope.planning.plan import Outcome, Plan, days_for, mfu
from rankscope.planning.rules import rules
from rankscope.planning.step import bubble_share
from rankscope.planning.units import (
    bytes_text,
    count_text,
    money_text,
    seconds_text,
)
from rankscope.terminal import SafeConsole, shown_json

Row = dict[str, str]
_COLUMNS = ("", "strategy", "how", "memory", "sends", "step", "within", "idle", "waits")
_TIMED = frozenset({*_COLUMNS[5:], "per M tokens"})
_NARROW = frozenset({"sends", "within", "idle", "waits"})  # left out below so many columns
_WIDE = 120


def show(plan: Plan, request: Request) -> None:
    """Print the strategies, then the one to take, then what is left out."""
    _Screen(SafeConsole(highlight=False), plan, request).show()


class _Screen:
    """Prints one plan."""

    def __init__(self, console: SafeConsole, plan: Plan, request: Request) -> None:
        self._console, self._plan, self._request = console, plan, request

    def show(self) -> None:
        """Print all of it."""
        self._head()
        if self._plan.outcomes:
            self._strategies()
            self._chosen(self._plan.outcomes[0])
        else:
            self._say("Nothing fits.", style="bold")
        self._left_out()

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, markup=False, soft_wrap=True, style=style)

    def _head(self) -> None:
        plan, model, machine = self._plan, self._plan.model, self._plan.machine
        self._say(
            f"{model.name}: {count_text(model.parameters)} weights, {model.num_layers} layers, "
            f"{model.precision.name}, {plan.optimizer}; {plan.batch:,} samples "
            f"({count_text(plan.tokens)} tokens) a step",
            style="bold",
        )
        nodes = f"{machine.nodes:,} node{'s' if machine.nodes > 1 else ''} of {machine.devices}"
        rate = f"{machine.flops / 1e12:,.0f} TFLOPs each" if machine.flops else "rate not known"
        self._say(
            f"on {nodes} {self._request.device.name}: {bytes_text(machine.memory_bytes)}, {rate}"
        )
        for note in self._request.notes:
            self._say(f"  {note}")

    def _strategies(self) -> None:
        plan = self._plan
        is_timed = any(outcome.time for outcome in plan.outcomes)
        columns = [*_COLUMNS, *(["per M tokens"] if self._request.price else [])]
        left_out = _NARROW if self._console.width < _WIDE else frozenset()
        left_out |= frozenset() if is_timed else _TIMED
        shown = [place for place, name in enumerate(columns) if name not in left_out]
        table = _table(*(columns[place] for place in shown))
        for place, outcome in enumerate(plan.outcomes):
            cells = self._row(outcome, is_chosen=place == 0)
            table.add_row(*(cells[place] for place in shown))
        self._console.print()
        self._console.print(table)
        self._say(
            f"{plan.num_fitting:,} of {plan.num_tried:,} layouts fit; the best of each strategy is "
            "shown. How: axes, then microbatches \u00d7 samples. Sends: bytes of a rank in a step"
            + ("; waits: for messages that computation does not cover" if is_timed else "")
        )

    def _row(self, outcome: Outcome, *, is_chosen: bool) -> list[str]:
        time, price = outcome.time, self._request.price
        cells = [
            "→" if is_chosen else "", outcome.layout.family, outcome.layout.text,
            bytes_text(outcome.memory.total), bytes_text(outcome.sent_bytes),
        ]  # fmt: skip
        if time is None:
            return [*cells, "not known", "", "", "", *([""] if price else [])]
        cells += [
            seconds_text(time.total), f"{_of(outcome.low_seconds)} to {_of(outcome.high_seconds)}",
            f"{bubble_share(time):.1%}", f"{time.exposed / time.total:.1%}",
        ]  # fmt: skip
        cost = money(outcome, self._plan, self._request)
        return [*cells, *([money_text(cost[1], price.currency)] if cost and price else [])]

    def _chosen(self, outcome: Outcome) -> None:
        self._console.print()
        self._say(f"Take {outcome.layout.family}: {outcome.layout.text}", style="bold")
        self._say(f"  {self._plan.why}.")
        self._say(f"  {_about(outcome.layout.family)}")
        memory = outcome.memory
        parts = [(part.name, getattr(memory, part.name)) for part in fields(memory)]
        self._say("  memory of the fullest rank: " + _joined(parts, bytes_text))
        kept, again = activations_both_ways(outcome, self._plan)
        self._say(
            f"  activations: {bytes_text(kept)} kept, {bytes_text(again)} with recomputation, "
            "which costs a forward more"
        )
        for messages in outcome.messages:
            self._say(
                f"  {messages.axis}: {messages.count:,.0f} \u00d7 {messages.operation} of "
                f"{bytes_text(messages.size_bytes)} among {messages.members}, "
                f"{bytes_text(messages.sent_bytes)} sent"
            )
        self._times(outcome)

    def _times(self, outcome: Outcome) -> None:
        time, plan, request = outcome.time, self._plan, self._request
        if time is None:
            return
        parts = [(part.name, getattr(time, part.name)) for part in fields(time)]
        self._say("  a step: " + _joined([p for p in parts if p[1]], seconds_text))
        share = mfu(plan, outcome, request.device.peak_flops.get(plan.model.precision.name, 0.0))
        rate = f"{count_text(plan.tokens / time.total)} tokens/s"
        self._say(f"  {rate}" + (f", {share:.0%} of the peak (MFU)" if share else ""))
        days = days_for(plan, outcome, request.tokens) if request.tokens else None
        if days is not None:
            self._say(f"  {count_text(request.tokens)} tokens: {seconds_text(days * 86_400)}")
        cost = money(outcome, plan, request)
        if cost is not None and request.price:
            whole = cost[1] / 1e6 * request.tokens
            texts = [f"{money_text(cost[0], request.price.currency)} a step"]
            texts += [f"{money_text(cost[1], request.price.currency)} a million tokens"]
            texts += [f"{money_text(whole, request.price.currency)} in all"] if whole else []
            self._say("  " + ", ".join(texts))

    def _left_out(self) -> None:
        if not self._plan.left_out:
            return
        self._console.print()
        self._say("Left out", style="bold")
        for one in self._plan.left_out:
            self._say(f"  {one.family}: {one.reason}")


def _about(family: str) -> str:
    text = (FAMILIES | ASYNCHRONOUS)[family]
    return text[0].upper() + text[1:]


def _of(seconds: float | None) -> str:
    return "?" if seconds is None else seconds_text(seconds)


def _joined(parts: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {text(value)}" for name, value in parts)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        justify: Literal["left", "right"] = "left" if place < 3 else "right"
        table.add_column(heading, overflow="fold", justify=justify, no_wrap=heading != "how")
    return table


def _rules() -> list[Row]:
    return [
        {"rule": r.name, "says": r.formula, "for example": r.example, "source": r.source}
        for r in rules()
    ]


def _models() -> list[Row]:
    precision = PRECISIONS["bf16"]
    return [
        {
            "model": name,
            "weights": count_text(transformer.model(name, precision).parameters),
            "layers": str(transformer.layers),
            "width": str(transformer.width),
            "sequence": str(transformer.sequence),
            "source": source,
        }
        for name, (transformer, source) in KNOWN_MODELS.items()
    ]


def _devices() -> list[Row]:
    return [
        {
            "device": device.name,
            "memory": bytes_text(device.memory_bytes),
            "peak TFLOPs": ", ".join(
                f"{name} {flops / 1e12:,.0f}" for name, flops in device.peak_flops.items()
            ),
            "inside": f"{device.inside_bytes_per_second / 1e9:,.0f} GB/s"
            if device.inside_bytes_per_second
            else "not known",
            "source": device.source,
        }
        for device in DEVICES.values()
    ]


LISTS: tuple[tuple[str, str, Callable[[], list[Row]]], ...] = (
    ("explain", "rules", _rules),
    ("list_models", "models", _models),
    ("list_devices", "devices", _devices),
)


def show_list(name: str, rows: list[Row], *, is_json: bool) -> None:
    """Print a list: rules one below the other, the others as a table."""
    console = SafeConsole(highlight=False)
    if is_json:
        console.file.write(shown_json(json.dumps({name: rows})) + "\n")
    elif name == "rules":
        for row in rows:
            console.print(row["rule"], markup=False, style="bold")
            for key in ("says", "for example", "source"):
                console.print(f"  {key}: {row[key]}", markup=False, soft_wrap=True)
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in rows[0]:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
