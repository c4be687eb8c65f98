"""`python -m rankscope.node --run-dir DIR`: the node collector as a process.

Settings come from the environment. A second one for the same run exits 0 at once. A failure that
is not a damaged file ends the process (exit code 70): what started it starts it again, and it
continues from the last commit, which is simpler to be sure of than a half-finished turn.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rankscope import settings as settings_table
from rankscope.files.run_directory import replace_file
from rankscope.files.start_collector import is_locked_by, take_lock
from rankscope.native.probe import build
from rankscope.node import offsets as progress
from rankscope.node.loop import Collector
from rankscope.node.losses import Ledger
from rankscope.node.offsets import Offsets
from rankscope.node.ranks import leftovers
from rankscope.node.sources.sampling import Sampling
from rankscope.node.upload.clock import ClockExchange
from rankscope.node.upload.outbox import LocalOutbox, Outbox, SpoolingOutbox, new_producer
from rankscope.node.upload.server import Server
from rankscope.node.upload.spool import Spool
from rankscope.node.upload.uploader import Uploader
from rankscope.node.upload.vitals import Vitals
from rankscope.settings import SettingError, Settings
from rankscope.wire import schema

EXIT_USAGE, EXIT_SOFTWARE = 64, 70
NICE = 10
DRAIN_SECONDS = 5.0  # after SIGTERM

logger = logging.getLogger("rankscope.node")


def main(argv: list[str] | None = None) -> int:
    """Run the collector until nothing is left to do; return the exit code."""
    arguments = _parse(argv)
    run_directory: Path = arguments.run_dir.absolute()
    descriptor = arguments.lock_fd if arguments.lock_fd >= 0 else take_lock(run_directory)
    if descriptor is None:
        return 0
    os.set_inheritable(descriptor, False)
    os.chdir("/")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.raiseExceptions = False  # a full disk must not stop us from saying less
    try:
        settings = settings_table.from_environment(os.environ)
        server = Server(settings.server, settings.token) if settings.server else None
    except (SettingError, ValueError) as error:
        logger.error("not started: %s", error)
        return EXIT_USAGE
    with contextlib.suppress(OSError):
        replace_file(run_directory / "node" / "pid", str(os.getpid()).encode())
    try:
        _run(run_directory, settings, server, descriptor)
    except Exception:  # the guard of the main thread: say it, end, be restarted
        logger.exception("the collector failed and ends")
        return EXIT_SOFTWARE
    return 0


def _run(run_directory: Path, settings: Settings, server: Server | None, lock: int) -> None:
    node = run_directory / "node"
    host = socket.gethostname()
    num_aside = 0 if server is None else leftovers.choose_server(run_directory, server.url)
    spool = None if server is None else Spool(run_directory / leftovers.SPOOL, settings.spool_bytes)
    offsets = _recover(node, spool, host)
    ledger = Ledger(offsets.losses)
    outbox: Outbox
    vitals = Vitals(run_directory.name, host)
    if spool is None:
        outbox = LocalOutbox(node, ledger)
    else:
        ledger.add("spool", "spool file damaged", spool.num_damaged)
        outbox = SpoolingOutbox(
            run_directory.name, host, node, spool, offsets, ledger, on_record=vitals.note
        )
    sampling = Sampling(run_directory, settings.sample_seconds, host)
    # the death watch starts in there, before nice: it must be quick, and nice is per thread
    collector = Collector(run_directory, settings, host, outbox, ledger, offsets, sampling)
    os.nice(NICE)
    sampling.start()
    if settings.probe_build and settings.collectives in ("auto", "probe"):
        build.build_in_background()
    uploader = None
    if server is not None and spool is not None:
        uploader = Uploader(
            server,
            spool,
            lambda items, why: collector.refused.put((items, why)),
            on_commands=collector.take_commands,
            traces=collector.traces,
            clock=ClockExchange(collector.found.put, host=host),
            vitals=vitals,
            run_id=run_directory.name,
        )
        uploader.start()
        _begin_delivery(run_directory, settings)
        _say_set_aside(outbox, num_aside, node)
    terminated = _on_sigterm(collector.wake.set)
    try:
        while not terminated():
            if not is_locked_by(run_directory, lock):  # what it would write is another one's now
                logger.error("%s was deleted: this collector ends", run_directory)
                return
            collector.turn()
            if collector.should_end():
                _mark_delivered(run_directory, collector, outbox)
                return
            collector.sleep()
        _drain(collector, uploader)
    finally:
        sampling.stop()


def _begin_delivery(run_directory: Path, settings: Settings) -> None:
    """Take the mark of a delivered run away, and look after the runs that were here before."""
    with contextlib.suppress(OSError):
        (run_directory / leftovers.DELIVERED).unlink(missing_ok=True)
    leftovers.Leftovers(run_directory, settings, os.environ).start()


def _say_set_aside(outbox: Outbox, num_batches: int, node: Path) -> None:
    """Report batches of this run that were meant for another server."""
    if num_batches:
        logger.warning("%d batches in %s are for another server: left there", num_batches, node)
        fields = {"batches": str(num_batches), "directory": str(node)}
        outbox.record(
            schema.Event(
                attempt=0, rank=schema.NODE_RANK, time_ns=time.time_ns(),
                name="batches for another server", fields=fields,
            )
        )  # fmt: skip


def _mark_delivered(run_directory: Path, collector: Collector, outbox: Outbox) -> None:
    """Mark a run of which the server has everything: its directory may be deleted some time."""
    is_all = collector.is_drained() and collector.has_finished_all()
    if outbox.wants_chunks and is_all and not leftovers.num_set_aside(run_directory):
        with contextlib.suppress(OSError):
            (run_directory / leftovers.DELIVERED).touch()


def _drain(collector: Collector, uploader: Uploader | None) -> None:
    """Read and send what is there, for a few seconds."""
    deadline = time.monotonic() + DRAIN_SECONDS
    if uploader is not None:
        uploader.hurry()
    while time.monotonic() < deadline:
        collector.turn()
        collector.commit()
        if collector.is_drained():
            return
        time.sleep(0.05)


def _recover(node: Path, spool: Spool | None, host: str) -> Offsets:
    """Return the newest offsets that an earlier collector left, or a new beginning."""
    found = [progress.load(node), None if spool is None else spool.recovered]
    known = [offsets for offsets in found if offsets is not None]
    return max(known, key=lambda offsets: offsets.sequence, default=Offsets(new_producer(host)))


def _on_sigterm(wake: Callable[[], None]) -> Callable[[], bool]:
    """Return a question: has SIGTERM come?"""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        wake()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return lambda: bool(received)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rankscope.node", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run")
    parser.add_argument("--lock-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
