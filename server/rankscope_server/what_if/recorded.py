"""What a run shows of its layout, its steps and its messages; None and 0: it does not show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.wire.formulas import bus_factor
from rankscope_server.diagnose.communication.transfer_model import MIN_BUCKET_BYTES, fit
from rankscope_server.findings.statistics import Array

REDUCTIONS = frozenset({"all_reduce", "all_reduce_coalesced"})
GATHERS = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "all_gather_into_tensor_coalesced",
})  # fmt: skip
SCATTERS = frozenset({
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
})  # fmt: skip
QUANTILES = (0.25, 0.5, 0.75)  # of transfer times: a fast link, the usual one, a slow one
_USUAL = 0.5  # of the steps
_NEAR = 0.05  # sizes that agree within this are of the same thing


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one operation and size, by all members of the data axis."""

    operation: str
    size_bytes: int
    per_step: float
    transfer_ms: tuple[float, ...]  # by QUANTILES; empty: of none is known when all were there

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes of a step."""
        return self.size_bytes * self.per_step


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Bytes a second of a rank, seconds of a hop; `is_split` whether sizes separate the two."""

    bytes_per_second: float
    latency_seconds: float
    is_split: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run as it was recorded. Times are means of the steps looked at, of all ranks."""

    ranks: int
    nodes: int
    step_lo: int
    step_hi: int
    num_steps: int
    step_ms: float  # 0: no steps
    parts: Mapping[str, float]  # ms, they add up to the step; empty: waits are not known
    # pipeline
    stages: int = 1  # ranks in a row
    chunks: int = 1
    schedule: str = ""  # as the planner calls it; empty: not known
    stage_ms: float = 0.0  # forward and backward of the slowest stage
    why_no_layout: str = ""  # neither data parallel nor a pipeline: what it is
    # data axis
    sent: tuple[Sent, ...] = ()
    microbatches: int = 0
    # model
    parameters: float = 0.0
    parameter_bytes: float = 0.0  # of one rank
    optimizer_bytes: float = 0.0  # of one rank
    layers: int = 0  # as the model says
    layer_parameters: float = 0.0
    # memory of the fullest rank
    memory_bytes: float = 0.0
    memory_source: str = ""
    processors: int = 0  # of a node, where ranks compute on them; 0: on devices of their own
    processor_share: float = 1.0  # of self time in which the main thread had one

    @property
    def devices(self) -> int:
        """Return the ranks of a node."""
        return self.ranks // self.nodes

    @property
    def strategy(self) -> str:
        """Return how the data axis shares the model; empty where its messages do not show it."""
        if self.ranks == 1 or self.why_no_layout:
            return ""
        reduced, gathered, scattered = (
            self.bytes_of(names) for names in (REDUCTIONS, GATHERS, SCATTERS)
        )
        if scattered and gathered:
            # weights are gathered for forward and for backward, of each microbatch; ZeRO-1: once
            return "fsdp" if gathered > (1 + _NEAR) * scattered / self.num_reductions else "zero1"
        return "ddp" if reduced and not gathered and not scattered else ""

    @property
    def num_reductions(self) -> int:
        """Return how often a step reduces the whole gradient: once, or after each microbatch."""
        whole = self.whole_bytes
        reduced = self.bytes_of(SCATTERS) or self.bytes_of(REDUCTIONS)
        return max(1, round(reduced / whole)) if whole else 1

    @property
    def whole_bytes(self) -> float:
        """Return the bytes of all weights; 0 where they are not known."""
        return self.parameters * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Return the bytes of a weight, by what a rank holds: all of it, or its part."""
        if not self.parameters or not self.parameter_bytes:
            return 0
        each = self.parameter_bytes / self.parameters
        for size in (4, 2, 8):
            for share in (1, self.ranks):
                if abs(each * share / size - 1) < _NEAR:
                    return size
        return 0

    @property
    def gradient_bytes(self) -> float:
        """Return the bytes of one whole reduction."""
        reduced = self.bytes_of(SCATTERS) or self.bytes_of(REDUCTIONS)
        return reduced / self.num_reductions

    @property
    def bucket_bytes(self) -> float:
        """Return the size of a full bucket; 0 where none was seen."""
        sizes = [one.size_bytes for one in self.sent if one.operation in REDUCTIONS | SCATTERS]
        return float(max(sizes, default=0))

    @property
    def num_layers(self) -> int:
        """Return the layers: what the model says, or one less than FSDP reduces apart."""
        if self.layers or self.strategy != "fsdp":
            return self.layers
        reduced = sum(one.per_step for one in self.sent if one.operation in SCATTERS)
        return max(1, round(reduced / self.num_reductions) - 1)

    @property
    def weights_of_layer(self) -> float:
        """Return the weights of a layer, of which there are `num_layers`."""
        if self.layer_parameters or not self.item_bytes:
            return self.layer_parameters
        scattered = [one for one in self.sent if one.operation in SCATTERS]
        usual = max(scattered, key=lambda one: one.per_step, default=None)
        return usual.size_bytes / self.item_bytes if usual else 0.0

    def bytes_of(self, operations: frozenset[str]) -> float:
        """Return what a step sends by these operations."""
        return sum(one.bytes_per_step for one in self.sent if one.operation in operations)

    def link(self, place: int = 1) -> MeasuredLink | None:
        """Return the link of the data axis, by one of QUANTILES; None where nothing was sent.

        Where all messages have nearly one size, all of their time counts as bandwidth.
        """
        operations = {one.operation for one in self.sent}
        for names in (REDUCTIONS, SCATTERS, GATHERS):
            for name in sorted(operations & names):
                found = self._link(name, place)
                if found is not None:
                    return found
        return None

    def _link(self, operation: str, place: int) -> MeasuredLink | None:
        own = [one for one in self.sent if one.operation == operation and one.transfer_ms]
        factor = bus_factor(operation, self.ranks // self.stages)
        if factor is None or not own:
            return None
        sizes = np.array([one.size_bytes for one in own], float)
        times = np.array([one.transfer_ms[place] for one in own], float)
        model = fit(sizes, times)
        if model is not None:
            hops = factor * (self.ranks // self.stages)
            rate = factor / (model.beta_ms_per_byte * 1e-3)
            return MeasuredLink(rate, model.alpha_ms * 1e-3 / hops, is_split=True)
        largest = int(np.argmax(sizes))
        if times[largest] <= 0:
            return None
        rate = factor * sizes[largest] / (times[largest] * 1e-3)
        return MeasuredLink(float(rate), 0.0, is_split=False)


def sent_of(
    operations: Sequence[str], sizes: Array, transfer_ms: Array, ranks: int, num_steps: float
) -> tuple[Sent, ...]:
    """Return the messages that carry data, of each operation and size, by rank and step.

    Arrays are of each call; `transfer_ms` is NaN where it is not known. What is smaller than a
    bucket can be are losses and counters, what most steps lack is no part of one.
    """
    found = []
    names = np.asarray(operations)
    for name in sorted(set(operations)):
        own = (names == name) & (sizes >= MIN_BUCKET_BYTES)
        for size in np.unique(sizes[own]).tolist():
            took = transfer_ms[own & (sizes == size)]
            known = took[~np.isnan(took)]
            quantiles = tuple(float(np.quantile(known, share)) for share in QUANTILES if len(known))
            found.append(Sent(name, int(size), len(took) / ranks / num_steps, quantiles))
    return tuple(one for one in found if one.per_step >= _USUAL)
