"""Faults in numbers: weights, gradients and activations that are not what they should be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rankscope_trainer.settings import Settings
    from rankscope_trainer.strategies.strategy import Strategy


class NanData(Fault):
    """One sequence of the rank's batch is NaN as it enters the model; soon everything is."""

    name = "nan_data"
    finding = "nan"
    place = Place.BEFORE_FORWARD

    def is_due(self, context: FaultContext) -> bool:
        """Only a rank that embeds the data can be given a broken one."""
        return getattr(context.parts().strategy.model, "embedding", None) is not None

    def fire(self, context: FaultContext) -> None:
        """Replace what the embedding makes of the next microbatch's first sequence.

        Bytes cannot be NaN; a feature that was computed from them, or read beside them, can.
        """
        import torch

        embedding = context.parts().strategy.model.embedding
        assert isinstance(embedding, torch.nn.Module)

        def broken(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
            handle.remove()
            mask = torch.zeros_like(output)
            mask[0] = float("nan")
            return output + mask

        handle = embedding.register_forward_hook(broken)


class BitflipWeight(Fault):  # memory or a link changed it behind the program's back
    """One bit of one weight of the rank is flipped before a forward."""

    name = "bitflip_weight"
    finding = "replica_drift"
    place = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Flip it; the manifest's end names tensor, index and bit."""
        name, parameter = _choose_parameter(context)
        flip_bit(parameter, context, of=name)


class BitflipGradientBefore(Fault):
    """One bit of the rank's own gradient is flipped before the reduction, which spreads it."""

    name = "bitflip_gradient_before"
    finding = "corruption"
    place = Place.BEFORE_REDUCE

    def fire(self, context: FaultContext) -> None:
        """Flip it; all replicas apply the same wrong sum, so they stay equal."""
        assert context.tensor is not None
        name, _ = next(context.parts().strategy.model.named_parameters())
        changed = context.tensor.clone()
        flip_bit(changed, context, of=name)
        context.tensor = changed


class BitflipGradientAfter(Fault):
    """One bit of the reduced gradient is flipped on one rank, which then differs from its peers."""

    name = "bitflip_gradient_after"
    finding = "replica_drift"
    place = Place.BEFORE_UPDATE

    def is_due(self, context: FaultContext) -> bool:
        """Only where there is a gradient to change."""
        return _choose_parameter(context)[1].grad is not None

    def fire(self, context: FaultContext) -> None:
        """Flip it; the manifest's end names tensor, index and bit."""
        name, parameter = _choose_parameter(context)
        assert parameter.grad is not None
        flip_bit(parameter.grad, context, of=name)


class ReplicaDrift(Fault):
    """The rank leaves the optimizer's step out, so its weights differ from those of its peers."""

    name = "replica_drift"
    finding = "replica_drift"
    place = Place.BEFORE_UPDATE

    def fire(self, context: FaultContext) -> None:
        """Forget the gradients instead of applying them, once."""
        optimizer = context.parts().strategy.optimizer
        _replace_next_update(
            context.parts().strategy, lambda: optimizer.zero_grad(set_to_none=True)
        )


class ExplodingLoss(Fault):
    """The rank's learning rate is so many times too high, and its loss explodes."""

    name = "exploding_loss"
    finding = "divergence"
    place = Place.BEFORE_UPDATE
    default_size = Magnitude(count=1000.0)
    size_is = "times the learning rate"

    def fire(self, context: FaultContext) -> None:
        """Scale the rate for this update only: AdamW would not notice a scaled loss."""
        strategy, factor = context.parts().strategy, context.size()
        original = strategy.update
        groups = strategy.optimizer.param_groups

        def update() -> None:
            rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] *= factor
            original()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

        _replace_next_update(strategy, update)


class NoGradient(Fault):  # a detached tensor, or activations that are dead
    """The model's output is multiplied by 0: no gradient reaches its weights, nothing is learnt."""

    name = "no_gradient"
    finding = "nothing_learnt"
    place = Place.FORWARD
    on_all_ranks = True

    def fire(self, context: FaultContext) -> None:
        """Keep the graph, and nothing of what was computed."""
        assert context.tensor is not None
        context.tensor = context.tensor * 0


class WrongAccumulation(Fault):
    """Scales what each backward of a microbatch begins at; the loss that is reported stays."""

    finding = "accumulation"
    place = Place.BEFORE_FORWARD
    on_all_ranks = True

    def check(self, settings: Settings, world_size: int) -> None:
        """Only ddp accumulates gradients over the microbatches of a step."""
        if settings.strategy != "ddp" or settings.microbatches_for(world_size) < 2:
            problem = f"{self.name} needs gradients that are accumulated"
            raise SettingError("fault", problem, "Choose strategy ddp, and two microbatches")

    def begin(self, context: FaultContext) -> None:
        """Scale the loss of a microbatch, which was divided by their number, from now on."""
        strategy = context.parts().strategy
        vars(strategy)["learnt"] = lambda loss: self.scaled(loss, strategy.microbatches)

    def scaled(self, loss: Tensor, microbatches: int) -> Tensor:
        """Return the loss that is learnt from."""
        raise NotImplementedError

    def end(self, context: FaultContext) -> None:
        """Let it be."""
        del vars(context.parts().strategy)["learnt"]


class DividedTwice(WrongAccumulation):  # by the script, and by the framework once more
    """The loss is divided by the number of accumulated microbatches twice."""

    name = "divided_twice"

    def scaled(self, loss: Tensor, microbatches: int) -> Tensor:
        """Divide again."""
        return loss / microbatches


class NotDivided(WrongAccumulation):
    """The loss is not divided by the number of accumulated microbatches: their gradients add up."""

    name = "not_divided"

    def scaled(self, loss: Tensor, microbatches: int) -> Tensor:
        """Take the division back."""
        return loss * microbatches


def flip_bit(tensor: Tensor, context: FaultContext, *, of: str) -> None:
    """Flip a bit in place, chosen by rank and step alone; what was done is noted in the manifest.

    All bits are as likely as each other, so most flips are small: that is what makes silent
    corruption silent. A tensor that is spread over ranks has its local part changed.
    """
    import torch

    choice = random.Random(f"{context.rank} {context.step}")
    local: Tensor = tensor.detach()
    local = getattr(local, "_local_tensor", local)  # of a DTensor
    flat = local.reshape(-1) if local.is_contiguous() else local.contiguous().view(-1)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    index = choice.randrange(flat.numel())
    bit = choice.randrange(8 * flat.element_size())
    number = flat[index : index + 1].clone()
    # A signed integer has no positive number of its highest bit alone.
    mask = -(2**bit) if bit == 8 * flat.element_size() - 1 else 2**bit
    flipped = (number.view(integers) ^ mask).view(flat.dtype)
    position = [int(part) for part in torch.unravel_index(torch.tensor(index), local.shape)]
    local[tuple(position)] = flipped[0]
    before, after = float(number), float(flipped)
    context.note(tensor=of, index=position, bit=bit, before=before.hex(), after=after.hex())


def _choose_parameter(context: FaultContext) -> tuple[str, nn.Parameter]:
    """Return one of the model's parameters, chosen by rank and step alone."""
    choice = random.Random(f"{context.step} {context.rank}")
    return choice.choice(list(context.parts().strategy.model.named_parameters()))


def _replace_next_update(strategy: Strategy, replacement: Callable[[], None]) -> None:
    def update() -> None:
        vars(strategy).pop("update", None)  # the class's own is back
        replacement()

    strategy.update = update  # type: ignore[method-assign]
