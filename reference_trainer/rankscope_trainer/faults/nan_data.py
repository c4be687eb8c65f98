"""One broken sample: a NaN enters through the data of one rank."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class NanData(Fault):
    """One sequence of the rank's batch is NaN as it enters the model; soon everything is."""

    name: ClassVar[str] = "nan_data"
    finding: ClassVar[str] = "nan"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

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
