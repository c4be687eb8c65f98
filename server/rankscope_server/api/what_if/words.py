"""Where the numbers behind the answers are from, and what changes are called."""

from __future__ import annotations

from rankscope_server.api.what_if.schema import WhatIfAnswer, WhatIfFactor, WhatIfInput
from rankscope_server.findings.text import bytes_text, ms_text, percent_text, ranks_text
from rankscope_server.text import plural
from rankscope_server.what_if.answers import Change
from rankscope_server.what_if.engine import Engine, optimizer_of
from rankscope_server.what_if.recorded import Recorded

_TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "FSDP"}
_MIB = 1 << 20


def run_text(recorded: Recorded) -> str:
    """Return "2 ranks on 1 node, DDP, 2 microbatches"."""
    texts = [f"{plural(recorded.ranks, 'rank')} on {plural(recorded.nodes, 'node')}"]
    if recorded.stages > 1:
        texts.append(f"a pipeline of {plural(recorded.stages, 'stage')}")
    if recorded.strategy:
        texts.append(NAMES[recorded.strategy])
    if recorded.microbatches:
        texts.append(_microbatches(recorded.microbatches))
    return ", ".join(texts)


def _links(times: float) -> str:
    if times > 1:
        return f"links {times:g}{_TIMES} faster"
    return f"links {1 / times:.3g}{_TIMES} slower"


def label_of(change: Change, recorded: Recorded, without: tuple[int, ...], equal: bool) -> str:
    """Return what is otherwise, in words."""
    nodes = change.add_nodes
    who = ranks_text(list(without)) if without else ""
    now = NAMES.get(recorded.strategy, "what it is")
    said = (
        (change.strategy, f"{NAMES.get(change.strategy, '')} in place of {now}"),
        (nodes > 0, f"{plural(nodes, 'node')} more"),
        (nodes < 0, f"{plural(-nodes, 'node')} fewer"),
        (change.ranks_per_node, f"{plural(change.ranks_per_node, 'rank')} on each node"),
        (change.link_times != 1.0, _links(change.link_times)),
        (change.microbatches, f"{_microbatches(change.microbatches)} in place of "
         f"{recorded.microbatches or 'an unknown number'}"),
        (change.bucket_bytes, f"buckets of {change.bucket_bytes / _MIB:g} MiB"),
        (who, f"{who} as fast as "
         f"{'its' if len(without) == 1 else 'their'} peers"),
        (equal, "the work spread evenly"),
    )  # fmt: skip
    text = ", ".join(words for is_said, words in said if is_said) or "as it is"
    return text[0].upper() + text[1:]


def _microbatches(count: int) -> str:
    return f"{count:,} microbatch{'' if count == 1 else 'es'}"


def first_sentence(
    answers: list[WhatIfAnswer], step_ms: float | None, num_ranks: int, is_asked: bool
) -> str:
    """Return the answer that was asked for, or the best of all."""
    known = [one for one in answers if one.step_ms is not None]
    if not known:
        return f"Not known: {answers[0].why_not}" if answers else "Not known: nothing to change"
    best = known[0]
    assert best.step_ms is not None
    assert best.throughput_ratio is not None
    now = "" if step_ms is None else f" in place of {ms_text(step_ms)}"
    gain = gain_text(best)
    assert best.ranks is not None
    if is_asked or best.throughput_ratio * num_ranks / best.ranks > 1:
        lead = "" if is_asked else f"Of {plural(len(known), 'change')} one gives most: "
        return f"{lead}{best.label}: a step of {ms_text(best.step_ms)}{now}, {gain}"
    return f"None of {plural(len(known), 'change')} would make it faster; {best.label}: {gain}"


def gain_text(answer: WhatIfAnswer) -> str:
    """Return "12 % more throughput (5 % to 20 %)"."""
    ratio, low, high = answer.throughput_ratio, answer.throughput_low, answer.throughput_high
    assert ratio is not None
    assert low is not None
    assert high is not None
    word = "more" if ratio >= 1 else "less"
    band = " to ".join(_signed(one - 1) for one in (low, high))
    return f"{percent_text(abs(ratio - 1))} {word} throughput ({band})"


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else chr(0x2212)}{percent_text(abs(share))}"


