"""The launcher: `python -m rankscope_trainer.regroup --ranks 4 -- --steps 200`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from rankscope_trainer.regroup import NUM_PLACES
from rankscope_trainer.regroup.places import Places
from rankscope_trainer.regroup.training import PROCESS, STORE

_LOOK_SECONDS = 0.05
_LEAVE_SECONDS = 30.0  # once the last step is trained; then what is stopped is killed
_STORE_SECONDS = 300.0

logger = logging.getLogger("rankscope_trainer")


class Launcher:
    """The ranks of this node: started, watched one by one, and never ended for another's sake."""

    def __init__(self, options: argparse.Namespace, trainer: Sequence[str]) -> None:
        """Keep, or reach, the store in which the ranks meet."""
        self._options = options
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does
        self._command = [python, "-u", "-m", "rankscope_trainer", "--regroup", *trainer]
        self._processes: dict[str, tuple[int | None, subprocess.Popen[bytes]]] = {}
        self._codes: list[int] = []
        self._replacements = options.replace
        host, _, port = options.store.rpartition(":")
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public
            host, int(port), is_master=0 in options.here, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
        )  # fmt: skip
        self._address = f"{host}:{self._store.port}"
        self._places = Places(self._store, "launcher", num_places=0, patience_seconds=0.0)

    def run(self) -> int:
        """Return 0 once the last step is trained, whatever died before; else a failed rank's."""
        for rank in self._options.here:
            self._start(rank)
        for _ in range(self._options.standby):
            self._start(None)
        over_since: float | None = None
        while self._processes:
            time.sleep(_LOOK_SECONDS)
            self._look()
            if over_since is None and self._places.is_over:
                over_since = time.monotonic()
            if over_since is not None and time.monotonic() - over_since > _LEAVE_SECONDS:
                self.send(signal.SIGKILL)
        if self._places.is_over:
            return 0
        return next((code if code > 0 else 128 - code for code in self._codes if code), 1)

    def send(self, number: int) -> None:
        """Send a signal to all that run here."""
        for _, process in self._processes.values():
            process.send_signal(number)

    def _start(self, rank: int | None) -> None:
        name = uuid.uuid4().hex
        variables = {STORE: self._address, PROCESS: name, NUM_PLACES: str(self._options.ranks)}
        if rank is not None:
            variables |= {
                "RANK": str(rank), "WORLD_SIZE": str(self._options.ranks),
                "LOCAL_RANK": str(self._options.here.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(self._options.here)),
            }  # fmt: skip
        process = subprocess.Popen(self._command, env={**os.environ, **variables})
        self._processes[name] = rank, process

    def _look(self) -> None:
        """See which processes have ended, and say so at once to those that may wait for them."""
        for name, (rank, process) in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            Places.say_gone(self._store, name)
            del self._processes[name]
            self._codes.append(code)
            if not code:
                continue
            who = "a process that stood by" if rank is None else f"rank {rank}"
            logger.warning("%s ended with code %d, the others train on", who, code)
            if self._replacements and not self._places.is_over:
                self._replacements -= 1
                self._start(None)


@contextlib.contextmanager
def _passing_on(launcher: Launcher) -> Iterator[None]:
    """Pass what asks us to leave on to the ranks."""

    def pass_on(number: int, frame: object) -> None:
        launcher.send(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str]) -> int:
    """Start the ranks of this node; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rankscope_trainer.regroup",
        description="Start ranks that train on without each other; what follows -- is for them.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the whole job")
    parser.add_argument(
        "--here", default="", help="those of this node, as 0,1; empty: all. That of 0 has the store"
    )
    parser.add_argument(
        "--store", default="", metavar="HOST:PORT", help="where the ranks meet; empty: a new one"
    )
    parser.add_argument("--standby", type=int, default=0, help="processes that wait for a place")
    parser.add_argument("--replace", type=int, default=0, help="start so many more where some die")
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:separator])
    here = options.here or ",".join(map(str, range(options.ranks)))
    options.here = [int(rank) for rank in here.split(",")]
    options.store = options.store or "127.0.0.1:0"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s launcher %(levelname)s %(message)s")
    launcher = Launcher(options, arguments[separator + 1 :])
    with _passing_on(launcher):
        return launcher.run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
