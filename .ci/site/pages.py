"""Hooks of MkDocs: documents outside of docs/ are pages too, links lead where they do in the tree.

The documents are written for the tree: they link to each other, to files of the source and to the
README by relative paths, and to headings as GitHub names them. Links to what is no page keep their
text alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
    "reference_trainer/README.md",
)  # fmt: skip
# Tables are wide here, and names are not to be cut.
_STYLE = ".md-grid { max-width: 88rem } .md-typeset td code { word-break: normal }\n"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:|#)([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)


def slug(title: str, separator: str) -> str:
    """Return the anchor of a heading, as GitHub makes it and `tests/test_docs.py` checks it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Set what cannot be written as YAML."""
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the documents that are not below docs/."""
    files.append(File.generated(config, "site.css", content=_STYLE))
    for name in OUTSIDE:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Make links of the tree links of the site."""
    here = posixpath.dirname(page.file.src_uri)
    outside = page.file.src_uri.removeprefix("project/") != page.file.src_uri
    folder = posixpath.join("" if outside else "docs", here.removeprefix("project").strip("/"))

    def in_site(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, link))
        uri = path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"
        if files.get_file_from_path(uri) is None:
            return text if (ROOT / path).exists() else match[0]  # MkDocs says that it leads nowhere
        return f"[{text}]({posixpath.relpath(uri, here or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(in_site, part) for part in parts[::2]]
    return "".join(parts)
