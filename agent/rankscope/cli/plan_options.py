"""The options of `rankscope plan`, and what they mean to it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.planning.errors import PlanError
from rankscope.planning.layout import ASYNCHRONOUS, FAMILIES
from rankscope.planning.machine import (
    BETWEEN_LATENCY_SECONDS,
    DEVICES,
    INSIDE_LATENCY_SECONDS,
    LINK_SHARE,
    PEAK_SHARE,
    PEAK_SHARE_HIGH,
    PEAK_SHARE_LOW,
    Device,
    Link,
    Machine,
)
from rankscope.planning.measured import link_between
from rankscope.planning.model import (
    KNOWN_MODELS,
    OPTIMIZER_BYTES,
    PRECISIONS,
    Model,
    Transformer,
)
from rankscope.planning.units import (
    Price,
    link_bytes_per_second,
    price_of,
    rate_flops,
    size_bytes,
    time_seconds,
)

RATE_BAND = 0.1  # of a rate that the user measured
_NUMBERS = ("layers", "width", "heads", "sequence", "vocabulary")
_NOT_FROM = "Give a name of --list-models, MODULE:CALLABLE, or --layers --width --heads"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `notes` say what was taken from where."""

    model: Model
    machine: Machine
    device: Device
    batch: int
    optimizer: str
    families: tuple[str, ...]
    price: Price | None
    tokens: float
    notes: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every option, in the order in which people need them."""
    _model(parser.add_argument_group("the model").add_argument)
    _step(parser.add_argument_group("the step").add_argument)
    _machine(parser.add_argument_group("the machine").add_argument)
    _answer(parser.add_argument_group("the answer").add_argument)


def _model(add: Callable[..., object]) -> None:
    add(
        "--model",
        metavar="NAME",
        help="a known model (--list-models), or MODULE:CALLABLE that returns a torch.nn.Module: it "
        "is built without memory, on the meta device",
    )
    add(
        "--trainer",
        metavar="CONFIG",
        help="the model and step of the reference trainer: a TOML file, or its flags in one word",
    )
    for name, text in (
        ("layers", "transformer blocks"),
        ("width", "numbers that represent one position (d_model, hidden size)"),
        ("heads", "attention heads"),
        ("kv-heads", "heads of keys and values, where they are fewer"),
        ("feed-forward", "width inside of the feed-forward part; default: 4 times the width"),
        ("sequence", "positions of one sample"),
        ("vocabulary", "different tokens"),
    ):
        add(f"--{name}", type=_natural, default=0, metavar="N", help=text)
    add("--gated", action="store_true", help="three matrices in the feed-forward part (SwiGLU)")
    add("--tied", action="store_true", help="the last projection is the table of tokens")
    add("--dropout", action="store_true", help="keep masks of dropout")
    add("--scores", action="store_true", help="attention without a fused kernel keeps its scores")
    add("--input", metavar="DTYPE:SHAPE", help="of a MODULE: int64:1x128, float32:1x3x224x224")


def _step(add: Callable[..., object]) -> None:
    add("--batch", type=_natural, default=0, metavar="N", help="samples of a step over all ranks")
    add("--precision", choices=tuple(PRECISIONS), default="bf16", help="default %(default)s")
    add("--optimizer", choices=tuple(OPTIMIZER_BYTES), default="adamw", help="default %(default)s")


def _machine(add: Callable[..., object]) -> None:
    add("--nodes", type=_natural, default=1, metavar="N", help="default %(default)s")
    add("--devices", type=_natural, default=1, metavar="N", help="of each node; default 1")
    add("--device", default="", metavar="NAME", help=f"{', '.join(DEVICES)}, or your own name")
    add("--memory", default="", metavar="SIZE", help="of a device, where not the table's: 80GB")
    add(
        "--rate",
        default="",
        metavar="RATE",
        help="what a device reaches in your training: 400TFLOPs; default: "
        f"{PEAK_SHARE} of the table's peak, {PEAK_SHARE_LOW} to {PEAK_SHARE_HIGH}",
    )
    add(
        "--link",
        default="",
        metavar="LINKS",
        help="what a device sends to another inside=450GB/s, and to another node "
        "between=50GB/s; with the time of a first byte: between=50GB/s:14us",
    )
    add(
        "--links",
        default="",
        metavar="FILE",
        help="links between nodes as `rankscope preflight --json FILE` measured them",
    )
    add(
        "--host-layer",
        default="",
        metavar="TIME",
        help="that the host works for a layer in a forward, where that is not hidden; a layer that "
        "is cut takes it on each of its ranks: 1ms; default: none",
    )
    add(
        "--message",
        default="",
        metavar="TIME",
        help="that a message inside of cut layers takes at least, where the host's work for it is "
        "not hidden: 5ms; default: none",
    )


def _answer(add: Callable[..., object]) -> None:
    add("--price", default="", metavar="PRICE", help="2.5/hour of a device, or 20/node-hour")
    add("--tokens", type=_amount, default=0.0, metavar="N", help="of the whole training: 2e12")
    add(
        "--strategy",
        default="",
        metavar="NAMES",
        help=f"these alone, with commas between: {', '.join((*FAMILIES, *ASYNCHRONOUS))}",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--explain", action="store_true", help="show the rules that it uses, with their sources")
    add("--list-models", action="store_true", help="show the known models")
    add("--list-devices", action="store_true", help="show the known devices, with their sources")


def request_of(arguments: argparse.Namespace) -> Request:
    """Return what was asked. Raises PlanError."""
    machine, device, notes = _machine_of(arguments)
    model, batch, optimizer, note = _model_of(arguments, machine)
    if not batch:
        raise PlanError("batch", "not given", "Give --batch, the samples of a step over all ranks")
    return Request(
        model=model,
        machine=machine,
        device=device,
        batch=batch,
        optimizer=optimizer,
        families=tuple(name.strip() for name in arguments.strategy.split(",") if name.strip()),
        price=price_of(arguments.price, "price") if arguments.price else None,
        tokens=arguments.tokens,
        notes=tuple(text for text in (note, *notes) if text),
    )


def _model_of(arguments: argparse.Namespace, machine: Machine) -> tuple[Model, int, str, str]:
    """Return the model, the batch, the optimizer, and a note on where they are from."""
    precision = PRECISIONS[arguments.precision]
    if arguments.trainer:
        from rankscope.cli.plan_trainer import layout_of, load, model_of

        settings = load(arguments.trainer, machine.ranks)
        model, layout = model_of(settings), layout_of(settings, machine.ranks)
        note = f"the reference trainer with {arguments.trainer}"
        return model, arguments.batch or layout.batch, settings.optimizer, note
    if arguments.model and ":" in arguments.model:
        from rankscope.cli.plan_module import model_of_module

        model, note = model_of_module(
            arguments.model, arguments.input, arguments.sequence, precision
        )
        return model, arguments.batch, arguments.optimizer, note
    given = _given(arguments)
    if arguments.model:
        if arguments.model not in KNOWN_MODELS:
            raise PlanError(
                "model", f"{arguments.model!r} is not known", f"{_NOT_FROM} --sequence --vocabulary"
            )
        transformer, source = KNOWN_MODELS[arguments.model]
        changed = dataclasses.replace(transformer, **given)
        model = changed.model(arguments.model, precision)
        return model, arguments.batch, arguments.optimizer, f"{arguments.model}: {source}"
    missing = [name for name in _NUMBERS if name not in given]
    if missing:
        raise PlanError(missing[0], "not given", f"{_NOT_FROM} --sequence --vocabulary")
    model = Transformer(**given).model("model", precision)
    return model, arguments.batch, arguments.optimizer, ""


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of a transformer that were given."""
    names = (*_NUMBERS, "kv_heads", "feed_forward")
    given: dict[str, Any] = {n: getattr(arguments, n) for n in names if getattr(arguments, n)}
    flags = {"gated": "is_gated", "tied": "is_tied", "scores": "stores_scores"}
    given |= {field: True for flag, field in flags.items() if getattr(arguments, flag)}
    return given | ({"dropout": 0.1} if arguments.dropout else {})


