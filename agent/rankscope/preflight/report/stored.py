"""The answer as one JSON document, and reports read back: such documents, and lines of `--emit`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.exchange.discover import Discovery, expected
from rankscope.preflight.exchange.intake import Intake, RefusedReportError
from rankscope.preflight.model import SCHEMA_VERSION, LaunchVerdict, NodeReport, decode_report
from rankscope.preflight.options import Options
from rankscope.preflight.report.summary import Summary


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes; `rankscope preflight merge` reads it back."""

    schema_version: int
    exit_code: int
    bad_nodes: tuple[str, ...] = ()  # what --exclude-list writes, one by one
    url: str = ""
    verdict: LaunchVerdict
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
    """Write out bytes that are no text: names of files and variables may hold them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return value


def decode(data: bytes) -> tuple[LaunchVerdict, Run]:
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


_INTAKE = Intake()


class StoredError(Exception):
    """What was read is no report; the message says where and why."""


def read(texts: Iterable[tuple[str, bytes]]) -> list[NodeReport]:
    """Return the reports in `texts`, pairs of a name for messages and the content.

    Of several reports of a node the newest counts. Raises StoredError.
    """
    reports: dict[str, NodeReport] = {}
    for name, data in texts:
        for report in _reports(name, data):
            before = reports.get(report.node)
            age = (report.started_unix_s, report.version)
            if before is None or age >= (before.started_unix_s, before.version):
                reports[report.node] = report
    return list(reports.values())


def _reports(name: str, data: bytes) -> Iterable[NodeReport]:
    if b'"verdict"' in data:
        try:
            document = msgspec.json.decode(data, type=Document)
            return [_INTAKE.take(report) for report in document.reports]
        except (msgspec.MsgspecError, RefusedReportError) as error:
            raise StoredError(f"{name}: {error}") from error
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise StoredError(f"{name}: no report in it; write it with `rankscope preflight --emit`")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_INTAKE.take(decode_report(_unlabelled(line))))
        except (msgspec.MsgspecError, RefusedReportError) as error:
            raise StoredError(f"{name}, line {number}: {error}") from error
    return found


def _unlabelled(line: bytes) -> bytes:
    """Cut off what `srun --label` and `mpirun --tag-output` put before each line."""
    start = line.find(b"{")
    return line[start:] if 0 < start <= 40 else line


def merged(
    reports: Sequence[NodeReport], run_id: str, nodes: tuple[str, ...], options: Options | None
) -> Run:
    """Return the run of `reports`; `nodes` are those that should be there, if it is known.

    Without `nodes` their number comes from the launch, so that a missing one is still missed.
    """
    sizes = [one.facts.launch.num_nodes or 0 for one in reports if one.facts.launch is not None]
    ranks = {one.node: one.node_rank for one in reports}
    is_ranked = bool(ranks) and min(ranks.values()) >= 0
    num_nodes = max(sizes, default=0) if is_ranked else 0
    names = expected(Discovery(nodes=nodes, num_nodes=num_nodes), ranks)
    asked = options or (reports[0].options if reports else Options())
    return Run(run_id, names, {one.node: one for one in reports}, asked)
