#!/usr/bin/env python3
# ruff: noqa: T201 - a command prints
"""Keep the vendored JavaScript honest: `update` fetches the pins, `check` proves nothing drifted.

    python .ci/vendor_web.py update    # needs npm and a registry
    python .ci/vendor_web.py check     # needs neither

The pins below are the only place where a version is chosen. To change one: edit its pin, run
`update`, run all tests, look at every page in both themes, and commit it alone with the reason.
Standard library only, so that `check` runs on any machine that has Python.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "web/vendor"
TESTS_ONLY = "tests/web/vendor"
LOCK = ROOT / SHIPPED / "vendor.lock.json"
INDEX = ROOT / "web" / "index.html"
DEV_PACKAGES = ROOT / ".ci" / "web" / "package.json"
ASSET_PREFIX = "static/{version}/"  # the server puts the real version there


@dataclass(frozen=True)
class Pin:
    """One package: its exact version, the files taken from it, and the import names they serve."""

    package: str
    version: str
    licence: str
    files: dict[str, str]  # path in the package -> name in the folder
    imports: dict[str, str]  # bare import name -> name in the folder
    into: str = SHIPPED

    @property
    def licence_file(self) -> str:
        """Return the name under which the licence text is kept."""
        return "LICENSE." + self.package.removeprefix("@").replace("/", "-")


PINS: tuple[Pin, ...] = (
    Pin(
        "preact",
        "11.2.0",
        "MIT",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js"},
        {"preact": "preact.js", "preact/hooks": "preact-hooks.js"},
    ),
    Pin(
        "@preact/signals-core",
        "1.14.5",
        "MIT",
        {"dist/signals-core.mjs": "signals-core.js"},
        {"@preact/signals-core": "signals-core.js"},
    ),
    Pin(
        "@preact/signals",
        "2.11.4",
        "MIT",
        {"dist/signals.mjs": "signals.js"},
        {"@preact/signals": "signals.js"},
    ),
    Pin(
        "uplot",
        "1.6.32",
        "MIT",
        {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
        {"uplot": "uplot.js"},
    ),
    Pin(
        "@fontsource-variable/inter",
        "5.3.0",
        "OFL-1.1",
        {"files/inter-latin-wght-normal.woff2": "inter.woff2"},
        {},
    ),
    Pin("axe-core", "4.14.1", "MPL-2.0", {"axe.min.js": "axe.min.js"}, {}, into=TESTS_ONLY),
)

# A source map that is not shipped is a failed request in the developer tools of every user.
SOURCE_MAP = re.compile(rb"\n?//[#@] sourceMappingURL=\S+\s*$|/\*[#@] sourceMappingURL=.*?\*/")


def main(arguments: list[str]) -> int:
    """Run one of the two commands and return the exit status."""
    if arguments == ["update"]:
        update()
        arguments = ["check"]
    if arguments != ["check"]:
        print(__doc__, file=sys.stderr)
        return 2
    problems = check()
    for problem in problems:
        print(f"vendor: {problem}", file=sys.stderr)
    if not problems:
        print(f"vendor: {len(PINS)} packages as pinned")
    return 1 if problems else 0


def update() -> None:
    """Fetch every pin, verify it, write its files and the lock."""
    lock: dict[str, Any] = {}
    for pin in PINS:
        archive, integrity = fetch(pin)
        folder = ROOT / pin.into
        folder.mkdir(parents=True, exist_ok=True)
        entry: dict[str, Any] = {
            "version": pin.version,
            "licence": pin.licence,
            "integrity": integrity,
            "files": {},
        }
        taken = {**pin.files, licence_member(archive): pin.licence_file}
        for member, name in taken.items():
            content = SOURCE_MAP.sub(b"", archive[member])
            (folder / name).write_bytes(content)
            entry["files"][f"{pin.into}/{name}"] = fact(content)
        lock[pin.package] = entry
    LOCK.write_text(json.dumps(lock, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def fetch(pin: Pin) -> tuple[dict[str, bytes], str]:
    """Return the files of the pinned package by path, and the integrity they were checked with."""
    name = f"{pin.package}@{pin.version}"
    told = subprocess.run(
        ["npm", "view", name, "dist.integrity"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", "--pack-destination", folder, name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        packed = next(Path(folder).glob("*.tgz")).read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(packed).digest()).decode()
    if found != told:
        raise SystemExit(f"vendor: {name}: packed {found}, the registry says {told}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [m for m in archive.getmembers() if m.isfile()]
        contents = {m.name.partition("/")[2]: archive.extractfile(m) for m in members}
        return {path: handle.read() for path, handle in contents.items() if handle}, found


def licence_member(archive: dict[str, bytes]) -> str:
    """Return the path of the licence text in a package."""
    return next(p for p in sorted(archive) if re.fullmatch(r"LICEN[CS]E(\.\w+)?", p, re.I))


def fact(content: bytes) -> dict[str, Any]:
    """Return what the lock says of one file."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


