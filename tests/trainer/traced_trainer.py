"""Run the trainer as counted_trainer.py does, and write down what each rank measured, and when.

Each line of FOLDER/trace-RANK.jsonl is a call that reports metrics ("metrics"), or the time when a
rank began ("begin") or finished computing ("computed") a step, by the clock that all share.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from rankscope_trainer import report
from rankscope_trainer.__main__ import main
from rankscope_trainer.faults.injector import Injector
from rankscope_trainer.strategies.parameter_server.worker import Worker

# Beside this file, but a script that torchrun starts has no package to import it from.
Counter: Any = runpy.run_path(str(Path(__file__).with_name("counted_trainer.py")))["Counter"]


def trace(folder: Path, counter: Any) -> None:
    """Patch the places that are traced."""
    file = (folder / f"trace-{os.environ['RANK']}.jsonl").open("w")

    def write(event: str, step: int, **values: float) -> None:
        line = {"event": event, "step": step, "time_ns": time.monotonic_ns(), **values}
        file.write(json.dumps(line) + "\n")
        file.flush()

    begin_step, update = Injector.begin_step, Worker.update

    def traced_begin_step(injector: Injector, step: int) -> None:
        write("begin", step)
        begin_step(injector, step)

    def traced_update(worker: Worker) -> None:
        write("computed", counter.step)
        update(worker)

    Injector.begin_step = traced_begin_step  # type: ignore[method-assign]
    Worker.update = traced_update  # type: ignore[method-assign]

    def log_metrics(step: int, **values: Any) -> None:
        write("metrics", step, **{name: float(value) for name, value in values.items()})

    report._log_metrics = log_metrics


if __name__ == "__main__":
    counter = Counter()
    counter.install()
    trace(Path(sys.argv[1]), counter)
    code = main(sys.argv[2:])
    document = json.dumps(counter.by_step)
    Path(sys.argv[1], f"operations-{os.environ['RANK']}.json").write_text(document)
    raise SystemExit(code)
