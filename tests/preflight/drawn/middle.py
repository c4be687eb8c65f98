"""A program between two nodes: it accepts what was meant for another and answers in its manner.

middle.py PORT tls|http|banner|echo|close|hang
"""

from __future__ import annotations

import socket
import sys
import threading

_TLS_ALERT = bytes((21, 3, 3, 0, 2, 2, 70))  # fatal, protocol_version
_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nserver: envoy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)
_BANNER = b"220 relay ESMTP\r\n"


def serve(link: socket.socket, manner: str) -> None:
    """Answer one connection."""
    with link:
        if manner == "close":
            return
        if manner == "banner":
            link.sendall(_BANNER)
        while data := link.recv(65536):
            if manner in ("tls", "http"):
                link.sendall(_TLS_ALERT if manner == "tls" else _HTTP)
                return
            if manner == "echo":
                link.sendall(data)


def guarded(link: socket.socket, manner: str) -> None:
    """Answer one connection, however it ends."""
    try:
        serve(link, manner)
    except OSError:
        pass


def main() -> None:
    port, manner = int(sys.argv[1]), sys.argv[2]
    with socket.create_server(("", port), backlog=512) as listening:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = listening.accept()
            threading.Thread(target=guarded, args=(link, manner), daemon=True).start()


if __name__ == "__main__":
    main()
