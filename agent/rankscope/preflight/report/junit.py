"""The answer as JUnit XML: one test case per check, for the result pages of build servers.

A warning fails its test case only with `--fail-on warn`; otherwise it is printed output. What was
skipped or stayed unknown is `skipped`: JUnit has no word for unknown, and passed it is not.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rankscope.preflight.model import CheckFinding, Result
from rankscope.preflight.report.summary import Summary, fixes
from rankscope.preflight.report.words import clean, clean_command

# What XML 1.0 (section 2.2) lets stand in a document; `clean` leaves nothing else but surrogates.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def encode(summary: Summary, fail_on: str = "fail") -> bytes:
    """Return the document."""
    failing = {"fail", "warn"} if fail_on == "warn" else {"fail"}
    results = summary.verdict.results
    num_failed = sum(one.status in failing for one in results)
    num_skipped = sum(one.status in ("skipped", "unknown") for one in results)
    totals = {
        "name": "rankscope preflight",
        "tests": str(len(results)),
        "failures": str(num_failed),
        "errors": "0",
        "skipped": str(num_skipped),
        "time": f"{summary.verdict.elapsed_ms / 1e3:.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", totals)
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "run": clean(summary.verdict.run_id),
        "nodes": str(len(summary.verdict.reported)),
        "expected_nodes": str(len(summary.verdict.expected)),
        "exit_code": str(summary.exit_code),
        "coverage": clean(summary.verdict.coverage) or "all pairs",
    }
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _legal(value)})
    for result in results:
        _case(suite, summary, result, failing)
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _case(suite: ElementTree.Element, summary: Summary, result: Result, failing: set[str]) -> None:
    attributes = {
        "classname": f"preflight.{_legal(clean(result.family))}",
        "name": _legal(clean(result.id)),
        "time": f"{result.elapsed_ms / 1e3:.3f}",
    }
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if result.status == "ok":
        return
    if result.status in ("skipped", "unknown"):
        message = _legal(f"{result.status}: {clean(result.reason)}")
        ElementTree.SubElement(case, "skipped", {"message": message})
        return
    title, text = _text_of(summary, result.id)
    if result.status in failing:
        about = {"message": _legal(title), "type": result.status}
        ElementTree.SubElement(case, "failure", about).text = _legal(text)
    else:
        ElementTree.SubElement(case, "system-out").text = _legal(f"warning: {text}")


def _text_of(summary: Summary, id: str) -> tuple[str, str]:
    """Return one line and all lines about a check: its own findings, or those that explain it."""
    own = [finding for finding in summary.findings if finding.id == id]
    if own:
        return "; ".join(clean(one.title) for one in own), "\n\n".join(map(_text, own))
    for finding in summary.findings:
        explained = [clean(one) for one in finding.explains if one.startswith(f"{id}:")]
        if explained:
            cause = f"{clean(finding.id)}: {clean(finding.title)}"
            return f"explained by {cause}", "\n".join([*explained, f"explained by {cause}"])
    return "see the other findings", "see the other findings"


def _text(finding: CheckFinding) -> str:
    lines: list[str] = [clean(finding.title), *map(clean, finding.lines)]
    if finding.impact:
        lines.append(f"if launched: {clean(finding.impact)}")
    if finding.unless:
        lines.append(f"unless: {clean(finding.unless)}")
    for nodes, owner, command in fixes(finding):
        lines.append(f"fix ({nodes}, {owner}):")
        lines += [f"  {line}" for line in clean_command(command)]
    lines += [f"explains: {clean(text)}" for text in finding.explains]
    return "\n".join(lines)


def _legal(text: str) -> str:
    return _NOT_XML.sub("?", text)
