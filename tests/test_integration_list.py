"""The list of integrations names tests that there are, and remembers only what passed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import integrations
from tests.integrations import ALL, Integration, key_of
from tests.outcomes import Outcome

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("one", ALL, ids=key_of)
def test_its_test_is_there(one: Integration) -> None:
    path, _, name = one.test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_only_what_passed_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "versions.json"
    path.write_text('{"Tables/pandas": {"version": "1.0", "day": "2020-01-01"}, "gone": {}}')
    monkeypatch.setattr(integrations, "VERSIONS", path)
    by_name = {key_of(one): one for one in ALL}
    pandas, duckdb = by_name["Tables/pandas"], by_name["Tables/DuckDB"]
    launcher = by_name["Launchers/multiprocessing"]
    integrations.remember([
        Outcome(pandas.test, "failed"), Outcome(duckdb.test, "passed"),
        Outcome(f"{launcher.test}[fork]", "passed"), Outcome(f"{launcher.test}[spawn]", "skipped"),
    ])  # fmt: skip
    known = integrations.versions()
    assert list(known) == ["Tables/pandas", "Tables/DuckDB"]
    assert known["Tables/pandas"]["version"] == "1.0"
    assert known["Tables/DuckDB"]["version"] == duckdb.version()
