"""The layers of a model: its row of equal modules with most weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the row of equal modules that holds most of the weights; the whole if there is none.

    Equal: of one class and as many weights.
    """
    best: list[nn.Module] = []
    weight = 0
    for owner in module.modules():
        by_kind: dict[tuple[type, int], list[nn.Module]] = {}
        for child in owner.children():
            by_kind.setdefault((type(child), num_weights(child)), []).append(child)
        for (_, size), alike in by_kind.items():
            if len(alike) > 1 and len(alike) * size > weight:
                best, weight = alike, len(alike) * size
    return best or [module]


def num_weights(module: nn.Module) -> int:
    """Return how many numbers the parameters of a module hold."""
    return sum(parameter.numel() for parameter in module.parameters())
