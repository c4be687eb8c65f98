"""A rank whose training thread waits for a lock that another thread never gives back."""

import threading
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place


class HangLock(Fault):
    """The training thread and another one wait for each other's lock, for ever."""

    name: ClassVar[str] = "hang_lock"
    finding: ClassVar[str] = "hang"
    place: ClassVar[Place] = Place.BEFORE_FORWARD

    def fire(self, context: FaultContext) -> None:
        """Take two locks in opposite orders in two threads, the classic deadlock."""
        metrics, model = threading.Lock(), threading.Lock()
        has_metrics = threading.Event()

        def report() -> None:
            with metrics:
                has_metrics.set()
                with model:
                    pass

        with model:
            threading.Thread(target=report, name="trainer-metrics", daemon=True).start()
            has_metrics.wait()
            with metrics:
                pass
