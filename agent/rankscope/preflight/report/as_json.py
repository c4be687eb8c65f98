"""The whole answer as one JSON document: the verdict, and the reports that it was judged from."""

from __future__ import annotations

import msgspec

from rankscope.preflight.checking import Run
from rankscope.preflight.model import SCHEMA_VERSION, NodeReport, Options, Verdict
from rankscope.preflight.report.summary import Summary


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `--json` writes; `rankscope preflight merge` reads it back."""

    exit_code: int
    bad_nodes: tuple[str, ...] = ()  # what --exclude-list writes, one by one
    url: str = ""
    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    reports: tuple[NodeReport, ...] = ()
    options: Options = Options()


def encode(summary: Summary, bad_nodes: tuple[str, ...] = ()) -> bytes:
    """Return the document of `summary`, ended by a line feed."""
    document = Document(
        exit_code=summary.exit_code,
        bad_nodes=bad_nodes,
        url=summary.url,
        verdict=summary.verdict,
        reports=summary.run.present,
        options=summary.run.options,
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


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
