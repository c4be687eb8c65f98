"""Gradients in 8 bits on the wire, added up in 32 bits.

An e4m3 number has 4 bits of precision and ends at 448, so each message carries its own scale, by
which its largest number becomes 448. No library adds such numbers up on the way, and their sum
would need a scale of its own. So each rank adds up one piece, in 32 bits, and hands out the mean:

    rank 0   a0 a1 a2 ─┐ all_to_all   a0 b0 c0 = piece 0 ─┐ all_gather
    rank 1   b0 b1 b2 ─┼ in 8 bits    a1 b1 c1 = piece 1 ─┼ in 8 bits    pieces 0 1 2 on all ranks
    rank 2   c0 c1 c2 ─┘              a2 b2 c2 = piece 2 ─┘

Both together send 2 (N - 1) / N bytes for each number, a quarter of what a ring sends; gathering
all gradients on all ranks would send N - 1. All ranks decode the same bytes, and get the same bits.

What rounding takes away is not lost but late: each rank keeps what its message lacks and adds it to
the next one, and so does the rank that adds up a piece (error feedback: Seide et al., "1-bit
stochastic gradient descent", 2014; in both directions: Tang et al., "DoubleSqueeze", 2019).

The wire is real: one byte a number. The arithmetic is not: no product is computed in 8 bits, and
without hardware for it PyTorch rounds to e4m3 in software, which may cost more time than it saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
SCALE_BYTES = 4


class Float8:
    """What a rank still owes of each bucket, and of the piece of it that it adds up."""

    def __init__(self) -> None:
        """Owe nothing."""
        self.iter = 0  # steps
        self._errors: dict[int, Tensor] = {}
        self._piece_errors: dict[int, Tensor] = {}

    def state(self) -> dict[str, Any]:
        """Return it, for a checkpoint."""
        return {"iter": self.iter, "errors": self._errors, "piece_errors": self._piece_errors}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Put it back."""
        self.iter = state["iter"]
        self._errors = {index: error.to(device) for index, error in state["errors"].items()}
        pieces = state["piece_errors"]
        self._piece_errors = {index: error.to(device) for index, error in pieces.items()}

    def reduce(self, index: int, flat: Tensor) -> None:
        """Replace a bucket on every rank by the mean over all ranks."""
        num_ranks = dist.get_world_size()
        length = piece_length(flat.numel(), num_ranks)
        share = F.pad(flat / num_ranks, (0, length * num_ranks - flat.numel()))
        share += self._errors.get(index, 0.0)
        sent = encode(share.view(num_ranks, length))
        self._errors[index] = share - decode(sent).flatten()
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent)
        mean = decode(arrived).sum(0) + self._piece_errors.get(index, 0.0)
        piece = encode(mean[None])
        self._piece_errors[index] = mean - decode(piece)[0]
        dist.all_gather(list(arrived), piece[0])
        flat.copy_(decode(arrived).flatten()[: flat.numel()])


def encode(numbers_PL: Tensor) -> Tensor:
    """Return P messages of bytes, (P, 4 + L): the scale of each and its numbers."""
    largest_P1 = numbers_PL.abs().amax(1, keepdim=True)
    scale_P1 = (largest_P1 / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes_PL = (numbers_PL / scale_P1).to(torch.float8_e4m3fn)
    return torch.cat([scale_P1.view(torch.uint8), codes_PL.view(torch.uint8)], dim=1)


def decode(messages_PB: Tensor) -> Tensor:
    """Return the numbers of P messages, (P, L), in 32 bits."""
    scale_P1 = messages_PB[:, :SCALE_BYTES].flatten().view(torch.float32)[:, None]
    codes_PL = messages_PB[:, SCALE_BYTES:].view(torch.float8_e4m3fn)
    return codes_PL.to(torch.float32) * scale_P1


def piece_length(length: int, num_ranks: int) -> int:
    """Return how many numbers of a bucket one rank adds up."""
    return -(-length // num_ranks)
