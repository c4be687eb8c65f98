"""How much of a step communication takes, how much of it shows, and what would make it less.

Exposed communication is what the step would be shorter by if transfers took no time: a replay
with zero transfers, so that waiting for late ranks does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope_server.diagnose.communication.transfer_model import (
    CAPS_MB,
    MB,
    MIN_BUCKET_BYTES,
    GradientStream,
    TransferModel,
    buckets_of,
    fit,
)
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import Array, median
from rankscope_server.replay.recorded_program import Program
from rankscope_server.replay.replay import Replay

_BLOCKED_MS = 0.01
_REDUCTIONS = frozenset({"all_reduce", "all_reduce_coalesced"})


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that carries data: one operation of one group, once a step."""

    node: int
    operation: str
    group: int
    num_ranks: int
    size_bytes: int
    dtype: str
    took_ms: Array  # per step


@dataclass(frozen=True, slots=True)
class Exposure:
    """Communication of a step in ms; the overlap is the share that compute hides."""

    step_ms: float
    total_ms: float
    exposed_ms: float

    @property
    def share(self) -> float:
        """Return exposed communication as a share of the step."""
        return self.exposed_ms / self.step_ms

    @property
    def overlap(self) -> float:
        """Return 1 - exposed / total, 0 where nothing is hidden."""
        return max(0.0, 1.0 - self.exposed_ms / self.total_ms) if self.total_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, and the throughput that it is predicted to give, with a band."""

    kind: str
    gain: float
    low: float
    high: float
    text: str


def collectives_of(
    replay: Replay,
    programs: Sequence[Program],
    operations: Sequence[str],
    dtypes: Sequence[str],
    policy: Policy,
) -> list[Collective]:
    """Return the collectives that carry data, of groups that were seen often enough."""
    num_ranks = np.bincount(
        np.concatenate([program.nodes.ravel() for program in programs]),
        minlength=replay.graph.num_nodes,
    )
    found: dict[int, Collective] = {}
    for program in programs:
        for at, name in enumerate(program.names):
            if name.shift is not None or name.size_bytes < MIN_BUCKET_BYTES:
                continue
            for node, group in zip(
                program.nodes[:, at].tolist(), program.groups[:, at].tolist(), strict=True
            ):
                found[node] = Collective(
                    node, operations[name.operation], group, int(num_ranks[node]),
                    name.size_bytes, dtypes[name.dtype], replay.recorded[node],
                )  # fmt: skip
    seen: dict[int, int] = {}
    for collective in found.values():
        seen[collective.group] = seen.get(collective.group, 0) + len(collective.took_ms)
    return [
        found[node] for node in sorted(found) if seen[found[node].group] >= policy.min_group_seen
    ]


def exposure_of(replay: Replay, large: Sequence[Collective]) -> Exposure:
    """Return how much of the step these collectives take and show."""
    step = replay.mean_step_ms()
    nodes = np.zeros(replay.graph.num_nodes, bool)
    nodes[[collective.node for collective in large]] = True
    without = replay.mean_step_ms(np.where(nodes[:, None], 0.0, replay.recorded))
    per_rank = sum(
        collective.num_ranks * float(np.mean(collective.took_ms)) for collective in large
    )
    return Exposure(step, per_rank / replay.graph.num_ranks, max(0.0, step - without))


def models_of(
    large: Sequence[Collective], share: float = 0.5
) -> dict[tuple[int, str], TransferModel]:
    """Return the model of each (group, operation) whose sizes differ enough.

    `share` is the quantile of the times at each size that counts as usual.
    """
    together: dict[tuple[int, str], list[Collective]] = {}
    for collective in large:
        together.setdefault((collective.group, collective.operation), []).append(collective)
    found = {}
    for key, ones in together.items():
        sizes = np.array([collective.size_bytes for collective in ones])
        usual = np.array([np.quantile(collective.took_ms, share) for collective in ones])
        model = fit(sizes, usual)
        if model is not None:
            found[key] = model
    return found


def stream_of(
    program: Program, large: Sequence[Collective], forward_ms: Array
) -> GradientStream | None:
    """Return when the gradients of DDP were ready, as the median rank of a program saw it.

    `forward_ms` is ranks x steps: from the step's beginning until backward began. None where the
    rank does not wait after its last bucket.
    """
    nodes = [collective.node for collective in large]
    mine = [at for at in range(len(program.names)) if program.nodes[0, at] in nodes]
    waited = program.blocked[..., mine] > _BLOCKED_MS
    begins = np.where(waited, program.ended[..., mine] - program.blocked[..., mine], np.nan)
    known = np.asarray(waited.any(axis=2))
    if np.mean(known) < 0.5:
        return None
    end = np.fmin.reduce(begins, axis=2)
    ready, end = median(program.issued[..., mine], 0).T, median(end, 0)
    begin = median(forward_ms, 0)
    usable = ~np.isnan(end) & ~np.isnan(begin) & ~np.isnan(ready).any(axis=0)
    return GradientStream(
        np.array([program.names[at].size_bytes for at in mine], float),
        ready[:, usable],
        np.minimum(begin[usable], ready[0, usable]),
        np.maximum(end[usable], ready[-1, usable]),
    )


def bucket_advice(
    stream: GradientStream, models: Sequence[TransferModel], step_ms: float, policy: Policy
) -> Advice:
    """Return the best bucket size; `models` are the usual one, a fast one and a slow one."""
    by_cap = bucket_gains(stream, models, step_ms, policy)
    cap = max(by_cap, key=lambda cap: (by_cap[cap][0], -cap))
    gain, low, high = by_cap[cap]
    return Advice("bucket", gain, low, high, f"Set bucket_cap_mb to {cap}")


def bucket_gains(
    stream: GradientStream, models: Sequence[TransferModel], step_ms: float, policy: Policy
) -> dict[int, tuple[float, float, float]]:
    """Return by MB of a bucket the gain with the first model, and a band of it."""
    total = float(stream.size_bytes.sum())
    return {
        cap: _gains(stream, models, buckets_of(total, cap * MB), 1.0, step_ms, 0.0, policy)
        for cap in CAPS_MB
    }


def compression_advice(
    stream: GradientStream,
    models: Sequence[TransferModel],
    step_ms: float,
    policy: Policy,
) -> Advice:
    """Return what sending half the bytes gives, less the time of the two casts."""
    total = float(stream.size_bytes.sum())
    cast_ms = 2 * total / policy.cast_bytes_per_second * 1e3
    gain, low, high = _gains(stream, models, list(stream.size_bytes), 0.5, step_ms, cast_ms, policy)
    return Advice(
        "compression", gain, low, high,
        "Register torch's bf16_compress_hook on the DDP model",
    )  # fmt: skip


def _gains(
    stream: GradientStream,
    models: Sequence[TransferModel],
    sizes: list[float],
    payload: float,
    step_ms: float,
    cost_ms: float,
    policy: Policy,
) -> tuple[float, float, float]:
    """Return the gain with the first model, and a band: the other models, and some each way."""
    found = []
    for model in models:
        now = stream.exposed_ms(model, list(stream.size_bytes))
        then = stream.exposed_ms(model, sizes, payload) + cost_ms
        saved = float(np.mean(now - then))
        found.append(step_ms / max(step_ms - saved, 1e-9) - 1.0)
    apart = max(policy.advice_band * abs(found[0]), policy.advice_band_points)
    return found[0], min(*found, found[0] - apart), max(*found, found[0] + apart)


def accumulation_advice(
    sizes: Sequence[int], microbatches: int, exposure: Exposure
) -> Advice | None:
    """Return what `no_sync` gives where gradients are reduced in every microbatch."""
    count, rest = divmod(len(sizes), max(microbatches, 1))
    if microbatches < 2 or rest or not count:
        return None
    parts = [tuple(sizes[at : at + count]) for at in range(0, len(sizes), count)]
    # DDP forms its buckets anew in the first step, so all parts are alike later.
    if any(part != parts[0] for part in parts):
        return None
    saved = exposure.exposed_ms * (microbatches - 1) / microbatches
    gain = exposure.step_ms / (exposure.step_ms - saved) - 1.0
    return Advice(
        "no_sync", gain, 0.7 * gain, gain,
        f"Run backward of all but the last of the {microbatches} microbatches in "
        "model.no_sync()",
    )  # fmt: skip


def is_reduction(collective: Collective) -> bool:
    """Return whether a collective is what DDP sends its gradients with."""
    return collective.operation in _REDUCTIONS
