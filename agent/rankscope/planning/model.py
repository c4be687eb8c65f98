"""A model as a planner sees it: parts in a row, and what each holds, computes and hands on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rankscope.planning.errors import PlanError

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one number where it is used and sent, and of the copy that the optimizer keeps.

    Mixed precision keeps 2 bytes of each weight, 2 of its gradient, and a copy of the weight in 4
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1).
    """

    name: str
    item_bytes: int
    master_bytes: int


PRECISIONS = {
    row.name: row
    for row in (Precision("bf16", 2, 4), Precision("fp16", 2, 4), Precision("fp32", 4, 0))
}
# State of the optimizer for one weight, in 32 bits: Adam keeps two moments, momentum one.
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Part:
    """What cannot be cut along the depth of the model. Bytes and FLOPs are of one sample."""

    parameters: float
    forward_flops: float
    saved_bytes: float  # kept from forward for backward, and cut by a tensor axis
    output_bytes: float  # what the next part gets, and all that recomputation keeps
    whole_saved_bytes: float = 0.0  # kept by each rank of a tensor axis, but for sequence parallel


@dataclass(frozen=True, slots=True)
class Model:
    """A first part, equal layers, a last part. `heads` 0: its layers cannot be cut by tensors."""

    name: str
    first: Part
    layer: Part
    num_layers: int
    last: Part
    precision: Precision
    tokens: int  # of one sample
    heads: int = 0
    tied_parameters: float = 0.0  # of the last part that are the first part's

    @property
    def parameters(self) -> float:
        """Return all weights; what two parts share counts once."""
        own = self.first.parameters + self.last.parameters - self.tied_parameters
        return own + self.num_layers * self.layer.parameters

    @property
    def forward_flops(self) -> float:
        """Return the FLOPs of the forward pass of one sample."""
        ends = self.first.forward_flops + self.last.forward_flops
        return ends + self.num_layers * self.layer.forward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of equal layers, by the numbers that its paper gives."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0  # 0: as many as heads
    feed_forward: int = 0  # 0: four times the width
    is_gated: bool = False  # three matrices in the feed-forward part in place of two (SwiGLU)
    has_biases: bool = False
    has_positions: bool = False  # a table of learned positions
    is_tied: bool = False  # the last projection is the table of tokens
    dropout: float = 0.0
    stores_scores: bool = False  # attention without a fused kernel keeps sequence x sequence

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise PlanError(name, f"{getattr(self, name)} is too small", "Give at least 1")
        if self.width % self.heads:
            problem = f"{self.heads} heads do not divide width {self.width} evenly"
            raise PlanError("heads", problem, "Choose a width that is a multiple of heads")
        if self.kv_heads and self.heads % self.kv_heads:
            problem = f"{self.kv_heads} do not divide {self.heads} heads evenly"
            raise PlanError("kv_heads", problem, "Choose a divisor of heads")

    def model(self, name: str, precision: Precision) -> Model:
        """Return its parts."""
        return Model(
            name=name,
            first=self._embedding(precision),
            layer=self._layer(precision),
            num_layers=self.layers,
            last=self._head(precision),
            precision=precision,
            tokens=self.sequence,
            heads=self.kv_heads or self.heads,
            tied_parameters=float(self.vocabulary * self.width) if self.is_tied else 0.0,
        )

    @property
    def _inner(self) -> int:
        return self.feed_forward or 4 * self.width

    @property
    def _kv_width(self) -> int:
        return self.width // self.heads * (self.kv_heads or self.heads)

    def _stream(self, precision: Precision) -> float:
        return float(self.sequence * self.width * precision.item_bytes)

    def _embedding(self, precision: Precision) -> Part:
        positions = self.sequence if self.has_positions else 0
        masks = self.sequence * self.width if self.dropout else 0
        parameters = (self.vocabulary + positions) * self.width
        return Part(parameters, 0.0, masks, self._stream(precision))

    def _layer(self, precision: Precision) -> Part:
        matrices = 2 * self.width * self.width + 2 * self.width * self._kv_width
        matrices += (3 if self.is_gated else 2) * self.width * self._inner
        norms = 2 * self.width * (2 if self.has_biases else 1)
        biases = 2 * self.width + self._inner + self.width + 2 * self._kv_width
        parameters = matrices + norms + (biases if self.has_biases else 0)
        # scores and their use: 2 FLOPs for each of sequence x sequence x width, twice, whole as
        # the papers count them though half of it is masked
        flops = 2 * matrices * self.sequence + 4 * self.sequence**2 * self.width
        whole, cut = self._saved(precision)
        return Part(parameters, flops, cut, self._stream(precision), whole)

    def _saved(self, precision: Precision) -> tuple[float, float]:
        """Return the activations kept of one sample: those that are whole, those that are cut.

        Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, where with dropout, 16 bits and four
        times the width they are s b h (10 + 24 + 5 a s / h).
        """
        item, mask = precision.item_bytes, 1 if self.dropout else 0
        positions = self.sequence
        # whole: inputs of both norms and of both first projections, masks on the residual stream
        whole = positions * self.width * (4 * item + 2 * mask)
        attention = (2 * self.width + 2 * self._kv_width) * item  # queries, output; keys, values
        inner = self._inner * item * (4 if self.is_gated else 2)
        cut = positions * (attention + inner)
        if self.stores_scores:
            kept = 2 * item + mask if self.dropout else item
            cut += self.heads * positions**2 * kept
        return float(whole), float(cut)

    def _head(self, precision: Precision) -> Part:
        norm = self.width * (2 if self.has_biases else 1)
        parameters = self.width * self.vocabulary + norm
        scores = self.sequence * self.vocabulary
        # inputs of the norm and of the projection, and the scores in 32 bits (same, section 4.3)
        saved = scores * FLOAT32_BYTES
        whole = 2 * self._stream(precision)
        return Part(parameters, 2.0 * self.width * scores, saved, 0.0, whole)