def check() -> list[str]:
    """Return every difference between pins, lock, files, import map and development pins."""
    if not LOCK.exists():
        return [f"{LOCK.relative_to(ROOT)} is missing: run `update`"]
    lock = json.loads(LOCK.read_text(encoding="utf-8"))
    return [
        *check_pins(lock),
        *check_files(lock),
        *check_import_map(),
        *check_development_pins(),
    ]


def check_pins(lock: dict[str, Any]) -> list[str]:
    """Return pins and lock entries that do not agree."""
    problems = [
        f"{name} is locked but not pinned" for name in set(lock) - {p.package for p in PINS}
    ]
    for pin in PINS:
        entry = lock.get(pin.package)
        if entry is None:
            problems.append(f"{pin.package} is pinned but not locked: run `update`")
            continue
        if (entry["version"], entry["licence"]) != (pin.version, pin.licence):
            problems.append(f"{pin.package} is pinned {pin.version}, locked {entry['version']}")
        wanted = {f"{pin.into}/{name}" for name in (*pin.files.values(), pin.licence_file)}
        if wanted != set(entry["files"]):
            problems.append(f"{pin.package} names other files than the lock: run `update`")
    return problems


def check_files(lock: dict[str, Any]) -> list[str]:
    """Return files that are missing, edited, or unknown to the lock."""
    problems = []
    known = {LOCK}
    for package, entry in lock.items():
        for name, expected in entry["files"].items():
            path = ROOT / name
            known.add(path)
            if not path.exists():
                problems.append(f"{name} of {package} is missing")
            elif fact(path.read_bytes()) != expected:
                problems.append(f"{name} of {package} was edited")
    for folder in (SHIPPED, TESTS_ONLY):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path not in known:
                problems.append(f"{path.relative_to(ROOT)} is not in the lock")
    return problems


def check_import_map() -> list[str]:
    """Return import names that `index.html` maps to another file than the pins do."""
    text = INDEX.read_text(encoding="utf-8")
    found = re.search(r'<script type="importmap">(.*?)</script>', text, re.S)
    if found is None:
        return ["index.html has no import map"]
    mapped = json.loads(found.group(1))["imports"]
    wanted = {
        name: f"./{ASSET_PREFIX}vendor/{file}" for pin in PINS for name, file in pin.imports.items()
    }
    return [
        f"index.html maps {name} to {mapped.get(name)}, the pins to {wanted.get(name)}"
        for name in sorted(set(mapped) | set(wanted))
        if mapped.get(name) != wanted.get(name)
    ]


def check_development_pins() -> list[str]:
    """Return packages whose types are checked at another version than the one that ships."""
    development = json.loads(DEV_PACKAGES.read_text(encoding="utf-8"))["devDependencies"]
    return [
        f"{DEV_PACKAGES.relative_to(ROOT)} has {pin.package} {development[pin.package]}, "
        f"{pin.version} ships"
        for pin in PINS
        if development.get(pin.package, pin.version) != pin.version
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
