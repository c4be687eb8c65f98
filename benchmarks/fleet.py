"""Kill and stop each kind of process of a fleet under load: is all there, once, and found as ever?

    python benchmarks/fleet.py                       # 50 events in rounds of 5
    python benchmarks/fleet.py --rounds 1 --json

A round: three servers of NATS, PostgreSQL, two gateways, two workers and a web server, all real
processes, and collectors that send several runs, each batch until a gateway has acknowledged it. In
turn a worker, a gateway, a server of NATS and the web server is killed (SIGKILL) and started again,
or stopped (SIGSTOP) and woken. Then the store is compared with what was acknowledged, and with that
of one server without a log that took the same batches undisturbed meanwhile. A round is one line of
JSON in `--results`; a round of the same seed and size that is there already is not repeated. Exit
status 1 on any difference, and where the partitions of a worker moved later than the bar.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from two_servers import (
    MOVES_SECONDS,
    Collector,
    Result,
    Server,
    Store,
    compare,
    count_sends,
    make_batches,
    postgres_server,
    run_rounds,
    wait_until_over,
)

from tests.server.nats_servers import NUM_SERVERS, NatsServers

RESULTS = Path(__file__).parent / "results" / "fleet.jsonl"
PARTITIONS = 4
KINDS = ("worker", "gateway", "nats", "web")
START_SECONDS = 300.0  # five processes at a time, on cores that others may use too
STOPPED_SECONDS = 9.0  # longer than a lease
QUIET_SECONDS = 4.0  # between two events


@dataclass
class FleetResult(Result):
    """One round, and which processes it hit."""

    hit: dict[str, int] = field(default_factory=dict)  # by kind and signal
    put_off: int = 0  # batches that were answered 503


class Process(Server):
    """A process of the fleet with its role."""

    def __init__(self, folder: Path, url: str, nats: NatsServers, role: str) -> None:
        super().__init__(folder, url)
        self.role = role
        self.environ = {"RANKSCOPE_SERVER_NATS_URL": nats.url}
        self.flags = ("--role", role, "--log-partitions", str(PARTITIONS))


@dataclass
class Fleet:
    """All of its processes."""

    nats: NatsServers
    store: Store
    gateways: list[Process]
    workers: list[Process]
    web: Process

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways, *self.workers, self.web]

    def owners(self) -> list[str]:
        """Return the process that has each partition, by the database; "" for none that is up."""
        rows = self.store.rows(
            "SELECT coalesce(server.name, '') FROM lease"
            " LEFT JOIN server ON server.id = lease.owner WHERE lease.name LIKE 'partition %'"
        )
        return [name for (name,) in rows]

    def partitions_of(self, process: Process) -> int:
        assert process.process is not None
        mine = f" {process.process.pid}"
        return sum(name.endswith(mine) for name in self.owners())

    def wait_for_owners(self, *but: Process) -> None:
        """Wait until workers other than some have all partitions."""
        deadline = time.monotonic() + 6 * MOVES_SECONDS
        good = [one for one in self.workers if one not in but]
        while sum(map(self.partitions_of, good)) < PARTITIONS and time.monotonic() < deadline:
            time.sleep(0.05)


@contextlib.contextmanager
def fleet(folder: Path, url: str) -> Any:
    nats = NatsServers(folder / "nats")
    roles = ["gateway", "gateway", "worker", "worker", "web"]
    try:
        nats.start()
        made = [Process(folder / f"{role}-{n}", url, nats, role) for n, role in enumerate(roles)]
        whole = Fleet(nats, Store(url), made[:2], made[2:4], made[4])
        for process in made:
            process.start()
        for process in made:
            process.wait(START_SECONDS)
        whole.wait_for_owners()
        yield whole
    finally:
        for process in made:
            process.kill()
        nats.close()


def disturb(result: FleetResult, whole: Fleet, draw: random.Random) -> None:
    """Kill and stop one process of each kind in turn."""
    for number in range(result.events):
        time.sleep(QUIET_SECONDS)
        kind = KINDS[number % len(KINDS)]
        is_kill = (number + number // len(KINDS)) % 2 == 0
        key = f"{kind} {'killed' if is_kill else 'stopped'}"
        result.hit[key] = result.hit.get(key, 0) + 1
        result.kills, result.stops = result.kills + is_kill, result.stops + (not is_kill)
        if kind == "nats":
            hit_nats(whole.nats, draw.randrange(NUM_SERVERS), is_kill)
        else:
            among = {"worker": whole.workers, "gateway": whole.gateways, "web": [whole.web]}[kind]
            hit(result, whole, draw.choice(among), is_kill)


def hit_nats(nats: NatsServers, number: int, is_kill: bool) -> None:
    nats.signal(number, signal.SIGKILL if is_kill else signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    if is_kill:
        nats.start_one(number)
    else:
        nats.signal(number, signal.SIGCONT)


def hit(result: FleetResult, whole: Fleet, victim: Process, is_kill: bool) -> None:
    owned = whole.partitions_of(victim) if victim in whole.workers else 0
    at = time.monotonic()
    if is_kill:
        victim.kill()
    else:
        victim.signal(signal.SIGSTOP)
    if owned:
        whole.wait_for_owners(victim)
        result.moves += owned
        result.move_seconds.append(round(time.monotonic() - at, 2))
    if is_kill:
        victim.start()
    else:
        time.sleep(max(0.0, at + STOPPED_SECONDS - time.monotonic()))
        victim.signal(signal.SIGCONT)
    victim.wait(START_SECONDS)


def measure(seed: int, events: int, folder: Path) -> FleetResult:
    """Run one round."""
    result, began = FleetResult(seed, events), time.monotonic()
    with postgres_server() as postgres, contextlib.ExitStack() as stack:
        urls = [postgres.create_migrated() for _ in range(2)]
        undisturbed = Server(folder / "undisturbed", urls[1])
        stack.callback(undisturbed.start().kill)
        undisturbed.wait(START_SECONDS)
        whole = stack.enter_context(fleet(folder, urls[0]))
        quiet = Store(urls[1])
        nodes = make_batches(seed, seconds=14.0 * events)
        ports = [gateway.port for gateway in whole.gateways]
        collectors = [Collector(batches, ports, seed + n) for n, batches in enumerate(nodes)]
        others = [Collector(batches, [undisturbed.port], seed) for batches in nodes]
        for collector in (*collectors, *others):
            collector.start()
        disturb(result, whole, random.Random(seed))
        for collector in (*collectors, *others):
            collector.pause_seconds = 0.0  # what is left, as fast as it goes
        for collector in (*collectors, *others):
            collector.join()
        result.ended = wait_until_over(whole.store) and wait_until_over(quiet)
        logs = "".join((process.folder / "log").read_text() for process in whole.processes)
        result.refused_writes = logs.count("has another owner now")
        count_sends(result, collectors)
        result.put_off = result.statuses.get("503", 0)
        acknowledged = {one for collector in collectors for one in collector.acknowledged}
        compare(result, whole.store, quiet, acknowledged)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def show(result: FleetResult) -> None:
    moves = sorted(result.move_seconds)
    print(f"seed {result.seed}: {result.hit}, {result.seconds:.0f} s")
    print(f"  {result.batches} batches acknowledged in {result.sends} sends: {result.statuses}")
    if moves:
        print(f"  {result.moves} partitions moved; until others had them: median"
              f" {moves[len(moves) // 2]} s, longest {moves[-1]} s")  # fmt: skip
    print(f"  {result.refused_writes} writes of a worker that was woken were refused")
    print(f"  lost {sum(result.lost.values())}, twice {sum(result.twice.values())}; of"
          f" {result.findings} findings {result.differs['findings']} differ")  # fmt: skip
    if not result.passed:
        parts = {"lost": result.lost, "twice": result.twice, "differs": result.differs}
        wrong = {name: {k: n for k, n in part.items() if n} for name, part in parts.items()}
        print(f"  FAILED {wrong}, came to an end: {result.ended}")


def main() -> int:
    about = (__doc__ or "").splitlines()[0]
    return run_rounds(about, RESULTS, FleetResult, measure, show, rounds=10, events=5)


if __name__ == "__main__":
    sys.exit(main())
