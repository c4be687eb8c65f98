"""What must hold of the dashboard's files themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
OWN = sorted(path for path in WEB.rglob("*.js") if "vendor" not in path.parts)


def test_vendored_files_are_the_pinned_ones() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "vendor_web.py"), "check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_types_are_those_of_the_server() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "api_types.py"), "check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_edited_vendored_file_is_noticed(tmp_path: Path) -> None:
    """The check can fail: a copy of the tree with one changed byte does."""
    for name in ("web", ".ci", "tests/web/vendor"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["cp", "-r", str(ROOT / name), str(target)]
        if name == ".ci":
            target.mkdir()
            (target / "web").mkdir()
            command = [
                "cp", str(ROOT / ".ci/vendor_web.py"), str(ROOT / ".ci/web/package.json"),
                str(target),
            ]  # fmt: skip
        subprocess.run(command, check=True)
    (tmp_path / ".ci" / "package.json").rename(tmp_path / ".ci" / "web" / "package.json")
    with (tmp_path / "web" / "vendor" / "uplot.js").open("ab") as file:
        file.write(b"\n")
    command = [sys.executable, str(tmp_path / ".ci" / "vendor_web.py"), "check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "uplot.js of uplot was edited" in result.stderr


@pytest.mark.parametrize("path", OWN, ids=[str(path.relative_to(WEB)) for path in OWN])
def test_sources_keep_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("/**"), "begins with what it is"
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write\b|\beval\(|new Function\b"
    assert not re.search(banned, text), "text from runs stays text"
    assert not re.search(r"https?://(?!www\.w3\.org)", text), "no address outside the origin"
    assert not re.search(r"""(href|src): ['"`]/""", text), "no address from the root: prefixes"


def test_web_holds_no_python_and_no_source_map() -> None:
    assert not list(WEB.rglob("*.py"))
    assert not list(WEB.rglob("*.map"))
    assert not [path for path in WEB.rglob("*.js") if "sourceMappingURL" in path.read_text()]


def test_index_has_no_inline_style_and_one_inline_script() -> None:
    text = (WEB / "index.html").read_text(encoding="utf-8")
    assert " style=" not in text
    inline = re.findall(r"<script(?![^>]*\bsrc=)([^>]*)>", text)
    assert inline == [' type="importmap"']
