"""The report as one archive to mail; docs/report.md lists what is in it."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from rankscope_server.api.report.schema import Report
from rankscope_server.report.page import page
from rankscope_server.report.words import run_text, time_text, title

CONTENTS: tuple[tuple[str, str], ...] = (
    ("README.txt", "what this is, the verdict in words, and this list"),
    ("report.html", "the report; opens in any browser, loads nothing"),
    ("report.json", "the same as data: what `rankscope report --json` prints"),
    ("findings.json", "every finding, with evidence, and what each detector looked at"),
    ("environment.json", "facts of the ranks: what they share and where they differ"),
    ("ranks.json", "where each rank is, or how it ended"),
    ("errors.json", "errors by cause, with one traceback of each"),
    ("last_lines.txt", "the last log lines of all ranks, oldest first"),
    ("versions.json", "versions of what made the report, and of what the run loaded"),
)
_LIBRARIES = ("python", "kernel", "os", "libc", "torch", "numpy")


def write_bundle(report: Report, path: Path) -> None:
    """Write the archive. Raises OSError."""
    files: dict[str, Any] = {
        "README.txt": _readme(report),
        "report.html": page(report),
        "report.json": report,
        "findings.json": {"findings": report.findings, "detectors": report.detectors},
        "environment.json": report.environment,
        "ranks.json": report.ranks,
        "errors.json": report.errors,
        "last_lines.txt": _lines(report),
        "versions.json": _versions(report),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, _ in CONTENTS:
            body = files[name]
            archive.writestr(name, body if isinstance(body, str) else _json(body))


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _readme(report: Report) -> str:
    rows = [f"{row.label}: {row.text}" for row in report.summary]
    files = [f"{name:18}{text}" for name, text in CONTENTS]
    return "\n".join(
        [
            f"Rankscope report: {title(report)}", run_text(report), "", *rows, "", *files, "",
            "Secrets are taken out by the rules of docs/privacy.md; host names, paths and the "
            "command line are in it.", "",
        ]
    )  # fmt: skip


def _lines(report: Report) -> str:
    rows = [
        f"{time_text(line.time_ms)}\trank {','.join(map(str, line.ranks))}\t{line.host}\t"
        f"{line.level}\t{line.message}"
        for line in report.lines
    ]
    return "\n".join(rows) + "\n" * bool(rows)


def _versions(report: Report) -> dict[str, Any]:
    facts = {fact.fact: fact.value for fact in report.environment.common}
    return {
        "report": {"made_by": report.made_by, "format": report.format,
                   "python": platform.python_version()},
        "run": {name: value for name, value in facts.items()
                if name.partition(".")[0] in _LIBRARIES or name.startswith("torch")},
        "policy": sorted({finding.policy_hash for finding in report.findings} - {""}),
    }  # fmt: skip
