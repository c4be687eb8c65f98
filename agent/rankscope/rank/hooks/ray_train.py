"""How training ends in a worker of Ray Train, which no exception and no exit status shows.

Ray runs the training function in a thread, catches what leaves it, and ends the process itself
with exit code 1 when the run is over, however it went (ray/train/v2/_internal/execution/
worker_group/thread_runner.py and worker.py, as of Ray 2.60).
"""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.exceptions import keep

_RUNNER = "ray.train.v2._internal.execution.worker_group.thread_runner"


class RayTrain:
    """How the training function of a worker of Ray Train ends, and its exception."""

    name: ClassVar[str] = "ray-train"
    needs: ClassVar[str] = _RUNNER

    def install(self, context: Context) -> str:
        """Listen where Ray takes an exception, and where it asks for what was returned."""
        import sys

        runner: Any = sys.modules[_RUNNER]
        take: Any = runner.construct_user_exception_with_traceback
        asked: Any = runner.ThreadRunner.get_return_value

        @guarded
        def failed(error: BaseException) -> None:
            keep(context, type(error), error, error.__traceback__, "training")
            context.exception_left()

        @guarded
        def ended(thread: Any) -> None:
            if thread.get_error() is None and not thread.is_running():
                context.training_over()

        def construct_user_exception_with_traceback(e: Any, *args: Any, **kwargs: Any) -> Any:
            failed(e)
            return take(e, *args, **kwargs)

        def get_return_value(self: Any) -> Any:
            ended(self)
            return asked(self)

        context.patch(
            runner, "construct_user_exception_with_traceback",
            construct_user_exception_with_traceback,
        )  # fmt: skip
        context.patch(runner.ThreadRunner, "get_return_value", get_return_value)
        return "the training function's thread"
