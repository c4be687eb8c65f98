"""A rank that was started with another environment than the others."""

import os
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place

VARIABLE, VALUE = "NCCL_PROTO", "Simple"


class EnvironmentDrift(Fault):
    """The rank joins the others with NCCL_PROTO=Simple, which NCCL reads and gloo does not."""

    name: ClassVar[str] = "environment_drift"
    finding: ClassVar[str] = "version_drift"
    place: ClassVar[Place] = Place.START

    def begin(self, context: FaultContext) -> None:
        """Set the variable before the group is joined."""
        context.tell(variable=VARIABLE, before=os.environ.get(VARIABLE, ""), value=VALUE)
        self._before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = VALUE

    def end(self, context: FaultContext) -> None:
        """Put back what was there."""
        if self._before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = self._before
