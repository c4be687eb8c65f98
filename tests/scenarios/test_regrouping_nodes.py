"""A job over two nodes loses a rank: each node has its launcher and its collector, one server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.nslab import Lab
from tests.scenarios.regrouping import SMALL

pytestmark = [pytest.mark.multiproc, pytest.mark.needs("namespaces")]

SERVER, PORT = 2, 8787  # the host of the server; the others have two ranks each
STEPS = 60
READ = "import sys,urllib.request as u;sys.stdout.write(u.urlopen(sys.argv[1]).read().decode())"
TRAINING = (
    "--batch-size", "2", "--global-batch", "12", "--layer-seconds", "0.01", "--steps", str(STEPS),
    "--regroup-seconds", "120",
)  # fmt: skip


class Job:
    """The laboratory with the server and the launchers of both nodes."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.url = f"http://{lab.names[SERVER]}:{PORT}"
        self._start(
            SERVER, "-m", "rankscope_server.cli", "--host", lab.ip(SERVER), "--port", str(PORT),
            "--data-dir", str(folder / "data"), "--insecure-bind", "--look-seconds", "0.3",
            "--allowed-hosts", lab.names[SERVER],
        )  # fmt: skip
        self.launchers = [
            self._start(
                node, "-m", "rankscope", "run", "--server", self.url, "--run-id", "job", "--",
                sys.executable, "-m", "rankscope_trainer.regroup", "--ranks", "4",
                "--here", here, "--store", f"{lab.names[0]}:29400", "--", *SMALL, *TRAINING,
                "--samples", str(folder / "samples"),
            )
            for node, here in enumerate(("0,1", "2,3"))
        ]  # fmt: skip

    def _start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        own = self.folder / self.lab.names[host]
        own.mkdir()
        environment = os.environ | {
            "HOME": str(own), "TMPDIR": str(own), "OMP_NUM_THREADS": "1",
            "RANKSCOPE_SERVER_DISK_RESERVE_BYTES": "0",
        }  # fmt: skip
        with (self.folder / f"log-{host}").open("wb") as log:
            return self.lab.popen(
                host, [sys.executable, *arguments], env=environment, cwd=own, stdout=log,
                stderr=log,
            )  # fmt: skip

    def get(self, path: str = "") -> dict[str, Any]:
        """Ask the server, on its own host; an empty object while it does not know the run."""
        address = f"{self.url}/api/v1/runs/job{path}"
        done = self.lab.run(SERVER, [sys.executable, "-S", "-c", READ, address], check=False)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def until(self, what: Callable[[], Any]) -> Any:
        """Return the first true value."""
        deadline = time.monotonic() + 200
        while not (found := what()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        return found

    def output(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log-*")))

    def trained(self) -> list[int]:
        """Return the steps that were trained, in order."""
        path = self.folder / "samples"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        known = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted({one["step"] for one in known if one.get("decision", "").startswith("train")})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Lab(3) as lab:
        yield Job(lab, tmp_path)


def test_the_other_node_trains_on_and_the_lost_rank_is_named(job: Job) -> None:
    job.until(lambda: len(job.trained()) > 5)
    victim = job.until(
        lambda: next((row for row in job.get("/ranks").get("ranks", ()) if row["rank"] == 3), None)
    )
    assert victim["host"] == "node1"
    job.lab.run(1, ["kill", f"-{signal.SIGKILL:d}", str(victim["pid"])])
    for launcher in job.launchers:
        assert launcher.wait(200) == 0, job.output()
    assert job.trained() == list(range(1, STEPS + 1))
    run = job.until(lambda: (r := job.get().get("run", {})).get("status") == "ended" and r)
    assert (run["step"], run["attempt"], run["hosts"]) == (STEPS, 0, ["node0", "node1"])
    assert run["status_text"] == "3 of 4 ranks ended cleanly"
    found = job.get("/findings")["open"]
    (lost,) = (one for one in found if one["kind"] == "lost_rank")
    assert (lost["ranks"], lost["hosts"]) == ([3], ["node1"])
    assert "SIGKILL" in lost["why"]
    assert not {one["kind"] for one in found} & {"crash", "hang", "desync", "replica_drift"}
