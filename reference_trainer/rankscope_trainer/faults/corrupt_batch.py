"""A batch that was damaged on its way from the disk to the model."""

from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

MASK = 0x55  # every second bit of a byte


class CorruptBatch(Fault):
    """So many bytes of the rank's batch are changed after it was drawn, once in each step."""

    name: ClassVar[str] = "corrupt_batch"
    finding: ClassVar[str] = "corrupt_batch"
    place: ClassVar[Place] = Place.BATCH
    default_size: ClassVar[Magnitude | None] = Magnitude(count=8)
    size_is: ClassVar[str] = "bytes of a batch"

    def __init__(self) -> None:
        """No batch was changed yet."""
        self._last_step = 0

    def is_due(self, context: FaultContext) -> bool:
        """Spare the batch drawn in place of a skipped one, and ranks that draw no bytes at all."""
        has_bytes = context.batch is not None and context.batch[0].numel() > 0
        return has_bytes and context.step != self._last_step

    def fire(self, context: FaultContext) -> None:
        """Flip half of the bits of the first bytes."""
        assert context.batch is not None
        self._last_step = context.step
        bytes_BT, _ = context.batch
        first = bytes_BT.view(-1)[: int(context.size())]
        first ^= MASK
        context.add(changed_bytes=len(first))
