"""The documents as a site: all pages, no link that leads nowhere, nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# whatever the browser fetches by itself
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe|source)[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"""
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", root / ".ci/site/mkdocs.yml",
         "-d", site],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT, made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_every_document_is_a_page_that_fetches_nothing_from_elsewhere(site: Path) -> None:
    assert len(list(site.glob("tutorials/*.html"))) == len(list(ROOT.glob("docs/tutorials/*.md")))
    for document in (*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")):
        folder = site if document.parent.name == "docs" else site / "project"
        name = document.stem if document.stem != "README" else "index"
        assert (folder / f"{name}.html").exists(), document.name
    pages = list(site.rglob("*.html"))
    assert len(pages) > 45
    for page in pages:
        assert FETCHED.findall(page.read_text()) == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(https?:)?//", style.read_text()), style.name


def test_the_site_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {row["location"].partition("#")[0] for row in index["docs"] if "stragg" in row["text"]}
    assert "detectors.html" in found


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    for name in ("docs", ".ci/site"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (*ROOT.glob("*.md"), ROOT / "reference_trainer" / "README.md"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    page = tmp_path / "docs" / "glossary.md"
    text = page.read_text()
    for name, anchor in (("missing", ""), ("index", "#no-such-heading")):
        page.write_text(f"{text}\n[x]({name}.md{anchor})\n")
        done = build(tmp_path, tmp_path / "site")
        assert done.returncode != 0, name
        assert (anchor or name) in done.stdout + done.stderr
