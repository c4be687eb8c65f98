"""The rules of thumb that a plan is made of, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.planning.model import KNOWN_MODELS, PRECISIONS
from rankscope.planning.step import microbatches_for
from rankscope.planning.units import bytes_text, count_text
from rankscope.wire.formulas import (
    bubble_fraction,
    bus_factor,
    expected_slowdown,
    training_flops,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what it says, in a formula, in numbers, and who found it."""

    name: str
    formula: str
    example: str
    source: str


def rules() -> list[Rule]:
    """Return all of them; the numbers of the examples come from the same functions as a plan."""
    return [*_of_models(), *_of_messages()]


def _of_models() -> list[Rule]:
    model = KNOWN_MODELS["llama2-7b"][0].model("llama2-7b", PRECISIONS["bf16"])
    parameters = model.parameters
    whole = 34 * 4096 * 4096
    return [
        Rule(
            "memory of the model's states",
            "2 x + 2 x + 12 x bytes for x weights: weights and gradients in 16 bits; a copy in 32 "
            "and Adam's two moments",
            f"{count_text(parameters)} weights: {bytes_text(16 * parameters)} on each rank of DDP; "
            "ZeRO-1, 2 and 3 divide the 12, the 12 + 2, and all 16 by the data ranks",
            "Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, sections 3.1 and 5",
        ),
        Rule(
            "memory of activations",
            "s b h (34 + 5 a s / h) bytes for each layer, in 16 bits; without the 5 a s / h where "
            "attention is one kernel; 2 s b h with recomputation",
            f"s = h = 4096, b = 1: {bytes_text(whole)} a layer, {bytes_text(2 * 4096 * 4096)} with "
            "recomputation, which costs a third more FLOPs",
            "Korthikanti et al. 2022, arXiv 2205.05198, section 4",
        ),
        Rule(
            "work of a step",
            "6 N D FLOPs for N weights and D tokens: 2 N D forward, 4 N D backward",
            f"{count_text(parameters)} weights, 4 M tokens: "
            f"{training_flops(parameters, 4e6):.3g} FLOPs",
            "Kaplan et al. 2020, arXiv 2001.08361, section 2.1",
        ),
    ]


def _of_messages() -> list[Rule]:
    return [
        Rule(
            "ring all_reduce",
            "each rank sends 2 (N - 1) / N of the size, in 2 (N - 1) hops",
            f"{bus_factor('all_reduce', 4):.2f} of the size with 4 ranks, "
            f"{bus_factor('all_reduce', 4000):.2f} with 4,000: the bytes hardly grow, the hops do",
            "Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69; performance notes of "
            "nccl-tests. Holds without reduction inside the network (SHARP)",
        ),
        Rule(
            "tree all_reduce",
            "2 log2 N hops in place of 2 (N - 1), twice the size",
            "1,024 ranks: 20 hops in place of 2,046; better for small messages",
            "Sanders, Speck & Traeff 2009, Parallel Computing 35; NCCL 2.4",
        ),
        Rule(
            "idle time of a pipeline",
            "(p - 1) / (v m + p - 1) of a step for p stages, m microbatches, v stages on each rank",
            f"p = 8: {bubble_fraction(8, 8):.0%} idle with 8 microbatches, "
            f"{bubble_fraction(8, 32):.0%} with 32; at most 5 % from "
            f"{microbatches_for(8, 0.05)} on",
            "Huang et al. 2019 (GPipe), arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473",
        ),
        Rule(
            "ZeRO-3 and FSDP send half as much again",
            "weights are gathered for forward and for backward, gradients reduced and scattered: "
            "3 (N - 1) / N of the size against 2 (N - 1) / N",
            "1.5 times the bytes of DDP; once more for each further microbatch",
            "Rajbhandari et al. 2020, section 7.2",
        ),
        Rule(
            "one slow rank",
            "a rank that takes f times longer for a share c of the step makes everybody's step "
            "1 - c + c f times longer",
            f"a rank at half speed where 80 % of a step is computation: "
            f"{expected_slowdown(0.8, 2.0):.1f} times longer, on however many ranks",
            "Amdahl 1967; synchronous training waits for the last",
        ),
    ]
