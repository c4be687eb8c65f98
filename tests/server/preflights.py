"""A preflight that a server hosts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.server.conftest import ServerProcess

Start = Callable[..., ServerProcess]


def get(server: ServerProcess, path: str, token: str = "") -> Any:
    request = urllib.request.Request(server.url + path)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)
