"""What the optimizers know: learning rate, number and size of parameters, size of their state."""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.process import environment
from rankscope.rank.context import Context
from rankscope.rank.hooks.numbers.layers import layers_of, num_weights
from rankscope.rank.steps import EndedStep
from rankscope.wire.schema import OPTIMIZER_USED

_MAX_CLASSES = 8


class LearningRate:
    """The learning rate of the first parameter group of the step's first optimizer, and its class.

    With the class goes what a rate is compared with: the one that the command line gives, and how
    many replicas share the batch.
    """

    name: ClassVar[str] = "learning-rate"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, context: Context) -> str:
        """Listen to optimizers."""
        self._context = context
        self._step = 0  # the last one whose rate was taken
        self._is_described = False
        context.listen("optimizer", self._optimizer, sampled=True)
        return "param_groups of the optimizer"

    def _optimizer(self, optimizer: Any) -> None:
        step = self._context.clock.step
        if not self._context.metrics.due or step == self._step:
            return
        self._step = step
        self._describe(optimizer)
        rate = optimizer.param_groups[0].get("lr")
        if isinstance(rate, int | float):
            self._context.metrics.put("learning_rate", float(rate))
        elif rate is not None and rate.numel() == 1:
            self._context.metrics.put_tensor("learning_rate", rate.detach().reshape(()))

    def _describe(self, optimizer: Any) -> None:
        """Record what the optimizer is, once, if the step has no other."""
        if self._is_described or len(self._context.cycle.optimizers()) > 1:
            return
        self._is_described = True
        given = environment.given_rate(environment.own_command())
        sizes = {model.process_group.size() for model in self._context.replicated}
        self._context.event(OPTIMIZER_USED, {
            "classes": " ".join(one.__name__ for one in type(optimizer).__mro__[:_MAX_CLASSES]),
            "given": "" if given is None else repr(given),
            "replicas": str(sizes.pop()) if len(sizes) == 1 else "",
        })  # fmt: skip


class ModelSize:
    """Parameters, their bytes and the bytes of optimizer state; counted once, after two steps."""

    name: ClassVar[str] = "model-size"
    needs: ClassVar[str] = "torch.optim.optimizer"

    def install(self, context: Context) -> str:
        """Listen to steps."""
        self._context = context
        self._num_steps = 0
        context.listen("step", self._step, sampled=True)
        return "param_groups and state of the optimizers"

    def _step(self, ended: EndedStep) -> None:
        self._num_steps += 1
        if self._num_steps != 2:
            return
        optimizers = self._context.cycle.optimizers()
        parameters = {
            id(parameter): parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        state = {
            id(value): value
            for optimizer in optimizers
            for values in optimizer.state.values()
            if isinstance(values, dict)
            for value in values.values()
            if hasattr(value, "element_size")
        }
        metrics = self._context.metrics
        if parameters:
            metrics.num_parameters = sum(parameter.numel() for parameter in parameters.values())
            metrics.put("parameters", metrics.num_parameters)
            metrics.put("parameter_bytes", sum(map(_bytes, parameters.values())))
            metrics.put("optimizer_state_bytes", sum(map(_bytes, state.values())))
        models = list(self._context.replicated)
        if models:
            metrics.put("model_parameters", sum(map(num_weights, models)))
        if len(models) == 1:
            layers = layers_of(models[0])
            metrics.put("model_layers", len(layers))
            metrics.put("layer_parameters", num_weights(layers[0]))


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor on this rank, of its shard if it is distributed."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return int(tensor.numel() * tensor.element_size())
