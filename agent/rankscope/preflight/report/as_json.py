"""The whole answer as one JSON document: the verdict, and the reports that it was judged from."""

from __future__ import annotations

from typing import Any

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.model import SCHEMA_VERSION, NodeReport, Options, Verdict
from rankscope.preflight.report.summary import Summary


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes; `rankscope preflight merge` reads it back."""

    schema_version: int
    exit_code: int
    bad_nodes: tuple[str, ...] = ()  # what --exclude-list writes, one by one
    url: str = ""
    verdict: Verdict
    reports: tuple[NodeReport, ...] = ()
    options: Options = Options()


def encode(summary: Summary, bad_nodes: tuple[str, ...] = ()) -> bytes:
    """Return the document of `summary`, ended by a line feed."""
    document = Document(
        schema_version=SCHEMA_VERSION,
        exit_code=summary.exit_code,
        bad_nodes=bad_nodes,
        url=summary.url,
        verdict=summary.verdict,
        reports=summary.run.present,
        options=summary.run.options,
    )
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_encodable(msgspec.to_builtins(document)))
    return msgspec.json.format(data, indent=1) + b"\n"


def _encodable(value: Any) -> Any:
    """Spell out bytes that are no text: names of files and variables may hold them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return value


def decode(data: bytes) -> tuple[Verdict, Run]:
    """Read a document. Raises `msgspec.MsgspecError`, which names the field."""
    document = msgspec.json.decode(data, type=Document)
    verdict = document.verdict
    run = Run(
        run_id=verdict.run_id,
        expected=verdict.expected,
        reports={report.node: report for report in document.reports},
        options=document.options,
    )
    return verdict, run