def _machine_of(arguments: argparse.Namespace) -> tuple[Machine, Device, list[str]]:
    device, notes = _device_of(arguments)
    peak = device.peak_flops.get(arguments.precision, 0.0)
    if arguments.rate:
        flops = rate_flops(arguments.rate, "rate")
        rates = (flops, flops * (1 - RATE_BAND), flops * (1 + RATE_BAND))
    else:
        rates = (peak * PEAK_SHARE, peak * PEAK_SHARE_LOW, peak * PEAK_SHARE_HIGH)
        if device.peak_flops and not peak:
            notes.append(f"{device.name} has no rate for {arguments.precision}")
    inside, between, more = _links_of(arguments, device)
    host = time_seconds(arguments.host_layer, "host-layer") if arguments.host_layer else 0.0
    least = time_seconds(arguments.message, "message") if arguments.message else 0.0
    machine = Machine(
        nodes=arguments.nodes, devices=arguments.devices, memory_bytes=device.memory_bytes,
        flops=rates[0], flops_low=rates[1], flops_high=rates[2],
        memory_bytes_per_second=device.memory_bytes_per_second, inside=inside, between=between,
        host_layer_seconds=host, least_message_seconds=least,
    )  # fmt: skip
    return machine, device, [*notes, *more]


def _device_of(arguments: argparse.Namespace) -> tuple[Device, list[str]]:
    name = arguments.device.lower()
    memory = size_bytes(arguments.memory, "memory") if arguments.memory else 0.0
    known = DEVICES.get(name)
    if known is not None:
        device = dataclasses.replace(known, memory_bytes=memory) if memory else known
        return device, [f"{name}: {known.source}"]
    if not memory:
        problem = f"the memory of {arguments.device or 'a device'} is not known"
        remedy = f"Give --memory, or a --device of: {', '.join(DEVICES)}"
        raise PlanError("memory", problem, remedy)
    notes = [] if arguments.rate else ["no rate is known: give --rate for times, or a --device"]
    return Device(arguments.device or "device", memory), notes


