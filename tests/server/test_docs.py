"""docs/api.md, OpenAPI, the settings and the code say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope_server.app import create_app
from rankscope_server.detectors import DETECTORS
from rankscope_server.settings import SETTINGS, Settings
from tests.server.conftest import TestClient

DOCS = (Path(__file__).parents[2] / "docs/api.md").read_text()


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


def test_every_detector_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "detectors.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|", text, re.M)
    assert rows == [detector.name for detector in DETECTORS]
