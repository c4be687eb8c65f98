"""What changes would give: the planner where the layout changes, the stored replay elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa

from rankscope.planning.errors import PlanError
from rankscope_server.answers import json_object
from rankscope_server.api.what_if import words
from rankscope_server.api.what_if.asked import MIB, Asked
from rankscope_server.api.what_if.recording import recorded_of
from rankscope_server.api.what_if.schema import WhatIf, WhatIfAnswer, WhatIfFactor, WhatIfNow
from rankscope_server.problems import Problem
from rankscope_server.what_if.answers import REPLAY_MISSED, Change, answer, check, offered
from rankscope_server.what_if.engine import CannotAnswer, engine_of
from rankscope_server.what_if.recorded import Recorded

_OFFERED_RANKS = 3  # without each of which the default list says what would be


@dataclass(frozen=True, slots=True)
class _Replay:
    """What the analysis stored of its replay: ratios to the step that the replay gives back."""

    without: Mapping[tuple[int, ...], float]
    equal: float | None
    buckets: Mapping[float, tuple[float, float, float]]  # by MiB: gain, low, high
    error: float
    why_none: str

    def ratio(self, asked: Asked) -> float:
        """Return the step without these ranks' slowness, the one of now being 1.

        Raises CannotAnswer.
        """
        if self.why_none:
            raise CannotAnswer(f"the steps could not be replayed: {self.why_none}")
        if asked.equal:
            assert self.equal is not None
            return self.equal
        found = self.without.get(asked.without)
        if found is None:
            shown = ", ".join(str(ranks[0]) for ranks in self.without if len(ranks) == 1)
            raise CannotAnswer(
                "a replay is made without the ranks that work longest beyond the usual, one by "
                "one, and without all that a finding calls slow"
                + (f"; these are {shown}" if shown else "; here no rank has peers")
            )
        return found


def what_if(connection: sa.Connection, run: sa.Row[Any], asked: Asked) -> WhatIf:
    """Return what was asked for, or each change that makes sense. Raises Problem 422."""
    recorded = _completed(recorded_of(connection, run), asked)
    _check(asked, recorded)
    replayed = _replay_of(run)
    questions = (
        [_differing(asked, recorded)] if asked.changes else _offered(recorded, replayed, asked)
    )
    answers = [_answer(one, recorded, replayed) for one in questions]
    if not asked.changes:
        answers = _best_bucket(answers)
    answers.sort(key=lambda one: _worth(one, recorded))
    step_ms = recorded.step_ms or None
    given = frozenset({"layers"} if asked.layers else ())
    return WhatIf(
        text=words.first_sentence(answers, step_ms, recorded.ranks, asked.changes),
        attempt=run.attempt, step_lo=recorded.step_lo, step_hi=recorded.step_hi,
        num_steps=recorded.num_steps,
        now=WhatIfNow(
            text=words.run_text(recorded), ranks=recorded.ranks, nodes=recorded.nodes,
            strategy=recorded.strategy, microbatches=recorded.microbatches or None,
            step_ms=step_ms, parts=_rounded(recorded.parts),
            memory_bytes=recorded.memory_bytes or None, memory_source=recorded.memory_source,
        ),
        answers=answers, inputs=words.inputs_of(recorded, given), factors=_factors(recorded),
    )  # fmt: skip


def _worth(one: WhatIfAnswer, recorded: Recorded) -> tuple[bool, float]:
    """Return what the best is the least by: throughput of a rank, as more ranks cost more."""
    if one.throughput_ratio is None or one.ranks is None:
        return True, 0.0
    return False, -one.throughput_ratio * recorded.ranks / one.ranks


def _completed(recorded: Recorded, asked: Asked) -> Recorded:
    if not asked.layers:
        return recorded
    each = recorded.parameters / asked.layers
    return replace(recorded, layers=asked.layers, layer_parameters=each)


def _differing(asked: Asked, recorded: Recorded) -> Asked:
    """Return what is asked for without what is so already."""
    change = asked.change
    same = {
        "strategy": change.strategy == recorded.strategy,
        "ranks_per_node": change.ranks_per_node == recorded.devices,
        "microbatches": change.microbatches == recorded.microbatches,
    }
    nothing = Change()
    fields = {name: getattr(nothing, name) for name, is_same in same.items() if is_same}
    return replace(asked, change=replace(change, **fields))


def _check(asked: Asked, recorded: Recorded) -> None:
    try:
        check(asked.change, recorded)
    except PlanError as error:
        raise Problem(422, error.problem, error.field, error.remedy) from error
    unknown = [rank for rank in asked.without if rank >= recorded.ranks]
    if unknown:
        what = f"there is no rank {unknown[0]}"
        raise Problem(422, what, "without", f"ranks are 0 to {recorded.ranks - 1}")


def _factors(recorded: Recorded) -> list[WhatIfFactor]:
    try:
        return words.factors_of(engine_of(recorded))
    except CannotAnswer:
        return []


def _replay_of(run: sa.Row[Any]) -> _Replay:
    stored = json_object(run.cost) or {}
    found = stored.get("what_if")
    if found is None:
        why = stored.get("no_what_if") or "what the run cost is not worked out"
        return _Replay({}, None, {}, 0.0, why)
    now = found["replayed_ms"]
    steps = {tuple(one["keys"]): one["step_ms"] / now for one in found["outcomes"]}
    without: dict[tuple[int, ...], float] = {
        (one["rank"],): one["step_ms"] / now for one in found.get("without", ())
    }
    slow = tuple(sorted(stored["slow_ranks"]))
    if ("as-peers",) in steps and slow:
        without[slow] = steps["as-peers",]
    buckets = {
        one["bucket_mib"]: (one["gain"], one["low"], one["high"])
        for one in stored.get("buckets", ())
    }
    return _Replay(without, steps["alike",], buckets, abs(now / found["step_ms"] - 1), "")


def _offered(recorded: Recorded, replayed: _Replay, asked: Asked) -> list[Asked]:
    between = asked.change.between_bytes_per_second
    found = [Asked(replace(one, between_bytes_per_second=between)) for one in offered(recorded)]
    nothing = Change()
    slowest = sorted(replayed.without, key=lambda ranks: replayed.without[ranks])
    found += [Asked(nothing, ranks) for ranks in slowest[:_OFFERED_RANKS]]
    if recorded.ranks > 1:
        found.append(Asked(nothing, equal=True))
    return found


def _best_bucket(answers: Sequence[WhatIfAnswer]) -> list[WhatIfAnswer]:
    """Return the answers with the best bucket alone: the others are for who asks."""
    buckets = [one for one in answers if one.key.startswith("bucket_mib=")]
    best = max(buckets, key=lambda one: one.throughput_ratio or 0.0, default=None)
    return [one for one in answers if one not in buckets or one is best]


def _answer(asked: Asked, recorded: Recorded, replayed: _Replay) -> WhatIfAnswer:
    label = words.label_of(asked.change, recorded, asked.without, asked.equal)
    try:
        return _answered(asked, recorded, replayed, label)
    except CannotAnswer as error:
        return WhatIfAnswer(
            key=asked.key, label=label, step_ms=None, step_low_ms=None, step_high_ms=None,
            throughput_ratio=None, throughput_low=None, throughput_high=None, ranks=None, parts={},
            memory_bytes=None, no_memory="", by="", assumptions=[], band="", why_not=str(error),
        )  # fmt: skip


def _answered(asked: Asked, recorded: Recorded, replayed: _Replay, label: str) -> WhatIfAnswer:
    is_replayed = bool(asked.without or asked.equal)
    ratio = replayed.ratio(asked) if is_replayed else 1.0
    kinds, now = asked.change.kinds, recorded.step_ms
    if not now:
        raise CannotAnswer("of no step is known how long ranks worked and how long they waited")
    if not kinds and is_replayed:
        return _by_replay(asked, label, recorded, ratio, replayed)
    bucket = replayed.buckets.get(asked.change.bucket_bytes / MIB)
    if kinds == ("bucket",) and not is_replayed and bucket is not None:
        return _by_bucket(asked, label, recorded, bucket)
    found = answer(recorded, asked.change, ratio)
    scale = now * found.ranks / recorded.ranks
    by: Literal["both", "planner"] = "both" if is_replayed else "planner"
    return WhatIfAnswer(
        key=asked.key, label=label, step_ms=found.step_ms, step_low_ms=found.low_ms,
        step_high_ms=found.high_ms, throughput_ratio=scale / found.step_ms,
        throughput_low=scale / found.high_ms, throughput_high=scale / found.low_ms,
        ranks=found.ranks, parts=_rounded(found.parts), memory_bytes=found.memory_bytes,
        no_memory=found.no_memory, by=by, assumptions=list(found.assumptions), band=found.band,
        why_not="",
    )  # fmt: skip


def _by_replay(
    asked: Asked, label: str, recorded: Recorded, ratio: float, replayed: _Replay
) -> WhatIfAnswer:
    assumption = (
        "each operation takes its mean over all ranks and steps" if asked.equal
        else "their self time is, operation by operation, the median of the other ranks of the "
        "stage in the same step; all else stays as it was recorded"
    )  # fmt: skip
    apart = max(replayed.error, REPLAY_MISSED)
    low, high = ratio * (1 - apart), ratio * (1 + apart)
    return WhatIfAnswer(
        key=asked.key, label=label, step_ms=recorded.step_ms * ratio,
        step_low_ms=recorded.step_ms * low, step_high_ms=recorded.step_ms * high,
        throughput_ratio=1 / ratio, throughput_low=1 / high, throughput_high=1 / low,
        ranks=recorded.ranks, parts={}, memory_bytes=recorded.memory_bytes or None, no_memory="",
        by="replay", assumptions=[assumption],
        band="by how much replays missed real steps without the slowness, and the recorded ones: "
        "docs/plan.md", why_not="",
    )  # fmt: skip


def _by_bucket(
    asked: Asked, label: str, recorded: Recorded, bucket: tuple[float, float, float]
) -> WhatIfAnswer:
    gain, low, high = bucket
    return WhatIfAnswer(
        key=asked.key, label=label, step_ms=recorded.step_ms / (1 + gain),
        step_low_ms=recorded.step_ms / (1 + high), step_high_ms=recorded.step_ms / (1 + low),
        throughput_ratio=1 + gain, throughput_low=1 + low, throughput_high=1 + high,
        ranks=recorded.ranks, parts={}, memory_bytes=recorded.memory_bytes or None, no_memory="",
        by="replay",
        assumptions=["gradients become ready as they were between the recorded buckets"],
        band="the quicker and the slower quarter of the recorded transfers, and at least a fifth "
        "of the gain", why_not="",
    )  # fmt: skip


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in parts.items()}
