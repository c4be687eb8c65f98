"""A real store of objects that speaks S3, SeaweedFS, on loopback; for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import obstore
from obstore.store import S3Store

from tests.ports import free_port

START_SECONDS = 60.0
BUCKET, KEY, SECRET = "rankscope", "a-key", "a-secret"


class SeaweedFS:
    """One process that is all of it; `close` ends it, its data stays in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._process = folder, None
        self._process: subprocess.Popen[bytes] | None
        names = ("master", "volume", "filer", "s3")
        self._ports = {
            f"{name}.port{kind}": free_port() for name in names for kind in ("", ".grpc")
        }

    @property
    def url(self) -> str:
        """Return the address of its S3."""
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def environ(self) -> dict[str, str]:
        """Return what a client has in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip

    def start(self) -> SeaweedFS:
        """Start it, and make its bucket."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        command = [
            "weed", "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", "-s3", "-s3.autoCreateBucket", "-s3.port.lance=0", "-s3.port.iceberg=0",
            "-master.volumeSizeLimitMB=64", "-volume.max=64", *ports,
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder,
                env=os.environ | self.environ,  # its only user
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while why := self._lacks():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2_000:]
            assert time.monotonic() < deadline, f"SeaweedFS did not start: {why}"
            time.sleep(0.1)
        return self

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(30)

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self.send(signal.SIGKILL)

    def _lacks(self) -> str:
        """Put an object, which makes its bucket; return why it does not work."""
        store = S3Store(
            BUCKET, endpoint=self.url, region="us-east-1", access_key_id=KEY,
            secret_access_key=SECRET, client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )  # fmt: skip
        try:
            obstore.put(store, "first", b"x")
        except (obstore.exceptions.BaseError, OSError) as error:
            return str(error)
        return ""
