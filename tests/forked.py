"""In place of torchrun, where a test is about something else: ranks that need not import PyTorch.

    python -S tests/forked.py SOCKET RANKS PROGRAM [ARGUMENTS ...]

They are forked by the fork server that listens at SOCKET, and write where this process does.
SIGTERM or SIGINT ends them. The exit code is 0, or 1 if one failed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Order the ranks and wait for their end."""
    path, ranks, program, *arguments = sys.argv[1:]
    order = {
        "program": program, "ranks": int(ranks), "arguments": arguments,
        "directory": os.getcwd(), "environ": dict(os.environ),
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: connection.shutdown(socket.SHUT_WR))
        text = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(connection, [text], [1, 2])
        connection.sendall(text[sent:])
        answer = connection.makefile().readline()
    return 1 if answer.strip() != "0" else 0


if __name__ == "__main__":
    sys.exit(main())
