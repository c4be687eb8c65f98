"""The answer of `rankscope plan --json`: units are in names, null is not known."""

from __future__ import annotations

import dataclasses
from typing import Any

from rankscope.cli.plan_options import Request
from rankscope.planning.memory import memory_of
from rankscope.planning.plan import (
    Outcome,
    Plan,
    days_for,
    mfu,
    money_of_step,
    unknown_rates,
)
from rankscope.planning.step import bubble_share


def answer_of(plan: Plan, request: Request) -> dict[str, Any]:
    """Return the object."""
    model, machine = plan.model, plan.machine
    return {
        "model": {
            "name": model.name, "parameters": model.parameters, "layers": model.num_layers,
            "tokens_per_sample": model.tokens, "precision": model.precision.name,
            "forward_flops_per_sample": model.forward_flops,
        },
        "step": {"batch": plan.batch, "tokens": plan.tokens, "optimizer": plan.optimizer},
        "machine": {
            "nodes": machine.nodes, "devices": machine.devices, "ranks": machine.ranks,
            "device": request.device.name, "memory_bytes": machine.memory_bytes,
            "flops_per_second": machine.flops or None,
            "links": {
                name: None if link is None else dataclasses.asdict(link)
                for name, link in (("inside", machine.inside), ("between", machine.between))
            },
        },
        "notes": list(request.notes),
        "unknown": unknown_rates(machine),
        "chosen": plan.chosen.layout.family if plan.chosen else None,
        "why": plan.why,
        "tried": plan.num_tried,
        "fitting": plan.num_fitting,
        "strategies": [_outcome(outcome, plan, request) for outcome in plan.outcomes],
        "left_out": [
            {
                "strategy": one.family, "why": one.reason,
                "memory_bytes": one.closest.memory.total if one.closest else None,
            }
            for one in plan.left_out
        ],
    }  # fmt: skip


def activations_both_ways(outcome: Outcome, plan: Plan) -> tuple[float, float]:
    """Return the activations kept whole, and with all but the layers' inputs computed again."""
    kept, again = (
        memory_of(
            plan.model, dataclasses.replace(outcome.layout, recomputes=recomputes), plan.machine,
            plan.optimizer,
        ).activations
        for recomputes in (False, True)
    )  # fmt: skip
    return kept, again


def money(outcome: Outcome, plan: Plan, request: Request) -> tuple[float, float] | None:
    """Return the price of a step and of a million tokens; None where one of them is not known."""
    step = money_of_step(plan, outcome, request.price) if request.price else None
    return None if step is None else (step, step / plan.tokens * 1e6)


def _outcome(outcome: Outcome, plan: Plan, request: Request) -> dict[str, Any]:
    memory, time = outcome.memory, outcome.time
    kept, again = activations_both_ways(outcome, plan)
    cost = money(outcome, plan, request)
    peak = request.device.peak_flops.get(plan.model.precision.name, 0.0)
    return {
        "strategy": outcome.layout.family,
        "layout": dataclasses.asdict(outcome.layout),
        "text": outcome.layout.text,
        "memory_bytes": dataclasses.asdict(memory) | {"total": memory.total},
        "activations_bytes": {"kept": kept, "recomputed": again},
        "messages": [
            dataclasses.asdict(messages) | {"sent_bytes": messages.sent_bytes}
            for messages in outcome.messages
        ],
        "sent_bytes": outcome.sent_bytes,
        "seconds": None if time is None else dataclasses.asdict(time) | {"total": time.total},
        "bounds_seconds": None if time is None else [outcome.low_seconds, outcome.high_seconds],
        "bubble_ratio": None if time is None else bubble_share(time),
        "exposed_seconds": None if time is None else time.exposed,
        "tokens_per_second": None if time is None else plan.tokens / time.total,
        "mfu_ratio": mfu(plan, outcome, peak),
        "days": days_for(plan, outcome, request.tokens) if request.tokens else None,
        "price": None if cost is None or request.price is None else {
            "currency": request.price.currency, "step": cost[0], "million_tokens": cost[1],
            "all_tokens": cost[1] / 1e6 * request.tokens if request.tokens else None,
        },
    }  # fmt: skip
