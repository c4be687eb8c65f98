from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.attach.imports import _Finder, when_imported


@pytest.fixture(autouse=True)
def no_finder_left() -> object:
    yield
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)


def test_runs_at_once_for_a_loaded_module() -> None:
    called: list[int] = []
    when_imported("json", lambda: called.append(1))
    assert called == [1]


def test_runs_after_the_whole_package_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "half_made"
    package.mkdir()
    (package / "__init__.py").write_text("import half_made.inner\ndone = True\n")
    (package / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[bool] = []
    when_imported("half_made.inner", lambda: seen.append(hasattr(sys.modules["half_made"], "done")))
    __import__("half_made")
    assert seen == [True]


def test_importing_the_agent_is_light() -> None:
    heavy = "torch numpy fastapi sqlalchemy pydantic psutil rich zstandard".split()
    script = (
        "import sys, rankscope, rankscope.runtime\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
