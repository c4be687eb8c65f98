"""By which numbers a script divides its loss before backward(), and how many passes make a step.

Read from the graph's last operations, in steps whose numbers are written: `loss / 4` leaves a
division with its 4. Nothing is computed. Reading what the graph saved may make hooks of the script
run (activations that are offloaded or computed again): where there are any, nothing is read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import attempt
from rankscope.rank.steps import EndedStep
from rankscope.wire.schema import LOSS_SCALE

_MOST_OPERATIONS = 8
_MAX_EVENTS = 4
_PASSES_ON = frozenset({
    "_DDPSinkBackward", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0", "CloneBackward0",
    "AliasBackward0", "ReshapeAliasBackward0",
})  # fmt: skip
_MEAN, _SUM = 1, 2  # of torch's loss functions


class LossScale:
    """By what the loss of each backward pass of a step is divided, where its graph shows it."""

    name: ClassVar[str] = "loss-scale"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, context: Context) -> str:
        """Listen to backward passes; learn whether the script has hooks on what graphs save."""
        from torch.autograd.graph import saved_tensors_hooks

        self._context = context
        self._passes: list[tuple[str, str]] = []  # factors and how they were reduced, of each
        self._num_local = 0  # passes whose gradients DDP keeps to itself (no_sync)
        self._is_scaled = self._has_hooks = False
        self._said: list[dict[str, str]] = []
        self._before: dict[str, str] = {}  # of the step before that was looked at
        context.on_new(saved_tensors_hooks, self._hooked)
        context.listen("scaled", self._scaled)
        context.listen("backward", self._backward, sampled=True)
        context.listen("step", self._step, sampled=True)
        return "the last operations before backward()"

    def _hooked(self, hooks: Any) -> None:
        self._has_hooks = True

    def _scaled(self, outputs: Any) -> None:
        self._is_scaled = True

    def _backward(self, roots: Any) -> None:
        is_scaled, self._is_scaled = self._is_scaled, False
        if self._has_hooks or len(self._said) >= _MAX_EVENTS:
            return
        known = factors_of(roots[0], skips_one=is_scaled) if len(roots) == 1 else None
        self._passes.append(known or ("", ""))
        models = list(self._context.replicated)
        if len(models) == 1 and models[0].process_group.size() > 1:
            self._num_local += not models[0].require_backward_grad_sync

    def _step(self, ended: EndedStep) -> None:
        passes, self._passes = self._passes, []
        num_local, self._num_local = self._num_local, 0
        is_whole = len(passes) == ended.microbatches
        before, self._before = self._before, {}
        if len(passes) < 2 or not is_whole or len(set(passes)) > 1 or not passes[0][1]:
            return
        facts = {
            "passes": str(len(passes)), "local": str(num_local), "factors": passes[0][0],
            "reduction": passes[0][1],
        }  # fmt: skip
        self._before = facts
        if facts != before:  # a pass that failed and was made again is no accumulation
            return
        if facts not in self._said and len(self._said) < _MAX_EVENTS:
            self._said.append(facts)
            self._context.event(LOSS_SCALE, facts)


def factors_of(loss: Any, *, skips_one: bool = False) -> tuple[str, str] | None:
    """Return by what a loss was divided, last first, and how it was reduced: "mean", "sum" or "".

    None where the graph does not show it. `skips_one`: the last product is a gradient scaler's.
    """
    factors: list[str] = []
    node = loss.grad_fn
    for _ in range(_MOST_OPERATIONS):
        if node is None:
            return None
        name = node.name()
        if name in ("DivBackward0", "MulBackward0") and not (skips_one and name[0] == "M"):
            number = _number(node)
            if not number:
                return " ".join(factors), ""
            factors.append(f"{number if name[0] == 'D' else 1 / number:.6g}")
        elif name in _PASSES_ON or name == "MulBackward0":
            skips_one = skips_one and name != "MulBackward0"
        else:
            return " ".join(factors), _reduction(node, name)
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return None


def _number(node: Any) -> float | None:
    """Return the plain number of a product or quotient; None for a tensor, or one on a device."""
    other: Any = attempt(lambda: node._saved_other)
    if other is None or other.device.type != "cpu" or other.numel() != 1 or other.requires_grad:
        return None
    return float(other)


def _reduction(node: Any, name: str) -> str:
    if name.startswith(("MeanBackward", "SumBackward")):
        return name[: -len("Backward0")].lower()
    return {_MEAN: "mean", _SUM: "sum"}.get(getattr(node, "_saved_reduction", None) or 0, "")
