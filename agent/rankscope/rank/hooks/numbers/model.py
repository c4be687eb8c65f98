"""What the optimizers know: learning rate, number and size of parameters, size of their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.events import listen
from rankscope.rank.steps import EndedStep

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class LearningRate:
    """The learning rate of the first parameter group of the step's first optimizer."""

    name: ClassVar[str] = "learning-rate"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, agent: Agent) -> str:
        """Listen to optimizers."""
        self._agent = agent
        self._step = 0  # the last one whose rate was taken
        listen(agent, "optimizer", self._optimizer, sampled=True)
        return "param_groups of the optimizer"

    def _optimizer(self, optimizer: Any) -> None:
        step = self._agent.clock.step
        if not self._agent.sheet.due or step == self._step:
            return
        self._step = step
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, int | float):
            self._agent.sheet.put("learning_rate", float(rate))
        elif rate is not None and rate.numel() == 1:
            self._agent.sheet.put_tensor("learning_rate", rate.detach().reshape(()))


class ModelSize:
    """Parameters, their bytes and the bytes of optimizer state; counted once, after two steps."""

    name: ClassVar[str] = "model-size"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, agent: Agent) -> str:
        """Listen to steps."""
        self._agent = agent
        self._num_steps = 0
        listen(agent, "step", self._step, sampled=True)
        return "param_groups and state of the optimizers"

    def _step(self, ended: EndedStep) -> None:
        self._num_steps += 1
        if self._num_steps != 2:
            return
        optimizers = self._agent.cycle.optimizers()
        parameters = {
            id(one): one
            for optimizer in optimizers
            for group in optimizer.param_groups
            for one in group["params"]
        }
        state = {
            id(value): value
            for optimizer in optimizers
            for values in optimizer.state.values()
            if isinstance(values, dict)
            for value in values.values()
            if hasattr(value, "element_size")
        }
        sheet = self._agent.sheet
        if parameters:
            sheet.num_parameters = sum(one.numel() for one in parameters.values())
            sheet.put("parameters", sheet.num_parameters)
            sheet.put("parameter_bytes", sum(map(_bytes, parameters.values())))
            sheet.put("optimizer_state_bytes", sum(map(_bytes, state.values())))
        if self._agent.replicated:
            sheet.put(
                "model_parameters",
                sum(one.numel() for model in self._agent.replicated for one in model.parameters()),
            )


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor on this rank, of its shard if it is distributed."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return int(tensor.numel() * tensor.element_size())
