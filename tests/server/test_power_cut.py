"""What `--synchronous` promises where the machine loses power: is an answer given before a sync?"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Sender, ServerProcess, log_line

BATCHES = 12
# As strace writes it: process, time, call, and with -y the file.
SYNC = re.compile(r"f(?:data)?sync\(\d+<[^>]*/rankscope\.db-wal>\)")


@pytest.mark.needs("strace")
@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_a_batch_is_on_the_disk_before_its_answer_where_it_must_be(
    tmp_path: Path, synchronous: str
) -> None:
    """Each answer of `full` comes after a sync of the log; those of `normal` wait for none."""
    calls = tmp_path / "calls"
    quiet = ("--look-seconds", "3600", "--retention-seconds", "3600")
    server = ServerProcess(tmp_path, "--synchronous", synchronous, *quiet)
    server.under = ("strace", "-D", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", str(calls))
    server.start()
    try:
        with httpx.Client(base_url=server.url) as client:
            sender = Sender(client)  # type: ignore[arg-type]
            syncs = []
            for number in range(BATCHES):
                sender.send(log_line(f"line {number}"))
                syncs.append(len(SYNC.findall(calls.read_text())))
    finally:
        server.close()
    grown = [after > before for before, after in itertools.pairwise(syncs)]
    assert grown == [synchronous == "full"] * (BATCHES - 1)
