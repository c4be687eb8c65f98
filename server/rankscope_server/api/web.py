"""Serves the dashboard: assets under their version for ever, one page for every other path."""

from __future__ import annotations

import base64
import hashlib
import json
import mimetypes
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

from rankscope_server.problems import not_found

router = APIRouter(include_in_schema=False)
IMMUTABLE = "public, max-age=31536000, immutable"
_IMPORT_MAP = re.compile(r'<script\s+type="importmap"[^>]*>(.*?)</script>', re.DOTALL)
_STATIC_IMPORT = re.compile(
    r"""(?:^|;)\s*(?:import|export)\b(?:[^'";()=]*?\bfrom)?\s*['"]([^'"]+)['"]""", re.MULTILINE
)
_OVERVIEW = re.compile(r"runs/[^/]+/?")
_HEAD = re.compile(r"<head(\s[^>]*)?>", re.IGNORECASE)
_VERSION = "{version}"
# A worker runs under the policy of its own script: the one that holds the event stream connects.
SCRIPT_POLICY = "default-src 'none'; connect-src 'self'; frame-ancestors 'none'"
MISSING_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rankscope</title></head>
<body><h1>The dashboard's files are missing</h1>
<p>The server works and its data is at <code>api/v1/runs</code>, but this installation holds no
<code>index.html</code>. Install Rankscope again, or run it from a complete checkout.</p>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Page:
    """The one page as it is served, and the policy that fits it."""

    html: str
    script_hashes: str


class Assets:
    """The folder of the dashboard's files and the version under which they are served now."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.version = assets_version(directory)
        self._stamp = _stamp(directory)
        self._modules: dict[tuple[str, str], list[str]] = {}

    def modules(self, entry: str) -> list[str]:
        """Return all modules that a module of the folder needs before it runs, itself first."""
        key = self.version, entry
        if key not in self._modules:
            self._modules = {
                known: self._modules[known] for known in self._modules if known[0] == key[0]
            }
            self._modules[key] = modules_of(self.directory, entry)
        return self._modules[key]

    def refresh(self) -> None:
        """Take a new version where a file has changed: developers edit while the server runs."""
        stamp = _stamp(self.directory)
        if stamp != self._stamp:
            self._stamp, self.version = stamp, assets_version(self.directory)


def assets_directory() -> Path | None:
    """Return the folder of the dashboard's files: in the wheel, else in the checkout."""
    for path in (Path(__file__).parents[1] / "web", Path(__file__).parents[3] / "web"):
        if path.is_dir():
            return path
    return None


def assets_version(directory: Path | None) -> str:
    """Return a name that changes with any byte of the assets: their addresses live for ever."""
    digest = hashlib.sha256()
    for path in _files(directory):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def modules_of(directory: Path | None, entry: str) -> list[str]:
    """Return the paths of a module and of all that it imports, not those that load later."""
    index = None if directory is None else directory / "index.html"
    if directory is None or index is None or not index.is_file():
        return []
    (text,) = _IMPORT_MAP.findall(index.read_text(encoding="utf-8"))
    names = json.loads(text)["imports"]
    found = [entry] if (directory / entry).is_file() else []
    for path in found:
        for name in _STATIC_IMPORT.findall((directory / path).read_text(encoding="utf-8")):
            bare = names.get(name, "").removeprefix(f"./static/{_VERSION}/")
            to = bare or posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
            if to not in found and (directory / to).is_file():
                found.append(to)
    return found


def preloads(assets: Assets, path: str) -> str:
    """Return links to the modules of the first route: a browser finds them level by level."""
    if assets.directory is None:
        return ""
    entries = ["app/main.js"] + ["app/pages/overview.js"] * bool(_OVERVIEW.fullmatch(path))
    modules = dict.fromkeys(one for entry in entries for one in assets.modules(entry))
    return "".join(
        f'<link rel="modulepreload" href="static/{assets.version}/{one}">' for one in modules
    )


def load_page(directory: Path | None, version: str) -> Page:
    """Return the page; `{version}` in it becomes the version of the assets."""
    index = None if directory is None else directory / "index.html"
    if index is None or not index.is_file():
        return Page(MISSING_PAGE, "")
    html = index.read_text(encoding="utf-8").replace(_VERSION, version)
    digests = (hashlib.sha256(text.encode()).digest() for text in _IMPORT_MAP.findall(html))
    return Page(html, "".join(f" 'sha256-{base64.b64encode(d).decode()}'" for d in digests))


def policy(page: Page) -> str:
    """Return the content security policy: nothing from elsewhere, no inline script but the map."""
    return (
        f"default-src 'self'; script-src 'self'{page.script_hashes}; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; worker-src 'self'; object-src 'none'; "
        "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    )


def base_of(path: str) -> str:
    """Return the relative address of the root as seen from `path`: `./`, `../`, `../../`."""
    return "../" * (path.lstrip("/").count("/")) or "./"


@router.api_route("/static/{version}/{path:path}", methods=["GET", "HEAD"])
def static(request: Request, version: str, path: str) -> Response:
    """Return an asset."""
    assets: Assets = request.app.state.assets
    file = find_asset(assets.directory, path)
    if file is None:
        raise not_found(f"no asset {path[:200]!r}", "reload the page")
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    if file.suffix in {".js", ".mjs"}:
        kind = "text/javascript"
    # An address of another version is answered, but must not be kept as if it were that version.
    cache = IMMUTABLE if version == assets.version else "no-cache"
    headers = {"Cache-Control": cache}
    if kind == "text/javascript":
        headers["Content-Security-Policy"] = SCRIPT_POLICY
    return Response(file.read_bytes(), 200, headers, media_type=kind)


@router.api_route("/{path:path}", methods=["GET", "HEAD"])
def page(request: Request, path: str) -> Response:
    """Return the page for any address that is neither data nor an asset."""
    if request.method == "HEAD" and path.startswith("api/"):
        raise HTTPException(405)
    if path.startswith(("api/", "static/")) or path in {"api", "static"}:
        raise not_found(f"no address /{path[:200]}", "see /api/v1/openapi.json for the paths")
    assets: Assets = request.app.state.assets
    assets.refresh()
    served = load_page(assets.directory, assets.version)
    base = f'<base href="{base_of(path)}">'
    html = _HEAD.sub(lambda match: match.group(0) + base, served.html, count=1)
    # after the import map: not every browser takes one once a module was asked for
    links = preloads(assets, path)
    html = _IMPORT_MAP.sub(lambda match: match.group(0) + links, html, count=1)
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": policy(served)}
    status = 200 if served.html is not MISSING_PAGE else 503
    return Response(html, status, headers, media_type="text/html; charset=utf-8")


def find_asset(directory: Path | None, path: str) -> Path | None:
    """Return the file of an asset; None for what is missing, hidden or outside the folder."""
    if directory is None:
        return None
    try:
        root = directory.resolve()
        file = (root / path).resolve()
        if not file.is_file() or not file.is_relative_to(root):
            return None
    except (OSError, ValueError):  # a name that no file system takes
        return None
    return None if _is_hidden(file.relative_to(root)) else file


def _files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if not _is_hidden(path.relative_to(directory)))


def _stamp(directory: Path | None) -> tuple[tuple[str, int, int], ...]:
    stats = ((path, path.stat()) for path in _files(directory))
    return tuple((str(path), found.st_mtime_ns, found.st_size) for path, found in stats)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