# Models by the numbers of their papers, so that a question can begin with a name.
_GPT = Transformer(
    layers=1, width=64, heads=1, sequence=2048, vocabulary=51_200,
    has_biases=True, has_positions=True, is_tied=True,
)  # fmt: skip
_LLAMA = Transformer(
    layers=1, width=64, heads=1, sequence=4096, vocabulary=32_000, is_gated=True
)  # fmt: skip


def _sized(base: Transformer, layers: int, width: int, heads: int, **more: Any) -> Transformer:
    return dataclasses.replace(base, layers=layers, width=width, heads=heads, **more)


KNOWN_MODELS: dict[str, tuple[Transformer, str]] = {
    "gpt2-1.5b": (
        _sized(_GPT, 48, 1600, 25, sequence=1024, vocabulary=50_257), "Radford et al. 2019",
    ),
    "gpt3-175b": (_sized(_GPT, 96, 12_288, 96), "Brown et al. 2020, arXiv 2005.14165"),
    "llama2-7b": (
        _sized(_LLAMA, 32, 4096, 32, feed_forward=11_008), "Touvron et al. 2023, arXiv 2307.09288",
    ),
    "llama2-13b": (
        _sized(_LLAMA, 40, 5120, 40, feed_forward=13_824), "Touvron et al. 2023, arXiv 2307.09288",
    ),
    "llama2-70b": (
        _sized(_LLAMA, 80, 8192, 64, kv_heads=8, feed_forward=28_672),
        "Touvron et al. 2023, arXiv 2307.09288",
    ),
    "llama3-8b": (
        _sized(_LLAMA, 32, 4096, 32, kv_heads=8, feed_forward=14_336, vocabulary=128_256,
               sequence=8192),
        "Grattafiori et al. 2024, arXiv 2407.21783",
    ),
    "llama3-405b": (
        _sized(_LLAMA, 126, 16_384, 128, kv_heads=8, feed_forward=53_248, vocabulary=128_256,
               sequence=8192),
        "Grattafiori et al. 2024, arXiv 2407.21783",
    ),
}  # fmt: skip
