"""Communication-bound steps, low bus bandwidth, and what would help."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankscope.wire.formulas import bus_factor
from rankscope.wire.schema import STEP_SKIPPED
from rankscope_server.diagnose.communication.split import (
    Advice,
    Collective,
    Exposure,
    accumulation_advice,
    bucket_advice,
    bucket_gains,
    collectives_of,
    compression_advice,
    exposure_of,
    is_reduction,
    models_of,
    stream_of,
)
from rankscope_server.diagnose.communication.transfer_model import (
    MB,
    MIN_BUCKET_BYTES,
    GradientStream,
    TransferModel,
)
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    Finding,
    ran,
    skipped,
)
from rankscope_server.findings.statistics import median
from rankscope_server.findings.text import bytes_text, ms_text, percent_text
from rankscope_server.replay.recorded_program import NoReplay, Program
from rankscope_server.replay.replay import Replay

_FAST, _USUAL, _SLOW = 0.25, 0.5, 0.75  # quantiles of transfer times, for the band


class Communication:
    """Finds steps that wait for the network, and says which change would help, by how much."""

    name: ClassVar[str] = "communication"
    finds: ClassVar[str] = (
        "Steps that wait for the network, links that became slower, and the change that would help"
    )
    needs: ClassVar[str] = "collectives of all ranks, steps that the replay reproduces"
    silent: ClassVar[str] = (
        "messages are small; the gain is below 3 %; sharded models: no advice on buckets"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return whether communication shows in the step, and whether it is slower than it was."""
        if window.world_size == 1:
            return skipped(self, "one rank sends nothing", NOT_HERE)
        try:
            replay, programs = window.replays.newest(
                window.steps, window.ranks, window.groups, window.policy
            )
        except NoReplay as error:
            return skipped(self, str(error), "record collectives on all ranks, or wait")
        events = window.replays.events
        every = collectives_of(
            replay, programs, events.words("operation"), events.words("dtype"), window.policy
        )
        large = [
            collective
            for collective in every
            if collective.size_bytes >= window.policy.min_message_bytes
        ]
        if window.facts.is_recording and not any(collective.size_bytes > 0 for collective in every):
            return skipped(self, "it does not hold the sizes of messages", NOT_HERE)
        if not large:
            size = window.policy.min_message_bytes // MB
            return ran(self, checked=(f"communication: no messages of {size} MB",))
        exposure = exposure_of(replay, large)
        found = list(_low_bandwidth(window, large))
        best = _best_advice(window, replay, programs, every, exposure)
        is_bound = exposure.share > window.policy.exposed_ratio
        if is_bound or best is not None:
            found.append(_finding(window, replay, large, exposure, best))
        return ran(self, found, () if found else (_text(window, replay, exposure),))


def bucket_gains_of(
    window: Window, replay: Replay, programs: list[Program]
) -> dict[int, tuple[float, float, float]]:
    """Return by MB of a DDP bucket the throughput that it is predicted to give, and a band.

    Empty where the step is no DDP's, or its waits do not show when gradients were ready.
    """
    events = window.replays.events
    every = collectives_of(
        replay, programs, events.words("operation"), events.words("dtype"), window.policy
    )
    found = _reductions(programs, every)
    if found is None or _accumulation(window, replay, found[0], every) is not None:
        return {}
    known = _stream(window, replay, *found)
    if known is None:
        return {}
    return bucket_gains(*known, replay.mean_step_ms(), window.policy)


def _best_advice(
    window: Window,
    replay: Replay,
    programs: list[Program],
    every: list[Collective],
    exposure: Exposure,
) -> Advice | None:
    """Return the change that is predicted to give most, None where none gives enough."""
    found = _reductions(programs, every)
    if found is None:
        return None
    program, mine = found
    advice = [_accumulation(window, replay, program, every, exposure)]
    known = _stream(window, replay, program, mine) if advice[0] is None else None
    if known is not None:
        advice.append(bucket_advice(*known, exposure.step_ms, window.policy))
        if _may_compress(window, mine, _columns(window, replay)):
            advice.append(compression_advice(*known, exposure.step_ms, window.policy))
    good = [one for one in advice if one is not None and one.gain >= window.policy.advice_gain]
    return max(good, key=lambda one: one.gain, default=None)


