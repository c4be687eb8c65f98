"""Takes secrets out of a report once more: what was imported, or an older agent sent, had no guard.

The same rules as everywhere: `rankscope.wire.redaction`, listed in docs/privacy.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rankscope.wire.assigned_secrets import HIDDEN
from rankscope.wire.redaction import clean, clean_fields
from rankscope.wire.secret_names import holds_secret
from rankscope_server.api.report.schema import Report

_VARIABLE = "env."


def cleaned(report: Report) -> Report:
    """Return the report without anything that looks like a secret."""
    return msgspec.convert(_clean(msgspec.to_builtins(report)), Report)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _clean(item) for key, item in value.items()}
    if isinstance(found.get("fields"), dict):  # of a log line
        found["fields"] = clean_fields(found["fields"])
    if str(found.get("fact", "")).startswith(_VARIABLE) and holds_secret(found["fact"]):
        if "value" in found:
            found["value"] = HIDDEN
        for one in found.get("values", []):
            one["value"] = HIDDEN
    return found
