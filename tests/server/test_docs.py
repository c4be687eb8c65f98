"""docs/api.md, OpenAPI, the settings and the code say the same."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from rankscope_server.api.app import create_app
from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings.policy import Policy
from rankscope_server.settings import SETTINGS, Settings
from rankscope_server.verdict.grouping import RULES
from tests.server.conftest import TestClient

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/api.md").read_text()


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    app = create_app(Settings())
    schema: dict[str, object] = app.openapi()
    return schema


def test_every_path_is_documented(document: dict[str, dict[str, object]]) -> None:
    for path in document["paths"]:
        short = path.removeprefix("/api/v1")
        assert f"{short}?" in DOCS or f"{short}`" in DOCS, path


def test_every_documented_path_exists(document: dict[str, dict[str, object]]) -> None:
    known = set(document["paths"])
    for path in re.findall(r"`(?:GET|POST|DELETE) (/[^`?]*)", DOCS):
        assert f"/api/v1{path}" in known or path == "/metrics", path


def test_every_reference_of_openapi_resolves(document: dict[str, dict[str, object]]) -> None:
    names = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert names <= set(document["components"]["schemas"])  # type: ignore[arg-type]
    for operations in document["paths"].values():
        for operation in operations.values():  # type: ignore[attr-defined]
            assert "200" in operation["responses"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_documented(setting: object) -> None:
    name, variable, text = setting.flag, setting.variable, setting.text  # type: ignore[attr-defined]
    row = next((line for line in DOCS.splitlines() if line.startswith(f"| `{name}`")), "")
    assert variable in row
    assert text in row


def test_settings_are_shown_without_secrets(client: TestClient) -> None:
    shown = client.get("/api/v1/settings").json()["settings"]
    assert [row["name"] for row in shown] == [setting.name for setting in SETTINGS]


def test_prometheus_counts_what_came(client: TestClient) -> None:
    from tests.server.conftest import Sender, log_line

    Sender(client).send(log_line("x"), {"kind": "odd"})
    text = client.get("/metrics").text
    assert "rankscope_ingest_batches_total 1\n" in text
    assert "rankscope_ingest_refused_total 1\n" in text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+ [0-9.e+-]+", line), line


DETECTORS_PAGE = (ROOT / "docs" / "detectors.md").read_text()


def table_of(head: str) -> list[list[str]]:
    """Return the cells of a table of docs/detectors.md, without its head."""
    lines = DETECTORS_PAGE[DETECTORS_PAGE.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_detector_is_described_with_what_it_may_say() -> None:
    rows = table_of("| Detector | What it finds |")
    assert [row[0] for row in rows] == [f"`{detector.name}`" for detector in DETECTORS]
    for row, detector in zip(rows, DETECTORS, strict=True):
        assert re.findall(r"`(\w+)`", row[2]) == list(detector.kinds), detector.name
        assert all(len(cell) > 3 for cell in row), detector.name


def test_what_explains_what_is_the_code() -> None:
    rows = table_of("| Cause | Explains | If |")
    assert rows == [[_names(rule.causes), _names(rule.effects), rule.why] for rule in RULES]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_every_threshold_is_listed_once() -> None:
    rows = table_of("| Thresholds of |")
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Policy))
    known = [f"`{detector.name}`" for detector in DETECTORS]
    detectors = [row[0] for row in rows if row[0].startswith("`")]
    assert detectors == [name for name in known if name in detectors]


def test_pages_have_words_for_every_kind_of_finding() -> None:
    text = (ROOT / "web" / "app" / "format.js").read_text()
    labels = dict(re.findall(r"^  (\w+): '([^']+)',$", text[text.index("KINDS = {") :], re.M))
    kinds = dict.fromkeys(kind for detector in DETECTORS for kind in detector.kinds)
    assert list(labels) == list(kinds)
    assert len(set(labels.values())) == len(labels)


def test_kinds_in_the_code_are_those_that_detectors_declare() -> None:
    """A finding is made with `kind=` somewhere; a kind that nobody declares has no words."""
    declared = {kind for detector in DETECTORS for kind in detector.kinds}
    made: set[str] = set()
    for path in sorted((ROOT / "server" / "rankscope_server" / "detectors").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding":
                for keyword in call.keywords:
                    if keyword.arg == "kind":
                        made |= _texts(keyword.value)
    assert made <= declared
    assert len(made) > 20


def _texts(value: ast.expr) -> set[str]:
    """Return the texts that an expression may be, those it merely compares with left out."""
    if isinstance(value, ast.IfExp):
        return _texts(value.body) | _texts(value.orelse)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return {value.value}
    return set()
