"""docs/api.md, OpenAPI, the settings and the code say the same."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import msgspec
import pytest

from rankscope_server.api.app import create_app
from rankscope_server.api.replies import documented_answers
from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings.kinds import KINDS, check
from rankscope_server.settings import SETTINGS, Settings
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


def test_every_field_of_every_answer_is_documented() -> None:
    pages = DOCS + (ROOT / "docs/report.md").read_text()
    _, answers = msgspec.json.schema_components(documented_answers(), ref_template="{name}")
    del answers["Command"]  # for collectors: `rankscope.wire.schema`
    missing = [
        f"{name}.{field}"
        for name, schema in answers.items()
        for field in schema["properties"]
        if f'"{field}"' not in pages and f"`{field}`" not in pages
    ]
    assert missing == []


def test_every_documented_path_exists(document: dict[str, dict[str, object]]) -> None:
    known = set(document["paths"])
    for path in re.findall(r"`(?:GET|POST|DELETE) (/[^`?]*)", DOCS):
        assert f"/api/v1{path}" in known or path == "/metrics", path


def test_every_reference_of_openapi_resolves(document: dict[str, dict[str, object]]) -> None:
    names = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert names <= set(document["components"]["schemas"])  # type: ignore[arg-type]
    for operations in document["paths"].values():
        for operation in operations.values():  # type: ignore[attr-defined]
            assert {"200", "303"} & set(operation["responses"])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_documented(setting: object) -> None:
    name, variable, text = setting.flag, setting.variable, setting.text  # type: ignore[attr-defined]
    row = next((line for line in DOCS.splitlines() if line.startswith(f"| `{name}`")), "")
    assert variable in row
    assert text in row


def test_settings_are_shown_without_secrets(client: TestClient) -> None:
    shown = client.get("/api/v1/settings").json()["settings"]
    assert [row["name"] for row in shown] == [setting.name for setting in SETTINGS]


DETECTORS_PAGE = (ROOT / "docs" / "detectors.md").read_text()


def table_of(head: str) -> list[list[str]]:
    """Return the cells of a table of docs/detectors.md, without its head."""
    below = DETECTORS_PAGE[DETECTORS_PAGE.index(head) :].splitlines()
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), below))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_detector_is_described() -> None:
    rows = table_of("| Detector | What it finds |")
    assert [row[0] for row in rows] == [f"`{detector.name}`" for detector in DETECTORS]
    assert all(len(cell) > 3 for row in rows for cell in row)


def test_tables_and_labels_are_made_from_the_code() -> None:
    documents = runpy.run_path(str(ROOT / ".ci" / "docs_tables.py"))["documents"]()
    for path, text in documents.items():
        assert path.read_text() == text, "run: python .ci/docs_tables.py update"


def test_every_kind_has_a_detector_and_a_label_of_its_own() -> None:
    detectors = [detector.name for detector in DETECTORS]
    assert {name for kind in KINDS for name in kind.detectors} == set(detectors)
    assert len({kind.id for kind in KINDS}) == len({kind.label for kind in KINDS}) == len(KINDS)
    assert all(kind.text and kind.severity for kind in KINDS)


def test_a_finding_of_a_kind_that_is_not_registered_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="has no kind 'odd' of the detector 'hang'"):
        check("odd", "hang")
    with pytest.raises(ValueError, match="has no kind 'hang' of the detector 'nan'"):
        check("hang", "nan")