def _reductions(
    programs: list[Program], every: list[Collective]
) -> tuple[Program, list[Collective]] | None:
    """Return what most ranks do, and its reductions; None where it does anything else."""
    program = max(programs, key=lambda one: len(one.rows))
    here = set(program.nodes[0].tolist())
    mine = [collective for collective in every if collective.node in here]
    if not mine or not all(is_reduction(collective) for collective in mine):
        return None  # sharded models do not send buckets
    if len({collective.group for collective in mine}) > 1 or any(
        name.shift is not None for name in program.names
    ):
        return None
    return program, mine


def _columns(window: Window, replay: Replay) -> np.ndarray:
    return np.searchsorted(window.steps.steps, replay.steps)


def _accumulation(
    window: Window,
    replay: Replay,
    program: Program,
    every: list[Collective],
    exposure: Exposure | None = None,
) -> Advice | None:
    """Return what `no_sync` gives where gradients are reduced in every microbatch."""
    counted = median(window.steps.get("microbatches")[0, _columns(window, replay)])
    sizes = [name.size_bytes for name in program.names if name.size_bytes >= MIN_BUCKET_BYTES]
    known = exposure or exposure_of(replay, every)
    return accumulation_advice(sizes, int(np.nan_to_num(counted)), known)


def _stream(
    window: Window, replay: Replay, program: Program, mine: list[Collective]
) -> tuple[GradientStream, list[TransferModel]] | None:
    """Return when gradients were ready, and how long a transfer takes: usually, fast, slow."""
    models = [
        model
        for share in (_USUAL, _FAST, _SLOW)
        if (model := models_of(mine, share).get((mine[0].group, mine[0].operation)))
    ]
    columns = _columns(window, replay)
    forward = sum(window.steps.get(name)[program.rows][:, columns] for name in ("data", "forward"))
    stream = stream_of(program, mine, np.asarray(forward, float)) if models else None
    return None if stream is None else (stream, models)


def _may_compress(window: Window, mine: list[Collective], columns: np.ndarray) -> bool:
    """Return whether gradients are fp32 and no step was skipped for an overflow."""
    flags = window.steps.get("flags")[:, columns].astype(np.int64)
    return all(collective.dtype == "float32" for collective in mine) and not np.any(
        flags & STEP_SKIPPED
    )


def _low_bandwidth(window: Window, large: list[Collective]) -> list[Finding]:
    """Return collectives that are slower now than the best that their group has shown."""
    policy, found = window.policy, []
    by_kind: dict[tuple[int, str, int, int], list[Collective]] = {}
    for collective in large:
        if collective.size_bytes >= policy.busbw_message_bytes:
            key = (
                collective.group,
                collective.operation,
                collective.size_bytes,
                collective.num_ranks,
            )
            by_kind.setdefault(key, []).append(collective)
    groups = window.replays.events.words("group")
    for (number, operation, size, num_ranks), ones in by_kind.items():
        # Of calls of one size, those beside heavy compute may always be slow: the fastest counts.
        now_ms = min(float(np.median(collective.took_ms)) for collective in ones)
        seen = sum(len(collective.took_ms) for collective in ones)
        factor = bus_factor(operation, num_ranks)
        best = window.times.quantile_ns(groups[number], operation, size, policy.busbw_best_share)
        if factor is None or best is None or seen < policy.min_group_seen or now_ms <= 0:
            continue
        busbw, expected = (factor * size / (ms * 1e6) for ms in (now_ms, best / 1e6))
        if busbw >= policy.busbw_ratio * expected:
            continue
        found.append(_bandwidth_finding(window, groups[number], operation, size, busbw, expected))
    return found


