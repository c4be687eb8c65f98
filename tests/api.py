"""Reads a server's API as tests and benchmarks do that wait for a run."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

_LIMIT_SECONDS = 20.0


def get(address: str, token: str = "") -> dict[str, Any]:
    """Return an answer; an empty one for 404: what was asked for is not there yet.

    Raises urllib.error.HTTPError, closed, for any other refusal, and URLError without a server.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_SECONDS) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
        return {}
