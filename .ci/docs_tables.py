#!/usr/bin/env python3
# ruff: noqa: T201 - a command prints
"""Write what is made from the registry of kinds, rules of grouping, policy, detectors and faults.

    python .ci/docs_tables.py update
    python .ci/docs_tables.py check

The table of the README, those of docs/detectors.md, docs/thresholds.md, docs/data.md,
docs/assistants.md and docs/integrations.md, the faults in the trainer's README, and the labels of
the pages in web/app/format.js. A test runs `check`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rankscope.cli import mcp
from rankscope.cli.mcp_tools import TOOLS
from rankscope.data import kinds as data_kinds
from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings import policy
from rankscope_server.findings.kinds import KINDS, Kind, kinds_of
from rankscope_server.verdict.grouping import RULES
from rankscope_trainer.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests import integrations  # noqa: E402 - the tests are beside this folder

README, DETECTORS_PAGE = ROOT / "README.md", ROOT / "docs" / "detectors.md"
THRESHOLDS, LABELS = ROOT / "docs" / "thresholds.md", ROOT / "web" / "app" / "format.js"
TRAINER, DATA = ROOT / "reference_trainer" / "README.md", ROOT / "docs" / "data.md"
ASSISTANTS, INTEGRATIONS = ROOT / "docs" / "assistants.md", ROOT / "docs" / "integrations.md"
UPDATE = "python .ci/docs_tables.py update"
_ALL_KINDS = "[docs/detectors.md](docs/detectors.md#kinds-of-findings)"
THRESHOLDS_HEAD = """# Thresholds

The numbers that decide whether a finding is made and what it says, each with its derivation, made
from `server/rankscope_server/findings/policy.py` by `python .ci/docs_tables.py update`. The hash of
all values is stored with every finding, so that a changed threshold is a visible change. Shares are
0 to 1, `ln_` is the logarithm of a ratio.

Not here, but beside the code that uses them, are numbers of how a quantity is measured (the steps
that a table looks at, floors that keep a division finite), those that bound memory or the length of
a text, and the confidence that a finding states together with its reason.
"""
UNITS = (  # by the end of a name, the first that fits
    (r"seconds$", "s"), (r"_ms$", "ms"), (r"bytes$", "bytes"), (r"bytes_per_second$", "bytes/s"),
    (r"^ln_", "ln of a ratio"), (r"sigmas$|_z$", "sigma"), (r"steps$|window$|block$", "steps"),
    (r"(share|ratio|gain|band|goal|band_points|_p|chance|one_run)$", "share"),
)  # fmt: skip


def names(ids: Iterable[str]) -> str:
    """Return names as code, with commas."""
    return ", ".join(f"`{one}`" for one in ids)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)


def readme_table() -> str:
    """Return the kinds that the README names, and how many others there are.

    Those with one sentence share a row.
    """
    by_text: dict[str, list[Kind]] = {}
    for kind in KINDS:
        if kind.is_headline:
            by_text.setdefault(kind.text, []).append(kind)
    rows = [(names(kind.id for kind in kinds), text) for text, kinds in by_text.items()]
    rest = sum(not kind.is_headline for kind in KINDS)
    return f"{table(('finding', 'what it says'), rows)}\n\nand {rest} more: {_ALL_KINDS}"


def kinds_table() -> str:
    """Return all kinds with their labels, detectors, sentences and severities."""
    return table(
        ("Kind", "On the pages", "Detector", "What it says", "Severity"),
        [(f"`{k.id}`", k.label, names(k.detectors), k.text, k.severity) for k in KINDS],
    )


def detectors_table() -> str:
    """Return all detectors with the kinds of findings that they make."""
    return table(
        ("Detector", "What it finds", "Kinds", "Needs", "Silent when"),
        [(f"`{d.name}`", d.finds, names(kinds_of(d.name)), d.needs, d.silent) for d in DETECTORS],
    )


def rules_table() -> str:
    """Return which finding explains which."""
    return table(
        ("Cause", "Explains", "If"),
        [(names(rule.causes), names(rule.effects), rule.why) for rule in RULES],
    )


def faults_table() -> str:
    """Return all faults of the trainer with the findings that they lead to."""
    rows = ((f"`{f.name}`", f"`{f.finding}`", in_a_cell(f.sentence), f.size_text) for f in FAULTS)
    return table(("name", "finding", "what happens", "size (if you say nothing)"), rows)


def data_table() -> str:
    """Return the tables of a run with their columns; whole numbers have no type beside them."""
    rows = []
    for kind in data_kinds.KINDS:
        fields = data_kinds.schema_of(kind)
        columns = (f"`{field.name}`{_type_text(str(field.type))}" for field in fields)
        rows.append((f"`{kind}`", ", ".join(columns)))
    return table(("table", "columns"), rows)


def tools_table() -> str:
    """Return the tools of assistants with their arguments and what they say of themselves."""
    rows = []
    for tool in TOOLS:
        said = mcp.description_of(tool).split("\n\n")[0]
        rows.append((f"`{tool.name}`", ", ".join(mcp.arguments_of(tool)), in_a_cell(said)))
    return table(("tool", "arguments", "what it does"), rows)


def integrations_table() -> str:
    """Return the programs of others that tests run, with the versions with which they passed."""
    known = integrations.versions()
    rows = []
    for one in integrations.ALL:
        passed = known.get(integrations.key_of(one))
        never = "not run since this list began"
        version = f"{passed['version']}, {passed['day']}" if passed else never
        path = one.test.partition("::")[0]
        rows.append((one.topic, one.program, version, one.sees, f"`{path}`"))
    return table(("For", "Program", "Passed with", "What is seen", "By"), rows)


def _type_text(arrow: str) -> str:
    if arrow.startswith("int"):
        return ""
    return " (text)" if arrow.startswith(("string", "dictionary")) else f" ({arrow})"


def in_a_cell(sentence: str) -> str:
    """Return a sentence as the text of a cell: without capital and full stop."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def with_labels(text: str) -> str:
    """Return web/app/format.js with the label of each kind; a module of its own is one request."""
    begin, end = "// labels of kinds: made by .ci/docs_tables.py\n", "// end of labels\n"
    head, _, rest = text.partition(begin)
    rows = "".join(f"  {kind.id}: '{kind.label}',\n" for kind in KINDS)
    return f"{head}{begin}const KINDS = {{\n{rows}}};\n{rest[rest.index(end) :]}"


