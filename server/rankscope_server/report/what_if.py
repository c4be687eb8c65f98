"""What-if answers of a run in a folder, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rankscope_server.report.run import from_folders


class WhatIfRefused(Exception):
    """What was asked for cannot be of this run; the message has the field and the remedy."""


def what_if_of(target: str, run_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `GET /runs/{run}/what-if` to these parameters.

    Raises WhatIfRefused, and ReportError where the folder cannot be read.
    """

    def view(connection: Any, chosen: str, *_: Any) -> dict[str, Any]:
        from rankscope_server.api.runs.queries import run_row
        from rankscope_server.api.what_if.asked import asked_of
        from rankscope_server.api.what_if.queries import what_if
        from rankscope_server.problems import Problem

        row = run_row(connection, chosen)
        try:
            body = what_if(connection, row, asked_of(**given))
        except Problem as problem:
            text = f"{problem.field}: {problem.what}; {problem.remedy}"
            raise WhatIfRefused(text) from problem
        found: dict[str, Any] = msgspec.to_builtins(body)
        return found

    return from_folders([Path(target)], run_id, view)