def _bandwidth_finding(
    window: Window, group: str, operation: str, size: int, busbw: float, expected: float
) -> Finding:
    ratio = busbw / expected
    return window.finding(
        "low_bus_bandwidth",
        f"low_bandwidth/{group}/{operation}/{size}",
        group=group,
        what=f"{operation} of {bytes_text(size)} in group {group} reaches {percent_text(ratio)} of "
        "the bandwidth that it has reached before",
        why=f"Its bus bandwidth is {busbw:.2f} GB/s, median of the newest steps; the best 5 % of "
        f"this group and size had {expected:.2f} GB/s or more",
        next="Measure the links of this group with nccl-tests (or the pairwise check) while "
        "nothing else runs, and compare",
        confidence=(
            0.6,
            "the shortest duration in the group counts, so late ranks are left "
            "out; what else used the network is not known",
        ),
        disproof="The best times were those of a network that nothing else used, and it "
        "is shared by design",
        ruled_out=("Late ranks: the last to arrive waits least, and its time is taken",),
    )


def _finding(
    window: Window, replay: Replay, large: list[Collective], exposure: Exposure, best: Advice | None
) -> Finding:
    is_bound = exposure.share > window.policy.exposed_ratio
    kind = "communication_bound" if is_bound else "communication_advice"
    gain = best.gain if best is not None else None
    cost = gain / (1 + gain) if gain is not None else None
    confidence = 0.6 + 0.1 * (abs(replay.error_ratio()) < 0.005) + 0.1 * (best is not None)
    band = f" ({percent_text(best.low)} to {percent_text(best.high)})" if best else ""
    return window.finding(
        kind,
        kind,
        cost=cost,
        what="The step is communication-bound"
        if is_bound
        else "Communication could be hidden better",
        why=f"{percent_text(exposure.share)} of the step of {ms_text(exposure.step_ms)} is exposed "
        f"communication, {percent_text(exposure.overlap)} of {ms_text(exposure.total_ms)} of "
        "transfers is hidden behind compute",
        next=f"{best.text}: the replay predicts {percent_text(best.gain)}{band} more throughput"
        if best
        else "Send less or compute more between exchanges: gradient accumulation, a larger "
        "batch per rank, a faster network",
        confidence=(
            round(confidence, 2),
            "a replay gives back the recorded steps within "
            f"{100 * abs(replay.error_ratio()):.1f} %; one without transfers says what shows",
        ),
        evidence=tuple(
            f"{collective.operation} of {bytes_text(collective.size_bytes)} "
            f"over {collective.num_ranks} ranks: "
            f"{ms_text(float(np.median(collective.took_ms)))}"
            for collective in large[:6]
        ),
        ruled_out=(
            "Late ranks: a transfer's time begins when its last member has arrived",
            f"Messages below {window.policy.min_message_bytes // MB} MB: they are left out",
        ),
        disproof="Gradients become ready otherwise than between the recorded buckets, or "
        "computation slows down while transfers run beside it",
    )


def _text(window: Window, replay: Replay, exposure: Exposure) -> str:
    columns = np.searchsorted(window.steps.steps, replay.steps)
    data = float(np.nanmean(window.steps.get("data")[:, columns])) / exposure.step_ms
    own = float(np.nanmean(window.steps.get("own")[:, columns])) / exposure.step_ms
    bound = ""
    if data > window.policy.data_bound_ratio:
        bound = f"; {percent_text(data)} is waiting for data"
    elif own > window.policy.compute_bound_ratio and exposure.share < 0.5 * (
        window.policy.exposed_ratio
    ):
        bound = "; the step is bound by computation"
    return (
        f"communication: {percent_text(exposure.share)} of the step is exposed, "
        f"{percent_text(exposure.overlap)} of transfers is hidden{bound}"
    )
