"""Whether one rank that was slow in one step is seen on the map, at every zoom.

    python benchmarks/one_bad_cell.py                     # 8,192 ranks, 10,000 steps
    python benchmarks/one_bad_cell.py --ranks 1024 --steps 2000 --json

The rollup of a run is written as ingest writes it: own work of 100 ms a step with log-normal
noise of 2 %, and one cell, somewhere, that took `--times` as long. The map is asked for as the
page asks for it, at every zoom from the whole run down to 64 steps around the cell, and as many
off its middle. At each zoom the bin that holds the cell must have a colour, so be above what is
usual in the run, and no bin of another rank or step as strong a one; the cursor's question for
that bin must name the rank and the step. Beside it stands how many other bins have a colour at all.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope.wire import schema
from rankscope_server.api.app import create_app
from rankscope_server.api.steps.cells import MISSING, USUAL
from rankscope_server.ingest.step_metrics import BLOCK_STEPS, STARTED
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.engine import open_engines
from rankscope_server.store.unit import Unit
from tests.server.conftest import Sender, TestClient

RUN = "one-bad-cell"
STEP_NS, BEGIN_NS = 120_000_000, 1_700_000_000 * 10**9
NORMAL_MS, NOISE = 100.0, 0.02
WIDTH, LANES = 1_200, 560  # of a canvas
LEAST_STEPS = 64


@dataclass
class Zoom:
    """One map."""

    step_lo: int
    step_hi: int
    bin: int  # steps in a column
    rank_bin: int  # ranks in a lane
    ratio: float  # of the bin that holds the cell
    usual_hi: float  # from here on a bin has a colour
    strongest_other_ratio: float
    others_coloured: int
    bins: int
    seconds: float
    response_bytes: int  # compressed
    worst_first_lane: int  # of the rank, with the order "worst"; 0 is the first
    is_named: bool  # by the cursor: the rank and the step, and not only the bin

    @property
    def is_seen(self) -> bool:
        """Return whether the cell stands out, and the cursor on its bin names it."""
        stands_out = self.ratio > self.usual_hi and self.ratio > self.strongest_other_ratio
        return stands_out and self.is_named


@dataclass
class Result:
    """All zooms."""

    cores: int
    ranks: int
    steps: int
    times: float
    rank: int
    step: int
    is_seen: bool
    cell_ratio: float  # as the cursor says it
    zooms: list[Zoom]


def fill(folder: str, options: argparse.Namespace, rank: int, step: int) -> None:
    """Write the tiles of the run; blocks of steps one after the other, so that memory is small."""
    random = np.random.default_rng(options.seed)
    writing, reading = open_engines(Settings(data_dir=folder).address_of_database(), "normal")
    for first in range(1, options.steps + 1, BLOCK_STEPS):
        steps = np.arange(first, min(first + BLOCK_STEPS, options.steps + 1))
        work = NORMAL_MS * random.lognormal(0, NOISE, (options.ranks, len(steps)))
        if first <= step < first + len(steps):
            work[rank, step - first] = NORMAL_MS * options.times
        ranks = np.repeat(np.arange(options.ranks), len(steps))
        of_cells = np.tile(steps, options.ranks)
        values = {
            "own_work": work.astype("<f4").reshape(-1),
            STARTED: BEGIN_NS + of_cells * STEP_NS,
        }
        with writing.begin() as connection:
            unit = Unit(connection)
            unit.tiles.add(RUN, 0, ranks, of_cells, values)
            unit.flush()
    with writing.begin() as connection:
        run = tables.run
        connection.execute(run.update().where(run.c.run_id == RUN).values(step=options.steps))
    writing.dispose()
    reading.dispose()


def register(client: TestClient, num_ranks: int) -> None:
    """Send what a run of so many ranks begins with."""
    sender = Sender(client, RUN, "p")
    records = [
        schema.RankRegistered(
            attempt=0, rank=rank, time_ns=BEGIN_NS, world_size=num_ranks, local_rank=rank % 8,
            local_world_size=8, node_rank=rank // 8, host=f"node-{rank // 8:04}", pid=rank + 1,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    for at in range(0, num_ranks, 1_024):
        sender.send(*records[at : at + 1_024])


def ranges(step: int, num_steps: int) -> list[tuple[int, int]]:
    """Return the whole run, and ever smaller parts of it that hold a step, not in their middle."""
    found, span = [(1, num_steps)], num_steps // 2
    while span >= LEAST_STEPS:
        lo = min(max(step - span // 3, 1), num_steps - span + 1)
        found.append((lo, lo + span - 1))
        span //= 2
    return found


def lane_of(answer: dict[str, Any], rank: int) -> int:
    """Return the lane that holds a rank."""
    return next(at for at, row in enumerate(answer["rows"]) if rank in row["ranks"])


def look(client: TestClient, span: tuple[int, int], rank: int, step: int) -> Zoom:
    """Ask for one map and see what is at the cell."""
    began = time.perf_counter()
    wish: dict[str, str | int] = {
        "metric": "own_work",
        "from": span[0],
        "to": span[1],
        "width": WIDTH,
        "lanes": LANES,
    }
    reply = client.get(f"/api/v1/runs/{RUN}/map", params=wish)
    assert reply.status_code == 200, reply.text
    seconds, answer = time.perf_counter() - began, reply.json()
    worst_first = client.get(f"/api/v1/runs/{RUN}/map", params=wish | {"order": "worst"})
    cells = np.frombuffer(base64.b64decode(answer["cells"]), np.uint8)
    cells = cells.reshape(-1, answer["columns"]).astype(float)
    with np.errstate(over="ignore"):
        ratio = np.where(cells == MISSING, 0.0, 2 ** ((cells - 127) / 127))
    at = lane_of(answer, rank), (step - answer["step_lo"]) // answer["bin"]
    usual = max(answer["usual"]["hi"], USUAL[1])
    own, first = answer["rows"][at[0]]["ranks"], answer["step_lo"] + at[1] * answer["bin"]
    last = min(first + answer["bin"] - 1, answer["step_hi"])
    named = client.get(
        f"/api/v1/runs/{RUN}/cell/worst",
        params={"ranks": ",".join(map(str, own)), "from": first, "to": last},
    ).json()
    mine = float(ratio[at])
    ratio[at] = 0.0
    return Zoom(
        step_lo=answer["step_lo"], step_hi=answer["step_hi"], bin=answer["bin"],
        rank_bin=answer["rank_bin"], ratio=round(mine, 3), usual_hi=round(usual, 3),
        strongest_other_ratio=round(float(ratio.max()), 3),
        others_coloured=int((ratio > usual).sum()), bins=int(ratio.size),
        seconds=round(seconds, 3), response_bytes=int(reply.headers.get("content-length", 0)),
        worst_first_lane=lane_of(worst_first.json(), rank),
        is_named=(named["rank"], named["step"]) == (rank, step),
    )  # fmt: skip


def measure(options: argparse.Namespace) -> Result:
    """Fill a store and look at every zoom."""
    random = np.random.default_rng(options.seed)
    rank, step = int(random.integers(options.ranks)), int(random.integers(10, options.steps))
    with tempfile.TemporaryDirectory() as folder:
        chosen = Settings(data_dir=folder, look_seconds=3600.0, disk_reserve_bytes=0)
        with TestClient(create_app(chosen), base_url="http://127.0.0.1:8787") as client:
            register(client, options.ranks)
        fill(folder, options, rank, step)
        with TestClient(create_app(chosen), base_url="http://127.0.0.1:8787") as client:
            zooms = [look(client, span, rank, step) for span in ranges(step, options.steps)]
            cell = client.get(f"/api/v1/runs/{RUN}/cell", params={"rank": rank, "step": step})
    return Result(
        cores=os.cpu_count() or 0, ranks=options.ranks, steps=options.steps, times=options.times,
        rank=rank, step=step, is_seen=all(zoom.is_seen for zoom in zooms),
        cell_ratio=round(cell.json()["ratio"], 3), zooms=zooms,
    )  # fmt: skip


def main() -> None:
    """Measure and print; exit 1 where the cell is not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8_192)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--times", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(asdict(result), indent=None if options.json else 2))
    sys.exit(0 if result.is_seen else 1)


if __name__ == "__main__":
    main()
