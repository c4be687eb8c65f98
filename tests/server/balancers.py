"""The load balancers of `deploy/`, started for real before servers of a test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.capabilities import find
from tests.ports import free_port

KINDS = ("haproxy", "nginx")
NAME = "rankscope.example"  # that the examples are written for
DEPLOY = Path(__file__).parents[2] / "deploy"
_START_SECONDS = 20.0


class Balancer:
    """A load balancer with the configuration that is shipped, of which addresses alone differ."""

    def __init__(
        self, kind: str, folder: Path, servers: Sequence[str], gateways: Sequence[str] = ()
    ) -> None:
        """`servers`: the addresses of two servers; `folder` gets certificate and configuration.

        `gateways`: those of two that get what collectors send.
        """
        self._gateways = {
            f"GATEWAY_{letter}": urlsplit(url).netloc
            for letter, url in zip("AB", gateways, strict=False)
        }
        self._folder, self._servers = folder, [urlsplit(url).netloc for url in servers]
        self._http, self._https = free_port(), free_port()
        self.plain_url = f"http://127.0.0.1:{self._http}"
        self.url = f"https://127.0.0.1:{self._https}"
        self.authority = folder / "rankscope.pem"
        self._make_certificate()
        self._command, more = self._haproxy() if kind == "haproxy" else self._nginx()
        self._environ = os.environ | more
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; return when it takes connections."""
        log = self._folder / "balancer.log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self._environ,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._https), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)

    def close(self) -> None:
        """End it, and wait until it is gone."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def _make_certificate(self) -> None:
        key = self._folder / "rankscope.key"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-keyout", key,
             "-out", self.authority, "-addext", f"subjectAltName=IP:127.0.0.1,DNS:{NAME}"],
            check=True, capture_output=True,
        )  # fmt: skip

    def _haproxy(self) -> tuple[list[str], dict[str, str]]:
        pair = self._folder / "pair.pem"
        pair.write_bytes(
            self.authority.read_bytes() + (self._folder / "rankscope.key").read_bytes()
        )
        return [str(find("haproxy")), "-db", "-f", str(DEPLOY / "haproxy" / "rankscope.cfg")], {
            "SERVER_A": self._servers[0], "SERVER_B": self._servers[1],
            "BIND_HTTP": f"127.0.0.1:{self._http}", "BIND_HTTPS": f"127.0.0.1:{self._https}",
            "CERTIFICATE": str(pair), **({} if os.geteuid() == 0 else {"KEEP_USER": "1"}),
            **self._gateways,
        }  # fmt: skip

    def _nginx(self) -> tuple[list[str], dict[str, str]]:
        text = (DEPLOY / "nginx" / "rankscope.conf").read_text()
        for shipped, ours, times in (
            ("10.0.0.11:8787", self._servers[0], 2),
            ("10.0.0.12:8787", self._servers[1], 2),
            ("listen 80;", f"listen 127.0.0.1:{self._http};", 1),
            ("listen 443 ssl", f"listen 127.0.0.1:{self._https} ssl", 1),
            ("/etc/nginx/rankscope.pem", str(self.authority), 1),
            ("/etc/nginx/rankscope.key", str(self._folder / "rankscope.key"), 1),
        ):
            assert text.count(shipped) == times, shipped
            text = text.replace(shipped, ours)
        (self._folder / "rankscope.conf").write_text(text)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        own = "".join(f"{kind}_temp_path {self._folder}/{kind};\n" for kind in kinds)
        main = self._folder / "nginx.conf"
        user = "user root;\n" if os.geteuid() == 0 else ""  # who may read a folder of pytest's
        main.write_text(
            f"{user}pid {self._folder}/nginx.pid;\ndaemon off;\nerror_log stderr;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{own}include {self._folder}/rankscope.conf;\n}}\n"
        )
        return [str(find("nginx")), "-c", str(main), "-p", str(self._folder)], {}


@contextmanager
def balancing(
    kind: str, folder: Path, servers: Sequence[str], gateways: Sequence[str] = ()
) -> Iterator[Balancer]:
    """Give a load balancer that runs before two servers; its folder is removed."""
    folder.mkdir()
    balancer = Balancer(kind, folder, servers, gateways)
    try:
        balancer.start()
        yield balancer
    finally:
        balancer.close()
        shutil.rmtree(folder)
