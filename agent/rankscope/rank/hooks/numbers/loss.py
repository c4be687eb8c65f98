"""The loss: the tensor on which `backward()` is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.events import listen
from rankscope.rank.steps import EndedStep
from rankscope.wire.metric_names import ALTERNATING

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

_MAX_PASSES = 64  # of one step whose losses are kept


class Losses:
    """Mean of the losses of a step's backward passes, before a gradient scaler scaled them."""

    name: ClassVar[str] = "loss"
    needs: ClassVar[str] = "torch.autograd"

    def install(self, agent: Agent) -> str:
        """Listen to backward passes and scalers."""
        import torch

        self._agent = agent
        self._stack = torch.stack
        self._seen: list[Any] = []
        self._unscaled: Any = None
        listen(agent, "backward", self._backward, sampled=True)
        listen(agent, "scaled", self._scaled)
        listen(agent, "step", self._step, sampled=True)
        return "the tensor of backward()"

    def _scaled(self, outputs: Any) -> None:
        if self._agent.sheet.due:
            self._unscaled = _scalar(outputs)

    def _backward(self, roots: Any) -> None:
        if not self._agent.sheet.due or len(roots) != 1 or len(self._seen) >= _MAX_PASSES:
            return
        loss = self._unscaled if self._unscaled is not None else _scalar(roots[0])
        self._unscaled = None
        if loss is not None:
            self._seen.append(loss)

    def _step(self, ended: EndedStep) -> None:
        seen, self._seen, self._unscaled = self._seen, [], None
        if not seen or not self._agent.sheet.due:
            return
        if self._agent.cycle.alternates:
            self._agent.sheet.put(ALTERNATING, 1.0)
        if all(isinstance(loss, float) for loss in seen):
            self._agent.sheet.put("loss", sum(seen) / len(seen))
        elif len({loss.device for loss in seen if not isinstance(loss, float)}) == 1:
            mean = self._stack(seen).mean() if len(seen) > 1 else seen[0]
            self._agent.sheet.put_tensor("loss", mean)


def _scalar(value: Any) -> Any:
    """Return a float from the CPU, a detached scalar of a device, None for anything else."""
    import torch

    if type(value) is not torch.Tensor or value.numel() != 1 or not value.is_floating_point():
        return None
    if value.device.type == "cpu":
        return float(value.detach())  # not `item`: scripts count or forbid its calls
    return value.detach().reshape(())
