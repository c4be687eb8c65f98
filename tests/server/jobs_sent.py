"""Simulated jobs of several dimensions, sent to a server: as many ranks as one likes.

python tests/server/jobs_sent.py http://127.0.0.1:8787 mesh --data 16 --tensor 8 --pipeline 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rankscope.wire import schema, zstd
from rankscope.wire.chunk import encode_chunk
from tests.server.seed import post_body
from tests.simulator.job import Fault, Job
from tests.simulator.records import Recording

ITEMS = 4_000  # of one batch


def send_job(
    send: Callable[[bytes], None], run_id: str, job: Job, *, collectives: bool = False
) -> None:
    """Send a whole run of a job in packed batches; its ranks do not end."""
    items = [_packed(item) for _, item in Recording(job, collectives=collectives).items()]
    started = schema.RunStarted(
        attempt=0, rank=-1, time_ns=time.time_ns(), name=run_id,
        command=["python", "train.py"], world_size=job.num_ranks,
    )  # fmt: skip
    every: list[Any] = [started, *items]
    for sequence, begin in enumerate(range(0, len(every), ITEMS), 1):
        part = every[begin : begin + ITEMS]
        body = {
            "schema_version": schema.SCHEMA_VERSION, "run_id": run_id, "producer": "simulator",
            "sequence": sequence, "host": "node-0000", "sent_ns": time.time_ns(),
            "records": [one for one in part if not isinstance(one, schema.Chunk)],
            "chunks": [one for one in part if isinstance(one, schema.Chunk)],
        }  # fmt: skip
        send(zstd.pack(msgspec.msgpack.encode(body)))


def _packed(item: Any) -> Any:
    """Return a record, or a chunk with its columns packed."""
    if not isinstance(item, tuple):
        return item
    chunk, columns = item
    return msgspec.structs.replace(chunk, data=encode_chunk(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("run_id")
    for name, usual in (("data", 16), ("tensor", 8), ("pipeline", 8), ("steps", 60), ("slow", -1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args()
    slow = Fault("slow_compute", rank=asked.slow, start=20, size=0.6)
    job = Job(
        data=asked.data, tensor=asked.tensor, pipeline=asked.pipeline, steps=asked.steps,
        microbatches=12, tells_numbers=True, faults=(slow,) if asked.slow >= 0 else (),
    )  # fmt: skip
    send_job(lambda body: post_body(asked.url, body, ""), asked.run_id, job)


if __name__ == "__main__":
    main()
