"""Three real servers of NATS JetStream on loopback, for tests and benchmarks."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

START_SECONDS = 30.0
NUM_SERVERS = 3


class NatsServers:
    """A cluster whose servers can be killed, stopped, woken and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._ports = [free_port() for _ in range(2 * NUM_SERVERS)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * NUM_SERVERS

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports[:NUM_SERVERS])

    def start(self) -> NatsServers:
        for number in range(NUM_SERVERS):
            self.start_one(number)
        return self

    def start_one(self, number: int) -> None:
        """Start a server on what it had on its disk, and wait until it listens."""
        routes = ",".join(f'"nats://127.0.0.1:{port}"' for port in self._ports[NUM_SERVERS:])
        configuration = self.folder / f"{number}.conf"
        configuration.write_text(
            f"server_name: n{number}\n"
            f"listen: 127.0.0.1:{self._ports[number]}\n"
            "max_payload: 20MB\n"
            f'jetstream {{ store_dir: "{self.folder / str(number)}" }}\n'
            f"cluster {{ name: log, listen: 127.0.0.1:{self._ports[NUM_SERVERS + number]}, "
            f"routes: [{routes}] }}\n"
        )
        with (self.folder / f"{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [_program(), "-c", str(configuration)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._ports[number]), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "nats-server did not start"
                time.sleep(0.05)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Send a signal to a server; wait for its end where it ends of it."""
        process = self._processes[number]
        assert process is not None
        process.send_signal(kind)
        if kind == signal.SIGKILL:
            process.wait(30)

    def lose_disk(self, number: int) -> None:
        """Remove what a server that is down had stored."""
        shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def close(self) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(30)


def _program() -> str:
    beside = Path(sys.executable).with_name("nats-server")  # of the wheel
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is not there: pip install 'rankscope[dev]'"
    return found