def inputs_of(recorded: Recorded, given: frozenset[str]) -> list[WhatIfInput]:
    """Return the numbers that answers rest on, each with its source, unknown ones too."""
    link, optimizer = recorded.link(), optimizer_of(recorded)
    steps = f"mean of {plural(recorded.num_steps, 'ordinary step')}, the middle half by time"
    sent = bytes_text(recorded.gradient_bytes)
    rows: tuple[tuple[str, str, float | str | None, str, str], ...] = (
        ("step_ms", "Step", recorded.step_ms or None, "ms", steps),
        ("computing_ms", "Forward and backward", recorded.stage_ms
         or _sum(recorded, "forward", "backward"), "ms", "self time, " + (
             "of the slowest stage" if recorded.stages > 1 else steps)),
        ("exposed_ms", "Exposed communication", _sum(recorded, "communication"), "ms",
         "the shortest wait of any rank in a step"),
        ("waiting_ms", "Waiting for other ranks", _sum(recorded, "waiting"), "ms",
         "blocked for longer than that"),
        ("update_ms", "Update", _sum(recorded, "optimizer"), "ms", "self time of the optimizer"),
        ("parameters", "Weights", recorded.parameters or None, "",
         "of the optimizers" if recorded.parameters else "no optimizer reported them"),
        ("gradient_bytes", "Gradients sent", recorded.gradient_bytes or None, "bytes",
         f"sum of reductions of a step, {plural(recorded.num_reductions, 'time')} {sent}"
         if recorded.gradient_bytes else "no sizes of messages are recorded"),
        ("layers", "Layers", recorded.num_layers or None, "", _layers_source(recorded, given)),
        ("optimizer", "Optimizer state as of", optimizer or None, "",
         f"{bytes_text(recorded.optimizer_bytes)} on a rank" if optimizer
         else "no optimizer reported its state"),
        ("memory_bytes", "Memory of the fullest rank", recorded.memory_bytes or None, "bytes",
         recorded.memory_source or "no memory of a rank was recorded"),
        ("microbatches", "Microbatches", recorded.microbatches or None, "",
         "said by the pipeline" if recorded.stages > 1 else "backward passes of a step"),
        ("bytes_per_second", "Link, of a rank", None if link is None else link.bytes_per_second,
         "bytes/s", "no collective with a size was recorded" if link is None
         else "how collectives of several sizes took longer" if link.is_split
         else "the largest collective; its latency cannot be separated"),
        ("latency_ms", "Latency of a hop", None if link is None or not link.is_split
         else link.latency_seconds * 1e3, "ms", "what is left of them at size 0"),
        ("processors", "Processors of a node", recorded.processors or None, "",
         "ranks compute on them" if recorded.processors
         else "no facts of the host, or ranks compute on devices"),
    )  # fmt: skip
    return [
        WhatIfInput(name=name, label=label, value=value, unit=unit, source=source)
        for name, label, value, unit, source in rows
    ]


def _sum(recorded: Recorded, *names: str) -> float | None:
    return sum(recorded.parts[name] for name in names) if recorded.parts else None


def _layers_source(recorded: Recorded, given: frozenset[str]) -> str:
    if "layers" in given:
        return "as asked"
    if recorded.layers:
        return "the row of equal modules with most weights, of the model under DDP"
    if recorded.num_layers:
        return "how many parts FSDP reduces apart, less what is outside of them"
    return "a model under DDP reports them; give layers"


def factors_of(engine: Engine) -> list[WhatIfFactor]:
    """Return what makes the planner's step of now the measured one."""
    found = []
    if engine.layout.data > 1:
        found += [
            WhatIfFactor(name="overlap", value=engine.overlap,
                         what="share of a backward that hides messages"),
            WhatIfFactor(name="shown", value=engine.shown,
                         what="share of the messages beyond it that showed"),
        ]  # fmt: skip
    if engine.layout.pipeline > 1:
        found.append(
            WhatIfFactor(name="idle", value=engine.idle,
                         what="share of the schedule's idle time that was measured")
        )  # fmt: skip
    found.append(
        WhatIfFactor(name="kept_ms", value=engine.kept_ms,
                     what="what of a step is in no formula, and is kept")
    )  # fmt: skip
    return found
