"""A proxy that shows a server under a prefix of the path."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def proxy(target: str, prefix: str) -> Iterator[str]:
    """Serve `target` under a prefix that it does not know."""
    there = urlsplit(target)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404, "outside the prefix")
                return
            link = http.client.HTTPConnection(there.hostname or "", there.port, timeout=20)
            headers = {"Host": there.netloc, "Accept": self.headers.get("Accept", "*/*")}
            link.request("GET", self.path.removeprefix(prefix), headers=headers)
            reply = link.getresponse()
            kept = ("Content-Type", "Content-Security-Policy", "Cache-Control")
            self.send_response(reply.status)
            for name in kept:
                if reply.getheader(name):
                    self.send_header(name, str(reply.getheader(name)))
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while part := reply.read1(65_536):
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                pass  # the browser closed its stream, or the server was silent for long
            link.close()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
