"""A byte-level GPT, to be read from top to bottom.

Names of tensors end in their shape: B batch, T positions, D width, H heads, K width of a head,
V bytes. The whole model is always built, so that every rank draws the same first weights; a
pipeline stage then keeps its own part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token is one byte


class Attention(nn.Module):
    """Every position looks at itself and at those before it."""

    mask_TT: Tensor | None

    def __init__(self, *, width: int, heads: int, dropout: float, mask: Tensor | None) -> None:
        """Make the projections into queries, keys and values, and the one back.

        A mask becomes a buffer: it is not trained, not saved, and DDP keeps it equal on all ranks.
        """
        super().__init__()
        self.register_buffer("mask_TT", mask, persistent=False)
        self.head_width = width // heads
        self.dropout = dropout
        # Query, key and value of one head are neighbours, so that heads can be dealt to ranks.
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix positions; the number of heads is as many as this rank's projection makes."""
        joint_BHTK3 = self.project_in(x_BTD).unflatten(2, (-1, 3 * self.head_width)).transpose(1, 2)
        query, key, value = joint_BHTK3.split(self.head_width, dim=3)
        positions = x_BTD.shape[1]
        mask_TT = None if self.mask_TT is None else self.mask_TT[:positions, :positions]
        mixed_BHTK = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask_TT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_TT is None,
        )
        out: Tensor = self.project_out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One transformer layer: attention, then a small network on each position."""

    def __init__(
        self, *, width: int, heads: int, dropout: float, mask: Tensor | None = None
    ) -> None:
        """Make both halves, each with a normalisation before it."""
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width=width, heads=heads, dropout=dropout, mask=mask)
        self.norm_network = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add to the residual stream what both halves find."""
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        out: Tensor = x_BTD + self.network(self.norm_network(x_BTD))
        return out


class Embedding(nn.Module):
    """Bytes and their positions become vectors."""

    def __init__(self, *, width: int, context: int) -> None:
        """Make one table for bytes and one for positions."""
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Look both up and add them."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.bytes(tokens_BT) + self.positions(positions_T)
        return x_BTD


class Head(nn.Module):
    """Vectors become scores for the next byte."""

    def __init__(self, *, width: int) -> None:
        """Make the last normalisation and the projection onto bytes."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Score every byte at every position."""
        scores_BTV: Tensor = self.project(self.norm(x_BTD))
        return scores_BTV


class GPT(nn.Module):
    """The whole model, or one pipeline stage of it."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        dropout: float,
        seed: int,
        mask_buffer: bool = False,
    ) -> None:
        """Build the whole model with weights that depend on nothing but the arguments."""
        super().__init__()
        self.num_layers = layers  # of the whole model
        # Parts that a stage does not own become None; the names of the rest do not change, so
        # the stages' weights together have exactly the names of the whole model's.
        self.embedding: Embedding | None = Embedding(width=width, context=context)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(
                    width=width,
                    heads=heads,
                    dropout=dropout,
                    mask=causal_mask(context) if mask_buffer else None,
                )
                for layer in range(layers)
            }
        )
        self.head: Head | None = Head(width=width)
        self._draw_weights(layers, seed)

    def _draw_weights(self, layers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # biases stay 0 and scales stay 1, see below
            # What is added to the residual stream 2 * layers times starts smaller (GPT-2).
            is_residual = name.endswith(("project_out.weight", "network.2.weight"))
            deviation = 0.02 / (2 * layers) ** 0.5 if is_residual else 0.02
            nn.init.normal_(parameter, std=deviation, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def keep_stage(self, stage: int, num_stages: int) -> GPT:
        """Drop what other pipeline stages own where all are as even as possible; return self."""
        return self.keep_layers(stage_layers(len(self.blocks), stage, num_stages))

    def keep_layers(self, layers: Iterable[int]) -> GPT:
        """Drop all other layers, and return this model.

        The embedding goes with the first layer of the whole model, the head with the last.
        """
        own = sorted(layers)
        self.blocks = nn.ModuleDict({str(layer): self.blocks[str(layer)] for layer in own})
        if 0 not in own:
            self.embedding = None
        if self.num_layers - 1 not in own:
            self.head = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Turn bytes (or what the stage before computed) into scores (or input of the next)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def causal_mask(context: int) -> Tensor:
    """Return which positions (second) each position (first) looks at, as booleans."""
    return torch.ones(context, context, dtype=torch.bool).tril()


def stage_layers(layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage: as even as possible, the first stages take the rest."""
    even, rest = divmod(layers, num_stages)
    first = stage * even + min(stage, rest)
    return range(first, first + even + (stage < rest))


def next_byte_loss(scores_BTV: Tensor, next_BT: Tensor) -> Tensor:
    """Return the mean surprise, in nats, at the byte that really comes next."""
    return F.cross_entropy(scores_BTV.flatten(0, 1), next_BT.flatten())
