from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from rankscope.rank.imports import _Finder, when_imported

AGENT = str(Path(rankscope.__file__).parents[1])


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


def test_runs_for_a_part_of_a_package_whose_import_had_begun_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import lightning` imports torch, and with it the agent, before its own parts."""
    package = tmp_path / "begun_before"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from rankscope.rank.imports import when_imported\n"
        "called = []\n"
        "when_imported('begun_before.inner', lambda: called.append(1))\n"
        "import begun_before.inner\n"
        "when_imported('begun_before.inner', lambda: called.append(2))\n"
    )
    (package / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert __import__("begun_before").called == [1, 2]


def test_what_a_package_sets_off_may_ask_for_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "asked_for"
    package.mkdir()
    (package / "__init__.py").write_text("import asked_for.inner\n")
    (package / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    when_imported(
        "asked_for", lambda: when_imported("asked_for.inner", lambda: seen.append("inner"))
    )
    __import__("asked_for")
    assert seen == ["inner"]


def test_a_program_that_never_imports_torch_loads_next_to_nothing(tmp_path: Path) -> None:
    site = Path(rankscope.__file__).parent / "rank" / "attach" / "site"
    script = "import sys; print(*sorted(m for m in sys.modules if m.startswith('rankscope')))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"RANKSCOPE": "1", "PYTHONPATH": str(site), "RANKSCOPE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == [
        "rankscope", "rankscope.process", "rankscope.process.family", "rankscope.rank",
        "rankscope.rank.attach", "rankscope.rank.attach.start", "rankscope.rank.guard",
        "rankscope.rank.imports",
    ]  # fmt: skip
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_a_program_that_never_imports_torch_pays_at_most_20_ms() -> None:
    """Processor time, which other work on the machine does not lengthen as it does a wait."""
    environ = {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}
    site = str(Path(rankscope.__file__).parent / "rank" / "attach" / "site")
    attached = environ | {"RANKSCOPE": "1", "PYTHONPATH": site}
    pairs = [(_cpu_seconds(environ), _cpu_seconds(attached)) for _ in range(20)]
    assert statistics.median(with_it - without for without, with_it in pairs) <= 0.020


def _cpu_seconds(environ: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], check=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_what_each_program_loads_needs_no_module_that_is_slow_to_import() -> None:
    slow = "typing re enum contextlib dataclasses inspect pathlib logging".split()
    script = (
        "import sys; before = set(sys.modules)\n"
        "import rankscope.rank.attach.start\n"
        f"print([name for name in {slow!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({AGENT!r})\n{script}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_importing_the_agent_is_light() -> None:
    heavy = "torch numpy fastapi sqlalchemy pydantic psutil rich".split()
    heavy += ["backports.zstd", "compression.zstd"]
    script = (
        "import sys, rankscope, rankscope.rank.runtime\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