def thresholds() -> str:
    """Return the page of all thresholds, a table for each topic of the policy."""
    parts = [THRESHOLDS_HEAD]
    for topic, rows in topics():
        title = topic[:1].upper() + topic[1:]
        parts.append(f"## {title}\n{table(('Name', 'Value', 'Unit', 'Derivation'), rows)}\n")
    return "\n".join(parts)


def topics() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Yield (topic, rows) in the order of the policy's source."""
    source = inspect.getsource(policy)
    lines = source.splitlines()
    (cls,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = {node.end_lineno: node for node in cls.body if isinstance(node, ast.AnnAssign)}
    begins = {node.lineno for node in fields.values()}
    topic, rows, comment = "", [], []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if found := re.match(r"# --- (.*?) -+$", text):
            if rows:
                yield topic, rows
            topic, rows, comment = found[1], [], []
        elif text.startswith("# "):
            comment.append(text[2:])
        if (node := fields.get(number)) is not None:
            rows.append(row_of(node, line, comment, bool(rows)))
            comment = []
        elif not text or (number not in begins and not text.startswith("#")):
            comment = comment if text else []
    yield topic, rows


def row_of(
    node: ast.AnnAssign, line: str, comment: Sequence[str], has_above: bool
) -> tuple[str, str, str, str]:
    """Return the row of one threshold; a comment above several is that of the first of them."""
    name, value = ast.unparse(node.target), ast.unparse(node.value) if node.value else ""
    number = getattr(policy.POLICY, name)
    several = number if isinstance(number, tuple) else (number,)
    shown = ", ".join(f"{one:,}" if isinstance(one, int) else f"{one:g}" for one in several)
    if value.startswith("math."):
        shown = f"{shown} ({value.removeprefix('math.')})"
    beside = [part for part in line.split("  # ")[1:] if part != "fmt: skip"]
    why = " ".join([*comment, *(f"({one})" if comment else one for one in beside)])
    unit = next((unit for end, unit in UNITS if re.search(end, name)), "")
    unit = "times" if unit == "share" and several[0] > 1 else unit
    return f"`{name}`", shown, unit, why or ("see above" if has_above else "")


def between(text: str, name: str, content: str) -> str:
    """Return the text with what stands between the marks of this name replaced."""
    begin, end = f"<!-- {name}: made by .ci/docs_tables.py -->\n", f"<!-- end of {name} -->"
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the marks of {name!r} are missing")
    return f"{head}{begin}{content}\n{rest[rest.index(end) :]}"


def documents() -> dict[Path, str]:
    """Return what each file must hold."""
    detectors = between(DETECTORS_PAGE.read_text(), "detectors", detectors_table())
    detectors = between(detectors, "kinds of findings", kinds_table())
    return {
        README: between(README.read_text(), "kinds of findings", readme_table()),
        DETECTORS_PAGE: between(detectors, "what explains what", rules_table()),
        THRESHOLDS: thresholds(),
        DATA: between(DATA.read_text(), "tables of a run", data_table()),
        ASSISTANTS: between(ASSISTANTS.read_text(), "tools of assistants", tools_table()),
        INTEGRATIONS: between(INTEGRATIONS.read_text(), "integrations", integrations_table()),
        TRAINER: between(TRAINER.read_text(), "faults", faults_table()),
        LABELS: with_labels(LABELS.read_text()),
    }


def main(what: str) -> int:
    """Update the files, or check them; return the exit code."""
    stale = [path for path, text in documents().items()
             if not path.exists() or path.read_text() != text]  # fmt: skip
    if what == "update":
        for path in stale:
            path.write_text(documents()[path])
    for path in stale:
        print(f"{'wrote' if what == 'update' else 'out of date:'} {path.relative_to(ROOT)}")
    if stale and what == "check":
        print(f"run: {UPDATE}")
    return 1 if stale and what == "check" else 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["update"], ["check"]):
        sys.exit(f"give update or check: {UPDATE}")
    sys.exit(main(sys.argv[1]))