def _links_of(
    arguments: argparse.Namespace, device: Device
) -> tuple[Link | None, Link | None, list[str]]:
    notes: list[str] = []
    inside = between = None
    if device.inside_bytes_per_second:
        inside = Link(device.inside_bytes_per_second * LINK_SHARE, INSIDE_LATENCY_SECONDS)
    if arguments.links:
        between, text = link_between(_read_json(arguments.links), arguments.devices)
        notes.append(f"links between nodes: {text}")
    for part in filter(None, arguments.link.split(",")):
        name, _, value = part.partition("=")
        rate, _, latency = value.partition(":")
        if name.strip() not in ("inside", "between"):
            remedy = "Write --link inside=450GB/s,between=50GB/s"
            raise PlanError("link", f"{name.strip()!r} is neither inside nor between", remedy)
        first = INSIDE_LATENCY_SECONDS if name.strip() == "inside" else BETWEEN_LATENCY_SECONDS
        link = Link(
            link_bytes_per_second(rate, "link"),
            time_seconds(latency, "link") if latency else first,
        )
        inside, between = (link, between) if name.strip() == "inside" else (inside, link)
    if arguments.nodes > 1 and between is None:
        notes.append("the link between nodes is not known: give --link between=... or --links FILE")
    return inside, between, notes


def _read_json(path: str) -> Any:
    try:
        answer = json.loads(Path(path).read_bytes())
    except OSError as error:
        remedy = "Name the file that `rankscope preflight --json FILE` wrote"
        raise PlanError("links", f"cannot read {path}: {error.strerror}", remedy) from error
    except ValueError as error:
        remedy = "Write it by `rankscope preflight --json FILE`"
        raise PlanError("links", f"{path} is not JSON", remedy) from error
    return answer if isinstance(answer, dict) else {}


def _natural(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, such as 2e12")
    return number
